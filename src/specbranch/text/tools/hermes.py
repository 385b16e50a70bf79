"""Tool calls of Hermes and Qwen: a JSON object between <tool_call> and </tool_call>.

Owns this format. Qwen2.5-Coder often writes ```json or <tools> instead, or no marker at all. Invariants: JSON without
the right marker is a call only if it names one of the request's functions. An end marker within a text of the arguments
ends nothing.
"""

from __future__ import annotations

from dataclasses import replace

from specbranch.text.tools.json_calls import JsonCalls
from specbranch.text.tools.reading import CALL_END, CALL_START, Calls, Outcome, State, ToolFormat, starts_with

FENCE, FENCE_END = "```json", "```"
_CLOSES = {CALL_START: CALL_END, "<tools>": "</tools>", FENCE: FENCE_END, "": ""}  # by opening marker


class HermesReader(JsonCalls):
    """Reads the objects of one pair of markers; models sometimes write several."""

    def __init__(self, calls: Calls, opening: str) -> None:
        super().__init__(calls, opening)
        self._close = _CLOSES[opening]
        self._known = None if opening == CALL_START else calls.schemas

    def _ends_well(self) -> bool:
        """An end marker that was cut is none."""
        return self._close.startswith(self._held.strip())

    def _between(self) -> Outcome:
        found = self._held.lstrip()
        if self._had_one and found.startswith("}"):  # a brace too many
            self._held = found[1:]
        elif found.startswith("{"):
            self._begin(found, self._known)
        elif found:
            return self._end(found)
        return Outcome()

    def _end(self, found: str) -> Outcome:
        """Read what is no object."""
        if not self._had_one:
            return Outcome(State.MALFORMED, self._held, self._said)
        if self._close and starts_with(found, (self._close,)) == "":
            return Outcome()
        is_closed = self._close and found.startswith(self._close)
        return Outcome(State.DONE, found.removeprefix(self._close) if is_closed else self._held)


class ExactHermesReader(HermesReader):
    """Reads the calls that a grammar allows. Other JSON in a fence is text."""

    exact = True


HERMES = ToolFormat("hermes", tuple(filter(None, _CLOSES)), HermesReader, (CALL_START, CALL_END), reads_bare=True)
# of an answer that follows a grammar of calls
EXACT_HERMES = replace(HERMES, openings=(CALL_START, FENCE), reader=ExactHermesReader, reads_bare=False)
