"""Predictors on disk, and at work beside a target: what is wrong with one is a sentence, and decoding goes on."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from specbranch import LLM
from specbranch.assembly import ModelChoice as Choice
from specbranch.assembly import load_runner
from specbranch.core.orders import Context, Verify
from specbranch.core.runner import Feed, Trial
from specbranch.core.slots import ROOT
from specbranch.hrad.forecaster import TargetForecaster, features, reached
from specbranch.hrad.network import Network
from specbranch.hrad.predictor import Predictor, PredictorError
from specbranch.training.distill.agreement import GREEDY
from specbranch.training.hrad.collect import states_along
from tiers import tiered
from tiny_models import CONFIGS, saved, some_tokens, tiny
from tiny_pair import make_gpt2, make_pair
from tiny_predictor import LAYERS, LONGEST, made


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    return make_pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture
def folder(pair: tuple[str, str], tmp_path: Path) -> Path:
    return made(*pair, tmp_path / "predictor")


@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.parametrize("runner", ["native", "transformers"])
def test_the_hidden_states_shown_are_those_that_transformers_gives(kind: str, runner: str, tmp_path: Path) -> None:
    path = str(saved(tiny(kind), tmp_path))
    tokens = some_tokens(12)
    with torch.no_grad():
        states = tiny(kind)(torch.tensor([tokens]), output_hidden_states=True).hidden_states
    expected = torch.cat(states[-LAYERS:], dim=-1)[0]
    loaded = reached(load_runner(Choice(path, runner=runner, device="cpu", context_length=64)))  # type: ignore[arg-type]
    loaded.open(0, GREEDY)
    loaded.extend(0, tokens[:4])
    found = features(loaded.show([Feed(0, tuple(tokens[4:]), tuple(range(ROOT, 7)))], LAYERS), [9] * 8, loaded)
    assert found.shape == (8, (LAYERS + 1) * 48)
    assert torch.allclose(found[:, :-48], expected[4:], rtol=1e-3, atol=1e-3 * float(expected.abs().max()))
    assert torch.equal(found[:, -48:], loaded.embedded((9,)).expand(8, -1))


def test_many_rows_and_few_show_the_same_states(tmp_path: Path) -> None:
    """Few rows go through the compiled step, many do not."""
    loaded = reached(load_runner(Choice(str(saved(tiny("llama"), tmp_path)), device="cpu", context_length=128)))
    tokens = some_tokens(30)
    many, few = (states_along(loaded, tokens[:1], tokens[1:], 3, most) for most in (30, 5))
    assert many.shape == (29, 3 * 48)
    assert torch.allclose(many, few, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("runner", ["native", "transformers"])
def test_a_verdict_says_what_the_network_makes_of_the_states_behind_its_token(
    runner: str, folder: Path, pair: tuple[str, str]
) -> None:
    loaded = reached(load_runner(Choice(pair[0], runner=runner, device="cpu", context_length=64)))  # type: ignore[arg-type]
    forecast = TargetForecaster(Predictor.load(folder), loaded)
    loaded.open(0, replace(GREEDY, wants_forecast=True))
    order, nodes = Verify(Context(3, ()), (7, 8)), (3, 4)
    work = [Feed(0, (1, 5, 9, 7, 8), (ROOT, 0, 1, 2, 3))]
    trials = [Trial(0, order, 2, nodes, wants_forecast=wants_forecast) for wants_forecast in (True, False)]
    found, unsent = loaded.verify(work, trials)()
    text = (1, 5, 9, *(order.tokens[n] for n in found.path), found.token)
    expected = forecast.along(states_along(loaded, text[:1], text[1:], LAYERS, 16), text[1:])[-1]
    assert unsent.said is None and found.said is not None and expected is not None
    signal = forecast.signal(found.said, 3 + len(found.path))
    assert signal is not None
    assert torch.allclose(torch.tensor(signal.chances), torch.tensor(expected.chances), atol=1e-3)


def test_what_is_saved_is_read_again(folder: Path, tmp_path: Path) -> None:
    network = Network(96, LONGEST).eval()
    with torch.no_grad():
        network.mean.add_(3e5)  # the scaling is kept in full precision
    about = Predictor.load(folder).about
    Predictor(about, network).save(tmp_path / "again")
    one, some = Predictor.load(tmp_path / "again"), torch.randn(3, 96) + 3e5
    assert torch.allclose(one.network.steps(some), network.steps(some), atol=1e-2)
    assert not torch.allclose(one.network.steps(some), Predictor.load(folder).network.steps(some), atol=1e-2)
    assert one.about == about and (about.longest, about.layers, about.hidden) == (LONGEST, LAYERS, 32)


def card(**values: object) -> Callable[[Path], None]:
    """Change what the JSON says."""

    def spoil(folder: Path) -> None:
        file = folder / "predictor.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | values))

    return spoil


def tampered(folder: Path) -> None:
    file = folder / "predictor.safetensors"
    data = bytearray(file.read_bytes())
    data[-5] ^= 1
    file.write_bytes(bytes(data))


def endless(folder: Path) -> None:
    found = Predictor.load(folder)
    with torch.no_grad():
        found.network.first.weight[0, 0] = float("nan")
    found.save(folder)


SPOILT: dict[str, tuple[Callable[[Path], None], str]] = {
    "tampered": (tampered, "was changed or damaged"),
    "another version": (card(version=99), "is of version 99, this program reads version 1"),
    "another format": (card(format="poem"), "does not tell of a predictor"),
    "no JSON": (lambda folder: (folder / "predictor.json").write_text("{"), "There is no predictor to be read"),
    "no weights": (lambda folder: (folder / "predictor.safetensors").unlink(), "cannot be read"),
    "other sizes": (card(layers=3), "does not hold the network"),
    "odd sizes": (card(hidden=-1), "hidden is -1"),
    "another target": (card(target_identity="0123"), "trained for the target target (0123)"),
    "another draft": (card(draft_identity="0123"), "trained for the draft draft (0123)"),
    "not finite": (endless, "not finite"),
}


@pytest.mark.parametrize("name", tiered(SPOILT, ("tampered", "another target", "not finite").__contains__))
def test_a_predictor_that_cannot_be_used_is_a_sentence_and_decoding_goes_on(
    name: str, folder: Path, pair: tuple[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    spoil, words = SPOILT[name]
    spoil(folder)
    config = {"policy": "paper", "num_speculative_tokens": 4}
    with LLM(*pair, speculative=config, device="cpu", dtype="float64", options={"predictor": str(folder)}) as llm:
        text = llm.generate("A branch", {"max_tokens": 12}).token_ids
        again = llm.using(speculative={**config, "stop_below": 0.2}).generate("A branch", {"max_tokens": 12}).token_ids
        assert text == again == llm.using("autoregressive").generate("A branch", {"max_tokens": 12}).token_ids
    reported = [
        record.message
        for record in caplog.records
        if "Decoding goes on by the draft's confidence alone." in record.message
    ]
    assert len(reported) == 1 and words in reported[0]


def test_a_pair_without_a_predictor_and_a_draft_that_is_too_long_are_reported(
    folder: Path, pair: tuple[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    with LLM(*pair, speculative={"policy": "paper"}, device="cpu", dtype="float64") as llm:
        assert llm.generate("A branch", {"max_tokens": 3}).token_ids
    with LLM(
        *pair,
        speculative={"policy": "paper", "num_speculative_tokens": 9},
        device="cpu",
        options={"predictor": str(folder)},
    ) as llm:
        assert llm.generate("A branch", {"max_tokens": 3}).token_ids
        assert llm.using(speculative={"policy": "paper", "num_speculative_tokens": 9, "stop_below": 0.2}).config
    first, second = (record.message for record in caplog.records)
    assert "There is no predictor (H-RAD) for this pair" in first
    assert "up to 6 tokens; num_speculative_tokens is 9" in second


def test_features_that_are_not_finite_say_nothing_and_that_is_warned_of_once(
    folder: Path, pair: tuple[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    forecast = TargetForecaster(Predictor.load(folder), load_runner(Choice(pair[0], device="cpu", context_length=64)))
    sound = torch.zeros(2, LAYERS * 32)
    assert None not in forecast.along(sound, [3, 4]) and forecast.signal(None, 7) is None
    assert not caplog.records
    with caplog.at_level(logging.WARNING):
        assert (
            forecast.along(sound * float("nan"), [3, 4]) == [None, None]
            and forecast.signal((float("nan"),) * LONGEST, 7) is None
        )
    assert sum("not finite" in record.message for record in caplog.records) == 1


class Opaque:
    """A runner whose hidden states cannot be reached."""


def test_a_target_whose_hidden_states_cannot_be_reached_is_reported(folder: Path) -> None:
    with pytest.raises(PredictorError, match="cannot be reached"):
        TargetForecaster(Predictor.load(folder), Opaque())


def test_a_target_with_too_few_layers_or_another_width_is_reported(pair: tuple[str, str], tmp_path: Path) -> None:
    deep, wide = made(*pair, tmp_path / "deep", layers=9), made(*pair, tmp_path / "wide", hidden=48)
    for runner in ("native", "transformers"):
        loaded = load_runner(Choice(pair[0], runner=runner, device="cpu", context_length=64))  # type: ignore[arg-type]
        with pytest.raises(Exception, match="the last 9"):
            TargetForecaster(Predictor.load(deep), loaded)
        with pytest.raises(PredictorError, match="hidden states of 48 numbers, this target's have 32"):
            TargetForecaster(Predictor.load(wide), loaded)


@pytest.mark.parametrize("executor", tiered(("serial", "process"), "serial".__eq__))
@pytest.mark.parametrize("temperature", tiered((0.0, 0.9), (0.9).__eq__))
def test_with_signals_the_text_is_that_of_plain_decoding(
    executor: str, temperature: float, folder: Path, pair: tuple[str, str]
) -> None:
    params = {"max_tokens": 40, "temperature": temperature, "seed": 4, "ignore_eos": True}
    config = {"policy": "paper", "num_speculative_tokens": 5, "stop_below": 0.1, "max_branches": 8}
    options = {"context_length": 256, "predictor": str(folder)}
    small: Any = {"device": "cpu", "dtype": "float64", "options": options}
    with LLM(*pair, speculative=config, executor=executor, **small) as llm:  # type: ignore[arg-type]
        found = llm.generate("A branch is a guess", params)
        plain = llm.using("autoregressive").generate("A branch is a guess", params)
        without = llm.using(speculative={**config, "without": ["hrad"]}).generate("A branch is a guess", params)
    assert found.token_ids == plain.token_ids == without.token_ids
    assert found.stats["rollback"] != without.stats["rollback"], "signals made no difference"


def layers_shown(runner: Any, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A list that tells of each forward from now on of how many layers it shows hidden states."""
    shown, score = list[int](), runner._score

    def noted(work: Sequence[Feed]) -> object:
        shown.append(runner.state_layers)
        return score(work)

    monkeypatch.setattr(runner, "_score", noted)
    return shown


