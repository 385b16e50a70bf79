"""How many threads compiled steps use: all of torch's on a quiet machine, fewer while other processes take its cores.

Owns the count and what is known of the last steps. A step ends when its slowest thread does, so a thread that shares
its core may cost more than it brings. Where threads lose time, fewer are tried for a few steps, and more again from
time to time; what is faster is kept. Invariant: only speed depends on the count, never a bit of a result.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

LOST_SHARE = 0.3  # of a core that threads waited for while they could have run: more, and fewer threads are tried
WINDOW_STEPS = 4  # of a window, at least
WINDOW_SECONDS = 0.02  # seconds of undisturbed work in a window, at least
BETTER = 0.95  # of the cost before a trial: hysteresis
WORSE_FACTOR = 1.5  # times the cost at which fewer threads did not help: then they are tried again at once
TRIAL_PAUSE = 0.25  # seconds between trials, at least
PAUSE_SHARE = 8  # a pause is so many times as long as the trial before it: the price of trials is bounded
LONGEST_PAUSE = 8.0  # seconds between trials that fail again and again, or that nothing speaks for
IDLE_LOOK = 0.1  # seconds between two looks whether a core is idle
IDLE = 0.5  # cores that must be idle for more threads to be tried
FORGET = 1.002  # by how much the least time of a step grows each time: texts grow, and so do their steps


Idle = Callable[[], float | None]


@dataclass(frozen=True, slots=True)
class StepTime:
    """What a step took, in seconds."""

    spent: float
    least: float  # what the same step took at its best
    lost: float  # by all threads, while others had their cores


@dataclass(frozen=True, slots=True)
class Cost:
    """What a window of steps took, but for the worst of them: one may meet anything."""

    slowdown: float  # how often their least time they took
    lost: float  # cores that threads lacked


@dataclass(frozen=True, slots=True)
class ThreadTrial:
    """Another number of threads under trial."""

    before: int
    slowdown: float
    start: float


@dataclass(slots=True)
class StepTimes:
    """The least time of each kind of step that one model makes."""

    _least: dict[tuple[int, ...], float] = field(default_factory=dict)

    def least(self, kind: tuple[int, ...], seconds: float) -> float | None:
        """Note a time above 0; returns the least so far, None where it is the first."""
        known = self._least.get(kind)
        self._least[kind] = seconds if known is None else min(seconds, known * FORGET)
        return None if known is None else self._least[kind]


class ThreadPace:
    """Chooses the number of threads from what steps took."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter, idle: Idle | None = None) -> None:
        self._clock, self._idle = clock, idle or idle_seconds
        self._window: list[StepTime] = []
        self._trial: ThreadTrial | None = None
        self._looked: tuple[float, float | None] = 0.0, None
        self._reset(0)

    def threads(self, most: int) -> int:
        """How many of `most` threads the next step should use."""
        if most != self._most:
            self._reset(most)
        return self._threads

    def note(self, step: StepTime) -> None:
        """Learn from a step with that many threads."""
        window, trial = self._window, self._trial  # read once: engines in other threads may be at work here too
        window.append(step)
        if len(window) < WINDOW_STEPS or sum(step.least for step in window) < WINDOW_SECONDS:
            return
        self._window, cost = [], _cost_of(window)
        if trial is not None:
            self._judge(trial, cost.slowdown)
        else:
            self._consider(cost)

    def _reset(self, most: int) -> None:
        self._most = self._threads = most
        self._window, self._trial = [], None
        self._next_fewer, self._pause, self._bearable = 0.0, TRIAL_PAUSE, 0.0
        self._next_more = self._overdue = 0.0
        self._looked = 0.0, None

    def _consider(self, cost: Cost) -> None:
        """Try another number of threads if there is reason to, and it is time."""
        now = self._clock()
        if cost.lost > LOST_SHARE and self._threads > 1 and (now >= self._next_fewer or cost.slowdown > self._bearable):
            self._try(_fewer(self._threads), cost.slowdown, now)
        elif self._threads < self._most and now >= self._next_more and self._has_room(now):
            self._try(_more(self._threads, self._most), cost.slowdown, now)

    def _has_room(self, now: float) -> bool:
        """Whether more threads may find cores: one was idle since the last look, or nobody knows, or it is time."""
        (before, idle_before), idle = self._looked, self._idle()
        self._looked, self._next_more = (now, idle), now + IDLE_LOOK
        if idle is None or idle_before is None or now >= self._overdue:
            return idle is None or now >= self._overdue
        return idle - idle_before >= IDLE * (now - before)

    def _try(self, threads: int, slowdown: float, now: float) -> None:
        self._trial = ThreadTrial(self._threads, slowdown, now)
        self._threads = threads

    def _judge(self, trial: ThreadTrial, slowdown: float) -> None:
        """Keep what is under trial if it is faster; go back otherwise, and wait for the next trial."""
        now, tried, self._trial = self._clock(), self._threads, None
        self._next_more = now + max(TRIAL_PAUSE, PAUSE_SHARE * (now - trial.start))
        self._overdue, self._looked = now + LONGEST_PAUSE, (now, self._idle())
        if slowdown < BETTER * trial.slowdown:
            self._next_fewer, self._pause = 0.0, TRIAL_PAUSE
            return
        self._threads = trial.before
        if tried < trial.before:
            self._pause = min(2 * self._pause, LONGEST_PAUSE)
            self._next_fewer, self._bearable = now + self._pause, WORSE_FACTOR * trial.slowdown


def _cost_of(window: Sequence[StepTime]) -> Cost:
    counted = sorted(window, key=lambda step: step.spent / step.least)[:-1]
    spent = sum(step.spent for step in counted)
    return Cost(spent / sum(step.least for step in counted), sum(step.lost for step in counted) / spent)


def _fewer(threads: int) -> int:
    """A few at a time: few busy processes are more usual than many."""
    return threads - 1 if threads <= 4 else threads - max(1, threads // 8)


def _more(threads: int, most: int) -> int:
    return min(most, threads + max(1, threads // 4))


def idle_seconds() -> float | None:
    """Seconds that this machine's cores were idle since it started, all together; None where it does not say."""
    try:
        with Path("/proc/stat").open(encoding="ascii") as file:
            return int(file.readline().split()[4]) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return None


PACE = ThreadPace()  # of this process: its models share the cores


def threads_now() -> int:
    """How many threads the next compiled call should use."""
    return PACE.threads(torch.get_num_threads())
