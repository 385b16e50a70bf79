"""Compiles what users give (a JSON schema, a regular expression, choices, a grammar), within bounds, and keeps it.

Owns the bounds against hostile schemas, the cache, and llguidance's view of the vocabulary. Does not own the states of
an answer (`core/grammar.py`). Invariant: whatever is given, a constraint comes back within COMPILE_SECONDS, or a
sentence says why not. A compiled grammar is never changed: each answer parses on a copy of its own.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Protocol, TypeVar

from specbranch.config import ConstraintKind, SamplingParams
from specbranch.core.grammar import TOO_COMPLEX, Constraint
from specbranch.errors import BadParameter
from specbranch.extras import LLGUIDANCE
from specbranch.grammar.parser import GuidanceParser, complexity
from specbranch.grammar.reasoning import behind_reasoning

MOST_CHARACTERS = 200_000  # of a schema or a grammar
DEEPEST_SCHEMA = 64  # levels of a JSON schema
COMPILE_SECONDS = 10.0
COMPILED_AT_ONCE = 2  # threads: one that has run out of time works on, as it cannot be stopped
MOST_COMPILED = 64  # grammars in the cache
MOST_ITEMS = 10_000  # of the parser, for one mask: 10 ms on a slow core. All requests of a batch wait for a mask
# Between two parts of JSON: one space, or one line break with some indentation. Models that are unsure write blanks
# without end if they may.
WHITESPACE = r" |\n {0,24}|\n\t{0,12}"

Found = TypeVar("Found")
Key = tuple[ConstraintKind, str, tuple[str, ...]]  # kind and text of a grammar, and the markers of reasoning before it


class Vocabulary(Protocol):
    """A tokenizer, as far as grammars need it."""

    eos_ids: tuple[int, ...]

    def definition(self) -> str:
        """Return the tokenizer as tokenizer.json has it."""
        ...

    def added_id(self, text: str) -> int | None:
        """Return the added token that a text is; None if it is none."""
        ...


@dataclass(frozen=True, slots=True)
class _Compiled:
    """A compiled grammar, or the sentence that says why there is none."""

    matcher: Any
    error: str = ""


class Grammars:
    """Compiles grammars for one vocabulary."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._cache: OrderedDict[Key, _Compiled] = OrderedDict()
        self._lock = threading.Lock()
        self._running = threading.Semaphore(COMPILED_AT_ONCE)

    def compile(self, params: SamplingParams) -> None:
        """Compile the grammar of a request ahead, in the thread of whoever asks; refuse what cannot be followed."""
        self.constraint(params, frozenset())

    def constraint(self, params: SamplingParams, ends: frozenset[int]) -> Constraint | None:
        """Return the constraint of one answer; None if its parameters name none. `ends`: the tokens that end it."""
        if params.constraint is None:
            return None
        LLGUIDANCE.require("or leave out json_schema, regex, choice, grammar and tool calls that are forced or strict")
        compiled, tokenizer = self._found((*params.constraint, params.reasoning)), self._tokenizer
        return Constraint(partial(GuidanceParser, compiled.matcher, tokenizer.eos_tokens, tokenizer.vocab_size), ends)

    def _found(self, key: Key) -> _Compiled:
        """Return a compiled grammar from the cache, or compile it."""
        with self._lock:
            found = self._cache.get(key)
        if found is None:
            kind, text, _ = key
            check_size(kind, text)
            self._tokenizer  # noqa: B018  (made outside the time that a grammar has)
            found = self._compiled_in_time(key)
        with self._lock:
            self._cache[key] = found
            self._cache.move_to_end(key)
            while len(self._cache) > MOST_COMPILED:
                self._cache.popitem(last=False)
        if found.error:
            raise BadParameter(found.error)
        return found

    def _compiled_in_time(self, key: Key) -> _Compiled:
        if not self._running.acquire(timeout=COMPILE_SECONDS):
            raise BadParameter("Other grammars are being compiled and take too long. Send the request again.")
        with self._lock:
            made = self._cache.get(key)
        if made is not None:  # by another request, while this one waited
            self._running.release()
            return made
        late = f"{key[0]} takes more than {COMPILE_SECONDS:g} s to compile. Make it simpler."
        return _within(COMPILE_SECONDS, lambda: self._compile(*key), self._running.release) or _Compiled(None, late)

    def _compile(self, kind: ConstraintKind, text: str, reasoning: tuple[str, ...]) -> _Compiled:
        import llguidance

        try:
            grammar = _grammar_text(kind, text)
            if reasoning:
                grammar = behind_reasoning(grammar, reasoning[0], reasoning[1], self._vocabulary.added_id)
            limits = llguidance.LLParserLimits(step_max_items=MOST_ITEMS)
            matcher = llguidance.LLMatcher(self._tokenizer, grammar, log_level=0, limits=limits)
        except Exception as error:  # whatever the library raises about a grammar
            return _Compiled(None, _refusal(kind, str(error)))
        if matcher.is_error():
            return _Compiled(None, _refusal(kind, matcher.get_error()))
        matcher.compute_bitmask()  # its lexer keeps what it has computed, for all copies
        if matcher.is_error() or matcher.is_stopped():
            reason = complexity(matcher.get_error())
            none = f"{kind} allows no text at all. Loosen it."
            return _Compiled(None, TOO_COMPLEX.format(what=kind, reason=reason) if reason else none)
        return _Compiled(matcher)

    @cached_property
    def _tokenizer(self) -> Any:
        """The vocabulary as llguidance has it; making it takes a second."""
        import llguidance

        try:
            ends = list(self._vocabulary.eos_ids) or None
            return llguidance.LLTokenizer(self._vocabulary.definition(), eos_token=ends)
        except Exception as error:  # the library raises bare Exceptions, too
            said = str(error).partition("\n")[0]
            raise BadParameter(
                f"Answers of this model cannot follow a grammar: its tokenizer is of a kind that llguidance does not "
                f"know ({said})."
            ) from error


