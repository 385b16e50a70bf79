"""A trace parsed into rounds: the fate of every drafted token, and what each model waited for.

Owns the parsing of a `core.trace.Trace`, not its drawing; `core.fates` names the fates. Invariant: the fates of a
branch's tokens add up to its length.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, NamedTuple

from specbranch.core.fates import FATE_NAMES, FATES, Fates, summed
from specbranch.core.trace import Event

RoundEvents = tuple[Event | None, Event | None]  # of a round: the draft's, the target's


@dataclass(frozen=True, slots=True)
class TracedRound:
    """The work of both models in one round of one request."""

    number: int
    draft: Event | None
    target: Event | None
    fates: tuple[Fates, ...] = ()  # one for each branch drafted in this round; of a tree, one for all that came to it
    emitted: int = 0  # tokens
    is_tree: bool = False  # the draft extends a tree, rather than branches

    @property
    def events(self) -> tuple[Event, ...]:
        """The models' work, the target's first."""
        return tuple(event for event in (self.target, self.draft) if event)

    @property
    def start(self) -> float:
        """The time when the first model started."""
        return min(event.start for event in self.events)

    @property
    def end(self) -> float:
        """The time when the last model finished."""
        return max(event.end for event in self.events)

    @property
    def seconds(self) -> float:
        """Seconds from the first start to the last end."""
        return self.end - self.start

    @property
    def together(self) -> float:
        """Seconds in which both models worked."""
        if not self.draft or not self.target:
            return 0.0
        return max(min(self.draft.end, self.target.end) - max(self.draft.start, self.target.start), 0.0)

    @property
    def fate(self) -> Fates:
        """The fates of all tokens drafted in this round."""
        return summed(self.fates)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, with the fates under their public names."""
        whole = self.fate
        return {
            "round": self.number,
            "emitted": self.emitted,
            "pending": self.target.pending if self.target else 0,
            "accepted": self.target.accepted if self.target else None,
            "arm": self.target.arm if self.target else "",
            "branches": list(self.draft.branches) if self.draft else [],
            "kept": self.draft.kept if self.draft else None,
            "drafted": {FATE_NAMES[fate].traced: whole.of(fate) for fate in FATES},
            **{f"{event.who}_seconds": event.seconds for event in self.events},
        }


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
        """Seconds from the first round after the prefill to the end."""
        return self.together + self.target_alone + self.draft_alone + self.neither

    @property
    def target_idle(self) -> float:
        """Seconds of decoding in which the target was idle."""
        return self.draft_alone + self.neither

    @property
    def draft_idle(self) -> float:
        """Seconds of decoding in which the draft was idle."""
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


def read_rounds(events: Iterable[Event], emitted: int | None = None, origins: Sequence[str] = ()) -> list[TracedRound]:
    """Parse the events of one session.

    `emitted` is the number of emitted tokens, since the request may end inside its last chain. `origins` says where
    each token came from: no event shows that the target's own token had been looked up if it was never sent.
    """
    found = [list(group) for _, group in groupby(events, key=lambda event: event.round)]
    pairs = [(_only(group, "draft"), _only(group, "target")) for group in found]
    counts = _emitted([target for _, target in pairs], emitted)
    is_tree = any(target and target.settled is not None for _, target in pairs)
    fates = _tree_fates(pairs, counts, origins) if is_tree else _branch_fates(pairs, counts)
    return [
        TracedRound(number, draft, target, fate, count, is_tree)
        for number, ((draft, target), fate, count) in enumerate(zip(pairs, fates, counts, strict=True))
    ]


def times(rounds: Sequence[TracedRound]) -> Times:
    """Add up where the time went; the first round is the prefill."""
    decoding = rounds[1:]
    together = sum(one.together for one in decoding)
    target = sum(one.target.seconds for one in decoding if one.target)
    draft = sum(one.draft.seconds for one in decoding if one.draft)
    whole = decoding[-1].end - decoding[0].start if decoding else 0.0
    prefill = rounds[0].seconds if rounds else 0.0
    neither = max(whole - target - draft + together, 0.0)
    has_draft = any(one.draft for one in rounds)
    return Times(prefill, together, target - together, draft - together, neither, len(decoding), has_draft)


