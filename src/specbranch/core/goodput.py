"""Goodput: tokens a second of each way to decode a batch, expected by the cost model and seen in rounds.

Owns the choice between plain decoding and planned rounds where several sessions share a round, and how far the model's
expectation is trusted. A plan is made for each session, so planning itself takes time, which grows with the batch; the
model does not know that, and what is seen does. Invariant: the choice depends on times and numbers of tokens alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Literal

Way = Literal["plain", "planned"]
Expected = Callable[[], Mapping[Way, float]]  # tokens a second of one session, by the model

BLOCK_ROUNDS = 12  # rounds of each session between two looks at the choice
LEFT_OUT = 4  # rounds of each session after a change that do not count: earlier work ends, and the draft catches up
BETTER_WAY = 1.03  # the other way is taken if it is this many times as fast
BLOCK_TRUST = 0.5  # part of a block's deviation from the model, in logarithms, that is taken over
UNSEEN, SEEN = 0.25, 0.03  # doubt in the estimate of a way: never tried, and just tried
DOUBT_GROWTH = 0.005  # of the doubt in the way that is not taken, for each block
KEPT = 0.95  # of the deviation of the way that is not taken, after each block
TRIAL_SHARE = 0.01  # of the seconds, that trials of a way that was not seen to be better may lose
SLOWEST_ROUND = 2.0  # times the median; a round counts at most that long, as it may include a setup


@dataclass(slots=True)
class WaySeen:
    """How one way did at one batch size."""

    expected: float = 0.0  # tokens a second of a session, by the model
    deviation: float = 0.0  # logarithm of what was seen, by what was expected
    doubt: float = UNSEEN
    last: float = -math.inf  # deviation when this way was last taken; it does not fade

    @property
    def estimate(self) -> float:
        """Tokens a second of a session."""
        return self.expected * math.exp(self.deviation)

    @property
    def evidence(self) -> float:
        """Tokens a second of a session, as when this way was last taken; 0: it never was."""
        return self.expected * math.exp(self.last)

    def take(self, seen: float) -> None:
        """Take in the tokens a second of a block."""
        known = self.doubt < UNSEEN
        deviation = math.log(max(seen, 1e-9) / max(self.expected, 1e-9))
        self.deviation += (BLOCK_TRUST if known else 1.0) * (deviation - self.deviation)
        self.last = self.deviation
        self.doubt = SEEN

    def fade(self) -> None:
        """Forget a little: another way was taken, and the text may have changed."""
        self.doubt = min(self.doubt + DOUBT_GROWTH, UNSEEN)
        self.deviation *= KEPT


@dataclass(slots=True)
class _Load:
    """What is known at one batch size."""

    way: Way
    left: float  # rounds, counted by sessions, until the choice is looked at again
    settling: float = 0.0
    tokens: int = 0
    rounds: list[float] = field(default_factory=list)  # seconds of each since the last look
    credit: float = 0.0  # seconds that a trial may lose; below 0: more was lost
    trial: bool = True  # this block tries a way that was not seen to be better
    ways: dict[Way, WaySeen] = field(
        default_factory=lambda: {"plain": WaySeen(doubt=SEEN, last=0.0), "planned": WaySeen()}
    )

    def update(self, expected: Mapping[Way, float]) -> None:
        for way, rate in expected.items():
            self.ways[way].expected = rate

    def look(self, batch_size: int, expected: Mapping[Way, float]) -> None:
        """Judge the block that has ended, and choose the way of the next.

        A way that was seen to be better is taken at once. One that may be better by now is tried if credit is left.
        """
        here, other = self.ways[self.way], self.ways[_other(self.way)]
        seconds = _without_setups(self.rounds)
        self.update(expected)  # before the comparison: since the block began, the model may have learned much
        if seconds > 0.0:
            here.take(self.tokens / seconds)
        other.fade()
        self.credit = min(self.credit + TRIAL_SHARE * seconds, seconds)
        seen_better = other.evidence > BETTER_WAY * here.estimate
        may_be_better = other.estimate * (1.0 + other.doubt) > BETTER_WAY * here.estimate
        if seen_better and self.trial:
            self.credit -= _loss(seconds, here.estimate, other.evidence)
        tries = may_be_better and not seen_better and _loss(seconds, other.estimate, here.estimate) <= self.credit
        if seen_better or tries:
            self.way, self.settling = _other(self.way), LEFT_OUT * batch_size
        self.trial = tries
        self.left, self.tokens, self.rounds = BLOCK_ROUNDS * batch_size, 0, []


def _loss(seconds: float, rate: float, best: float) -> float:
    """Return the seconds that a trial as long as this block loses, with the rounds after its beginning that do not
    count."""
    trial = seconds * (BLOCK_ROUNDS + LEFT_OUT) / BLOCK_ROUNDS
    return trial * max(1.0 - rate / max(best, 1e-9), 0.0)


def _without_setups(rounds: list[float]) -> float:
    """Return the seconds of some rounds; a round that may include a setup counts as a slow one."""
    most = SLOWEST_ROUND * median(rounds) if rounds else 0.0
    return sum(min(seconds, most) for seconds in rounds)


class Goodput:
    """Chooses how a batch decodes."""

    def __init__(self) -> None:
        self._loads: dict[int, _Load] = {}  # by the power of two of the sessions

    def choose(self, batch_size: int, expected: Expected) -> Way:
        """Return how to decode among so many sessions."""
        key = batch_size.bit_length()
        if key not in self._loads:
            rates = expected()
            hopeful = rates["planned"] * (1.0 + UNSEEN) > rates["plain"]
            load = self._loads[key] = _Load("planned" if hopeful else "plain", 0.0)
            load.update(rates)
            load.left, load.settling = BLOCK_ROUNDS * batch_size, LEFT_OUT * batch_size
        return self._loads[key].way

    def rounds_left(self, batch_size: int) -> int:
        """Return how many rounds of each session are left before the choice is looked at again."""
        load = self._loads.get(batch_size.bit_length())
        return 1 if load is None else max(round((load.settling or load.left) / batch_size), 1)

    def record(
        self, batch_size: int, way: Way, tokens: int, seconds: float, expected: Expected, rounds: int = 1
    ) -> None:
        """Take in some rounds of one session."""
        load = self._loads.get(batch_size.bit_length())
        if load is None or way != load.way:
            return  # it was started before the way was changed
        if load.settling > 0:
            load.settling = max(load.settling - rounds, 0.0)
            return
        load.tokens += tokens
        load.rounds += [seconds / rounds] * rounds
        load.left -= rounds
        if load.left <= 0:
            load.look(batch_size, expected())

    def seen(self) -> dict[int, dict[Way, tuple[float, float]]]:
        """Return expected and estimated tokens a second of each way, by the power of two of the batch size."""
        return {
            key: {way: (one.expected, one.estimate) for way, one in load.ways.items()}
            for key, load in self._loads.items()
        }


def _other(way: Way) -> Way:
    return "plain" if way == "planned" else "planned"
