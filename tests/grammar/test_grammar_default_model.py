"""The default pair under twenty schemas: answers that finish are valid, and every method gives the same ones."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from schemas import SCHEMAS
from specbranch import LLM, SamplingParams
from specbranch.answer import Output
from specbranch.core.methods import METHODS

pytest.importorskip("llguidance")
jsonschema = pytest.importorskip("jsonschema")
pytestmark = [pytest.mark.slow, pytest.mark.default_model]

TALK = [{"role": "user", "content": "Answer in JSON, as briefly as you can."}]
TEMPERATURES = (0.0, 0.8)
MOST_CUT = 2  # of forty answers: endless decimals of a number without bounds
Answers = dict[tuple[str, float], Output]


@pytest.fixture(scope="module")
def llm(default_model: object, nothing_kept: None) -> Iterator[LLM]:
    with LLM(method="specbranch", device="cpu", options={"keep_experience": False}) as loaded:
        yield loaded


def params_of(name: str, temperature: float) -> SamplingParams:
    return SamplingParams(max_tokens=160, temperature=temperature, seed=2, json_schema=SCHEMAS[name])


@pytest.fixture(scope="module")
def plain(llm: LLM) -> Answers:
    view = llm.using(method="autoregressive")
    keys = [(name, temperature) for name in SCHEMAS for temperature in TEMPERATURES]
    return {key: view.chat(TALK, params_of(*key)) for key in keys}


def test_answers_that_finish_are_valid_and_nearly_all_do(plain: Answers) -> None:
    finished = {key: answer for key, answer in plain.items() if answer.finish_reason == "stop"}
    for (name, _), answer in finished.items():
        jsonschema.validate(json.loads(answer.text), SCHEMAS[name])
    assert len(plain) - len(finished) <= MOST_CUT


@pytest.mark.parametrize("method", [name for name in METHODS if name != "autoregressive"])
def test_every_method_gives_the_answers_of_plain_decoding(llm: LLM, plain: Answers, method: str) -> None:
    """Every schema, at one temperature or the other."""
    view, every = llm.using(method=method), 3 if method == "lookahead" else 1  # lookahead is slow on a CPU
    for at, name in list(enumerate(SCHEMAS))[::every]:
        key = name, TEMPERATURES[at % 2]
        found, expected = view.chat(TALK, params_of(*key)), plain[key]
        assert (found.token_ids, found.finish_reason) == (expected.token_ids, expected.finish_reason), key