def usual_seconds(rounds: Sequence[TracedRound]) -> float:
    """Return the typical time of a decode round."""
    return statistics.median(one.seconds for one in rounds[1:] or rounds) if rounds else 0.0


def _only(group: list[Event], who: str) -> Event | None:
    return next((event for event in group if event.who == who), None)


def _emitted(targets: Sequence[Event | None], total: int | None) -> list[int]:
    counts = [len(target.tokens) if target else 0 for target in targets]
    surplus = 0 if total is None else sum(counts) - total
    for at in range(len(counts) - 1, -1, -1):
        cut = min(max(surplus, 0), counts[at])
        counts[at], surplus = counts[at] - cut, surplus - cut
    return counts


class _Verification(NamedTuple):
    """A verification: how many tokens were sent and emitted, and if the request ended among them."""

    pending: int
    good: int
    ended: bool


def _verification(target: Event | None, emitted: int) -> _Verification | None:
    if target is None or target.accepted is None:
        return None
    return _Verification(target.pending, min(target.accepted, emitted), emitted <= target.accepted)


def _branch_fates(pairs: Sequence[RoundEvents], counts: Sequence[int]) -> list[tuple[Fates, ...]]:
    found = [_verification(target, count) for (_, target), count in zip(pairs, counts, strict=True)]
    following = [*found[1:], None]
    return [_fates(draft, *verdicts) for (draft, _), *verdicts in zip(pairs, found, following, strict=True)]


def _fates(draft: Event | None, meanwhile: _Verification | None, following: _Verification | None) -> tuple[Fates, ...]:
    """Return the fates of each branch.

    A chain drafted alone goes to the next verification. A branch drafted during a verification follows if its head is
    hit; then the tokens after its head go there.
    """
    if draft is None:
        return ()
    if meanwhile is None:
        return tuple(_followed(length, following) for length in draft.branches)
    fates = []
    for at, length in enumerate(draft.branches):
        hit, survives = at == draft.kept, at == (draft.kept or 0)
        fate = _followed(length - 1, following) if hit and not meanwhile.ended else Fates()
        fate.add_branches(length if survives else 0, 0 if survives else length, hit, meanwhile.ended)
        fates.append(fate)
    return tuple(fates)


def _followed(length: int, following: _Verification | None) -> Fates:
    """Follow a chain into the next verification; tokens that are not sent there were dropped."""
    if following is None:
        return Fates(unused=length)
    sent = min(following.pending, length)
    fates = Fates(dropped=length - sent)
    fates.add_chain(sent, min(following.good, sent), following.ended)
    return fates


def _tree_fates(pairs: Sequence[RoundEvents], counts: Sequence[int], origins: Sequence[str]) -> list[tuple[Fates, ...]]:
    """Collect the fates of each round's tokens from the verdicts."""
    fates = [Fates() for _ in pairs]
    position = 0
    targets = [
        (number, target, count) for number, ((_, target), count) in enumerate(zip(pairs, counts, strict=True)) if target
    ]
    for number, target, count in targets:
        position += count
        foreseen = 0 < position <= len(origins) and origins[position - 1] == "branch"
        for at, fate in _judged(target, number, count, foreseen, is_last=number == targets[-1][0]):
            fates[at].add(fate)
    return [(fate,) if fate.total else () for fate in fates]


def _judged(target: Event, number: int, emitted: int, foreseen: bool, is_last: bool) -> Iterator[tuple[int, Fates]]:
    """Return the fates in a verdict, each with its round. If the request ended among its tokens, the rest was not
    verified."""
    if target.settled is None or target.accepted is None:
        return
    ended = emitted <= target.accepted
    taken = target.used[: target.accepted]
    yield from ((at, Fates(accepted=1) if position < emitted else Fates(unused=1)) for position, at in enumerate(taken))
    if not ended and (foreseen or len(target.used) > target.accepted):
        yield (*target.used, number)[target.accepted], Fates(accepted=1)
    for one in target.settled:
        yield one.round, one.fates(ended)
        if is_last and not ended:
            yield one.round, Fates(unused=one.left)
