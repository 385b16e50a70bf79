"""What is learned of a pair and outlives requests: costs, acceptance by rank and probability, and the decoding rate.

Owns the estimates that a `Planner` uses; how they are saved is `experiences.py`. They start from built-in figures, and
from the evaluation of the draft if there is one. Invariant: all later estimates come from verdicts and times, never
from tokens that no verdict has judged.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Literal, Self

from specbranch.core.arms import Arms
from specbranch.core.costs import Costs, MeasuredCosts
from specbranch.core.draft_evaluation import ClassCounts, DraftEvaluation
from specbranch.core.draft_gain import Kinds
from specbranch.core.goodput import Goodput
from specbranch.core.orders import Orders, Reports
from specbranch.core.trees import Chances, log_odds, shifted

# Initial acceptance rates of a draft's first candidate, and of its others, by class of the draft's probability.
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
USUAL_HITS = 0.7  # initial share of positions at which the draft's first candidate is the target's token
USUAL_COVER = 0.8  # initial share of positions at which the target's token is among the candidates
# Initial acceptance rates of looked-up tokens. A row for each class of match length. Columns: the draft has not scored
# the position; the token is the draft's first candidate; one of its others; none of them.
USUAL_LOOK = (
    (0.2, 0.65, 0.2, 0.06),
    (0.45, 0.75, 0.31, 0.12),
    (0.65, 0.8, 0.4, 0.2),
    (0.68, 0.87, 0.5, 0.25),
    (0.85, 0.93, 0.6, 0.35),
    (0.94, 0.96, 0.65, 0.45),
    (0.96, 0.97, 0.7, 0.5),
)
# Initial shares of places from which on lookup is right for 1, 2, … tokens.
USUAL_LOOKED = (0.2, 0.08, 0.04, 0.03, 0.02, 0.02, 0.01, 0.01, 0.01, 0.01, 0.01, 0.01, 0.01, 0.01, 0.01)
# For the middle two columns: what is added to the candidate's log-odds if lookup proposes the same token.
USUAL_SHIFT = ((0.2, 1.0), (0.6, 1.5), (0.8, 1.8), (1.2, 2.0), (1.5, 2.4), (1.7, 2.8), (1.8, 2.9))
# Observations that a class counts at most if it starts from the draft's evaluation, whose text is not the user's. This
# is three times what built-in figures count; a frequent class meets as many in some hundred tokens.
EVALUATED_CLASS = 60.0
EVALUATED_SHARE = 40.0  # the same for USUAL_HITS and USUAL_COVER, which follow the latest 200 positions
LEARNING_PACE = 0.06  # step size of learning these shifts
MOST_SHIFT = 30.0  # log-odds: a larger shift adds no certainty, and its exponential may overflow
LATELY = 50.0  # tokens over which the rate of a request is measured
AT_FIRST_TOKENS = 15.0  # that the initial estimate of the rate counts as
PROBING = 0.01  # share of the seconds that probes may lose: asking a draft that does not pay
IN_BATCH = 0.5  # factor on PROBING in a batch: a draft gains less there


class Tally:
    """How often something came true, by class.

    The initial share counts as `trust` observations. Beyond `memory` observations older ones fade.
    """

    def __init__(self, usual: tuple[float, ...], trust: float = 20.0, memory: float = 4000.0) -> None:
        self.seen = [trust] * len(usual)
        self.true = [trust * share for share in usual]
        self.met = [0.0] * len(usual)  # how often each class was met, the initial share left out
        self.right = [0.0] * len(usual)  # how often it came true then
        self.trust, self._memory = trust, memory

    @property
    def most(self) -> float:
        """The most observations that a class can count."""
        return self._memory + 1.0

    def add(self, at: int, true: bool) -> None:
        """Count an observation."""
        if self.seen[at] >= self._memory:
            for counts in (self.seen, self.true, self.met, self.right):
                counts[at] *= 0.5
        self.seen[at] += 1.0
        self.met[at] += 1.0
        self.true[at] += true
        self.right[at] += true

    def start_from(self, seen: Sequence[int], true: Sequence[int], most: float) -> None:
        """Start from counts as well as from the initial shares; a class counts at most `most` observations."""
        for at, (more, of_these) in enumerate(zip(seen, true, strict=True)):
            count = self.seen[at] + more
            share = (self.true[at] + of_these) / count
            self.seen[at] = min(count, most)
            self.true[at] = share * self.seen[at]

    def shares(self) -> tuple[float, ...]:
        """Return how often it came true, by class."""
        return tuple(true / seen for true, seen in zip(self.true, self.seen, strict=True))


Learned = Literal["first", "other", "cover", "hits", "looked", "shift"]
News = tuple[Learned, int, float]  # an observation: what it is of, its class, and its outcome


@dataclass(slots=True)
class Insight:
    """Learned statistics: acceptance of drafted and looked-up candidates, and the decoding rate."""

    first: Tally = field(default_factory=lambda: Tally(USUAL_FIRST))
    other: Tally = field(default_factory=lambda: Tally(USUAL_OTHER))
    cover: Tally = field(default_factory=lambda: Tally((USUAL_COVER,), memory=200.0))
    hits: Tally = field(default_factory=lambda: Tally((USUAL_HITS,), trust=10.0, memory=200.0))
    looked: Tally = field(
        default_factory=lambda: Tally(tuple(share for line in USUAL_LOOK for share in line), 6.0, 400.0)
    )
    shifts: list[float] = field(
        default_factory=lambda: [x for first, other in USUAL_SHIFT for x in (0.0, first, other, 0.0)]
    )
    looked_tokens: float = 0.3  # of lookup in a round, lately
    looked_by_depth: list[float] = field(
        default_factory=lambda: list(USUAL_LOOKED)
    )  # how often lookup is right, lately
    beyond: float = 0.0  # tokens that a draft brought beyond what its first step promised, lately
    observations: int = 0  # how many were taken in
    news: list[News] | None = None  # what was learned since the last save; None: nothing is saved

    @classmethod
    def starting_from(cls, prior: DraftEvaluation | None) -> Self:
        """Return the statistics before the first verdict: built-in figures, and a draft's evaluation if there is one.

        Classes that the evaluation did not meet keep the built-in figures.
        """
        insight = cls()
        if prior is not None and prior.positions:
            insight._start_from(prior)
        return insight

    def _start_from(self, prior: DraftEvaluation) -> None:
        # One factor for both tallies: how often classes occur is compared between them.
        factor = min(EVALUATED_CLASS / max(*prior.first.met, *prior.other.met), 1.0)
        both: tuple[tuple[Tally, ClassCounts], ...] = (self.first, prior.first), (self.other, prior.other)
        for tally, counts in both:
            tally.start_from(counts.met, counts.right, EVALUATED_CLASS)
            tally.met = [factor * count for count in counts.met]
            tally.right = [factor * count for count in counts.right]
        self.hits.start_from((prior.positions,), (prior.hits,), EVALUATED_SHARE)
        self.cover.start_from((prior.positions,), (prior.covered,), EVALUATED_SHARE)

    def chances(self, drift: float = 0.0, look_drift: float = 0.0) -> Chances:
        """Return the acceptance rates as a table; drifts are added to their log-odds."""
        first, other, looked = self.first.shares(), self.other.shares(), self.looked.shares()
        if drift:
            first, other = (tuple([shifted(share, drift) for share in shares]) for shares in (first, other))
        if look_drift:
            looked = tuple([shifted(share, look_drift) for share in looked])
        return Chances(first, other, looked, tuple(self.shifts))

    @property
    def covered(self) -> float:
        """The probability that the target's token is among the candidates."""
        return self.cover.true[0] / self.cover.seen[0]

    def kinds(self, chances: Chances, drift: float) -> tuple[Kinds, Kinds]:
        """Return the draft's candidates by class: how many a position has, and how often they are right.

        Until many positions are known, one more class stands for the unknown ones, with the shares of all positions:
        a first candidate, and two others that share the rest of what is covered.
        """
        met, others = self.first.met, self.other.met
        total = sum(met) + self.first.trust
        hits, rest = self.hits.shares()[0], max(self.covered - self.hits.shares()[0], 0.0)
        off = self._off(met)
        first, other = ([shifted(chance, off) for chance in of] for of in (chances.first, chances.other))
        return (
            Kinds([one / total for one in (*met, self.first.trust)], (*first, shifted(hits, drift))),
            Kinds([one / total for one in (*others, 2.0 * self.first.trust)], (*other, 0.5 * rest)),
        )

    def _off(self, met: list[float]) -> float:
        """Return how far this draft's first candidates are from the initial shares of their classes, in log-odds.

        All classes together show that long before each of them has enough counts.
        """
        count = sum(met)
        if count <= 0.0:
            return 0.0
        shares = self.first.shares()
        mean = sum([one * share for one, share in zip(met, shares, strict=True)]) / count
        seen = (sum(self.first.right) + self.hits.trust * mean) / (count + self.hits.trust)
        return log_odds(seen) - log_odds(mean)

    def learn(self, of: Learned, at: int, value: float) -> None:
        """Learn an observation, and note it as news for the next save."""
        self.take(of, at, value)
        if self.news is not None:
            self.news.append((of, at, value))

    def take(self, of: Learned, at: int, value: float) -> None:
        """Learn an observation: whether a candidate of class `at` was right.

        "shift": how much more often it was right than expected.
        """
        self.observations += 1
        match of:
            case "shift":
                self.shifts[at] = min(max(self.shifts[at] + LEARNING_PACE * value, -MOST_SHIFT), MOST_SHIFT)
            case _:
                tally: Tally = getattr(self, of)
                tally.add(at, bool(value))


