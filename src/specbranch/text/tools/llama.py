"""Tool calls of Llama 3: JSON behind <|python_tag|>, or an answer that is JSON from its start.

Owns this format. Invariant: JSON without the marker is a call only if it names one of the request's functions.
"""

from __future__ import annotations

from specbranch.text.tools.json_calls import JsonCalls
from specbranch.text.tools.reading import Calls, Outcome, State, ToolFormat

TAG = "<|python_tag|>"
_BETWEEN = "; \t\r\n"  # separates calls


class LlamaReader(JsonCalls):
    """Reads one object or several."""

    def __init__(self, calls: Calls, opening: str) -> None:
        super().__init__(calls, opening)
        self._known = None if opening else calls.schemas

    def _ends_well(self) -> bool:
        return not self._held.strip(_BETWEEN)

    def _between(self) -> Outcome:
        found = self._held.lstrip(_BETWEEN if self._had_one else None)
        if found.startswith("{"):
            self._begin(found, self._known)
        elif found:
            return Outcome(State.DONE if self._had_one else State.MALFORMED, self._held, self._said)
        return Outcome()


LLAMA = ToolFormat("llama3_json", (TAG,), LlamaReader, (TAG,), reads_bare=True)
