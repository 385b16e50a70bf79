"""How long a round waits for a draft worker, and when the worker counts as lost, by its measured speed.

Owns the limits and the measured speed. Invariant: a round's wait is bounded whatever was ordered; only the time until
the worker counts as lost rises with its prefill.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from specbranch.core.cost_curves import Recent
from specbranch.core.orders import Branch, Draft, Drafted, DraftOrder, Effort, Grow, Prefill
from specbranch.core.trees import Tree

TIMES = 3.0  # factor on the expected seconds of the work: a round waits this long …
TIMES_LOST = 8.0  # … and a worker counts as lost after this long
PREFILL_WAIT = 1.0  # seconds of prefill that a round waits for, at most
UNMEASURED_TOKEN = 0.02  # seconds of prefill for each token, as long as none was timed
LONGEST_CHUNK = 256  # tokens of a prefill chunk, at most, in any runner
PREFILL_TOKENS = 64  # tokens from which on a round measures the speed of prefill
FASTER, SLOWER = 0.1, 0.5  # weight of a new time that is faster or slower: an estimate too short does more harm


@dataclass(frozen=True, slots=True)
class ChildLimits:
    """How long a round waits for a draft process, in seconds, at least."""

    start: float = 600.0  # until its model is loaded
    first: float = 60.0  # until its first answer, before it counts as lost: kernels may have to be compiled
    hung: float = 10.0  # until any other answer
    grace: float = 0.5  # that a round waits: until it asks for the answer so far, and once more for that answer
    unmeasured: float = 5.0  # instead of the first of these two waits, while the worker's speed is unknown


@dataclass(frozen=True, slots=True)
class Amount:
    """The size of an order: tokens to prefill, and steps behind them."""

    prefill: int
    steps: int


def amount_of(orders: Mapping[int, DraftOrder]) -> Amount:
    """Return the size of orders; sessions step together, and prefill one after the other."""
    return Amount(sum(map(_uncomputed, orders.values())), max(map(_steps, orders.values()), default=0))


class ChildSpeed:
    """The speed of a worker: smoothed seconds for a step, for a token of prefill, and of messages on their way."""

    def __init__(self) -> None:
        self.step: float | None = None
        self.token: float | None = None
        self._trips: Recent = Recent()

    @property
    def trip(self) -> float:
        """Seconds of an order and its answer on their way, about."""
        return self._trips.median

    def learn_trip(self, seconds: float) -> None:
        """Learn from an answer that was waited for."""
        self._trips.add(seconds)

    def learn(self, made: Mapping[int, Drafted], effort: Effort) -> None:
        """Learn from what a round took."""
        if sum(prompt.read for prompt in effort.prompts.values()) >= PREFILL_TOKENS:
            self.token = _smoothed(self.token, effort.seconds / effort.tokens) if effort.tokens else self.token
        else:
            steps = max(map(_taken, made.values()), default=1)
            self.step = _smoothed(self.step, effort.seconds / max(steps, 1))

    def patience(self, amount: Amount, limits: ChildLimits) -> float:
        """Return how long a round waits before it asks for the answer so far."""
        if self.step is None:
            return limits.unmeasured
        prefill = min(amount.prefill * (self.token or self.step), PREFILL_WAIT)
        return max(limits.grace, TIMES * (prefill + amount.steps * self.step + self.trip))

    def last_patience(self, limits: ChildLimits) -> float:
        """Return how long it waits after that: for one step."""
        return max(limits.grace, TIMES * ((self.step or 0.0) + self.trip))

    def limit(self, amount: Amount, limits: ChildLimits, first: bool) -> float:
        """Return after how long the worker counts as lost; `first`: it has not answered any order yet."""
        token = UNMEASURED_TOKEN if self.token is None else TIMES_LOST * self.token
        steps = TIMES_LOST * amount.steps * (self.step or 0.0)
        return max(limits.first if first else limits.hung, amount.prefill * token + steps)


def _smoothed(before: float | None, now: float) -> float:
    if before is None:
        return now
    return before + (now - before) * (SLOWER if now > before else FASTER)


def _uncomputed(order: DraftOrder) -> int:
    uncomputed = len(order.on.tail)
    return min(uncomputed, max(order.most, LONGEST_CHUNK)) if isinstance(order, Prefill) else uncomputed


def _steps(order: DraftOrder) -> int:
    match order:
        case Draft():
            return max(order.plan.length, 1)
        case Grow():
            return max(order.growth.deepest, 1)  # about as many, unless it is broad
        case Prefill():
            return 0


def _taken(made: Drafted) -> int:
    """Return how many steps the worker took for a session."""
    if isinstance(made, tuple):
        return max((len(branch.tokens) for branch in made if isinstance(branch, Branch)), default=1)
    return len(made.steps) if isinstance(made, Tree) else 1
