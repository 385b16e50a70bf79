"""What is refused, with a sentence: hostile schemas, mistakes, a missing package."""

from __future__ import annotations

import json
import random
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from schemas import SCHEMAS
from small_tokenizers import byte_level, save
from specbranch.config import SamplingParams
from specbranch.core.grammar import Constraint, Mask, State
from specbranch.errors import BadParameter, MissingPackage, SpecBranchError
from specbranch.extras import Extra
from specbranch.grammar import compiler
from specbranch.grammar.compiler import DEEPEST_SCHEMA, MOST_CHARACTERS, MOST_COMPILED, Grammars
from specbranch.grammar.parser import GuidanceParser
from specbranch.text.tokenizer import Tokenizer

END = 2


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    save(byte_level(), folder)
    return Tokenizer.from_folder(folder)


@pytest.fixture
def grammars(tokenizer: Tokenizer) -> Grammars:
    pytest.importorskip("llguidance")
    return Grammars(tokenizer)


def refusal(grammars: Grammars, **given: Any) -> str:
    with pytest.raises(BadParameter) as caught:
        grammars.constraint(SamplingParams(**given), frozenset((END,)))
    return str(caught.value)


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "boolean"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema, "maxItems": 1}
    return schema


def test_without_the_package_a_sentence_says_what_to_install(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    absent = Extra("a_package_that_is_not_there", "grammar", "An answer that follows a schema or a grammar")
    monkeypatch.setattr(compiler, "LLGUIDANCE", absent)
    assert Grammars(tokenizer).constraint(SamplingParams(), frozenset()) is None
    with pytest.raises(MissingPackage, match=r"pip install 'specbranch\[grammar\]'"):
        Grammars(tokenizer).constraint(SamplingParams(regex="a"), frozenset())


def test_a_schema_that_is_too_large_or_too_deep_is_refused(grammars: Grammars) -> None:
    assert "characters" in refusal(grammars, json_schema={"enum": ["x" * MOST_CHARACTERS]})
    assert f"at most {DEEPEST_SCHEMA}" in refusal(grammars, json_schema=nested(DEEPEST_SCHEMA + 1))
    assert "characters" in refusal(grammars, regex="a" * (MOST_CHARACTERS + 1))
    brackets = {"const": "[" * 200 + '"\\' * 3}  # in a string they do not nest
    assert grammars.constraint(SamplingParams(json_schema=brackets), frozenset((END,))) is not None


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "unknown"},
        {"$ref": "https://example.com/elsewhere.json"},
        {"$ref": "#/$defs/absent"},
        {"not": {"type": "string"}},
        {"type": "array", "uniqueItems": True},
        {"type": "string", "minLength": 5, "maxLength": 2},
        {"type": "string", "pattern": "([a-z"},
        {"$ref": "#"},
    ],
)
def test_a_schema_that_cannot_be_followed_is_refused_with_its_reason(grammars: Grammars, schema: Any) -> None:
    said = refusal(grammars, json_schema=schema)
    assert said.startswith("json_schema ") and said.endswith(".") and "\n" not in said


@pytest.mark.parametrize(
    "given",
    [{"regex": "([a"}, {"regex": "(?=a)b"}, {"grammar": 'root ::= (("a"'}, {"grammar": 'start: "a" absent'}],
)
def test_other_mistakes_are_refused_with_their_reason(grammars: Grammars, given: dict[str, str]) -> None:
    assert "cannot be followed" in refusal(grammars, **given)


