"""How long a draft worker may take, by how fast it was.

Owns the limits and the measured speed. Invariant: what a round waits for is bounded whatever was ordered; only the time
until the worker counts as lost grows with the text it has to read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from specbranch.core.orders import Branch, Draft, Drafted, DraftOrder, Grow, Prefill, Span
from specbranch.core.trees import Tree

TIMES = 3.0  # a round waits for so many times what the work should take …
TIMES_LOST = 8.0  # … and a worker that takes so many times as long is lost
READING = 1.0  # seconds of prefill that a round takes into account; for more it does not wait
UNMEASURED_TOKEN = 0.02  # seconds for each token of a text, as long as none was timed
LONGEST_CHUNK = 256  # tokens: a worker reads whole chunks of a prompt, and no runner has longer ones
READS = 64  # tokens from which on a round shows what prefill takes
FASTER, SLOWER = 0.1, 0.5  # how much of a new time is believed; what is too short does more harm


@dataclass(frozen=True, slots=True)
class ChildLimits:
    """How long a draft process is waited for, in seconds, at least."""

    start: float = 600.0  # until its model is loaded
    first: float = 60.0  # until its first answer, before it counts as lost: kernels may have to be compiled
    hung: float = 10.0  # until any other answer
    grace: float = 0.5  # that a round waits: once until it asks for what there is, and once more for that
    unmeasured: float = 5.0  # instead of the first of these two, while the worker's speed is not known


@dataclass(frozen=True, slots=True)
class Amount:
    """What was ordered: tokens of texts to be read, and steps behind them."""

    read: int
    steps: int


def amount_of(orders: Mapping[int, DraftOrder]) -> Amount:
    """Return how much was ordered; sessions take their steps together, and read one after the other."""
    return Amount(sum(map(_to_read, orders.values())), max(map(_steps, orders.values()), default=0))


class ChildSpeed:
    """How fast a worker is: seconds a step, and a token of a text, smoothed."""

    def __init__(self) -> None:
        self.step: float | None = None
        self.token: float | None = None

    def learn(self, made: Mapping[int, Drafted], span: Span) -> None:
        """Take in what a round took."""
        if sum(prompt.read for prompt in span.prompts.values()) >= READS:
            self.token = _smoothed(self.token, span.seconds / span.tokens) if span.tokens else self.token
        else:
            steps = max(map(_taken, made.values()), default=1)
            self.step = _smoothed(self.step, span.seconds / max(steps, 1))

    def patience(self, amount: Amount, limits: ChildLimits) -> float:
        """Return how long a round waits before it asks for what there is."""
        if self.step is None:
            return limits.unmeasured
        reading = min(amount.read * (self.token or self.step), READING)
        return max(limits.grace, TIMES * (reading + amount.steps * self.step))

    def last_patience(self, limits: ChildLimits) -> float:
        """Return how long it waits after that: for one step."""
        return max(limits.grace, TIMES * (self.step or 0.0))

    def limit(self, amount: Amount, limits: ChildLimits, first: bool) -> float:
        """Return after how long the worker counts as lost; `first`: it has answered nothing yet."""
        token = UNMEASURED_TOKEN if self.token is None else TIMES_LOST * self.token
        steps = TIMES_LOST * amount.steps * (self.step or 0.0)
        return max(limits.first if first else limits.hung, amount.read * token + steps)


def _smoothed(before: float | None, now: float) -> float:
    if before is None:
        return now
    return before + (now - before) * (SLOWER if now > before else FASTER)


def _to_read(order: DraftOrder) -> int:
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
    """How many steps were taken for a session."""
    if isinstance(made, tuple):
        return max((len(branch.tokens) for branch in made if isinstance(branch, Branch)), default=1)
    return len(made.steps) if isinstance(made, Tree) else 1
