"""Tool calls of Mistral: [TOOL_CALLS] and a JSON list of objects, or a name, [ARGS] and a JSON object.

Owns this format. The second way is that of newer models, some of which write [CALL_ID] and an id before [ARGS], or
leave [ARGS] out.
"""

from __future__ import annotations

import re

from specbranch.text.tools.json_call import Scanner
from specbranch.text.tools.json_calls import JsonCalls
from specbranch.text.tools.reading import Calls, Outcome, State, ToolFormat

TOOL_CALLS, CALL_ID, ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
_HEAD = re.compile(r"\s*([\w.\-]{1,128})\s*(?:\[CALL_ID\][^\[{]*)?(?:\[ARGS\])?\s*")
_LONGEST = 512  # characters of a name with its markers


class MistralReader:
    """Reads what follows one marker."""

    def __init__(self, calls: Calls, opening: str) -> None:
        self._calls, self._opening = calls, opening
        self._reader: _List | _Named | None = None
        self._held = ""  # not read yet

    def feed(self, text: str) -> Outcome:
        """Read more text. The first letter says which way the calls are written."""
        if self._reader is None:
            self._held += text
            start = self._held.lstrip()
            if not start:
                return Outcome()
            self._reader = (_List if start[0] == "[" else _Named)(self._calls, self._opening)
            text = self._held
        return self._reader.feed(text)

    def finish(self) -> str:
        """Return what is text for the user."""
        return self._opening + self._held if self._reader is None else self._reader.finish()


class _List(JsonCalls):
    """Reads a list of objects."""

    def __init__(self, calls: Calls, said: str) -> None:
        super().__init__(calls, said)
        self._opened = False

    def _between(self) -> Outcome:
        found = self._held.lstrip(" \t\r\n," if self._had_one else None)
        if found.startswith("[") and not self._opened:
            self._opened = True
            self._said += self._held[: len(self._held) - len(found)] + "["
            self._held = found[1:]
        elif found.startswith("{"):
            self._begin(found)
        elif found.startswith("]") and self._had_one:
            return Outcome(State.DONE, found[1:])
        elif found:
            return Outcome(State.DONE if self._had_one else State.MALFORMED, self._held, self._said)
        return Outcome()


class _Named:
    """Reads a name and its arguments."""

    def __init__(self, calls: Calls, said: str) -> None:
        self._calls, self._said = calls, said
        self._head = ""
        self._scanner: Scanner | None = None  # of the arguments

    def feed(self, text: str) -> Outcome:
        if self._scanner is not None:
            return self._arguments(self._scanner, text)
        self._head += text
        brace = self._head.find("{")
        if brace < 0 and len(self._head) <= _LONGEST and self._may_become_a_name():
            return Outcome()
        found = _HEAD.fullmatch(self._head, 0, brace) if 0 <= brace <= _LONGEST else None
        if found is None:
            return Outcome(State.MALFORMED, self._head, self._said)
        self._calls.begin(found[1])
        self._scanner = Scanner()
        return self._arguments(self._scanner, self._head[brace:])

    def finish(self) -> str:
        return self._said + self._head if self._scanner is None else ""

    def _may_become_a_name(self) -> bool:
        """Return False for text that no brace can make a call, such as a sentence."""
        words = self._head.partition("[")[0].split()
        return len(words) <= 1 and self._head.count("[") <= 2

    def _arguments(self, scanner: Scanner, text: str) -> Outcome:
        for at, character in enumerate(text):
            scanner.step(character)
            if scanner.depth == 0 and not scanner.in_text:
                self._calls.add(text[: at + 1])
                self._calls.end()
                return Outcome(State.DONE, text[at + 1 :])
        self._calls.add(text)
        return Outcome()


MISTRAL = ToolFormat("mistral", (TOOL_CALLS,), MistralReader, (TOOL_CALLS, CALL_ID, ARGS), short_ids=True)
