"""Tool calls of Llama 3: JSON behind <|python_tag|>, or an answer that is JSON from its start.

Owns this format. Invariant: JSON without the marker is a call only if it names one of the request's functions.
"""

from __future__ import annotations

from specbranch.text.tools.json_call import JsonCall
from specbranch.text.tools.reading import Calls, Outcome, State, ToolFormat

TAG = "<|python_tag|>"
_BETWEEN = "; \t\r\n"  # separates calls


class LlamaReader:
    """Reads one object or several."""

    def __init__(self, calls: Calls, opening: str) -> None:
        self._calls, self._opening, self._said = calls, opening, opening
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
        """Return what is text for the user."""
        if self._call is None:
            return "" if self._had_one and not self._held.strip(_BETWEEN) else self._said + self._held
        head = self._call.finish()
        return self._said + head if head else ""

    def _within(self, call: JsonCall) -> Outcome:
        self._held = call.feed(self._held)
        if call.state is State.MALFORMED:
            raw = call.raw + self._held
            return Outcome(State.MALFORMED, raw[1:], self._said + raw[:1])
        if call.state is State.DONE:
            self._call, self._said, self._had_one = None, "", True
        return Outcome()

    def _between(self) -> Outcome:
        found = self._held.lstrip(_BETWEEN if self._had_one else None)
        if found.startswith("{"):
            self._said += self._held[: len(self._held) - len(found)]
            self._held = found
            self._call = JsonCall(self._calls, None if self._opening else self._calls.schemas)
        elif found:
            state = State.DONE if self._had_one else State.MALFORMED
            return Outcome(state, self._held, self._said)
        return Outcome()


LLAMA = ToolFormat("llama3_json", (TAG,), LlamaReader, (TAG,), reads_bare=True)
