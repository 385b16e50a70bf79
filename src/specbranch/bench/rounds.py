"""A trace read round by round: what became of every drafted token, and what each model waited for.

Owns the reading of a `core.trace.Trace`, not its drawing. Invariant: the fates of a branch's tokens add up to its length.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from specbranch.core.trace import Event


@dataclass(frozen=True, slots=True)
class Fate:
    """What became of one branch's tokens, in their order: emitted, refused by the target, cut by the length rule, never judged, or lost."""

    used: int = 0
    rolled_back: int = 0
    dropped: int = 0
    unused: int = 0
    lost: int = 0

    def __add__(self, other: Fate) -> Fate:
        return Fate(*(a + b for a, b in zip(self.counts, other.counts, strict=True)))

    @property
    def counts(self) -> tuple[int, int, int, int, int]:
        """The numbers, in the order of the tokens."""
        return self.used, self.rolled_back, self.dropped, self.unused, self.lost

    @property
    def total(self) -> int:
        """How many tokens there were."""
        return sum(self.counts)


@dataclass(frozen=True, slots=True)
class Round:
    """What both models did in one round of one request."""

    number: int
    draft: Event | None
    target: Event | None
    fates: tuple[Fate, ...] = ()  # one for each branch drafted in this round
    emitted: int = 0  # tokens

    @property
    def events(self) -> tuple[Event, ...]:
        """The models' work, the target's first."""
        return tuple(event for event in (self.target, self.draft) if event)

    @property
    def start(self) -> float:
        """When the first model began."""
        return min(event.start for event in self.events)

    @property
    def end(self) -> float:
        """When the last model was done."""
        return max(event.end for event in self.events)

    @property
    def seconds(self) -> float:
        """From the first model's beginning to the last one's end."""
        return self.end - self.start

    @property
    def together(self) -> float:
        """Seconds in which both were at work."""
        if not self.draft or not self.target:
            return 0.0
        return max(min(self.draft.end, self.target.end) - max(self.draft.start, self.target.start), 0.0)

    @property
    def fate(self) -> Fate:
        """Of all tokens drafted in this round."""
        return sum(self.fates, Fate())


@dataclass(frozen=True, slots=True)
class Times:
    """Where the seconds of a request went; all but `prefill` are decoding."""

    prefill: float
    together: float
    target_alone: float
    draft_alone: float
    neither: float
    rounds: int
    has_draft: bool

    @property
    def decoding(self) -> float:
        """Seconds from the first round after the prompt to the end."""
        return self.together + self.target_alone + self.draft_alone + self.neither

    @property
    def target_idle(self) -> float:
        """Seconds of decoding in which the target did nothing."""
        return self.draft_alone + self.neither

    @property
    def draft_idle(self) -> float:
        """Seconds of decoding in which the draft did nothing."""
        return self.target_alone + self.neither

    def to_dict(self) -> dict[str, Any]:
        """Return plain values."""
        return {
            "rounds": self.rounds,
            "prefill_seconds": self.prefill,
            "decoding_seconds": self.decoding,
            "both_at_work_seconds": self.together,
            "target_alone_seconds": self.target_alone,
            "draft_alone_seconds": self.draft_alone,
            "neither_seconds": self.neither,
            "target_idle_seconds": self.target_idle,
            "draft_idle_seconds": self.draft_idle if self.has_draft else None,
        }


def read_rounds(events: Iterable[Event], emitted: int | None = None) -> list[Round]:
    """Read the events of one session; `emitted` tells how many tokens were, as the request may have ended inside its last chain."""
    found = [list(group) for _, group in groupby(events, key=lambda event: event.round)]
    pairs = [(_only(group, "draft"), _only(group, "target")) for group in found]
    counts = _emitted([target for _, target in pairs], emitted)
    verdicts = [_Verdict.of(target, count) for (_, target), count in zip(pairs, counts, strict=True)]
    after = [*verdicts[1:], None]
    return [
        Round(number, draft, target, _fates(draft, verdict, following), count)
        for number, ((draft, target), verdict, following, count) in enumerate(zip(pairs, verdicts, after, counts, strict=True))
    ]


def times(rounds: Sequence[Round]) -> Times:
    """Add up where the time went. The first round reads the prompt."""
    decoding = rounds[1:]
    together = sum(one.together for one in decoding)
    target, draft = (sum(event.end - event.start for one in decoding if (event := getattr(one, who))) for who in ("target", "draft"))
    whole = decoding[-1].end - decoding[0].start if decoding else 0.0
    prefill = rounds[0].seconds if rounds else 0.0
    neither = max(whole - target - draft + together, 0.0)
    has_draft = any(one.draft for one in rounds)
    return Times(prefill, together, target - together, draft - together, neither, len(decoding), has_draft)


def usual_seconds(rounds: Sequence[Round]) -> float:
    """How long a round of decoding takes, usually."""
    return statistics.median(one.seconds for one in rounds[1:]) if len(rounds) > 1 else sum(one.seconds for one in rounds)


def _only(group: list[Event], who: str) -> Event | None:
    return next((event for event in group if event.who == who), None)


def _emitted(targets: Sequence[Event | None], total: int | None) -> list[int]:
    counts = [len(target.tokens) if target else 0 for target in targets]
    surplus = 0 if total is None else sum(counts) - total
    for at in range(len(counts) - 1, -1, -1):
        cut = min(max(surplus, 0), counts[at])
        counts[at], surplus = counts[at] - cut, surplus - cut
    return counts


@dataclass(frozen=True, slots=True)
class _Verdict:
    """A verification: of so many tokens how many were emitted, and whether the request ended among them."""

    pending: int
    accepted: int
    ended: bool

    @classmethod
    def of(cls, target: Event | None, emitted: int) -> _Verdict | None:
        if target is None or target.accepted is None:
            return None
        ended = emitted <= target.accepted
        return cls(target.pending, min(target.accepted, emitted), ended)


def _fates(draft: Event | None, beside: _Verdict | None, following: _Verdict | None) -> tuple[Fate, ...]:
    """What became of each branch, as `core.stats` counts it.

    A chain drafted alone goes on to the next verification. Beside one, the branch that is hit does, and its head is emitted at once; if
    none is, the first is what a plain method would have drafted, and so is rolled back.
    """
    if draft is None:
        return ()
    if beside is None:
        return tuple(_kept(length, 0, following) for length in draft.branches)
    if beside.ended:
        return tuple(Fate(unused=length) for length in draft.branches)
    if draft.kept is None:
        return tuple(Fate(lost=length) if at else Fate(rolled_back=length) for at, length in enumerate(draft.branches))
    return tuple(_kept(length, 1, following) if at == draft.kept else Fate(lost=length) for at, length in enumerate(draft.branches))


def _kept(length: int, heads: int, following: _Verdict | None) -> Fate:
    """Follow a kept branch into the next verification."""
    if following is None:
        return Fate(used=heads, unused=length - heads)
    sent = min(following.pending, length - heads)
    accepted = min(following.accepted, sent)
    refused = 0 if following.ended else sent - accepted
    return Fate(heads + accepted, refused, length - heads - sent, sent - accepted - refused)
