"""What is known of a pair and kept from request to request: costs, how far the draft's word goes, how fast decoding has
been.

Owns the estimates a `Planner` goes by. Invariant: they are made of verdicts and times, never of tokens that are not
judged.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

from specbranch.core.costs import Costs, LearnedCosts
from specbranch.core.orders import Orders, Reports
from specbranch.core.stance import Stance
from specbranch.core.trees import Chances

# How often a target takes a draft's candidate, by what the draft says of it: usual figures, to begin with.
USUAL_FIRST = (0.05, 0.06, 0.09, 0.13, 0.22, 0.3, 0.38, 0.46, 0.6, 0.73, 0.79, 0.87, 0.92, 0.95, 0.975, 0.99, 0.99)
USUAL_OTHER = (
    0.003,
    0.015,
    0.036,
    0.075,
    0.118,
    0.185,
    0.26,
    0.37,
    0.42,
    0.42,
    0.45,
    0.45,
    0.45,
    0.45,
    0.45,
    0.45,
    0.45,
)
USUAL_COVER = 0.8  # how often the target's next token is among those proposed
# How often a token that was looked up is right. A line for each class of how many words match before it. In a line: the
# draft said nothing yet; it is the draft's first candidate; one of its others; none of them.
USUAL_LOOK = (
    (0.2, 0.65, 0.2, 0.06),
    (0.45, 0.75, 0.31, 0.12),
    (0.65, 0.8, 0.4, 0.2),
    (0.68, 0.87, 0.5, 0.25),
    (0.85, 0.93, 0.6, 0.35),
    (0.94, 0.96, 0.65, 0.45),
    (0.96, 0.97, 0.7, 0.5),
)
# For the middle two: how much the draft's log-odds rise if the text says the same.
USUAL_SHIFT = ((0.2, 1.0), (0.6, 1.5), (0.8, 1.8), (1.2, 2.0), (1.5, 2.4), (1.7, 2.8), (1.8, 2.9))
LEARNING_PACE = 0.06  # how fast those shifts are learned
MOST_SHIFT = 30.0  # log-odds: beyond it nothing becomes more certain, and an exponential may overflow
LATELY = 400.0  # tokens over which the rate is measured
EXPERIENCE_TOKENS = 1 << 16  # that count for it, with the round that goes beyond
PROBING = 0.01  # share of the time that may be spent on asking a draft that does not pay
IN_BATCH = 0.5  # of that: less can be gained there


class Tally:
    """How often something came true, by class. The usual share counts as `trust` observations; beyond `memory` of
    them older ones fade."""

    def __init__(self, usual: tuple[float, ...], trust: float = 20.0, memory: float = 4000.0) -> None:
        self.seen = [trust] * len(usual)
        self.true = [trust * share for share in usual]
        self.trust, self._memory = trust, memory

    @property
    def most(self) -> float:
        """How many observations of a class count at the most."""
        return self._memory + 1.0

    def add(self, at: int, true: bool) -> None:
        """Take in an observation."""
        if self.seen[at] >= self._memory:
            self.seen[at], self.true[at] = 0.5 * self.seen[at], 0.5 * self.true[at]
        self.seen[at] += 1.0
        self.true[at] += true

    def shares(self) -> tuple[float, ...]:
        """How often, by class."""
        return tuple(true / seen for true, seen in zip(self.true, self.seen, strict=True))


Learned = Literal["first", "other", "cover", "looked", "shift", "pace"]
News = tuple[Learned, int, float]  # what an observation is of, its class, and how it came out


@dataclass(slots=True)
class Insight:
    """How far the word of a draft and of the text itself goes, and how fast decoding has been."""

    first: Tally = field(default_factory=lambda: Tally(USUAL_FIRST))
    other: Tally = field(default_factory=lambda: Tally(USUAL_OTHER))
    cover: Tally = field(default_factory=lambda: Tally((USUAL_COVER,), memory=200.0))
    looked: Tally = field(
        default_factory=lambda: Tally(tuple(share for line in USUAL_LOOK for share in line), 6.0, 400.0)
    )
    shifts: list[float] = field(
        default_factory=lambda: [x for first, other in USUAL_SHIFT for x in (0.0, first, other, 0.0)]
    )
    tokens: float = 0.0
    seconds: float = 0.0
    news: list[News] | None = None  # what was learned since it was last written down, where that is done

    def chances(self) -> Chances:
        """As a table."""
        return Chances(self.first.shares(), self.other.shares(), self.looked.shares(), tuple(self.shifts))

    def promise(self, price: float) -> float:
        """How many tokens the draft's candidates at a place promise beyond the price of their rows, as a share of what
        they promise where rows cost nothing."""
        found = free = 0.0
        for tally in (self.first, self.other):
            for true, seen in zip(tally.true, tally.seen, strict=True):
                share, met = true / seen, max(seen - tally.trust, 0.0) + 1.0
                free += met * share
                if share > price:
                    found += met * (share - price)
        return found / free

    def learn(self, of: Learned, at: int, value: float) -> None:
        """Take in an observation, and note it where news are wanted."""
        self.take(of, at, value)
        if self.news is not None:
            self.news.append((of, at, value))

    def take(self, of: Learned, at: int, value: float) -> None:
        """Take in an observation: whether a candidate of class `at` was right. "shift": how much more often than
        expected. "pace": the seconds of a round that gave `at` tokens."""
        match of:
            case "shift":
                self.shifts[at] = min(max(self.shifts[at] + LEARNING_PACE * value, -MOST_SHIFT), MOST_SHIFT)
            case "pace":
                self._passed(at, value)
            case _:
                tally: Tally = getattr(self, of)
                tally.add(at, bool(value))

    def _passed(self, tokens: int, seconds: float) -> None:
        if self.tokens > LATELY:
            self.tokens, self.seconds = 0.5 * self.tokens, 0.5 * self.seconds
        self.tokens += tokens
        self.seconds += seconds

    def rate(self, plain: float) -> float:
        """Tokens a second, never fewer than plain decoding's, which takes `plain` for one; half as many again before
        anything is known."""
        few = 40.0
        return max((few * 1.5 + self.tokens) / max(few * plain + self.seconds, 1e-12), 1.0 / max(plain, 1e-12))


class Experience:
    """What is known of a pair; outlives requests, one for each engine."""

    def __init__(self, costs: Costs | None = None, has_draft: bool = True) -> None:
        """Without `costs` they are learned."""
        self.costs: Costs = LearnedCosts() if costs is None else costs
        self.learned = self.costs if isinstance(self.costs, LearnedCosts) else None
        self.has_draft = has_draft
        self.insight = Insight()
        self.stance = None if self.costs.prices_all else Stance(self._most_plain)
        # What free text shows says nothing about text that is being copied, where lookup pays; kept in no file.
        self.copying = None if self.costs.prices_all else Stance(self._most_plain)
        self._credit = 0.0  # seconds that may be spent on asking it all the same

    def _most_plain(self, batch_size: int) -> float:
        """Tokens a second of plain decoding, of each of so many sessions: a forward's time is the least it takes."""
        seconds = self.costs.target_seconds(batch_size) if self.costs.knows_target else 0.0
        return 1.0 / seconds if seconds > 0.0 else math.inf

    def pay_probe(self, seconds: float) -> bool:
        """Whether a draft that does not pay may be asked once more; if so, it is paid for."""
        if self._credit < seconds:
            return False
        self.reset_probe_credit()
        return True

    def reset_probe_credit(self) -> None:
        """The draft is asked: for a while nothing is saved by which it could be asked in vain."""
        self._credit = 0.0

    def record_forwards(
        self,
        orders: Orders,
        reports: Reports,
        emitted: int,
        waited: float = 0.0,
        slowed: float = 1.0,
        batch_size: int = 1,
    ) -> None:
        """Learn from a round of one session; what it cost is learned by the `Loop`, of all sessions together.

        `waited`: what passed without it; `slowed`: how much longer plain decoding takes here than alone.
        """
        spans = [span for span in (reports.drafting, reports.verifying) if span is not None]
        seconds = max(span.end for span in spans) - min(span.start for span in spans) if spans else 0.0
        if orders.verify is not None:
            seconds += self.costs.host
        seconds += waited
        self._credit += PROBING * (IN_BATCH if batch_size > 1 else 1.0) * seconds / batch_size
        self.insight.learn("pace", emitted, seconds / slowed)
