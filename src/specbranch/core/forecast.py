"""H-RAD's prediction of how much of a draft the target will accept, and the protocol of predictors.

Owns the values between predictors (`hrad`, or a record of one) and the policy `paper`. `Request.wants_forecast` says
that a method uses predictions. Then the target's probe output comes with each verdict (`Judged.said`). A forecaster
turns it into a signal next to the target, and the signal travels in the verdict.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

NONE, SOME, ALL = range(3)  # how much of a draft is accepted: H-RAD's classes


@dataclass(frozen=True, slots=True)
class Signal:
    """H-RAD's prediction for the draft behind a verdict.

    For a draft of 1, 2, … tokens: the probabilities that none, some or all of it is accepted.
    """

    chances: tuple[tuple[float, float, float], ...]

    @classmethod
    def of(cls, steps: Sequence[float]) -> Signal:
        """Make a signal from the probability of each token of a draft, given that all before it are accepted."""
        found, whole, none = [], 1.0, 1.0 - steps[0]
        for step in steps:
            whole *= step
            found.append((none, max(1.0 - none - whole, 0.0), whole))
        return cls(tuple(found))

    @property
    def sound(self) -> bool:
        """True if these are probabilities at all."""
        # NaN fails both comparisons
        return all(0.0 <= chance <= 1.0 for classes in self.chances for chance in classes)

    def hard(self, length: int) -> int | None:
        """Return the likeliest class of a draft of `length` tokens: NONE, SOME or ALL; None if it predicts none so
        long."""
        if not 1 <= length <= len(self.chances):
            return None
        classes = self.chances[length - 1]
        return max(range(3), key=lambda at: classes[at])


class Forecaster(Protocol):
    """Predicts how much of the next draft is accepted."""

    def signal(self, said: tuple[float, ...] | None, position: int) -> Signal | None:
        """Return the prediction for a draft behind the token at `position`, by the probe's output; None: there is
        none."""
        ...
