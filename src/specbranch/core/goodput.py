"""Goodput: tokens a second of each way to decode a batch, expected by the cost model and seen in rounds.

Owns the choice between plain decoding and planned rounds where several sessions share a round, and how far the model's
expectation is trusted. The choice is one for the whole batch, and lasts for a block of rounds: a session that joins
takes part in the present block. A plan is made for each session, so planning itself takes time, which grows with the
batch; the model does not know that, and what is seen does. Invariant: the choice depends on times and numbers of
tokens alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import fmean, median
from typing import Literal

from specbranch.core.round_clock import RoundClock

Way = Literal["plain", "planned"]

BLOCK_ROUNDS = 12  # rounds between two looks at the choice
LEFT_OUT = 4  # rounds after a change that do not count: earlier work ends, and the draft catches up
BETTER_WAY = 1.03  # the other way is taken if it is this many times as fast
BLOCK_TRUST = 0.5  # part of a block's deviation from the model, in logarithms, that is taken over
LATEST_BLOCKS = 3.0  # blocks in what was seen lately of the way that is taken, about
STILL_LATE = 0.5  # blocks that count of those seen before another way was taken, at most
UNSEEN, SEEN = 0.25, 0.03  # doubt in the estimate of a way: never tried, and just tried
DOUBT_GROWTH = 0.005  # of the doubt in the way that is not taken, for each block
KEPT = 0.95  # of the deviation of the way that is not taken, after each block
TRIAL_SHARE = 0.01  # of the seconds, that trials of a way that was not seen to be better may lose
LEAST_TRIAL = 2  # rounds of a trial, before the model may say that it loses
SLOWEST_ROUND = 2.0  # times the median; a round counts at most that long, as it may include a setup


@dataclass(frozen=True, slots=True)
class Outlook:
    """What the cost model expects of a batch."""

    rates: Mapping[Way, float]  # tokens a second of one session
    change: float = 0.0  # seconds until drafts that were not asked have caught up, so that planned rounds can draft


Expected = Callable[[int], Outlook]  # by the batch size


@dataclass(slots=True)
class WaySeen:
    """How one way did at one batch size."""

    expected: float = 0.0  # tokens a second of a session, by the model
    deviation: float = 0.0  # logarithm of what was seen, by what was expected
    doubt: float = UNSEEN
    last: float = -math.inf  # deviation when this way was last taken; it does not fade
    tried: bool = False
    lately: float = 0.0  # tokens a second of a session, as seen in the latest blocks
    blocks: float = 0.0  # how many of them these are

    @property
    def estimate(self) -> float:
        """Tokens a second of a session."""
        return self.expected * math.exp(self.deviation)

    @property
    def evidence(self) -> float:
        """Tokens a second of a session, as when this way was last taken; 0: it never was."""
        return self.expected * math.exp(self.last)

    def take(self, seen: float, part: float = 1.0) -> None:
        """Take in the tokens a second of a block, of which this part was seen."""
        known = self.doubt < UNSEEN
        self.blocks = min(self.blocks + part, LATEST_BLOCKS)
        self.lately += part / self.blocks * (seen - self.lately)
        deviation = math.log(max(seen, 1e-9) / max(self.expected, 1e-9))
        self.deviation += part * (BLOCK_TRUST if known else 1.0) * (deviation - self.deviation)
        self.last = self.deviation
        self.doubt += part * (SEEN - self.doubt)

    def fade(self) -> None:
        """Forget a little: another way was taken, and the text may have changed."""
        self.doubt = min(self.doubt + DOUBT_GROWTH, UNSEEN)
        self.deviation *= KEPT


@dataclass(slots=True)
class _Block:
    """Rounds that a batch decodes in one way; rounds are counted by the loop."""

    batch_size: int  # at its start
    way: Way
    first: int  # the round that it was chosen in
    left_out: int = 0  # rounds that do not count
    price: float | None = None  # seconds of credit that a trial has paid; None: it is no trial
    hoped: float = 0.0  # tokens a second of a session that were expected of a trial
    tokens: int = 0
    rounds: int = 0  # of single sessions, in which these came
    sessions: int = 0  # summed up over these rounds
    last: int = 0  # the last round that was reported

    @property
    def counts(self) -> int:
        """The first round that counts."""
        return self.first + self.left_out

    @property
    def end(self) -> int:
        """The round in which the choice is looked at again."""
        return self.counts + BLOCK_ROUNDS

    def covers(self, batch_size: int, clock: RoundClock) -> bool:
        """True if it goes on for a batch of this size; somewhat more or less than at its start is the same batch."""
        return clock.rounds < self.end and abs(_size(batch_size) - _size(self.batch_size)) <= 1

    def round_seconds(self, clock: RoundClock) -> float:
        """Return the seconds of a round; one that may include a setup counts as a slow one. 0: none was timed."""
        seconds = clock.seconds_behind(self.counts, self.last)
        most = SLOWEST_ROUND * median(seconds) if seconds else 0.0
        return fmean([min(one, most) for one in seconds]) if seconds else 0.0

    def part(self, clock: RoundClock) -> float:
        """Return how much of it was timed, and reported."""
        timed = len(clock.seconds_behind(self.counts, self.last))
        return min(timed / BLOCK_ROUNDS, self.rounds * self.rounds / max(self.sessions, 1) / BLOCK_ROUNDS, 1.0)


class Goodput:
    """Chooses how a batch decodes."""

    def __init__(self) -> None:
        self._seen: dict[int, dict[Way, WaySeen]] = {}  # by the power of two of the sessions
        self._block: _Block | None = None
        self._credit = 0.0  # seconds that a trial may lose; below 0: more was lost
        self._saving = 0.0  # seconds that a trial would cost for which the credit is too low

    def choose(self, batch_size: int, clock: RoundClock, expected: Expected) -> Way:
        """Return how to decode the next round among so many sessions."""
        block = self._block
        if block is None or not block.covers(batch_size, clock) or self._is_lost(block, batch_size, clock, expected):
            self._judge(clock, expected)
            block = self._block = self._next_block(batch_size, clock, expected(batch_size))
        return block.way

    def is_plain(self, clock: RoundClock) -> bool:
        """True if the batch decodes plainly at present."""
        return self._block is not None and self._block.way == "plain" and clock.rounds < self._block.end

    @property
    def is_trial(self) -> bool:
        """True if the batch tries planned rounds at present."""
        return self._block is not None and self._block.way == "planned" and self._block.price is not None

    def rounds_left(self, clock: RoundClock) -> int:
        """Return how many rounds are left before the choice is looked at again."""
        if self._block is None:
            return 1
        until = self._block.counts if clock.rounds < self._block.counts else self._block.end
        return max(until - clock.rounds, 1)

    def record(self, batch_size: int, since: int, way: Way, tokens: int, rounds: int = 1) -> None:
        """Take in some rounds of one session; the first came behind round `since` of the clock."""
        block = self._block
        if block is None or way != block.way or since < block.counts or _size(batch_size) != _size(block.batch_size):
            return  # it was started before the way was changed, or among more or fewer sessions
        block.tokens += tokens
        block.rounds += rounds
        block.sessions += batch_size * rounds
        block.last = max(block.last, since + rounds)

    def seen(self) -> dict[int, dict[Way, tuple[float, float]]]:
        """Return expected and estimated tokens a second of each way, by the power of two of the batch size."""
        return {
            size: {way: (one.expected, one.estimate) for way, one in ways.items()} for size, ways in self._seen.items()
        }

    def _is_lost(self, block: _Block, batch_size: int, clock: RoundClock, expected: Expected) -> bool:
        """True if a trial of planned rounds may end early: its first rounds have taught the model that it loses."""
        if block.price is None or block.way == "plain" or clock.rounds < block.first + LEAST_TRIAL:
            return False
        ways = self._ways(batch_size, expected(batch_size))
        now = BETTER_WAY * ways["planned"].estimate
        return now < min(block.hoped, ways["plain"].evidence)

    def _judge(self, clock: RoundClock, expected: Expected) -> None:
        """Learn from the block that has ended."""
        block = self._block
        round_seconds = block.round_seconds(clock) if block else 0.0
        if block is None or not block.rounds or not round_seconds:
            return
        # What the model says now: since the block began, it may have learned much, and the batch may have changed.
        sessions = round(block.sessions / block.rounds)
        ways = self._ways(sessions, expected(sessions))
        here, other = ways[block.way], ways[_other(block.way)]
        rate = block.tokens / block.rounds / round_seconds
        here.take(rate, block.part(clock))
        other.fade()
        seconds = round_seconds * (block.last - block.first)
        self._credit = min(self._credit + TRIAL_SHARE * seconds, max(seconds, self._saving))
        if block.price is not None:  # it was paid at the start; now its loss is known
            self._credit += block.price - seconds * _lost(rate, other.evidence)

    def _ways(self, batch_size: int, outlook: Outlook) -> dict[Way, WaySeen]:
        """Return what is known of both ways at a batch size, with what the model expects now."""
        size = _size(batch_size)
        if size not in self._seen:  # a model that expects too little does so in batches of about that size, too
            near = [self._seen[one]["planned"].deviation for one in (size - 1, size + 1) if one in self._seen]
            self._seen[size] = {
                "plain": WaySeen(doubt=SEEN, last=0.0),
                "planned": WaySeen(deviation=max([0.0, *near])),
            }
        ways = self._seen[size]
        for way, rate in outlook.rates.items():
            ways[way].expected = rate
        return ways

    def _next_block(self, batch_size: int, clock: RoundClock, outlook: Outlook) -> _Block:
        """Choose the way of the next block.

        A batch goes on as before, also if its size has changed. A way that was seen to be better is taken at once. One
        that may be better by now is tried if credit is left, and once at each size if the model expects it to be
        better. The very first batch has the benefit of the doubt.
        """
        before, now, ways = self._block, clock.rounds, self._ways(batch_size, outlook)
        if before is None:
            hopeful = ways["planned"].estimate * (1.0 + UNSEEN) > ways["plain"].estimate
            way: Way = "planned" if hopeful else "plain"
            return _Block(batch_size, way, now, LEFT_OUT, 0.0 if hopeful else None, ways["planned"].estimate)
        here, other = ways[before.way], ways[_other(before.way)]
        now_here = here.lately if here.blocks else here.estimate
        seen_better = other.evidence > BETTER_WAY * now_here
        may_be_better = other.estimate * (1.0 + other.doubt) > BETTER_WAY * now_here
        if seen_better:
            other.blocks = min(other.blocks, STILL_LATE)
            return _Block(batch_size, _other(before.way), now, LEFT_OUT)
        price = before.round_seconds(clock) * (BLOCK_ROUNDS + LEFT_OUT) * _lost(other.estimate, now_here)
        price += outlook.change if before.way == "plain" else 0.0
        self._saving = price if may_be_better else 0.0
        if may_be_better and price <= (self._credit if other.tried else max(self._credit, 0.0)):
            self._credit -= price
            other.tried, other.blocks = True, min(other.blocks, STILL_LATE)
            return _Block(batch_size, _other(before.way), now, LEFT_OUT, price, other.estimate)
        unproven = before.price is not None and now_here < other.evidence
        return _Block(batch_size, before.way, now, 0, 0.0 if unproven else None)


def _size(batch_size: int) -> int:
    """Return the power of two of a batch size: sizes between two of them share what is known."""
    return batch_size.bit_length()


def _lost(rate: float, best: float) -> float:
    """Return the share of its seconds that a slower way loses."""
    return max(1.0 - rate / max(best, 1e-9), 0.0)


def _other(way: Way) -> Way:
    return "plain" if way == "planned" else "planned"
