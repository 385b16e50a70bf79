"""Every way of decoding that `auto` may choose, and what it would have given on the text so far, by the costs as they are known.

Owns the forecast. A *walker* goes over the trail of a request as its method would have: where it would have started a round, what would
have been accepted, what that would have cost; so all ways are judged on the same text though only one of them is at work. Invariant: a
forecast depends on the trail and the costs alone, and on nothing of which way is at work.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from functools import lru_cache
from math import sqrt

from specbranch.core.costs import Costs
from specbranch.core.trail import Trail

# AdaEDL measures entropy, the others the top probability: how one usually goes with the other (drafts of SmolLM2, greedy).
AS_ENTROPY = ((0.0, 0.0), (0.1, 0.03), (0.2, 0.14), (0.4, 0.29), (0.6, 0.41), (0.8, 0.555), (0.9, 0.68), (0.97, 0.8), (1.0, 1.0))
AS_TOP = tuple((y, x) for x, y in AS_ENTROPY)


@dataclass(frozen=True, slots=True)
class Arm:
    """A method with its settings; `stop_below` is in the method's own measure.

    With `look`, nothing is drafted where so many tokens of the text's end were there before: what followed them is verified instead.
    """

    method: str
    length: int = 0
    stop_below: float = 0.0
    width: int = 1
    look: int = 0

    @property
    def drafts(self) -> bool:
        """Whether the draft model is asked."""
        return self.method not in ("autoregressive", "lookup")


PLAIN = Arm("autoregressive")
LOOKUPS = tuple(Arm("lookup", length) for length in (2, 5, 10, 15))
REPEATS = 0.8  # the chance that a token found is right, as an arm that looks first takes it to be
KNOWN = 2  # tokens
LATELY, LONG = 60.0, 300.0  # tokens
SERIAL = (
    *(Arm("speculative", length) for length in (1, 3, 8)),
    *(Arm("speculative", length, look=KNOWN) for length in (1, 2, 3, 5, 8, 15)),
    *(Arm("adaptive", length, 0.3) for length in (5, 10)),
    *(Arm("adaptive", length, stop, look=KNOWN) for length in (5, 10, 15) for stop in (0.3, 0.45)),
)
OVERLAPPED = (
    *(Arm("pearl", length) for length in (3, 6, 14)),
    *(Arm("pearl", length, look=KNOWN) for length in (2, 3, 4, 6, 9, 14)),
    *(Arm("specbranch", length, stop, 6) for length, stop in ((3, 0.2), (5, 0.45), (8, 0.2))),
    *(Arm("specbranch", length, stop, 6, KNOWN) for length in (3, 5, 8, 12) for stop in (0.2, 0.45)),
)


class Prices:
    """Seconds of whole rounds, each computed once."""

    def __init__(self, costs: Costs, context: int = 0) -> None:
        self.costs, self.context = costs, context
        self.host = costs.host
        self.step = costs.draft_seconds(1, context)
        self._verified: dict[int, float] = {}
        self._found: Arm | None = None
        self._beside: dict[tuple[int, int, int], float] = {}

    def verified(self, rows: int) -> float:
        """Seconds of a round in which the target alone is at work."""
        if rows not in self._verified:
            self._verified[rows] = self.costs.target_seconds(rows, self.context) + self.host
        return self._verified[rows]

    def drafted(self, steps: int) -> float:
        """Seconds of a round in which one lane is drafted."""
        return steps * self.step + self.host

    def beside(self, rows: int, steps: int, width: int) -> float:
        """Seconds of a round in which the target verifies while so many lanes are drafted."""
        key = (rows, steps, width)
        if key not in self._beside:
            self._beside[key] = self._together(rows, steps, width) + self.host
        return self._beside[key]

    def at_most(self, arm: Arm) -> float:
        """Tokens a second of an arm that drafts, if the draft were always right."""
        length = arm.length
        if arm.method in ("pearl", "specbranch"):
            return length / self.beside(length, length, 1)
        return (length + 1) / (self.drafted(length) + self.verified(length + 1))

    @property
    def found(self) -> Arm:
        """How an arm that looks first verifies what it finds: as many tokens as pay, which depends on what further rows cost."""
        if self._found is None:
            self._found = max(LOOKUPS, key=lambda arm: _expected(arm.length) / max(self.verified(arm.length + 1), 1e-9))
        return self._found

    def reading(self, tokens: int) -> float:
        """Seconds the draft takes to read what it has missed."""
        return self.costs.draft_seconds(tokens, self.context) if tokens > 1 else 0.0

    def _together(self, rows: int, steps: int, width: int) -> float:
        costs, draft = self.costs, 0.0
        target, step = costs.target_seconds(rows, self.context), costs.draft_seconds(width, self.context)
        if not costs.overlap:
            return target + steps * step
        for _ in range(steps):
            if draft < target:
                target += costs.slow_down
                draft += costs.draft_slow_down
            draft += step
        return max(target, draft)


@dataclass(slots=True)
class Pace:
    """Tokens and seconds added up, the older ones fading: what is `memory` tokens old weighs 1/e."""

    memory: float
    tokens: float = 0.0
    seconds: float = 0.0

    @property
    def rate(self) -> float:
        """Tokens a second."""
        return self.tokens / self.seconds if self.seconds else 0.0

    def add(self, tokens: int, seconds: float) -> None:
        """Take a round in."""
        fading = max(1.0 - tokens / self.memory, 0.0)
        self.tokens = fading * self.tokens + tokens
        self.seconds = fading * self.seconds + seconds

    def worth(self, tokens: float) -> Pace:
        """The same pace, for no more than so many tokens' worth."""
        share = min(tokens / self.tokens, 1.0) if self.tokens else 0.0
        return Pace(self.memory, share * self.tokens, share * self.seconds)


