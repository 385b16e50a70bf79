"""A tool call as a JSON object with a name and arguments, read character by character.

Owns the scan of JSON that is not complete yet. Invariant: before a call has its name, everything is held back, so a
malformed head can still become text. After that, arguments are passed on as the model writes them, valid or not.
"""

from __future__ import annotations

import json
import re
import string
from collections.abc import Container
from typing import Any

from specbranch.text.tools.reading import LONGEST_HEAD, Calls, State

ARGUMENTS = ("arguments", "parameters")
_TEXT = r'"((?:[^"\\]|\\.)*)"'
_HEAD = re.compile(
    rf'\{{\s*(?:"(?:type|id)"\s*:\s*{_TEXT}\s*,\s*)?"name"\s*:\s*{_TEXT}\s*,\s*"(?:{"|".join(ARGUMENTS)})"\s*:\s*\{{',
    re.DOTALL,
)
_OUTSIDE = frozenset('{}[]:,"+-.' + string.ascii_letters + string.digits + string.whitespace)  # of JSON, beside texts


class Scanner:
    """How deep a position of JSON is in brackets, and if it is in a text. Brackets of all kinds count alike."""

    __slots__ = ("_escaped", "depth", "in_text")

    def __init__(self) -> None:
        self.depth, self.in_text, self._escaped = 0, False, False

    def step(self, character: str) -> None:
        """Read one character."""
        if self.in_text:
            self._step_text(character)
        elif character == '"':
            self.in_text = True
        elif character in "{[":
            self.depth += 1
        elif character in "}]":
            self.depth -= 1

    def _step_text(self, character: str) -> None:
        if self._escaped:
            self._escaped = False
        elif character == "\\":
            self._escaped = True
        elif character == '"':
            self.in_text = False


class JsonCall:
    """Reads one object, from its brace on."""

    def __init__(self, calls: Calls, known: Container[str] | None = None, exact: bool = False) -> None:
        """`known`: names of functions; an object with another name is malformed. None: any name. `exact`: so is one
        whose name, as it is written, does not come first, with an object as its arguments."""
        self._calls, self._known, self._exact = calls, known, exact
        self._scanner, self._phase = Scanner(), self._head
        self._raw: list[str] = []  # what was held back
        self._tried = False
        self.state = State.READING

    @property
    def raw(self) -> str:
        """What it has read, while the call has no name."""
        return "".join(self._raw)

    def feed(self, text: str) -> str:
        """Read text; return what it did not read, as the call is over."""
        at = 0
        while at < len(text) and self.state is State.READING:
            at = self._phase(text, at)
        return text[at:]

    def finish(self) -> str:
        """Return what is text for the user, as the answer ends here."""
        if self._phase == self._head:
            return self.raw
        if self._phase == self._tail:
            self._calls.end()
        return ""

    def _head(self, text: str, at: int) -> int:
        """Read one character before the arguments of a call whose name comes first, or of another object."""
        character, scanner = text[at], self._scanner
        if (not scanner.in_text and character not in _OUTSIDE) or len(self._raw) >= LONGEST_HEAD:
            self.state = State.MALFORMED
            return at
        scanner.step(character)
        self._raw.append(character)
        if character == "{" and scanner.depth == 2 and not scanner.in_text and not self._tried:
            self._tried = True
            if (found := _HEAD.fullmatch(self.raw)) and (name := self._name(self._said(found[2]))):
                self._calls.begin(name)
                self._raw.clear()
                self._phase = self._arguments
                return self._arguments(text, at + 1, "{")
        if scanner.depth == 0:
            self._read_whole()
        return at + 1

    def _arguments(self, text: str, at: int, before: str = "") -> int:
        """Pass on arguments up to their end."""
        start, scanner = at, self._scanner
        while at < len(text):
            character = text[at]
            if character in "<`" and not scanner.in_text:  # no JSON: the end marker of a call that lacks brackets
                self._calls.add(before + text[start:at])
                return self._done(at)
            scanner.step(character)
            at += 1
            if scanner.depth == 1 and not scanner.in_text and character in "}]":
                self._phase = self._tail
                break
        self._calls.add(before + text[start:at])
        return at

    def _tail(self, text: str, at: int) -> int:
        """Read one character behind the arguments. A missing brace is forgiven."""
        character, scanner = text[at], self._scanner
        if not scanner.in_text and character not in _OUTSIDE:
            return self._done(at)
        scanner.step(character)
        return self._done(at + 1) if scanner.depth == 0 else at + 1

    def _done(self, at: int) -> int:
        self._calls.end()
        self.state = State.DONE
        return at

    def _read_whole(self) -> None:
        """Read an object that is complete: its name came late, or its arguments are no object."""
        found = None if self._exact else _loaded(self.raw)
        arguments = _arguments_of(found) if isinstance(found, dict) else None
        name = self._name(found.get("name")) if isinstance(found, dict) else None
        if name is None or arguments is None:
            self.state = State.MALFORMED
            return
        self._raw.clear()
        self._calls.begin(name)
        self._calls.add(arguments)
        self._done(0)

    def _said(self, name: str) -> Any:
        """Return the name that a text of JSON means."""
        return name if self._exact else _loaded(f'"{name}"')

    def _name(self, given: Any) -> str | None:
        known = isinstance(given, str) and given and (self._known is None or given in self._known)
        return given if known else None


def _arguments_of(call: dict[str, Any]) -> str | None:
    """Return a call's arguments as JSON. Some models write them as a text that holds JSON."""
    given: Any = next((call[name] for name in ARGUMENTS if call.get(name) is not None), {})
    if isinstance(given, str):
        return given if isinstance(_loaded(given), dict) else None
    return json.dumps(given, ensure_ascii=False) if isinstance(given, dict) else None


def _loaded(text: str) -> Any:
    """Return JSON as a value; None if it is none. Line breaks within texts are forgiven."""
    try:
        return json.loads(text, strict=False)
    except (ValueError, RecursionError):
        return None
