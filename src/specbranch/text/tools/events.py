"""What a parser finds in the text of an answer: text, reasoning, and tool calls piece by piece.

Owns the events, and how neighbours are joined. It does not own where they begin and end in a text. Invariant: joined
events do not depend on how the text was cut into pieces.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TypeGuard


@dataclass(frozen=True, slots=True)
class Said:
    """Text for the user."""

    text: str


@dataclass(frozen=True, slots=True)
class Thought:
    """Text of the model's reasoning."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegun:
    """A tool call whose function is known."""

    index: int  # of the answer's calls
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """Further text of a call's arguments, which are JSON."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class CallEnded:
    """A call is complete. A call of an answer that was cut has no such event."""

    index: int


Event = Said | Thought | CallBegun | CallArguments | CallEnded


def joined(events: Iterable[Event]) -> list[Event]:
    """Return events with the texts of equal neighbours joined."""
    found: list[Event] = []
    for event in events:
        last = found[-1] if found else None
        if isinstance(event, (Said, Thought, CallArguments)) and _goes_on(last, event):
            found[-1] = replace(event, text=last.text + event.text)
        else:
            found.append(event)
    return found


def _goes_on(last: Event | None, event: Said | Thought | CallArguments) -> TypeGuard[Said | Thought | CallArguments]:
    same_call = not isinstance(event, CallArguments) or (isinstance(last, CallArguments) and last.index == event.index)
    return type(last) is type(event) and same_call