class Pace:
    """Tokens a second of one request, lately."""

    def __init__(self) -> None:
        self._tokens = self._seconds = 0.0
        self._at_first = AT_FIRST_TOKENS  # tokens that the initial estimate still counts as

    def add(self, tokens: int, seconds: float) -> None:
        """Take in a run of the executor."""
        if self._tokens > LATELY:
            self._tokens, self._seconds = 0.5 * self._tokens, 0.5 * self._seconds
            self._at_first *= 0.5
        self._tokens += tokens
        self._seconds += seconds

    def rate(self, plain: float) -> float:
        """Return tokens a second, at least the rate of plain decoding, which takes `plain` seconds for one token.

        The initial estimate is half as many tokens again as plain decoding.
        """
        found = (self._at_first * 1.5 + self._tokens) / max(self._at_first * plain + self._seconds, 1e-12)
        return max(found, 1.0 / max(plain, 1e-12))


class Experience:
    """What is learned of a pair; there is one for each engine."""

    def __init__(
        self, costs: Costs | None = None, has_draft: bool = True, prior: DraftEvaluation | None = None
    ) -> None:
        """Learn costs unless `costs` are given; `prior`: the draft's own evaluation."""
        self.costs: Costs = MeasuredCosts() if costs is None else costs
        self.learned = self.costs if isinstance(self.costs, MeasuredCosts) else None
        self.has_draft = has_draft
        self.insight = Insight.starting_from(prior)
        self.goodput = Goodput()
        self.arms = Arms()  # of all requests; not saved
        self._credit = 0.0  # seconds that may go to a probe

    def start_again(self, insight: Insight) -> None:
        """Forget what an exchanged draft has shown. In place, because running requests plan by these statistics."""
        news: list[News] | None = None if self.insight.news is None else []
        for one in fields(Insight):
            setattr(self.insight, one.name, getattr(insight, one.name))
        self.insight.news = news
        self.goodput, self.arms = Goodput(), Arms()
        self.reset_probe_credit()

    def has_credit(self, seconds: float) -> bool:
        """True if the probe credit covers so many seconds."""
        return self._credit >= seconds

    def pay_probe(self, seconds: float) -> bool:
        """Spend the probe credit if it covers so many seconds; returns True if it did."""
        if not self.has_credit(seconds):
            return False
        self.reset_probe_credit()
        return True

    def return_probe(self, seconds: float) -> None:
        """Give back what a probe has brought: the credit bounds what probes lose, so a useful one is soon repeated."""
        self._credit += seconds

    def reset_probe_credit(self) -> None:
        """Reset the probe credit: the draft is asked anyway."""
        self._credit = 0.0

    def record_forwards(self, orders: Orders, reports: Reports, waited: float = 0.0, batch_size: int = 1) -> float:
        """Return the seconds of a run of the executor for one session; the `Loop` learns the costs.

        `waited`: seconds of rounds that ran without this session.
        """
        spans = [span for span in (reports.drafting, reports.verifying) if span is not None]
        if self.costs.last_run is not None:
            seconds = self.costs.last_run
        else:
            seconds = max(span.end for span in spans) - min(span.start for span in spans) if spans else 0.0
            seconds += self.costs.host if orders.verify is not None else 0.0
        seconds += waited
        self._credit += PROBING * (IN_BATCH if batch_size > 1 else 1.0) * seconds / batch_size
        return seconds
