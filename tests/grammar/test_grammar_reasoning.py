"""A grammar that begins behind reasoning: the same tokens with every method, wherever the boundary lies."""

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
from specbranch.config import SpeculativeConfig
from specbranch.core.grammar import State
from specbranch.core.methods import METHODS
from specbranch.errors import BadParameter
from specbranch.grammar.compiler import Grammars
from specbranch.text.tokenizer import Tokenizer
from tiers import each_value

pytest.importorskip("llguidance")

PROMPT = "A branch is a guess about what the large model will say next."
SCHEMA = SCHEMAS["nested"]
WORD = "[a-z]{2,5}( [a-z]{2,5}){1,3}!"
# Markers that a random model writes soon: a letter, which is a part of many tokens, and an added token.
MARKERS: dict[str, str] = {
    "a letter": "e",
    "two letters": "he",
    "a token": "<tool>",
}
QUICK_MARKERS = ["a letter", *(pytest.param(name, marks=pytest.mark.slow) for name in MARKERS if name != "a letter")]


def asked(llm: LLM, marker: str, **given: Any) -> SamplingParams:
    """The marker's tokens are made likely, so that it comes."""
    tokenizer, closing = llm.core.tokenizer, MARKERS[marker]
    bias = dict.fromkeys(tokenizer.encode(closing, add_special=False), 3.0)
    return SamplingParams(max_tokens=190, logit_bias=bias, reasoning=("", closing), **given)


def parts(text: str, params: SamplingParams) -> tuple[str, str]:
    """Reasoning, and what follows it."""
    thought, found, answer = text.partition(params.reasoning[1])
    assert found, text
    return thought, answer.lstrip()


def same(one: Output, other: Output) -> bool:
    return (one.text, one.token_ids, one.finish_reason) == (other.text, other.token_ids, other.finish_reason)


PLAIN: dict[str, Output] = {}


def plain_answer(llm: LLM, params: SamplingParams) -> Output:
    """The answer of plain decoding; it is computed once for all methods."""
    if repr(params) not in PLAIN:
        PLAIN[repr(params)] = llm.using(method="autoregressive").generate(PROMPT, params)
    return PLAIN[repr(params)]


@each_value
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("marker", MARKERS)
def test_every_method_gives_the_answer_of_plain_decoding(
    llm: LLM, marker: str, temperature: float, method: str
) -> None:
    constraint: dict[str, Any] = {"json_schema": SCHEMA} if marker == "a token" else {"regex": WORD}
    params = asked(llm, marker, temperature=temperature, seed=1, **constraint)
    plain = plain_answer(llm, params)
    assert plain.finish_reason == "stop", plain.text
    _, answer = parts(plain.text, params)
    assert matches(json.loads(answer), SCHEMA) if "json_schema" in constraint else re.fullmatch(WORD, answer)
    assert same(llm.using(method=method).generate(PROMPT, params), plain)


@pytest.mark.parametrize("marker", QUICK_MARKERS)
def test_the_boundary_may_lie_inside_an_accepted_block(llm: LLM, marker: str) -> None:
    """The answer is predicted, so that blocks with the boundary are accepted; so are blocks up to a wrong token."""
    inside = 0
    for seed in range(2):
        params = asked(llm, marker, temperature=0.8, seed=seed, regex=WORD)
        plain = llm.using(method="autoregressive").generate(PROMPT, params)
        assert re.fullmatch(WORD, parts(plain.text, params)[1])
        at = _boundary(plain, params.reasoning[1])
        wrong = [*plain.token_ids[: at + 1], plain.token_ids[at], *plain.token_ids[at + 1 :]]  # one too many
        for method in ("specbranch", "lookup"):
            for predicted in (list(plain.token_ids), wrong):
                output = llm.using(method=method).generate(PROMPT, params, prediction=predicted)
                assert same(output, plain)
                inside += {output.pieces[at].origin, output.pieces[at + 1].origin} == {"draft"}
    assert inside >= 2


def _boundary(output: Output, closing: str) -> int:
    """Return the token that completes the closing marker."""
    text = ""
    for at, piece in enumerate(output.pieces):
        text += piece.text
        if closing in text:
            return at
    raise AssertionError(output.text)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["autoregressive", "specbranch", "speculative", "pearl"])
