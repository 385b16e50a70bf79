"""The kinds of time in a timeline: their look on a terminal and in a picture, and their meaning.

Owns the table of kinds; drafting is divided by the fates of its tokens, as `core.fates` names them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal, NamedTuple

from specbranch.core.fates import FATES, Fate, Fates, summed
from specbranch.lab.traces.rounds import TracedRound

SpanKind = Literal["target", "reading", "waiting", "cut"] | Fate


class SpanLook(NamedTuple):
    """The look of one kind of time."""

    glyph: str  # on a terminal
    ascii: str  # on a terminal that shows nothing else
    meaning: str  # in a legend
    outcome: str = ""  # behind a number of tokens
    colour: str | None = None  # on a terminal
    hue: int = 0  # of the palette of `charts`


SPAN_LOOKS: Mapping[SpanKind, SpanLook] = {
    "target": SpanLook("█", "#", "target at work", colour="blue", hue=0),
    "accepted": SpanLook("▓", "=", "drafted, in the answer", "in the answer", "green", 2),
    "rejected": SpanLook("x", "x", "drafted, rolled back", "rolled back", "red", 3),
    "siblings": SpanLook("/", "/", "drafted beside the main line, not taken", "beside the main line", "cyan", 6),
    "dropped": SpanLook("~", "~", "drafted, dropped by the length rule", "dropped", "magenta", 5),
    "unused": SpanLook("?", "?", "drafted, never judged", "never judged", None, 4),
    "losing": SpanLook("-", "-", "drafted on a branch that lost", "left behind", "yellow", 1),
    "reading": SpanLook(":", ":", "draft reads, drafts nothing"),
    "waiting": SpanLook("·", ".", "waiting for the other"),
    "cut": SpanLook("»", ">", "longer than drawn"),
}


def shares(fates: Fates) -> list[tuple[Fate, int]]:
    """Return the fates that occur and their numbers of tokens, in drawing order."""
    return [(fate, count) for fate in FATES if (count := fates.of(fate))]


def kinds_in(rounds: Iterable[TracedRound]) -> list[SpanKind]:
    """Return the kinds of work that need an explanation."""
    return ["target", *(kind for kind, _ in shares(summed(one.fate for one in rounds)))]