def check_size(kind: ConstraintKind, text: str) -> None:
    """Refuse what is too large, before anything parses it."""
    if len(text) > MOST_CHARACTERS:
        raise BadParameter(f"{kind} has {len(text)} characters; expected at most {MOST_CHARACTERS}. Make it smaller.")
    if kind == "json_schema" and (depth := _depth(text)) > DEEPEST_SCHEMA:
        raise BadParameter(f"json_schema is nested {depth} levels deep; expected at most {DEEPEST_SCHEMA}. Use $ref.")


def _depth(text: str) -> int:
    """Return how deep a JSON text is nested, by its brackets outside of strings."""
    deepest = depth = 0
    inside = escaped = False
    for letter in text:
        if inside:
            inside, escaped = letter != '"' or escaped, letter == "\\" and not escaped
        elif letter == '"':
            inside = True
        elif letter in "{[":
            depth += 1
            deepest = max(deepest, depth)
        elif letter in "}]":
            depth -= 1
    return deepest


def _grammar_text(kind: ConstraintKind, text: str) -> str:
    """Return what llguidance compiles."""
    from llguidance import LLMatcher
    from llguidance.gbnf_to_lark import any_to_lark

    if kind == "json_schema":
        return str(LLMatcher.grammar_from_json_schema(text, overrides={"whitespace_pattern": WHITESPACE}))
    if kind == "regex":
        return str(LLMatcher.grammar_from_regex(text))
    if kind == "choice":  # one terminal: a choice may begin with another
        quoted = " | ".join(json.dumps(one, ensure_ascii=False) for one in json.loads(text))
        return str(LLMatcher.grammar_from_lark(f"start: CHOICE\nCHOICE: {quoted}"))
    return str(LLMatcher.grammar_from_lark(any_to_lark(text)))


def _refusal(kind: ConstraintKind, reason: str) -> str:
    said = " ".join(reason.split())[:300].rstrip(".")
    return f"{kind} cannot be followed: {said}. See docs/structured.md for what is supported."


def _within(seconds: float, work: Callable[[], Found], after: Callable[[], object]) -> Found | None:
    """Return what a thread finds in time; None if it takes longer. `after` is called once it ends."""
    found: list[Found] = []

    def run() -> None:
        try:
            found.append(work())
        finally:
            after()

    thread = threading.Thread(target=run, name="specbranch-grammar", daemon=True)
    thread.start()
    thread.join(seconds)
    return found[0] if found else None
