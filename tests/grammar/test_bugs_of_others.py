"""Mistakes that other servers made with grammars under speculation, with the numbers of their issues.

Those of parsers are in `tests/text/test_tool_parsers.py`; the whole of sglang#18605 (answers that are no JSON with a
draft) is `test_grammar_models.py`.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable

import pytest

from specbranch import LLM, SamplingParams
from specbranch.core.grammar import State
from specbranch.grammar.compiler import Grammars
from specbranch.serve.call_grammar import GRAMMARS, Function

pytest.importorskip("llguidance")

PROMPT = "A branch is a guess about what the large model will say next."
SCHEMA = {"type": "object", "properties": {"a": {"enum": [1, 20]}}, "required": ["a"], "additionalProperties": False}
THINKS = SamplingParams(json_schema=SCHEMA, reasoning=("<think>", "</think>"))
FUNCTIONS = [Function("f", SCHEMA), Function("g", None)]
ANSWER = '<think>Hm, {{.</think>\n\n{"a": 20}'


@pytest.fixture(scope="module")
def start(llm: LLM) -> Callable[[SamplingParams], State]:
    tokenizer = llm.core.tokenizer
    grammars = Grammars(tokenizer)

    def made(params: SamplingParams) -> State:
        found = grammars.constraint(params, frozenset(tokenizer.eos_ids))
        assert found is not None
        return found.start()

    return made


def test_reasoning_may_end_anywhere_in_a_block(llm: LLM, start: Callable[[SamplingParams], State]) -> None:
    """vllm#48228, #34650, #36138, #48516, #44006: the grammar stayed off, or was a token late, and let `{{` through."""
    tokens = llm.core.tokenizer.encode(ANSWER, add_special=False)
    twice = llm.core.tokenizer.encode(ANSWER.replace('{"a"', '{{"a"'), add_special=False)
    for first in range(len(tokens)):
        for last in range(first, len(tokens)):  # a block from the one to the other
            state = start(THINKS).walk(tokens[:first])
            assert state is not None and state.permitted(tokens[first:last]) == last - first
            behind = state.walk(tokens[first:last])
            assert behind is not None and behind.commit().permitted(tokens[last:]) == len(tokens) - last
    assert start(THINKS).walk(twice) is None


def test_a_grammar_never_fails_to_go_on_behind_a_rejected_block(
    llm: LLM, start: Callable[[SamplingParams], State]
) -> None:
    """vllm#53777: after rejected drafts the parser "failed to advance". Blocks are drawn at random, and cut."""
    calls = GRAMMARS["hermes"](FUNCTIONS, llm.core.tokenizer.added_id)
    for params in (THINKS, SamplingParams(grammar=calls.forced(True)), SamplingParams(grammar=calls.in_text(True))):
        chance, here, taken = random.Random(3), start(params), list[int]()
        for _ in range(12):
            for _ in range(3):  # branches that come to nothing
                drawn(here, chance, 5)
            block = drawn(here, chance, 4)
            for token in block[: chance.randint(0, len(block))]:
                after = here.advance(token)
                assert after is not None
                here = after.commit()
                taken.append(token)
            fresh = start(params).walk(taken)
            assert fresh is not None and here.is_over == fresh.is_over
            assert set(here.allowed or ()) == set(fresh.allowed or ())


def drawn(state: State, chance: random.Random, count: int) -> list[int]:
    """Some tokens that may follow."""
    found: list[int] = []
    while len(found) < count and (allowed := list(state.allowed or ())):
        token = chance.choice(allowed)
        after = state.advance(token)
        assert after is not None
        found.append(token)
        state = after
    return found


@pytest.mark.parametrize("method", ["lookup", "specbranch"])
def test_drafts_behind_the_end_of_an_answer_break_nothing(llm: LLM, method: str) -> None:
    """vllm#47025: the parser crashed on drafts behind the end, and on end tokens within a block."""
    end = llm.core.tokenizer.eos_ids[0]
    params = SamplingParams(max_tokens=60, json_schema=SCHEMA)
    plain = llm.using(method="autoregressive").generate(PROMPT, params)
    answer = [token for token in plain.token_ids if token != end]
    for predicted in ([*answer, end, *answer], [*answer, *answer], [*answer[:3], end, *answer[3:]], [end, *answer]):
        output = llm.using(method=method).generate(PROMPT, params, prediction=predicted)
        assert output.token_ids == plain.token_ids and json.loads(output.text)["a"] in (1, 20)


def test_blanks_are_bounded_in_calls_and_behind_reasoning(llm: LLM, start: Callable[[SamplingParams], State]) -> None:
    """vllm#38696: a model that is unsure wrote blanks until its answer was cut."""
    tokenizer, calls = llm.core.tokenizer, GRAMMARS["hermes"](FUNCTIONS, llm.core.tokenizer.added_id)
    forced = SamplingParams(grammar=calls.forced(True))
    for params, text in (
        (THINKS, "<think>Hm.</think>"),
        (THINKS, "{"),
        (forced, '<tool_call>\n{"name": "f", "arguments": {'),
        (forced, '<tool_call>\n{"name": "f", "arguments": {"a": 1'),
    ):
        assert start(params).walk(tokenizer.encode(f"{text}\n", add_special=False)) is not None
        for blank in ("\n", " ", "\t"):
            assert start(params).walk(tokenizer.encode(text + blank * 40, add_special=False)) is None
