"""The evaluation of a draft: how many of its candidates the target chose, by class of the draft's probability.

Owns the counts and how positions are counted. Does not own the forwards (`training/distill`), the file
(`models/drafts/evaluation_file.py`), or how far a planner trusts the counts (`experience.py`). Invariant: each position
has one first candidate, and at most one candidate of a position is the target's token.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from specbranch.core.trees import CLASSES, class_of

MOST_COUNTED = 10**12  # of one class: far more than anybody measures


class JudgedPosition(NamedTuple):
    """The draft's probabilities of its candidates at one position, best first, and the rank of the target's token."""

    said: tuple[float, ...]
    rank: int | None  # None: it is none of the candidates


@dataclass(frozen=True, slots=True)
class ClassCounts:
    """Candidates by class of the draft's probability: how many were met, and how many were the target's token."""

    met: tuple[int, ...] = (0,) * CLASSES
    right: tuple[int, ...] = (0,) * CLASSES


@dataclass(frozen=True, slots=True)
class DraftEvaluation:
    """Counts of a draft's first candidates, and of its others."""

    first: ClassCounts = ClassCounts()
    other: ClassCounts = ClassCounts()
    text: str = ""  # what it was measured on, in words

    @property
    def positions(self) -> int:
        """The number of positions that were compared."""
        return sum(self.first.met)

    @property
    def hits(self) -> int:
        """The number of positions at which the first candidate is the target's token."""
        return sum(self.first.right)

    @property
    def covered(self) -> int:
        """The number of positions at which one of the candidates is the target's token."""
        return self.hits + sum(self.other.right)

    @property
    def fault(self) -> str | None:
        """Say what is impossible about the counts; None: nothing."""
        for name, counts in (("first", self.first), ("other", self.other)):
            if not len(counts.met) == len(counts.right) == CLASSES:
                return f"{name} candidates are counted in {len(counts.met)} classes; expected {CLASSES}"
            if any(not 0 <= right <= met <= MOST_COUNTED for met, right in zip(counts.met, counts.right, strict=True)):
                return f"a class of the {name} candidates has more that are right than were met, or an impossible count"
        if self.positions < 1 or self.covered > self.positions:
            return f"it has {self.positions} positions, and {self.covered} at which a candidate is the target's token"
        return None


NOT_EVALUATED = DraftEvaluation()


def evaluate(positions: Iterable[JudgedPosition], text: str = "") -> DraftEvaluation:
    """Count the candidates of all positions."""
    met, right = ([[0] * CLASSES, [0] * CLASSES] for _ in range(2))  # of first candidates, and of others
    for said, rank in positions:
        for at, probability in enumerate(said):
            kind, of = min(at, 1), class_of(probability)
            met[kind][of] += 1
            right[kind][of] += at == rank
    first, other = (ClassCounts(tuple(m), tuple(r)) for m, r in zip(met, right, strict=True))
    return DraftEvaluation(first, other, text)
