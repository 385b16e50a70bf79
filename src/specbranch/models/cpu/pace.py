"""How many threads compiled steps use: all of torch's on a quiet machine, fewer while other processes take its cores.

Owns the count and what is known of the last steps. A step ends when its slowest thread does, so a thread that shares
its core may cost more than it brings. Where threads lose time, fewer are tried for a few steps, and more again from
time to time; what is faster is kept. Invariant: only speed depends on the count, never a bit of a result.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

LOST = 0.15  # of a core that threads waited for while they could have run: more, and fewer threads are tried
STEPS = 3  # of a window, at least
WINDOW = 0.01  # seconds of undisturbed work in a window, at least
BETTER = 0.95  # of the cost before a trial: hysteresis
PAUSE = 0.25  # seconds between trials, at least
PAUSE_SHARE = 8  # a pause is so many times as long as the trial that failed: the price of trials is bounded
FORGET = 1.002  # by how much the least time of a step grows each time: texts grow, and so do their steps


@dataclass(slots=True)
class Window:
    """The last steps with one number of threads, in seconds."""

    steps: int = 0
    spent: float = 0.0
    least: float = 0.0  # what the same steps took at their best
    lost: float = 0.0  # by all threads, while others had their cores

    @property
    def full(self) -> bool:
        return self.steps >= STEPS and self.least >= WINDOW

    @property
    def cost(self) -> float:
        return self.spent / self.least


@dataclass(slots=True)
class Trial:
    """Another number of threads under trial."""

    before: int
    cost: float
    start: float


@dataclass(slots=True)
class StepTimes:
    """The least time of each kind of step that one model makes."""

    _least: dict[tuple[int, ...], float] = field(default_factory=dict)

    def least(self, kind: tuple[int, ...], seconds: float) -> float | None:
        """Note a time; returns the least so far, None where it is the first."""
        known = self._least.get(kind)
        self._least[kind] = seconds if known is None else min(seconds, known * FORGET)
        return None if known is None else self._least[kind]


class Pace:
    """Chooses the number of threads from what steps took."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._most = self._threads = 0
        self._window = Window()
        self._trial: Trial | None = None
        self._next_trial = 0.0

    def threads(self, most: int) -> int:
        """How many of `most` threads the next step should use."""
        if most != self._most:
            self._most = self._threads = most
            self._window, self._trial, self._next_trial = Window(), None, 0.0
        return self._threads

    def note(self, seconds: float, least: float, lost: float) -> None:
        """Learn from a step with that many threads; `lost` is the time that all threads together waited for a core."""
        window = self._window
        window.steps, window.spent = window.steps + 1, window.spent + seconds
        window.least, window.lost = window.least + least, window.lost + lost
        if not window.full:
            return
        self._window = Window()
        if self._trial is not None:
            self._judge(self._trial, window.cost)
        elif self._clock() >= self._next_trial:
            self._try(self._other(window), window.cost)

    def _other(self, window: Window) -> int:
        """The number of threads to try next; the present one where all is well."""
        if window.lost > LOST * window.spent and self._threads > 1:
            return _fewer(self._threads)
        return min(self._most, _more(self._threads, self._most))

    def _try(self, threads: int, cost: float) -> None:
        if threads != self._threads:
            self._trial = Trial(self._threads, cost, self._clock())
            self._threads = threads

    def _judge(self, trial: Trial, cost: float) -> None:
        """Keep what is under trial if it is faster; go back otherwise, and wait for the next trial."""
        now, self._trial = self._clock(), None
        if cost < BETTER * trial.cost:
            self._next_trial = now if self._threads < trial.before else now + PAUSE
            return
        self._threads = trial.before
        self._next_trial = now + max(PAUSE, PAUSE_SHARE * (now - trial.start))


def _fewer(threads: int) -> int:
    """One fewer at first, then half as many: few busy processes are more usual than many."""
    return threads - 1 if threads <= 4 else threads - max(1, threads // 8)


def _more(threads: int, most: int) -> int:
    return min(most, threads + max(1, threads // 4))


PACE = Pace()  # of this process: its models share the cores


def threads_now() -> int:
    """How many threads the next compiled call should use."""
    return PACE.threads(torch.get_num_threads())
