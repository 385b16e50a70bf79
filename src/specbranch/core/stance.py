"""The choice between planned and plain rounds, by the measured rates of both at each batch size.

Owns both rates for each load, and when the other way is tried again. A plan only prices the models' time. What planning
itself costs on the host is in no price, and shows only here. Invariant: the choice depends on times and numbers of
tokens alone.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median

PLANNED, PLAINLY = False, True  # the two ways to decode
TRIAL = {PLANNED: 24, PLAINLY: 8}  # rounds of each session in a trial of the other way, by that way
BEGINNING = 48  # planned rounds of each session before the first trial of plain decoding
MANY = 8  # batch size from which on a new load starts with plain decoding: planning on the host costs most there
ENOUGH, AMONG = 8, 4  # a hopeless trial may end after ENOUGH rounds of each session, of at most AMONG sessions
HOPELESS = 0.8  # share of the better way's rate below which a trial is hopeless
SPAN, MOST_SPAN = 64, 4096  # rounds of each session between two trials: at first, and at most
LONGER = {True: 4, False: 2}  # factor on these rounds after a trial that lost, by whether it was hopeless
TRYING = 0.01  # share of the seconds that trials may lose
BELIEVED = 1024  # rounds of each session, at most, before a saved choice is tried again
LEFT_OUT = 2  # rounds of each session after a change that do not count: earlier work ends, and the draft catches up
LATELY = 256  # rounds over which a rate is measured
SLOW = 4.0  # factor on the median seconds of a round: a round counts at most that long, as it may include a setup
MostPlain = Callable[[int], float]  # tokens a second of plain decoding, at the most, of each of so many sessions
Findings = dict[int, tuple[bool, int]]  # by load: whether plain decoding was faster, and how long that is believed


class _Rate:
    """Tokens a second over the latest rounds of one session each."""

    def __init__(self) -> None:
        self._rounds: deque[tuple[int, float]] = deque(maxlen=LATELY)
        self._found: float | None = None  # until another round comes in

    def add(self, tokens: int, seconds: float) -> None:
        self._rounds.append((tokens, seconds))
        self._found = None

    @property
    def per_second(self) -> float:
        if self._found is None:
            most = SLOW * self.usual
            seconds = sum(min(seconds, most) for _, seconds in self._rounds)
            self._found = sum(tokens for tokens, _ in self._rounds) / seconds if seconds > 0.0 else 0.0
        return self._found

    @property
    def usual(self) -> float:
        """Seconds of the middle round."""
        return median([seconds for _, seconds in self._rounds]) if self._rounds else 0.0


@dataclass(slots=True)
class _Load:
    """What is known at one load; rounds are counted by sessions, `left` of them until the way is looked at again."""

    left: float
    plainly: bool = PLANNED
    best: bool = PLANNED
    span: int = SPAN
    settling: float = 0.0
    compared: bool = False  # both ways were
    tried: tuple[int, float] = (0, 0.0)  # tokens and seconds of the trial, with all that is left out of its rate
    rates: dict[bool, _Rate] = field(default_factory=lambda: {PLANNED: _Rate(), PLAINLY: _Rate()})

    def turn(self, batch_size: int, most_plain: float) -> None:
        """Try the other way, or go on with the better one; plain decoding is not tried where it cannot be it."""
        if self.best is PLANNED and not self.is_trial and self.rates[PLANNED].per_second >= most_plain:
            self.left = self.span * batch_size
            return
        if not self.is_trial:
            self.plainly = not self.best
            self.left, self.rates[self.plainly] = TRIAL[self.plainly] * batch_size, _Rate()
            self.tried = 0, 0.0
        else:
            best = max((PLANNED, PLAINLY), key=lambda way: self.rates[way].per_second)
            self.span = min(LONGER[self.is_hopeless] * self.span, MOST_SPAN) if best is self.best else SPAN
            self.plainly = self.best = best
            self.compared = True
            self.left = max(self.span * batch_size, self._repaid())
        self.settling = LEFT_OUT * batch_size

    @property
    def is_hopeless(self) -> bool:
        """Whether the other way, on trial, is far behind the better one."""
        return self.rates[not self.best].per_second < HOPELESS * self.rates[self.best].per_second

    @property
    def is_trial(self) -> bool:
        """Whether the other way is being tried."""
        return self.plainly is not self.best

    def is_over(self, batch_size: int) -> bool:
        """Whether the way is to be looked at again: its rounds were made, or a trial has shown enough."""
        if self.left <= 0 or not self.is_trial:
            return self.left <= 0
        return TRIAL[self.plainly] * batch_size - self.left >= ENOUGH * min(batch_size, AMONG) and self.is_hopeless

    def _repaid(self) -> float:
        """The rounds of the better way in which what the trial has lost is a small share of the time."""
        better, (tokens, seconds) = self.rates[self.best], self.tried
        if better.per_second <= 0.0:
            return 0.0
        return (seconds - tokens / better.per_second) / (TRYING * better.usual)


class Stance:
    """Says how to go on at a load, and hears what came of it."""

    def __init__(self, most_plain: MostPlain = lambda batch_size: math.inf) -> None:
        self._most_plain = most_plain
        self._loads: dict[int, _Load] = {}  # by the power of two of the sessions at once

    def plainly(self, batch_size: int) -> bool:
        """Whether to decode plainly among so many sessions."""
        return self._at(batch_size).plainly

    def note(self, batch_size: int, plainly: bool, tokens: int, seconds: float) -> None:
        """Take in a round of one session."""
        load = self._at(batch_size)
        if plainly is not load.plainly:
            return  # it was begun before the way was changed
        if load.is_trial:
            load.tried = load.tried[0] + tokens, load.tried[1] + seconds
        if load.settling > 0:
            load.settling -= 1
            return
        load.rates[plainly].add(tokens, seconds)
        load.left -= 1
        if load.is_over(batch_size):
            load.turn(batch_size, self._most_plain(batch_size))

    def found(self) -> Findings:
        """Return what was found at each load at which both ways were compared."""
        return {key: (load.best, load.span) for key, load in self._loads.items() if load.compared}

    def believe(self, found: Findings) -> None:
        """Begin with what was found before."""
        for key, (best, span) in found.items():
            believed = min(span, BELIEVED)
            self._loads[key] = _Load(believed * 2 ** (key - 1), best, best, believed, compared=True)

    def _at(self, batch_size: int) -> _Load:
        key = batch_size.bit_length()
        if key not in self._loads:
            way = PLAINLY if self._seems_plain(batch_size, key) else PLANNED
            self._loads[key] = _Load((SPAN if way is PLAINLY else BEGINNING) * batch_size, way, way)
        return self._loads[key]

    def _seems_plain(self, batch_size: int, key: int) -> bool:
        """Which way to begin with at a load that is new: the more sessions, the less is gained by planning."""
        found = [(other, load.best) for other, load in self._loads.items() if load.compared]
        if any(other > key and best is PLANNED for other, best in found):
            return False
        return batch_size >= MANY or any(other < key and best is PLAINLY for other, best in found)
