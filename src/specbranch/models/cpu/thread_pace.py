"""The number of threads of compiled steps: all of torch's on a quiet machine, fewer if other processes use its cores.

Owns the count and the times of recent steps. A step ends when its slowest thread ends, so a thread that shares its core
may cost more than it gains. If threads lose time, a few steps try fewer threads; from time to time they try more. The
faster count stays. Invariant: only speed depends on the count, never a bit of a result.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

LOST_SHARE = 0.3  # cores that threads waited for; above this, fewer threads are tried
WINDOW_STEPS = 4  # steps of a window, at least
WINDOW_SECONDS = 0.02  # seconds of undisturbed work in a window, at least
BETTER = 0.95  # a trial succeeds below this share of the cost before it (hysteresis)
WORSE_FACTOR = 1.5  # if the cost rises this much since a failed trial of fewer threads, they are tried again at once
TRIAL_PAUSE = 0.25  # seconds between trials, at least
PAUSE_SHARE = 8  # a pause is this many times as long as the trial before it, which bounds the cost of trials
LONGEST_PAUSE = 8.0  # seconds between trials that keep failing, or that no measurement suggests
IDLE_LOOK = 0.1  # seconds between two checks for idle cores
IDLE = 0.5  # cores that must be idle for more threads to be tried
FORGET = 1.002  # factor of a step's least time at each step: longer sequences take longer steps


Idle = Callable[[], float | None]


@dataclass(frozen=True, slots=True)
class StepTime:
    """The time of a step, in seconds."""

    spent: float
    least: float  # the best time of the same kind of step
    lost: float  # time that all threads lost to other processes


@dataclass(frozen=True, slots=True)
class Cost:
    """The cost of a window of steps, without the worst of them, which may have any cause."""

    slowdown: float  # their time divided by their least time
    lost: float  # cores that threads waited for


@dataclass(frozen=True, slots=True)
class ThreadTrial:
    """A trial of another number of threads."""

    before: int
    slowdown: float
    start: float


@dataclass(slots=True)
class StepTimes:
    """The least time of each kind of step of one model."""

    _least: dict[tuple[int, ...], float] = field(default_factory=dict)

    def least(self, kind: tuple[int, ...], seconds: float) -> float | None:
        """Note a time above 0, and return the least so far; None for the first one."""
        known = self._least.get(kind)
        self._least[kind] = seconds if known is None else min(seconds, known * FORGET)
        return None if known is None else self._least[kind]


class ThreadPace:
    """Chooses the number of threads from the times of steps."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter, idle: Idle | None = None) -> None:
        self._clock, self._idle = clock, idle or idle_seconds
        self._window: list[StepTime] = []
        self._trial: ThreadTrial | None = None
        self._looked: tuple[float, float | None] = 0.0, None
        self._reset(0)

    def threads(self, most: int) -> int:
        """Return how many of `most` threads the next step should use."""
        if most != self._most:
            self._reset(most)
        return self._threads

    def note(self, step: StepTime) -> None:
        """Learn from a step with the current number of threads."""
        window, trial = self._window, self._trial  # read once: other engine threads may change them
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
        """Start a trial of another number of threads if a measurement suggests it and the pause is over."""
        now = self._clock()
        if cost.lost > LOST_SHARE and self._threads > 1 and (now >= self._next_fewer or cost.slowdown > self._bearable):
            self._try(_fewer(self._threads), cost.slowdown, now)
        elif self._threads < self._most and now >= self._next_more and self._has_room(now):
            self._try(_more(self._threads, self._most), cost.slowdown, now)

    def _has_room(self, now: float) -> bool:
        """True if more threads may find cores: one was idle since the last check, or unknown, or the pause is over."""
        (before, idle_before), idle = self._looked, self._idle()
        self._looked, self._next_more = (now, idle), now + IDLE_LOOK
        if idle is None or idle_before is None or now >= self._overdue:
            return idle is None or now >= self._overdue
        return idle - idle_before >= IDLE * (now - before)

    def _try(self, threads: int, slowdown: float, now: float) -> None:
        self._trial = ThreadTrial(self._threads, slowdown, now)
        self._threads = threads

    def _judge(self, trial: ThreadTrial, slowdown: float) -> None:
        """Keep the tried count if it is faster; else return to the old one and pause."""
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
    """Return a slightly smaller count: few busy processes are more usual than many."""
    return threads - 1 if threads <= 4 else threads - max(1, threads // 8)


def _more(threads: int, most: int) -> int:
    return min(most, threads + max(1, threads // 4))


def idle_seconds() -> float | None:
    """Return the idle seconds of all cores since the machine started; None if the system does not say."""
    try:
        with Path("/proc/stat").open(encoding="ascii") as file:
            return int(file.readline().split()[4]) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return None


PACE = ThreadPace()  # one for the process, as its models share the cores


def threads_now() -> int:
    """Return how many threads the next compiled call should use."""
    return PACE.threads(torch.get_num_threads())
