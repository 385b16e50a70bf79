"""The mutual slow-down of draft and target when both run at once: rounds of chosen sizes on the executor itself.

Owns the choice of rounds. Invariants: times are those of the executor's rounds, from the spans it reports. The number
of draft steps is as many as fit into a target forward alone.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Self

from specbranch.config import ExecutorName, SamplingParams
from specbranch.core.loop import Executor
from specbranch.core.orders import Context, Draft, Orders, Plan, Reports, Span, Verify
from specbranch.core.rehearsal import NUMBER
from specbranch.core.request import Request
from specbranch.errors import ModelError

OVERLAP_ROWS = 4  # that the target verifies
FILL = 0.8  # share of a target forward that its parallel draft steps take when alone
MOST_STEPS = 16
# Numbers of steps to try, as shares of those that fit. On one GPU a step may take much longer next to the target than
# alone. Then fewer steps end before the target does, and the smaller numbers say more.
OVERLAP_SHARES: dict[ExecutorName, tuple[float, ...]] = {"process": (1.0,), "streams": (0.25, 0.5, 0.75, 1.0)}


@dataclass(frozen=True, slots=True)
class Slowing:
    """The seconds that a draft step in parallel with the target adds to the target, and to itself."""

    target: float
    draft: float
    steps: int  # tried at most


class TrialRounds:
    """Rounds after one text that can be repeated: a target forward, some draft steps, or both at once."""

    def __init__(self, executor: Executor, text: Sequence[int]) -> None:
        last = text[-1]
        self._executor, self._text = executor, tuple(text)
        self._lasts = (last, int(last == 0))  # the text's last token, and one that differs from it

    def __enter__(self) -> Self:
        """Open the text; each model prefills it in its first round."""
        self._executor.open(NUMBER, Request(SamplingParams(), 0, len(self._text)))
        return self

    def __exit__(self, *_: object) -> None:
        self._executor.free(NUMBER)

    def forward(self) -> float:
        """Return the seconds of a target forward alone."""
        return _timed(self._run(Orders(verify=self._verify())).verifying).seconds

    def draft(self, steps: int) -> Span:
        """Return the time of some draft steps alone; its tokens count the steps."""
        return _timed(self._run(Orders(self._steps(steps))).drafting)

    def both(self, steps: int) -> tuple[float, Span]:
        """Return both times, of one round."""
        report = self._run(Orders(self._steps(steps), self._verify()))
        return _timed(report.verifying).seconds, _timed(report.drafting)

    def _steps(self, steps: int) -> Draft:
        return Draft(Context(0, self._text), Plan(steps + 1))  # the first token needs none: its row is there

    def _verify(self) -> Verify:
        """Order a forward. Its text ends with another token each time, so that this one is computed again."""
        self._lasts = self._lasts[::-1]
        return Verify(Context(0, (*self._text[:-1], self._lasts[0])), self._text[: OVERLAP_ROWS - 1])

    def _run(self, orders: Orders) -> Reports:
        report = self._executor.run({NUMBER: orders})[NUMBER]
        if report.error is not None:
            raise report.error
        return report


def _timed(span: Span | None) -> Span:
    if span is None:
        raise ModelError("The draft process ended while it was timed in parallel with the target. Measure again.")
    return span


def measure_slowing(
    rounds: TrialRounds, repeats: int, tick: Callable[[], None], shares: Sequence[float] = (1.0,)
) -> Slowing:
    """Time a target forward and some draft steps, each alone and both at once, in turns; return medians."""
    fit = _fitting(rounds)
    counts = sorted({max(round(fit * share), 1) for share in shares})
    target, draft = [], []
    for number in range(repeats + 1):
        steps = counts[number % len(counts)]
        forward_alone, drafting_alone = rounds.forward(), rounds.draft(steps)
        forward, drafting = rounds.both(steps)
        if number:  # the first time is for warming up
            target.append((forward - forward_alone) / drafting.tokens)
            draft.append(_step(drafting) - _step(drafting_alone))
        tick()
    return Slowing(max(statistics.median(target), 0.0), max(statistics.median(draft), 0.0), counts[-1])


def _fitting(rounds: TrialRounds) -> int:
    """Return how many draft steps fit into a forward; the first round of each model is a prefill."""
    rounds.forward()
    rounds.draft(4)
    step = min(_step(rounds.draft(4)) for _ in range(3))
    return min(max(int(FILL * rounds.forward() / step), 1), MOST_STEPS)


def _step(drafting: Span) -> float:
    return drafting.work_seconds / drafting.tokens