def test_the_ratio_rule_follows_the_grammar_behind_reasoning(llm: LLM, method: str) -> None:
    config = SpeculativeConfig(method=method, policy="confidence" if method == "specbranch" else None, rule="ratio")
    for seed in range(3):
        params = asked(llm, "a letter", temperature=1.0, seed=seed, regex=WORD)
        output = llm.using(speculative=config).generate(PROMPT, params)
        assert re.fullmatch(WORD, parts(output.text, params)[1]), output.text


@pytest.mark.slow
def test_a_batch_gives_what_each_gives_alone(llm: LLM) -> None:
    view = llm.using(method="specbranch")
    several = [asked(llm, marker, temperature=0.8, seed=3, regex=WORD) for marker in MARKERS]
    several.append(SamplingParams(max_tokens=24, temperature=0.8, seed=1))
    alone = [view.generate(PROMPT, params) for params in several]
    answers = [llm.core.make_samples(llm.core.encode(PROMPT), params, view.decoding)[0] for params in several]
    for answer, expected in zip(llm.core.run_all(answers, len(answers)), alone, strict=True):
        assert same(answer.output(), expected)


def test_an_end_token_does_not_end_reasoning(llm: LLM) -> None:
    end = llm.core.tokenizer.eos_ids[0]
    params = asked(llm, "a letter", temperature=0.8, seed=1, regex="[a-z]{3}[a-z]*")
    output = llm.generate(PROMPT, replace(params, logit_bias={**params.logit_bias, end: 100.0}))
    assert re.fullmatch("[a-z]{3,}", parts(output.text, params)[1]) and output.token_ids[-1] == end


@pytest.fixture(scope="module")
def start(llm: LLM) -> Any:
    tokenizer: Tokenizer = llm.core.tokenizer
    grammars = Grammars(tokenizer)

    def made(**given: Any) -> Any:
        found = grammars.constraint(SamplingParams(**given), frozenset(tokenizer.eos_ids))
        assert found is not None
        state = found.start()

        def walk(text: str) -> State | None:
            return state.walk(tokenizer.encode(text, add_special=False))

        return walk

    return made


CONSTRAINTS: dict[str, dict[str, Any]] = {
    "schema": {"json_schema": {"type": "array", "items": {"type": "integer"}}},
    "regex": {"regex": r"\[[0-9, ]*\]"},
    "choice": {"choice": ["[1, 2]", "[]"]},
    "gbnf": {"grammar": 'root ::= "[" [0-9, ]* "]"'},
    "lark": {"grammar": 'start: "[" INSIDE "]"\nINSIDE: /[0-9, ]*/'},
}


@pytest.mark.parametrize("name", CONSTRAINTS)
@pytest.mark.parametrize("markers", [("<think>", "</think>"), ("<tool>", "</tool>"), ("[THINK]", "[/THINK]")])
def test_reasoning_may_come_first_and_the_grammar_is_on_behind_it(
    start: Any, name: str, markers: tuple[str, str]
) -> None:
    opening, closing = markers
    thought = f"{opening}Hm [ {{ 小 \n{closing}"
    walk = start(reasoning=markers, **CONSTRAINTS[name])
    for text in ("[1, 2]", f"{thought}[1, 2]", f"{thought}\n\n[1, 2]", f"{thought}\n{thought}[1, 2]"):
        assert walk(text) is not None and walk(text).is_over, text
    for text in ("Hm", f"{thought}\n\n[[", f"{thought}x", f"{thought}{' ' * 9}["):  # `[[`: vllm#48228
        assert walk(text) is None, text
    assert not walk(thought).is_over and walk(f"{opening}[[[[") is not None
    opened = start(reasoning=("", closing), **CONSTRAINTS[name])
    assert opened(f"[[ so{closing}\n\n[1, 2]").is_over and opened(f"[[ so{closing}[[") is None


@pytest.mark.parametrize("markers", [("<think>",), ("<think>", ""), "<think>", (1, 2), ("a", "b", "c")])
def test_markers_that_are_no_pair_are_refused(markers: Any) -> None:
    with pytest.raises(BadParameter, match="expected an opening and a closing marker"):
        SamplingParams(regex="a", reasoning=markers)
