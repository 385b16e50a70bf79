"""Several tool calls, each a JSON object, one after the other.

Owns the turns of reading an object and what stands between two. Does not own what may stand there: each format says so
in `_between`. Invariant: a turn that changes nothing ends the reading of the present text.
"""

from __future__ import annotations

from collections.abc import Container

from specbranch.text.tools.json_call import JsonCall
from specbranch.text.tools.reading import Calls, Outcome, State


class JsonCalls:
    """Reads the objects behind an opening marker."""

    exact = False  # as for `JsonCall`

    def __init__(self, calls: Calls, said: str) -> None:
        """`said`: the marker. It becomes text if no object follows."""
        self._calls, self._said = calls, said
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
            return "" if self._had_one and self._ends_well() else self._said + self._held
        head = self._call.finish()
        return self._said + head if head else ""

    def _begin(self, found: str, known: Container[str] | None = None) -> None:
        """Begin to read an object; `found`: what is held, from its brace on. `known`: as for `JsonCall`."""
        self._said += self._held[: len(self._held) - len(found)]
        self._held, self._call = found, JsonCall(self._calls, known, self.exact)

    def _within(self, call: JsonCall) -> Outcome:
        self._held = call.feed(self._held)
        if call.state is State.MALFORMED:
            raw = call.raw + self._held
            return Outcome(State.MALFORMED, raw[1:], self._said + raw[:1])
        if call.state is State.DONE:
            self._call, self._said, self._had_one = None, "", True
        return Outcome()

    def _ends_well(self) -> bool:
        """True if an answer may end with what is held behind its last object: then it is no text."""
        return True

    def _between(self) -> Outcome:
        """Look for an object, or for the end."""
        raise NotImplementedError
