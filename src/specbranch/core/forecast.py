"""What is foretold of a draft before it is verified: H-RAD's signal, and who gives it.

Owns the vocabulary between those who foretell (`hrad`, or a record of what it said) and those who heed it (the policy
`paper`). A request says by `wants_forecast` that its method heeds signals; then the target's probe is told with each
verdict (`Judged.said`), a forecaster makes a signal of it where the target is, and the signal travels in the verdict.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

NONE, SOME, ALL = range(3)  # of a draft is taken: H-RAD's classes


@dataclass(frozen=True, slots=True)
class Signal:
    """What H-RAD foretells of the draft behind a verdict: for a draft of 1, 2, … tokens the chances that none, some
    or all is taken."""

    chances: tuple[tuple[float, float, float], ...]

    @classmethod
    def of(cls, steps: Sequence[float]) -> Signal:
        """Make one from the chance of each token of a draft once all before it are taken."""
        found, whole, none = [], 1.0, 1.0 - steps[0]
        for step in steps:
            whole *= step
            found.append((none, max(1.0 - none - whole, 0.0), whole))
        return cls(tuple(found))

    @property
    def sound(self) -> bool:
        """Whether these are chances at all."""
        # false for what is not a number
        return all(0.0 <= chance <= 1.0 for classes in self.chances for chance in classes)

    def hard(self, length: int) -> int | None:
        """The likeliest class for a draft of so many tokens, NONE, SOME or ALL; nothing if that is longer than it
        knows."""
        if not 1 <= length <= len(self.chances):
            return None
        classes = self.chances[length - 1]
        return max(range(3), key=lambda at: classes[at])


class Forecaster(Protocol):
    """Foretells what becomes of the next draft."""

    def signal(self, said: tuple[float, ...] | None, position: int) -> Signal | None:
        """What becomes of a draft behind the token at this position, by what the target's probe said; nothing if
        that cannot be told."""
        ...