@pytest.mark.slow
def test_a_stream_keeps_its_signals_while_another_method_decodes_and_that_one_pays_for_none(
    folder: Path, pair: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    params = {"max_tokens": 40, "ignore_eos": True}
    config = {"policy": "paper", "num_speculative_tokens": 5, "stop_below": 0.1}
    with LLM(*pair, speculative=config, device="cpu", dtype="float64", options={"predictor": str(folder)}) as llm:
        alone = llm.generate("A branch is a guess", params)
        stream = llm.stream("A branch is a guess", params)
        first = next(stream)
        plain = llm.using("autoregressive").generate("A branch is a guess", params)
        *_, last = [first, *stream]
        shown = layers_shown(llm.target_runner, monkeypatch)
        llm.using("autoregressive").generate("A branch is a guess", params)
        assert set(shown) == {0}, "plain decoding pays for hidden states"
        llm.generate("A branch is a guess", params)
        assert set(shown) == {0, LAYERS}
    assert last.output is not None and plain.token_ids == last.output.token_ids == alone.token_ids
    assert last.output.stats["rollback"] == alone.stats["rollback"]


@pytest.mark.slow
def test_transformers_targets_foretell_too(tmp_path: Path) -> None:
    target = make_gpt2(tmp_path / "gpt2")
    folder = made(target, target, tmp_path / "predictor")
    config = {"policy": "paper", "num_speculative_tokens": 4}
    with LLM(target, target, speculative=config, device="cpu", options={"predictor": str(folder)}) as llm:
        found = llm.generate("A branch", {"max_tokens": 20})
        assert found.token_ids == llm.using("autoregressive").generate("A branch", {"max_tokens": 20}).token_ids
        assert llm.decoding.wants_forecast
