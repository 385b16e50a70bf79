"""The parser of an answer: pieces of text of any size in, events out.

Owns the order of reasoning, text and calls, and the spaces between them. The formats are in files of their own.
Invariant: any cutting of a text into pieces gives the same joined events. Nothing is lost: a call whose head is
malformed becomes text. Only markers, and spaces beside calls and reasoning, are left out.
"""

from __future__ import annotations

from specbranch.text.tools.events import Event, Said
from specbranch.text.tools.reading import Calls, Reader, Schemas, State, ToolFormat, find_marker
from specbranch.text.tools.reasoning import ReasoningParser


class CallParser:
    """Finds the calls of one format in a text."""

    def __init__(self, form: ToolFormat, schemas: Schemas) -> None:
        self._form, self._calls = form, Calls(schemas)
        self._held = ""  # not read yet
        self._space = ""  # spaces behind the last text: they are dropped if a call follows
        self._trims = False  # spaces behind a call are dropped
        self._at_start = True  # nothing but spaces so far
        self._reader: Reader | None = None
        self._events: list[Event] = []

    @property
    def is_within_call(self) -> bool:
        """True if a call has begun and has not ended."""
        return self._reader is not None

    def feed(self, text: str) -> list[Event]:
        """Read more text; return what it brought. Loops until nothing changes."""
        self._held += text
        while self._held and (self._search() if self._reader is None else self._read(self._reader)):
            pass
        return self._take()

    def finish(self) -> list[Event]:
        """Return the rest, as the answer ends here."""
        if self._reader is not None:
            rest = self._reader.finish()
            self._add_calls()
            self._say(rest)
        self._say(self._held)
        self._reader, self._held = None, ""
        if self._space and not self._trims:
            self._events.append(Said(self._space))
        return self._take()

    def _search(self) -> bool:
        """Look for a call. Return True if there is more to do."""
        if self._at_start and self._form.reads_bare:
            found = self._held.lstrip()
            if not found:
                return False
            if found[0] == "{":
                self._say(self._held[: len(self._held) - len(found)])
                self._held = found
                return self._start("")
        marker = find_marker(self._held, self._form.openings)
        self._say(self._held[: marker.at])
        self._held = self._held[marker.at :]
        if marker.marker is None:
            return False
        self._held = self._held.removeprefix(marker.marker)
        return self._start(marker.marker)

    def _start(self, opening: str) -> bool:
        self._reader, self._at_start = self._form.reader(self._calls, opening), False
        return True

    def _read(self, reader: Reader) -> bool:
        """Have the reader read on. Return True if there is more to do."""
        outcome = reader.feed(self._held)
        self._held = outcome.rest
        self._add_calls()
        if outcome.state is State.READING:
            return False
        self._reader = None
        self._say(outcome.said)
        return True

    def _add_calls(self) -> None:
        if new := self._calls.take():
            self._events += new
            self._space, self._trims = "", True

    def _say(self, text: str) -> None:
        """Add text, but hold back the spaces at its end."""
        text = self._space + (text.lstrip() if self._trims else text)
        said = text.rstrip()
        self._space = text[len(said) :]
        if said:
            self._trims = self._at_start = False
            self._events.append(Said(said))

    def _take(self) -> list[Event]:
        taken, self._events = self._events, []
        return taken


class AnswerParser:
    """Finds reasoning and calls in an answer, as far as they are looked for."""

    def __init__(self, reasoning: ReasoningParser | None, calls: CallParser | None) -> None:
        self._reasoning, self._calls = reasoning, calls

    @property
    def is_within_call(self) -> bool:
        """True if a call has begun and has not ended."""
        return self._calls is not None and self._calls.is_within_call

    def feed(self, text: str) -> list[Event]:
        """Read more text; return what it brought."""
        if self._reasoning is None:
            return self._other(text)
        other = self._reasoning.feed(text)
        return [*self._reasoning.take(), *self._other(other)]

    def finish(self) -> list[Event]:
        """Return the rest, as the answer ends here."""
        events: list[Event] = []
        if self._reasoning is not None:
            other = self._reasoning.finish()
            events = [*self._reasoning.take(), *self._other(other)]
        return events if self._calls is None else [*events, *self._calls.finish()]

    def _other(self, text: str) -> list[Event]:
        if self._calls is not None:
            return self._calls.feed(text) if text else []
        return [Said(text)] if text else []
