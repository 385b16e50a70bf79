"""Each impossible parameter gets its sentence, and each unknown name the nearest one."""

from __future__ import annotations

from dataclasses import FrozenInstanceError
from typing import Any

import pytest

from specbranch.config import SamplingParams, SpeculativeConfig
from specbranch.errors import BadParameter, nearest, unknown

NAN = float("nan")
INF = float("inf")


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("temperature", -0.1, "a number ≥ 0"),
        ("temperature", NAN, "a number ≥ 0"),
        ("temperature", INF, "a number ≥ 0"),
        ("temperature", "hot", "a number ≥ 0"),
        ("temperature", True, "a number ≥ 0"),
        ("top_p", 1.1, "above 0 and at most 1"),
        ("top_p", 0.0, "above 0 and at most 1"),
        ("top_p", -1, "above 0 and at most 1"),
        ("top_k", 0, "a whole number ≥ 1"),
        ("top_k", 2.5, "a whole number ≥ 1"),
        ("top_k", -3, "a whole number ≥ 1"),
        ("min_p", 1.5, "from 0 to 1"),
        ("min_p", -0.5, "from 0 to 1"),
        ("repetition_penalty", 0.0, "a number above 0"),
        ("repetition_penalty", -1.0, "a number above 0"),
        ("presence_penalty", 2.5, "from -2 to 2"),
        ("frequency_penalty", -2.5, "from -2 to 2"),
        ("logit_bias", {-1: 2.0}, "token ids ≥ 0 with finite numbers"),
        ("logit_bias", {3: NAN}, "token ids ≥ 0 with finite numbers"),
        ("logit_bias", {"x": 1.0}, "token ids ≥ 0 with finite numbers"),
        ("max_tokens", 0, "a whole number ≥ 1"),
        ("max_tokens", 1.5, "a whole number ≥ 1"),
        ("max_tokens", True, "a whole number ≥ 1"),
        ("min_tokens", -1, "a whole number ≥ 0"),
        ("min_tokens", 300, "at most max_tokens (256)"),
        ("n", 0, "a whole number ≥ 1"),
        ("logprobs", -1, "a whole number ≥ 0"),
        ("seed", "lucky", "a whole number, or nothing"),
        ("seed", True, "a whole number, or nothing"),
        ("stop", 5, "strings that are not empty"),
        ("stop_token_ids", 5, "token ids ≥ 0"),
        ("logit_bias", [1.0], "token ids with numbers"),
        ("ignore_eos", "no", "true or false"),
        ("stop", ("",), "strings that are not empty"),
        ("stop", ("a", 3), "strings that are not empty"),
        ("stop_token_ids", (-1,), "token ids ≥ 0"),
    ],
)
def test_an_impossible_sampling_parameter_is_a_sentence(name: str, value: Any, expected: str) -> None:
    with pytest.raises(BadParameter) as caught:
        SamplingParams(**{name: value})
    sentence = str(caught.value)
    assert sentence.startswith(f"{name} is {value!r}; expected ")
    assert expected in sentence
    assert sentence.endswith(".")


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("num_speculative_tokens", 0, "a whole number from 1 to 64"),
        ("num_speculative_tokens", 65, "a whole number from 1 to 64"),
        ("method", 5, "a name"),
        ("num_speculative_tokens", 2.0, "a whole number from 1 to 64"),
        ("max_branches", 0, "a whole number ≥ 1"),
        ("stop_below", -0.1, "a number from 0 to 1"),
        ("stop_below", 1.1, "a number from 0 to 1"),
        ("stop_below", NAN, "a number from 0 to 1"),
        ("ngram_min", 0, "a whole number ≥ 1"),
        ("ngram_max", 0, "a whole number ≥ ngram_min (1)"),
        ("lookahead_window", 0, "a whole number ≥ 1"),
        ("lookahead_window", 2.5, "a whole number ≥ 1"),
        ("lookahead_candidates", 0, "a whole number ≥ 1"),
        ("lookahead_ngram", 2, "a whole number from 3 to 16"),
        ("lookahead_ngram", 17, "a whole number from 3 to 16"),
    ],
)
def test_an_impossible_speculative_setting_is_a_sentence(name: str, value: Any, expected: str) -> None:
    with pytest.raises(BadParameter) as caught:
        SpeculativeConfig(**{name: value})
    assert str(caught.value).startswith(f"{name} is {value!r}; expected {expected}")


def test_a_lookahead_window_and_its_candidates_fit_a_caches_tail() -> None:
    assert SpeculativeConfig(lookahead_window=16, lookahead_ngram=5, lookahead_candidates=16).lookahead_window == 16
    with pytest.raises(
        BadParameter,
        match=r"· \(lookahead_ngram − 1\) is 132; expected at most 128, the nodes a cache's tail holds; lower one",
    ):
        SpeculativeConfig(lookahead_window=17, lookahead_ngram=5, lookahead_candidates=16)


def test_the_longest_ngram_is_not_shorter_than_the_shortest() -> None:
    with pytest.raises(BadParameter, match=r"ngram_max is 2; expected a whole number ≥ ngram_min \(3\)"):
        SpeculativeConfig(ngram_min=3, ngram_max=2)


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("rule", "mach", "Unknown rule 'mach'. Did you mean 'match'? Known: match, ratio."),
        ("heads", "sample", "Unknown heads 'sample'. Did you mean 'sampled'? Known: sampled, top."),
        (
            "policy",
            "confident",
            "Unknown policy 'confident'. Did you mean 'confidence'? Known: confidence, entropy, fixed, last, oracle, "
            "paper, planner.",
        ),
    ],
)
def test_an_unknown_choice_offers_the_nearest(name: str, value: str, said: str) -> None:
    with pytest.raises(BadParameter) as caught:
        SpeculativeConfig.from_dict({name: value})
    assert str(caught.value) == said


@pytest.mark.parametrize(
    ("kind", "key", "offered"),
    [
        (SamplingParams, "temprature", "Unknown sampling parameter 'temprature'. Did you mean 'temperature'?"),
        (SamplingParams, "max_token", "Unknown sampling parameter 'max_token'. Did you mean 'max_tokens'?"),
        (
            SpeculativeConfig,
            "num_spec_tokens",
            "Unknown speculative setting 'num_spec_tokens'. Did you mean 'num_speculative_tokens'?",
        ),
    ],
)
def test_an_unknown_key_offers_the_nearest(kind: Any, key: str, offered: str) -> None:
    with pytest.raises(BadParameter) as caught:
        kind.from_dict({key: 1})
    assert str(caught.value).startswith(offered)


def test_a_name_like_no_other_offers_none_but_lists_all() -> None:
    assert nearest("zzz", ["match", "ratio"]) == ""
    assert str(unknown("rule", "zzz", ["ratio", "match"])) == "Unknown rule 'zzz'. Known: match, ratio."


def test_possible_parameters_are_taken_as_given() -> None:
    values: dict[str, Any] = {
        "temperature": 0.7,
        "top_k": 40,
        "top_p": 0.9,
        "stop": "END",
        "stop_token_ids": [1, 2],
        "logit_bias": {3: -1.0},
    }
    params = SamplingParams.from_dict(values)
    assert (params.temperature, params.top_k, params.stop, params.stop_token_ids) == (0.7, 40, ("END",), (1, 2))


def test_parameters_cannot_be_changed_afterwards() -> None:
    with pytest.raises(FrozenInstanceError):
        SamplingParams().temperature = 1.0  # type: ignore[misc]
