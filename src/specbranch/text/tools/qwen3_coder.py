"""Tool calls of Qwen3-Coder: <function=NAME> and <parameter=NAME> with plain values, mostly within <tool_call>.

Owns this format. Invariant: the arguments are JSON, whatever a value holds: a value is a text, unless the function's
schema has another type for it and the value is JSON.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from specbranch.text.tools.reading import (
    CALL_END,
    CALL_START,
    LONGEST_HEAD,
    Calls,
    Outcome,
    State,
    ToolFormat,
    find_marker,
    starts_with,
)

FUNCTION, END = "<function=", "</function>"
PARAMETER, VALUE_END = "<parameter=", "</parameter>"
_ENDS = (VALUE_END, PARAMETER, END)  # of a value: models sometimes forget the first
_LITERALS = {"True": True, "False": False, "None": None}
_LONGEST_NAME = 256


class Qwen3CoderReader:
    """Reads one function."""

    def __init__(self, calls: Calls, opening: str) -> None:
        self._calls, self._raw = calls, opening  # all that was read, while the call is not begun
        self._held = ""  # not read yet
        self._phase = self._open if opening == CALL_START else self._name
        self._function, self._key = "", ""
        self._begun, self._parameters = False, 0
        self._streams = False  # the value is a text, passed on as it comes
        self._at_start = False  # nothing of the value was passed on

    def feed(self, text: str) -> Outcome:
        """Read more text."""
        self._held += text
        while True:
            before = self._phase, self._held
            outcome = self._phase()
            if outcome is not None:
                return outcome
            if before == (self._phase, self._held):
                return Outcome()

    def finish(self) -> str:
        """Return what is text for the user. What there is of a value is passed on."""
        if not self._begun:
            return self._raw + self._held
        if self._phase == self._value and self._streams:
            self._calls.add(_escaped(self._held))
        return ""

    def _open(self) -> Outcome | None:
        """Read up to the function's name."""
        found = self._held.lstrip()
        marker = starts_with(found, (FUNCTION,))
        if marker is None:
            return self._malformed()
        if marker:
            self._read(len(self._held) - len(found) + len(FUNCTION))
            self._phase = self._name
        return None

    def _name(self) -> Outcome | None:
        name, closed, _ = self._held.partition(">")
        if "<" in name or "\n" in name or len(name) > _LONGEST_NAME or (closed and not name.strip()):
            return self._malformed()
        if closed:
            self._function = name.strip()
            self._read(len(name) + 1)
            self._phase = self._body
        return None

    def _body(self) -> Outcome | None:
        """Look for a parameter or the end. The first of them makes it a call."""
        found = self._held.lstrip()
        marker = starts_with(found, (PARAMETER, END, CALL_END))
        if marker == "" and len(self._held) < LONGEST_HEAD:
            return None
        if not marker:
            return self._ended(self._held) if self._begun else self._malformed()
        if not self._begun:
            self._begun, self._raw = True, ""
            self._calls.begin(self._function)
            self._calls.add("{")
        if marker == PARAMETER:
            self._held, self._phase = found.removeprefix(PARAMETER), self._parameter
            return None
        if marker == CALL_END:
            return self._ended(found.removeprefix(CALL_END))
        self._end()
        self._held, self._phase = found.removeprefix(END), self._close
        return None

    def _parameter(self) -> Outcome | None:
        key, closed, rest = self._held.partition(">")
        if closed:
            self._key, self._held, self._phase = key.strip(), rest, self._value
            kinds = _kinds(self._calls.schemas.get(self._function), self._key)
            self._streams, self._at_start = kinds <= {"string"}, True
            quote = '"' if self._streams else ""
            self._calls.add(f"{', ' if self._parameters else ''}{_json(self._key)}: {quote}")
            self._parameters += 1
        return None

    def _value(self) -> Outcome | None:
        """Read a value up to its end; one line break on each side belongs to the markers."""
        found = find_marker(self._held, _ENDS)
        if self._streams:
            self._pass_on(found.at, found.marker is not None)
        if found.marker is None:
            return None
        at = 0 if self._streams else found.at
        if self._streams:
            self._calls.add('"')
        else:
            kinds = _kinds(self._calls.schemas.get(self._function), self._key)
            self._calls.add(_json(_typed(self._held[:at].removeprefix("\n").removesuffix("\n"), kinds)))
        self._held, self._phase = self._held[at:].removeprefix(VALUE_END), self._body
        return None

    def _pass_on(self, end: int, is_whole: bool) -> None:
        """Pass on a text's value up to a position. A line break before that is held back: it may be the last."""
        value, self._held = self._held[:end], self._held[end:]
        if self._at_start and value:
            value, self._at_start = value.removeprefix("\n"), False
        if is_whole:
            value = value.removesuffix("\n")
        elif value.endswith("\n"):
            value, self._held = value[:-1], "\n" + self._held
        self._calls.add(_escaped(value))

    def _close(self) -> Outcome | None:
        """Look for the end marker around the function, which may be missing."""
        found = self._held.lstrip()
        marker = starts_with(found, (CALL_END,))
        if marker == "":
            return None
        return Outcome(State.DONE, self._held if marker is None else found.removeprefix(CALL_END))

    def _end(self) -> None:
        self._calls.add("}")
        self._calls.end()

    def _ended(self, rest: str) -> Outcome:
        self._end()
        return Outcome(State.DONE, rest)

    def _read(self, count: int) -> None:
        self._raw += self._held[:count]
        self._held = self._held[count:]

    def _malformed(self) -> Outcome:
        """Give up: the opening marker is text, and the rest is searched again."""
        opening = CALL_START if self._raw.startswith(CALL_START) else FUNCTION
        return Outcome(State.MALFORMED, self._raw.removeprefix(opening) + self._held, opening)


def _kinds(schema: Mapping[str, Any] | None, key: str) -> frozenset[str]:
    """Return the JSON types that a parameter may have; none if the schema does not say."""
    properties = schema.get("properties") if isinstance(schema, Mapping) else None
    return kinds_of(properties.get(key)) if isinstance(properties, Mapping) else frozenset()


def kinds_of(described: Any, depth: int = 4) -> frozenset[str]:
    """Return the JSON types that a schema names; "any" for a reference, none if it does not say."""
    if not isinstance(described, Mapping) or not depth:
        return frozenset()
    given = described.get("type")
    several_types = given if isinstance(given, list) else [given]
    found = {one for one in several_types if isinstance(one, str)}
    for name in ("anyOf", "oneOf", "allOf"):
        several = described.get(name)
        for one in several if isinstance(several, list) else ():
            found |= kinds_of(one, depth - 1)
    return frozenset(found) or frozenset({"any"} if "$ref" in described else ())


def _typed(value: str, kinds: frozenset[str]) -> Any:
    """Return a value by its type. What is not of that type stays a text."""
    if "string" in kinds and value.strip() != "null":
        return value
    if value.strip() in _LITERALS:
        return _LITERALS[value.strip()]
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _escaped(text: str) -> str:
    return _json(text)[1:-1]


QWEN3_CODER = ToolFormat("qwen3_coder", (CALL_START, FUNCTION), Qwen3CoderReader, (CALL_START, CALL_END))