class Walker:
    """Goes over a trail by one arm, and keeps its pace of late and in the long run."""

    __slots__ = ("arm", "lately", "long", "pending", "place")

    def __init__(self, arm: Arm, lately: Pace | None = None, long: Pace | None = None) -> None:
        self.arm = arm
        self.lately, self.long = lately or Pace(LATELY), long or Pace(LONG)
        self.place = 0  # the entry its next round starts at
        self.pending = -1  # tokens in flight there; -1: a chain is still to be drafted

    @property
    def rate(self) -> float:
        """Tokens a second to expect: what is of late alone is noise, and what is of long ago alone is not this text."""
        return sqrt(self.lately.rate * self.long.rate)

    def walk(self, trail: Trail, prices: Prices) -> None:
        """Go on as far as the text decides."""
        go, look = _ROUNDS[self.arm.method], self.arm.look
        while self.place < len(trail.entries):
            looks = look and self.pending <= 0 and trail.found[self.place][0] >= look
            outcome = (_lookup if looks else go)(self, trail, prices)
            if outcome is None:
                return
            tokens, seconds, self.pending = outcome
            self.place += tokens
            self.lately.add(tokens, seconds)
            self.long.add(tokens, seconds)

    def anew(self, lately: float, long: float) -> Walker:
        """Return a walker for a new trail that takes what is known so far for so many tokens' worth."""
        return Walker(self.arm, self.lately.worth(lately), self.long.worth(long))


Outcome = tuple[int, float, int] | None  # tokens emitted, seconds, tokens in flight; None: the text does not decide it yet


def _plain(walker: Walker, trail: Trail, prices: Prices) -> Outcome:
    return 1, prices.verified(1), -1


def _lookup(walker: Walker, trail: Trail, prices: Prices) -> Outcome:
    found = trail.looked_up(walker.place, walker.arm.length if walker.arm.method == "lookup" else prices.found.length)
    if found is None:
        return None
    return found[1] + 1, prices.verified(found[0] + 1), -1


def _speculative(walker: Walker, trail: Trail, prices: Prices) -> Outcome:
    return _serial(walker.arm.length, walker, trail, prices)


def _adaptive(walker: Walker, trail: Trail, prices: Prices) -> Outcome:
    arm = walker.arm
    return _serial(trail.sure_length(walker.place, arm.length, as_top(arm.stop_below), keep=True), walker, trail, prices)


def _serial(length: int, walker: Walker, trail: Trail, prices: Prices) -> Outcome:
    right = trail.right_length(walker.place, length)
    if right is None:
        return None
    return right + 1, prices.drafted(length) + prices.verified(length + 1), -1


def _pearl(walker: Walker, trail: Trail, prices: Prices) -> Outcome:
    entries, place, length, pending = trail.entries, walker.place, walker.arm.length, max(walker.pending, 0)
    right = trail.right_length(place, pending)
    if right is None or place + right >= len(entries):
        return None
    hit = right == pending and entries[place + right][1] == 0
    return right + 1, prices.beside(pending + 1, length, 1), length - 1 if hit else -1


def _branching(walker: Walker, trail: Trail, prices: Prices) -> Outcome:
    arm, entries, place, pending, seconds = walker.arm, trail.entries, walker.place, walker.pending, 0.0
    if pending < 0:
        pending = trail.sure_length(place, arm.length, arm.stop_below)
        seconds = prices.drafted(min(pending + 1, arm.length))
    right = trail.right_length(place, pending)
    if right is None or place + pending >= len(entries):
        return None
    sure, rank = entries[place + pending]
    width = max(1, int(arm.width * (1.0 - sure)))
    # A chain that ended before an unsure token has been read to its end; one that ran to its full length lacks a step.
    seconds += prices.beside(pending + 1, arm.length if pending >= arm.length - 1 else arm.length - 1, width)
    if right < pending or rank >= width:
        return right + 1, seconds, -1
    return right + 1, seconds, trail.sure_length(place + pending + 1, arm.length - 1, arm.stop_below)


_ROUNDS = {
    "autoregressive": _plain,
    "lookup": _lookup,
    "speculative": _speculative,
    "adaptive": _adaptive,
    "pearl": _pearl,
    "specbranch": _branching,
}


def _expected(length: int) -> float:
    """Tokens that a forward over so many found ones emits."""
    return sum(REPEATS**count for count in range(length + 1))


@lru_cache(maxsize=4096)
def as_top(bound: float) -> float:
    """The top probability that goes with AdaEDL's bound."""
    return _along(AS_TOP, bound)


def _along(points: tuple[tuple[float, float], ...], x: float) -> float:
    at = min(max(bisect_left(points, (x,)), 1), len(points) - 1)
    (x0, y0), (x1, y1) = points[at - 1], points[at]
    return y0 + (y1 - y0) * (x - x0) / (x1 - x0)
