"""What the formats of tool calls share: the protocol of a reader, and markers that may be cut in two.

Owns the outcome of a reader, and the search for markers in an unfinished text. Each format has its own file.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any, Protocol

from specbranch.text.tools.events import CallArguments, CallBegun, CallEnded, Event

Schemas = Mapping[str, Mapping[str, Any]]  # the functions that may be called, and the JSON schemas of their arguments
CALL_START, CALL_END = "<tool_call>", "</tool_call>"  # around a call of Hermes, Qwen and Qwen3-Coder
LONGEST_HEAD = 2**16  # characters that are held back before a call has its name: a longer head is text


class State(Enum):
    """How far a reader is."""

    READING = auto()
    DONE = auto()
    MALFORMED = auto()


@dataclass(slots=True)
class Outcome:
    """What a reader made of more text."""

    state: State = State.READING
    rest: str = ""  # text that is none of the reader's; it is searched for further calls
    said: str = ""  # of a malformed call: what comes before `rest`, which is text for the user


class Reader(Protocol):
    """Reads what follows one opening marker: a call, or several."""

    def feed(self, text: str) -> Outcome:
        """Read more text. Once it is done or malformed, it is not called again."""
        ...

    def finish(self) -> str:
        """Return what is text for the user, as the answer ends here."""
        ...


@dataclass(slots=True)
class Calls:
    """The calls of an answer so far. Readers add to them."""

    schemas: Schemas = field(default_factory=dict)
    events: list[Event] = field(default_factory=list)
    count: int = 0

    def begin(self, name: str) -> None:
        """Add a call."""
        self.events.append(CallBegun(self.count, name))
        self.count += 1

    def add(self, text: str) -> None:
        """Add text to the latest call's arguments."""
        if text:
            self.events.append(CallArguments(self.count - 1, text))

    def end(self) -> None:
        """Mark the latest call as complete."""
        self.events.append(CallEnded(self.count - 1))

    def take(self) -> list[Event]:
        """Return the events since the last call of this."""
        taken, self.events = self.events, []
        return taken


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """One way to write tool calls."""

    name: str
    openings: tuple[str, ...]  # markers behind which a call is read
    reader: Callable[[Calls, str], Reader]  # for an opening marker; "" for JSON at the start of an answer
    markers: tuple[str, ...]  # that may be special tokens; detokenizing must not skip them
    reads_bare: bool = False  # an answer that starts with a brace may be a call
    short_ids: bool = False  # templates of this format take ids of nine letters and digits


@dataclass(frozen=True, slots=True)
class Found:
    """Where a marker is in a text, or may begin at its end."""

    at: int
    marker: str | None  # None: it may begin there, or there is none if `at` is the text's end


def find_marker(text: str, markers: Sequence[str]) -> Found:
    """Return the first of some markers in a text."""
    places = [(at, -len(marker), marker) for marker in markers if (at := text.find(marker)) >= 0]
    begun = min(_begun(text, marker) for marker in markers)
    if places and min(places)[0] <= begun:
        at, _, marker = min(places)
        return Found(at, marker)
    return Found(begun, None)


def starts_with(text: str, markers: Sequence[str]) -> str | None:
    """Return the marker that a text starts with; None if none, "" if more text may complete one."""
    for marker in markers:
        if text.startswith(marker):
            return marker
    return "" if any(marker.startswith(text) for marker in markers) else None


def _begun(text: str, marker: str) -> int:
    """Return where the marker's beginning is the end of a text; the text's length if nowhere."""
    for length in range(min(len(marker) - 1, len(text)), 0, -1):
        if text.endswith(marker[:length]):
            return len(text) - length
    return len(text)
