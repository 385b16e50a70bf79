"""Predictions as a user gives them: to `LLM`, to `AsyncLLM`, and from the command line; on a tiny pair."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from specbranch import LLM, AsyncLLM, SamplingParams
from specbranch.errors import BadParameter
from tiers import each_value

PROMPT = "A branch is a guess about what the large model will say next."
COUNTS = ("accepted_prediction_tokens", "rejected_prediction_tokens")


@pytest.fixture(scope="module")
def llm(pair: tuple[str, str]) -> Iterator[LLM]:
    with LLM(*pair, dtype="float64", device="cpu", options={"context_length": 256}) as loaded:
        yield loaded


@each_value
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("method", ["lookup", "specbranch", "auto"])
def test_an_answer_is_the_same_whatever_is_predicted(llm: LLM, method: str, temperature: float) -> None:
    params = SamplingParams(temperature=temperature, seed=3, max_tokens=40)
    plain = llm.using("autoregressive").generate(PROMPT, params)
    view, ids = llm.using(method), plain.token_ids
    for expected in (ids, (*ids[:10], 5, *ids[12:]), (7,) * 60, "no, something else", ""):
        found = view.generate(PROMPT, params, prediction=expected)
        assert found.token_ids == ids and found.text == plain.text
    streamed = list(view.stream(PROMPT, params, prediction=ids))
    assert "".join(chunk.text for chunk in streamed) == plain.text


def test_a_right_prediction_saves_forwards_for_each_sample_and_each_prompt(llm: LLM) -> None:
    params = SamplingParams(max_tokens=40, n=2, temperature=0.8, seed=1)
    plain = llm.using("autoregressive").generate([PROMPT, PROMPT + " So"], params)
    expected, view = plain[0].token_ids, llm.using("lookup")
    found = view.generate([PROMPT, PROMPT + " So"], params, prediction=expected)
    assert [one.token_ids for one in found] == [one.token_ids for one in plain]
    assert [other.token_ids for one in found for other in one.alternatives] == [
        other.token_ids for one in plain for other in one.alternatives
    ]
    stats = found[0].stats
    assert stats[COUNTS[0]] >= 30 and stats[COUNTS[1]] == 0 and stats["target_forwards"] < 12
    talk: Any = [{"role": "user", "content": "Hello"}]
    said = view.chat(talk, {"max_tokens": 20})
    again = view.chat(talk, {"max_tokens": 20}, prediction=said.token_ids)
    assert again.text == said.text and again.stats[COUNTS[0]] >= 14


def test_what_is_no_prediction_is_refused_with_a_sentence(llm: LLM) -> None:
    for wrong in ([1, -1], [10**9], 5, ["text"]):
        with pytest.raises(BadParameter, match=r"prediction is .*expected a text, or token ids from 0"):
            llm.generate(PROMPT, prediction=wrong)  # type: ignore[call-overload]
    with pytest.raises(BadParameter, match=r"prediction has 257 tokens, but the context holds 256\. Shorten it\."):
        llm.generate(PROMPT, prediction=[5] * 257)


def test_an_async_engine_takes_predictions(pair: tuple[str, str]) -> None:
    made = LLM(*pair, "lookup", dtype="float64", device="cpu", options={"context_length": 256})
    engine = AsyncLLM(made, max_batch=2)
    try:
        first = engine.submit(PROMPT, {"max_tokens": 30}).result()
        again = engine.submit(PROMPT, {"max_tokens": 30}, {"prediction": first.token_ids}).result()
        assert again.token_ids == first.token_ids and again.stats[COUNTS[0]] >= 20 > first.stats[COUNTS[0]]
        with pytest.raises(BadParameter, match=r"prediction is 3"):
            engine.submit(PROMPT, options={"prediction": 3})
    finally:
        engine.shut_down()
