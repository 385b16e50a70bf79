"""Answers of tiny models that follow a grammar: valid, and the same with every method."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any

import pytest

from schema_check import matches
from schemas import SCHEMAS
from specbranch import LLM, SamplingParams
from specbranch.answer import Output
from specbranch.core.methods import METHODS
from specbranch.errors import BadParameter
from specbranch.grammar.parser import GuidanceParser
from tiers import each_value, tiered

pytest.importorskip("llguidance")

PROMPT = "A branch is a guess about what the large model will say next."
CONSTRAINTS: dict[str, dict[str, Any]] = {
    "schema": {"json_schema": SCHEMAS["nested"]},
    "regex": {"regex": r"[A-Z][a-z]{2,6}( [a-z]{2,5}){2,5}\."},
    "choice": {"choice": ["red", "green", "greenish", "transparent"]},
    "gbnf": {"grammar": 'root ::= "yes" | "no" [0-9]+ "."'},
    "lark": {"grammar": 'start: "<" WORD ">" WORD "</" WORD ">"\nWORD: /[a-z]{1,4}/'},
}


def same(one: Output, other: Output) -> bool:
    assert (one.text, one.token_ids, one.finish_reason) == (other.text, other.token_ids, other.finish_reason)
    for mine, theirs in zip(one.logprobs or (), other.logprobs or (), strict=True):
        assert mine.logprob == pytest.approx(theirs.logprob, abs=1e-9)
        assert [token for token, _ in mine.top] == [token for token, _ in theirs.top]
    return True


@each_value
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("name", CONSTRAINTS)
def test_every_method_gives_the_answer_of_plain_decoding(llm: LLM, name: str, temperature: float, method: str) -> None:
    params = SamplingParams(max_tokens=190, temperature=temperature, seed=5, logprobs=2, **CONSTRAINTS[name])
    plain = llm.using(method="autoregressive").generate(PROMPT, params)
    assert plain.finish_reason == "stop"
    assert same(llm.using(method=method).generate(PROMPT, params), plain)


@pytest.mark.parametrize("temperature", tiered([0.0, 0.8], (0.8).__eq__))
@pytest.mark.parametrize("name", tiered(SCHEMAS, {"long keys", "nested", "any of"}.__contains__))
def test_an_answer_is_what_its_schema_describes(llm: LLM, name: str, temperature: float) -> None:
    schema = SCHEMAS[name]
    params = SamplingParams(max_tokens=190, temperature=temperature, seed=2, json_schema=schema)
    plain = llm.using(method="autoregressive").generate(PROMPT, params)
    assert plain.finish_reason == "stop", plain.text
    assert matches(json.loads(plain.text), schema), plain.text
    for method in ("specbranch", "tree", "lookup"):
        assert same(llm.using(method=method).generate(PROMPT, params), plain)


@pytest.mark.parametrize(
    "method", tiered(["autoregressive", "specbranch", "tree", "speculative", "lookup"], "specbranch".__eq__)
)
@pytest.mark.parametrize("temperature", tiered([0.0, 0.8], (0.8).__eq__))
def test_a_batch_of_grammars_gives_what_each_gives_alone(llm: LLM, method: str, temperature: float) -> None:
    view = llm.using(method=method)
    free = SamplingParams(max_tokens=24, temperature=temperature, seed=1)
    asked = [replace(free, max_tokens=190, **constraint) for constraint in CONSTRAINTS.values()] + [free]
    alone = [view.generate(PROMPT, params) for params in asked]
    answers = [llm.core.make_samples(llm.core.encode(PROMPT), params, view.decoding)[0] for params in asked]
    for answer, expected in zip(llm.core.run_all(answers, len(answers)), alone, strict=True):
        assert same(answer.output(), expected)


@pytest.mark.slow
def test_an_answer_in_another_process_than_its_draft_is_the_same(pair: tuple[str, str], llm: LLM) -> None:
    params = SamplingParams(max_tokens=190, temperature=0.8, seed=5, **CONSTRAINTS["schema"])
    several = params, replace(params, reasoning=("", "e"))
    plain = [llm.using(method="autoregressive").generate(PROMPT, one) for one in several]
    options = {"context_length": 256, "keep_experience": False}
    with LLM(*pair, dtype="float64", device="cpu", executor="process", options=options) as apart:
        for method in ("specbranch", "pearl", "speculative"):
            for one, expected in zip(several, plain, strict=True):
                assert same(apart.using(method=method).generate(PROMPT, one), expected)


def test_the_transformers_runner_gives_valid_answers(pair: tuple[str, str]) -> None:
    options = {"context_length": 256, "keep_experience": False, "runner": "transformers"}
    with LLM(*pair, "speculative", dtype="float32", device="cpu", options=options) as llm:
        answer = llm.generate(PROMPT, SamplingParams(max_tokens=190, json_schema=SCHEMAS["nested"]))
    assert matches(json.loads(answer.text), SCHEMAS["nested"])


def test_samples_of_one_prompt_each_follow_the_grammar(llm: LLM) -> None:
    params = SamplingParams(max_tokens=190, temperature=1.2, seed=9, n=4, **CONSTRAINTS["regex"])
    output = llm.generate(PROMPT, params)
    texts = [one.text for one in (output, *output.alternatives)]
    assert len(set(texts)) == 4
    assert all(re.fullmatch(str(params.regex), text) for text in texts)


@pytest.mark.parametrize("method", ["autoregressive", "speculative", "pearl", "specbranch"])
def test_the_ratio_rule_follows_the_grammar(llm: LLM, method: str) -> None:
    view = llm.using(
        speculative={"method": method, "policy": "confidence" if method == "specbranch" else None, "rule": "ratio"}
    )
    for seed in range(4):
        params = SamplingParams(max_tokens=190, temperature=1.0, seed=seed, **CONSTRAINTS["regex"])
        output = view.generate(PROMPT, params)
        assert output.finish_reason == "stop" and re.fullmatch(str(params.regex), output.text), output.text


def test_end_tokens_come_only_where_the_grammar_accepts(llm: LLM) -> None:
    """A bias that makes the end token the likeliest by far ends the answer at the first place where it may end."""
    end = llm.core.tokenizer.eos_ids[0]
    params = SamplingParams(max_tokens=50, logit_bias={end: 100.0}, regex="[a-z]{3}( [a-z]{2})?")
    output = llm.generate(PROMPT, params)
    assert re.fullmatch("[a-z]{3}", output.text) and output.token_ids[-1] == end
    ignored = llm.generate(PROMPT, replace(params, ignore_eos=True, logit_bias={}))
    assert re.fullmatch("[a-z]{3} [a-z]{2}", ignored.text) and ignored.finish_reason == "stop"


def test_penalties_and_filters_apply_with_a_grammar(llm: LLM) -> None:
    params = SamplingParams(max_tokens=60, temperature=0.9, seed=3, top_k=3, top_p=0.8, min_p=0.01, min_tokens=4)
    params = replace(params, repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.5, logprobs=1)
    params = replace(params, regex="[a-z ]{4,30}!")
    plain = llm.using(method="autoregressive").generate(PROMPT, params)
    assert re.fullmatch("[a-z ]{4,30}!", plain.text)
    for method in ("specbranch", "speculative", "lookahead", "pearl"):
        assert same(llm.using(method=method).generate(PROMPT, params), plain)


def test_log_probabilities_are_those_before_the_mask(llm: LLM) -> None:
    """The one token that may follow is not certain for the model."""
    output = llm.generate(PROMPT, SamplingParams(max_tokens=20, logprobs=3, choice=["transparent"]))
    assert output.text == "transparent" and output.logprobs
    scored = llm.score(output.prompt_token_ids + output.token_ids)
    expected = scored.logprobs[len(output.prompt_token_ids) - 1 :] if hasattr(scored, "logprobs") else None
    assert min(one.logprob for one in output.logprobs) < -0.1
    if expected is not None:
        for mine, theirs in zip(output.logprobs, expected, strict=False):
            assert mine.logprob == pytest.approx(theirs.logprob, abs=1e-6)


def test_forced_tokens_need_fewer_forwards_than_tokens(llm: LLM) -> None:
    params = SamplingParams(max_tokens=120, json_schema=SCHEMAS["long keys"])
    for method in ("lookup", "speculative", "specbranch"):
        output = llm.using(method=method).generate(PROMPT, params)
        assert output.stats["target_forwards"] < 0.7 * len(output.token_ids)


def test_streamed_text_is_that_of_the_whole_answer(llm: LLM) -> None:
    params = SamplingParams(max_tokens=190, temperature=0.8, seed=5, **CONSTRAINTS["schema"])
    assert "".join(chunk.text for chunk in llm.stream(PROMPT, params)) == llm.generate(PROMPT, params).text


@pytest.mark.parametrize("rule", ["match", "ratio"])
@pytest.mark.parametrize("method", METHODS)
def test_a_dead_end_fails_with_its_sentence_and_says_nothing_behind_it(
    llm: LLM, method: str, rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a draft goes there, whose rows have no token to choose from."""
    params = SamplingParams(max_tokens=50, temperature=0.8, seed=1, regex="[ab]{2}(one|two) [a-z]+ and")
    plain = llm.using(method="autoregressive").generate(PROMPT, replace(params, max_tokens=6)).text
    before = GuidanceParser.mask
    monkeypatch.setattr(GuidanceParser, "mask", lambda one: before(one) if len(one._tokens) < 6 else b"")
    text = ""
    with pytest.raises(BadParameter, match="No token of this model's vocabulary can continue"):
        for chunk in llm.using(speculative={"method": method, "rule": rule}).stream(PROMPT, params):
            text += chunk.text
    assert plain.startswith(text) if rule == "match" else re.match("[ab]", text), text
