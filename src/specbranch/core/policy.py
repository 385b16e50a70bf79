"""How far to draft, where to fork, how much to keep: numbers in, a Plan out.

Owns the choice of lengths and widths. `policies` lists all policies by name; those that use signals are in
`hrad_policy`. Invariant under the ratio rule: whether a token is kept depends on its distribution q (maximum, entropy),
never on the token drawn from it or on anything after it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from specbranch.config import HeadKind, Part, SpeculativeConfig
from specbranch.core.orders import Branch, Plan, Until, Verdict


class Policy(Protocol):
    """Plans for one session; may learn from verdicts."""

    def chain(self) -> Plan:
        """Plan one chain, to be drafted while the target waits."""
        ...

    def fork(self, pending: Branch) -> Plan:
        """Plan what to draft while the target verifies `pending`."""
        ...

    def trim(self, branch: Branch) -> Branch:
        """Cut a chain to the tokens that are worth verifying."""
        ...

    def inherit(self, branch: Branch) -> Branch:
        """Cut the tokens behind the head of a branch that was hit."""
        ...

    def observe(self, pending: Branch, verdict: Verdict) -> None:
        """Learn from the verdict on a pending chain."""
        ...


@dataclass(frozen=True, slots=True)
class PolicyKind:
    """One policy of the table: how to make it, and what methods and commands need to know of it."""

    make: Callable[[SpeculativeConfig, HeadKind], Policy] | None  # None: the planner, which plans trees instead
    parts: tuple[Part, ...] = ()  # those that can be left out
    signal_part: Part | None = None  # the part that uses a predictor's signals
    needs_branches: bool = False  # it only makes sense if branches are drafted during a verify

    def uses_signals(self, config: SpeculativeConfig) -> bool:
        """True if signals make any difference to it."""
        return self.signal_part is not None and self.signal_part not in config.without


class Fixed:
    """Always the same length, one branch."""

    def __init__(self, length: int, heads: HeadKind = "top", until: Until = "length") -> None:
        self.length = length
        self.heads = heads
        self.until = until

    def chain(self) -> Plan:
        """Plan a chain of the fixed length."""
        return Plan(self.length)

    def fork(self, pending: Branch) -> Plan:
        """Plan one continuation of the pending chain."""
        return Plan(self.length, ((len(pending.tokens), 1),), heads=self.heads, until=self.until)

    def trim(self, branch: Branch) -> Branch:
        """Keep all of it."""
        return branch

    def inherit(self, branch: Branch) -> Branch:
        """Cut it as any chain."""
        return self.trim(branch)

    def observe(self, pending: Branch, verdict: Verdict) -> None:
        """Learn nothing."""


class Confidence(Fixed):
    """Keep tokens while the draft is confident, and fork at the first unsure one (SpecBranch's implicit signal).

    The less sure the draft is, the wider the fork.
    """

    def __init__(
        self, length: int, stop_below: float, width: int = 1, heads: HeadKind = "top", until: Until = "length"
    ) -> None:
        super().__init__(length, heads, until)
        self.stop_below = stop_below
        self.width = width

    def chain(self) -> Plan:
        """Plan a chain that ends before the first unsure token."""
        return Plan(self.length, stop_below=self.stop_below)

    def fork(self, pending: Branch) -> Plan:
        """Plan branches behind the pending chain, at full length; the one that is hit is trimmed then."""
        return Plan(self.length, ((len(pending.tokens), self.width),), narrow=True, heads=self.heads, until=self.until)

    def trim(self, branch: Branch) -> Branch:
        """Cut before the first unsure token."""
        sure = next((i for i, c in enumerate(branch.confidence) if c < self.stop_below), len(branch.tokens))
        return branch.cut(0, sure)


class Entropy(Fixed):
    """AdaEDL (arXiv 2410.18351): stop where 1 − sqrt(γ·H) falls under a moving threshold.

    This is a lower bound on acceptance by the entropy H of the draft.
    """

    goal = 0.9  # wanted acceptance (α in the paper)
    recall = 0.5  # weight of the past in the running acceptance (β₁)
    calm = 0.9  # weight of the past in the threshold (β₂)
    pace = 0.01  # step of the threshold (ε)

    def __init__(self, length: int, threshold: float = 0.3, heads: HeadKind = "top", until: Until = "length") -> None:
        super().__init__(length, heads, until)
        self.threshold = threshold
        self.acceptance = self.goal

    def chain(self) -> Plan:
        """Plan a chain that ends with the first token whose bound is under the threshold; it has at least one."""
        return Plan(self.length, stop_below=self.threshold, keep_unsure=True, measure="entropy")

    def observe(self, pending: Branch, verdict: Verdict) -> None:
        """Move the threshold towards the acceptance goal."""
        if not pending.tokens:
            return
        rate = len(verdict.path) / len(pending.tokens)
        self.acceptance = self.recall * self.acceptance + (1 - self.recall) * rate
        step = self.pace if self.acceptance <= self.goal else -self.pace
        self.threshold = self.calm * self.threshold + (1 - self.calm) * (self.threshold + step)


def until_of(config: SpeculativeConfig) -> Until:
    """Return what ends a draft during a verify: its length, or the end of the verify."""
    return "target" if config.until_target else "length"


def width_of(config: SpeculativeConfig) -> int:
    """Return how many branches may start at a fork."""
    return 1 if "branches" in config.without else config.max_branches
