"""Two models side by side, really: the draft in a process of its own, as `exec.process` runs it, and what each costs
the other.

Owns the draft's process while it is measured. Invariant: all draft steps counted ran while the target was at work.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from specbranch.config import SamplingParams
from specbranch.core.orders import Context, Draft, Plan
from specbranch.core.request import Request
from specbranch.errors import ModelError
from specbranch.exec.messages import Open, Recipe, RoundDrafted, Work
from specbranch.exec.process import START_WITHIN, Child, Lost

ANSWER_WITHIN = 120.0  # seconds
FILL = 0.8  # share of a target forward that the draft steps beside it take when alone
MOST_STEPS = 16


@dataclass(frozen=True, slots=True)
class Slowing:
    """Seconds that a draft step beside the target adds to the target, and to itself."""

    target: float
    draft: float
    steps: int


class Companion:
    """A draft in a process of its own that has read a text, and drafts after it as often as it is told; to be
    closed."""

    def __init__(self, recipe: Recipe, text: Sequence[int]) -> None:
        self._read = len(text)
        self._ticket = 0
        self._child = Child.start(recipe)
        try:
            self._child.receive(START_WITHIN)
            self._child.send(Open(0, Request(SamplingParams(), 0, self._read)))
            self._order(Context(0, tuple(text)), 1)
            self.finish()
        except Lost as loss:
            self.close()
            raise ModelError(f"The draft worker could not start: {loss}.") from loss

    def begin(self, steps: int) -> None:
        """Have it take so many steps, and return at once."""
        self._order(Context(self._read, ()), steps + 1)  # the first token needs none: its row is there

    def finish(self) -> float:
        """Wait for the steps; returns the seconds they took."""
        message = self._child.receive(ANSWER_WITHIN)
        if not isinstance(message, RoundDrafted):
            raise ModelError(f"The draft worker answered {type(message).__name__} where drafted tokens were expected.")
        return message.span.seconds

    def close(self) -> None:
        """Stop the process."""
        self._child.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self.close()

    def _order(self, on: Context, length: int) -> None:
        self._ticket += 1
        self._child.send(Work(self._ticket, {0: Draft(on, Plan(length), 0, self._ticket)}))


def measure_slowing(
    companion: Companion, forward: Callable[[], float], repeats: int, tick: Callable[[], None]
) -> Slowing:
    """Time a target forward and some draft steps, each alone and both at once, taking turns."""
    steps = _steps(companion, forward)
    target, draft = [], []
    for number in range(repeats + 1):
        alone, drafting_alone = forward(), _drafting(companion, steps)
        companion.begin(steps)
        beside = forward()
        drafting = companion.finish()
        if number:  # the first time is for warming up
            target.append(beside - alone)
            draft.append(drafting - drafting_alone)
        tick()
    return Slowing(_per_step(target, steps), _per_step(draft, steps), steps)


def _per_step(added: list[float], steps: int) -> float:
    return max(statistics.median(added) / steps, 0.0)


def _steps(companion: Companion, forward: Callable[[], float]) -> int:
    """How many steps fit beside a forward."""
    forward()
    _drafting(companion, 4)
    step = min(_drafting(companion, 4) for _ in range(3)) / 4
    return min(max(int(FILL * forward() / step), 1), MOST_STEPS)


def _drafting(companion: Companion, steps: int) -> float:
    companion.begin(steps)
    return companion.finish()
