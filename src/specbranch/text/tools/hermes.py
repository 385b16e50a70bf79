"""Tool calls of Hermes and Qwen: a JSON object between <tool_call> and </tool_call>.

Owns this format. Qwen2.5-Coder often writes ```json or <tools> instead, or no marker at all. Invariants: JSON without
the right marker is a call only if it names one of the request's functions. An end marker within a text of the arguments
ends nothing.
"""

from __future__ import annotations

from specbranch.text.tools.json_call import JsonCall
from specbranch.text.tools.reading import CALL_END, CALL_START, Calls, Outcome, State, ToolFormat, starts_with

_CLOSES = {CALL_START: CALL_END, "<tools>": "</tools>", "```json": "```", "": ""}  # by opening marker


class HermesReader:
    """Reads the objects of one pair of markers; models sometimes write several."""

    def __init__(self, calls: Calls, opening: str) -> None:
        self._calls, self._said = calls, opening  # what becomes text if the next object is malformed
        self._close = _CLOSES[opening]
        self._known = None if opening == CALL_START else calls.schemas
        self._held = ""  # not read yet
        self._call: JsonCall | None = None
        self._had_one = False

    def feed(self, text: str) -> Outcome:
        """Read more text."""
        self._held += text
        while True:
            before = self._call, self._held
            outcome = self._between() if self._call is None else self._within(self._call)
            if outcome.state is not State.READING or before == (self._call, self._held):
                return outcome

    def finish(self) -> str:
        """Return what is text for the user. An end marker that was cut is none."""
        if self._call is not None:
            head = self._call.finish()
            return self._said + head if head else ""
        return "" if self._had_one and self._close.startswith(self._held.strip()) else self._said + self._held

    def _within(self, call: JsonCall) -> Outcome:
        self._held = call.feed(self._held)
        if call.state is State.MALFORMED:
            raw = call.raw + self._held
            return Outcome(State.MALFORMED, raw[1:], self._said + raw[:1])
        if call.state is State.DONE:
            self._call, self._said, self._had_one = None, "", True
        return Outcome()

    def _between(self) -> Outcome:
        """Look for an object, or for the end marker."""
        found = self._held.lstrip()
        space = self._held[: len(self._held) - len(found)]
        if self._had_one and found.startswith("}"):  # a brace too many
            self._held = found[1:]
            return Outcome()
        if found.startswith("{"):
            self._said += space
            self._held, self._call = found, JsonCall(self._calls, self._known)
            return Outcome()
        if not found:
            return Outcome()
        if not self._had_one:
            return Outcome(State.MALFORMED, self._held, self._said)
        if self._close and starts_with(found, (self._close,)) == "":
            return Outcome()
        is_closed = self._close and found.startswith(self._close)
        return Outcome(State.DONE, found.removeprefix(self._close) if is_closed else self._held)


HERMES = ToolFormat("hermes", tuple(filter(None, _CLOSES)), HermesReader, (CALL_START, CALL_END), reads_bare=True)