@pytest.mark.parametrize(
    "given",
    [
        {"json_schema": {"type": "string", "maxLength": 10**9}},
        {"json_schema": {"type": "array", "minItems": 10**5, "maxItems": 10**6}},
        {"json_schema": {"type": "string", "pattern": "^(a|b|c)*abc(x{1,1000}){1,1000}$"}},
        {"json_schema": {"type": "object", "patternProperties": {"^(a+)+$": {"type": "integer"}}}},
        {"json_schema": {"anyOf": [{"type": "string", "pattern": f"^[a-z]{{{n}}}$"} for n in range(300)]}},
        {"regex": "(a?){50}a{50}"},
        {"regex": "(.*a){20}"},
        {"choice": [f"choice {n}" for n in range(5000)]},
    ],
)
def test_hostile_grammars_are_refused_or_followed_in_bounded_time(grammars: Grammars, given: dict[str, Any]) -> None:
    """Either a sentence, or a parser whose masks come; the bound on compiling is that of the module."""
    try:
        constraint = grammars.constraint(SamplingParams(**given), frozenset((END,)))
    except SpecBranchError as error:
        assert str(error).endswith(".")
        return
    assert constraint is not None
    state = constraint.start()
    for _ in range(20):
        state.check()
        allowed = state.allowed
        assert allowed is not None
        after = state.advance(next(iter(allowed)))
        assert after is not None
        if after.is_over:
            return
        state = after.commit()


def test_compiling_that_takes_too_long_is_refused_and_not_tried_again(
    grammars: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, released = list[str](), threading.Event()

    def slow(kind: str, text: str) -> str:
        calls.append(text)
        released.wait()
        return ""

    monkeypatch.setattr(compiler, "COMPILE_SECONDS", 0.05)
    monkeypatch.setattr(compiler, "_grammar_text", slow)
    assert "to compile" in refusal(grammars, regex="slow")
    assert "to compile" in refusal(grammars, regex="slow") and calls == ["slow"]
    refusal(grammars, regex="slow too")
    assert "Other grammars" in refusal(grammars, regex="third")  # two threads are at work, and cannot be stopped
    released.set()
    while threading.active_count() > 1 and any(t.name == "specbranch-grammar" for t in threading.enumerate()):
        time.sleep(0.01)
    assert "to compile" not in refusal(grammars, regex="third")


def test_compiled_grammars_are_kept_and_shared(grammars: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    made = list[str]()
    before = compiler._grammar_text
    monkeypatch.setattr(compiler, "_grammar_text", lambda kind, text: made.append(text) or before(kind, text))
    one, other = (grammars.constraint(SamplingParams(regex="[a-c]{2}"), frozenset((END,))) for _ in range(2))
    assert made == ["[a-c]{2}"] and one is not None and other is not None
    state = one.start()
    token = next(iter(state.allowed or ()))
    after = state.advance(token)
    assert after is not None
    after.commit()
    assert token in (one.start().allowed or ()) and token in (other.start().allowed or ())  # each has its own parser
    for number in range(MOST_COMPILED):
        grammars.constraint(SamplingParams(regex=f"[a-c]{{{number + 3}}}"), frozenset((END,)))
    grammars.constraint(SamplingParams(regex="[a-c]{2}"), frozenset((END,)))
    assert made.count("[a-c]{2}") == 2, "the oldest was not dropped"


def test_requests_that_wait_for_the_same_grammar_compile_it_once(
    grammars: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, released, waiting = list[str](), threading.Event(), compiler.COMPILED_AT_ONCE + 4
    before = compiler._grammar_text

    def slow(kind: Any, text: str) -> str:
        made.append(text)
        released.wait()
        return before(kind, text)

    monkeypatch.setattr(compiler, "_grammar_text", slow)
    threads = [
        threading.Thread(target=grammars.compile, args=(SamplingParams(regex="[d-f]{2}"),)) for _ in range(waiting)
    ]
    for thread in threads:
        thread.start()
    while len(made) < compiler.COMPILED_AT_ONCE:
        time.sleep(0.001)
    released.set()
    for thread in threads:
        thread.join()
    assert len(made) < waiting


def test_blanks_in_json_are_bounded(grammars: Grammars, tokenizer: Tokenizer) -> None:
    constraint = grammars.constraint(SamplingParams(json_schema={"type": "object"}), frozenset((END,)))
    assert constraint is not None
    start = constraint.start()
    for text, fits in (('{"a": 1}', True), ('{\n  "a": [\n    1\n  ]\n}', True), ("{  ", False), ("{\n\n", False)):
        ids = tokenizer.encode(text, add_special=False)
        assert (start.permitted(ids) == len(ids)) is fits, text
    deep = tokenizer.encode("{\n" + " " * 60, add_special=False)
    assert start.permitted(deep) < len(deep)


def test_the_mask_of_a_state_does_not_depend_on_the_way_there(grammars: Grammars, tokenizer: Tokenizer) -> None:
    """Masks after forks and rollbacks are those of a fresh parser that has consumed the same tokens."""
    schema = {"type": "object", "properties": {"ab": {"type": "string", "maxLength": 4}, "n": {"type": "integer"}}}
    schema |= {"required": ["ab", "n"], "additionalProperties": False}
    params, ends = SamplingParams(json_schema=schema), frozenset((END,))
    texts = ['{"ab": "xy", "n": 12}', '{"ab": "xz", "n": 3}', '{"ab":"", "n":0}', '{\n  "ab": "x\\n", "n": -7}']
    constraint = grammars.constraint(params, ends)
    assert constraint is not None
    shared = constraint.start()
    for depth in range(1, 20):  # breadth first: the parser goes to and fro
        for text in texts:
            ids = tokenizer.encode(text, add_special=False)[:depth]
            fresh = grammars.constraint(params, ends)
            assert fresh is not None
            here, there = shared.walk(ids), fresh.start().walk(ids)
            assert here is not None and there is not None
            assert set(here.allowed or ()) == set(there.allowed or ()), (text, depth)
            assert here.is_over == there.is_over


@pytest.mark.slow
def test_what_is_asked_without_a_mask_is_what_the_mask_says(grammars: Grammars, tokenizer: Tokenizer) -> None:
    """Also of a forced text, which may have other tokens with the same bytes, and of ids that no token has."""
    rng, forced, forbidden = random.Random(4), 0, 0
    given: list[dict[str, Any]] = [{"json_schema": schema} for schema in SCHEMAS.values()]
    given += [{"choice": ["red", "green", "greenish"]}, {"regex": "[A-Z][a-z]{2,6}( [a-z]{2,5}){2,5}"}]
    for params in (SamplingParams(**one) for one in given):
        constraint = grammars.constraint(params, frozenset((END,)))
        assert constraint is not None
        parser, ids = constraint.parser(), list[int]()
        for _ in range(40):
            only, allows = parser.forced(), [parser.allows(token) for token in range(-1, tokenizer.vocabulary_size + 9)]
            mask = Mask(parser.mask())
            assert only in (None, mask.only)
            assert allows == [token in mask for token in range(-1, tokenizer.vocabulary_size + 9)]
            forced, forbidden = forced + (only is not None), forbidden + allows.count(False)
            if not (allowed := list(mask)):
                break
            ids.append(rng.choice(allowed))
            parser.consume(ids[-1])
    assert forced > 20 and forbidden > 1000


class Fragile:
    """A matcher that gives up behind two tokens 1 in a row, and stays so, as the library's does."""

    def __init__(self) -> None:
        self.tokens, self.failed = list[int](), False

    def deep_copy(self) -> Fragile:
        return Fragile()

    def consume_token(self, token: int) -> bool:
        self.tokens.append(token)
        self.failed = self.failed or self.tokens[-2:] == [1, 1]
        return not self.failed

    def consume_tokens(self, tokens: list[int]) -> bool:
        return all(self.consume_token(token) for token in tokens)

    def rollback(self, count: int) -> bool:
        del self.tokens[-count:]
        return not self.failed

    def compute_bitmask(self) -> bytes:
        self.failed = self.failed or self.tokens[-2:] == [3, 3]  # this one only when it is asked
        return bytes([0b1111])

    def compute_ff_tokens(self) -> list[int]:
        return []

    def validate_tokens(self, tokens: list[int]) -> int:
        return len(tokens)

    def is_error(self) -> bool:
        return self.failed

    def get_error(self) -> str:
        return "lexer error: too many expressions\n<state>\n…" if self.failed else ""

    def is_accepting(self) -> bool:
        return False


def test_where_the_library_gives_up_other_branches_go_on() -> None:
    state = Constraint(lambda: GuidanceParser(Fragile(), (2,), 4), frozenset()).start()
    assert list(state.allowed or ()) == [0, 1, 3]
    for bad in ([0, 1, 1], [0, 3, 3]):
        dead = state.walk(bad)
        assert dead is not None and list(dead.allowed or ()) == [] and not dead.is_over
        with pytest.raises(BadParameter, match=r"too complex to be followed \(lexer error: too many expressions\)\. "):
            dead.check()
        other = state.walk([0, 1, 3])
        assert other is not None and list(other.allowed or ()) == [0, 1, 3]


AMBIGUOUS = "start: e\ne: e e | e e e | | /[a-z]*/ | /[a-f ]*/ | /[a-k ]+/"


def test_an_ambiguous_grammar_ends_with_a_sentence_before_its_masks_take_long(
    grammars: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A longer text has more readings, so masks take ever longer. The bound is lower, as this vocabulary is small."""
    monkeypatch.setattr(compiler, "MOST_ITEMS", 1000)
    constraint = grammars.constraint(SamplingParams(grammar=AMBIGUOUS), frozenset((END,)))
    assert constraint is not None
    state: State | None = constraint.start()
    with pytest.raises(BadParameter, match=r"The answer's grammar is too complex to be followed \(.*items.* simpler"):
        for _ in range(100):
            assert state is not None
            state.check()
            state = state.advance(max(token for token in state.allowed or () if token != END))


def test_what_is_too_complex_from_the_start_is_not_said_to_allow_no_text(
    grammars: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiler, "MOST_ITEMS", 1)
    said = refusal(grammars, grammar=AMBIGUOUS)
    assert said.startswith("grammar is too complex to be followed (") and "\n" not in said, said
    monkeypatch.undo()
    assert refusal(grammars, json_schema={"$ref": "#"}) == "json_schema allows no text at all. Loosen it."


def test_a_tokenizer_that_the_library_does_not_know_is_refused(grammars: Grammars) -> None:
    class Odd:
        eos_ids = (1,)

        def definition(self) -> str:
            return json.dumps({"model": {"type": "Odd"}})

    with pytest.raises(SpecBranchError, match="tokenizer"):
        Grammars(Odd()).constraint(SamplingParams(regex="a"), frozenset())


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"regex": "a", "choice": ["b"]}, "regex and choice are both given"),
        ({"json_schema": "{"}, "no JSON"),
        ({"json_schema": "[1]"}, "json_schema"),
        ({"json_schema": 3}, "json_schema"),
        ({"json_schema": {"a": object()}}, "no JSON"),
        ({"regex": ""}, "regex"),
        ({"choice": "red"}, "choice"),
        ({"choice": ["red", ""]}, "choice"),
        ({"choice": ["red", 3]}, "choice"),
        ({"grammar": 7}, "grammar"),
    ],
)
def test_parameters_that_make_no_sense_are_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(BadParameter, match=said):
        SamplingParams(**given)


def test_a_schema_is_kept_as_its_text_so_that_parameters_can_be_saved() -> None:
    schema = {"type": "object", "properties": {"b": {"const": "ü"}, "a": {}}}
    params = SamplingParams(json_schema=schema, n=2)
    assert json.loads(str(params.json_schema)) == schema and hash(params) == hash(
        SamplingParams(json_schema=schema, n=2)
    )
    assert params.constraint == ("json_schema", params.json_schema)
    assert not SamplingParams().is_constrained


def test_masks_are_sets_of_tokens() -> None:
    mask = Mask.of([3, 8, 200])
    assert list(mask) == [3, 8, 200] and len(mask) == 3 and mask.only is None
    assert 8 in mask and 9 not in mask and 10_000 not in mask
    assert Mask.of([77]).only == 77 and Mask.of([]).only is None


def test_the_extra_is_in_the_table_of_pyproject() -> None:
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    assert 'grammar = ["llguidance' in text


def test_where_the_library_gives_up_on_a_mask_no_token_may_follow_that_was_allowed_before() -> None:
    """A drafted token may have been asked for before the mask, whose computation fails."""
    state = Constraint(lambda: GuidanceParser(Fragile(), (2,), 4), frozenset()).start()
    dead = state.walk([3, 3])
    assert dead is not None and dead.advance(1) is not None, "asked alone, the library allows it"
    assert list(dead.allowed or ()) == []
    assert dead.advance(1) is None and dead.permitted([1]) == 0
