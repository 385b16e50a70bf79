"""How far to draft, where to fork, how much to keep: numbers in, a Plan out.

Owns the choice of lengths and widths. Invariant under the ratio rule: whether a token is kept depends on its law q
(max, entropy), never on the token drawn from it or on anything after it.
"""

from __future__ import annotations

from typing import Protocol

from specbranch.config import HeadKind, PolicyName, SpeculativeConfig
from specbranch.core.forecast import ALL, NONE, SOME, Signal
from specbranch.core.orders import Branch, Plan, Until, Verdict


class Policy(Protocol):
    """Plans for one session; may learn from verdicts."""

    def chain(self) -> Plan:
        """Plan one chain, drafted while nothing is verified."""
        ...

    def fork(self, pending: Branch) -> Plan:
        """Plan what to draft while `pending` is verified."""
        ...

    def trim(self, branch: Branch) -> Branch:
        """Cut a chain to what is worth verifying."""
        ...

    def inherit(self, branch: Branch) -> Branch:
        """Cut what the branch that survived a verification drafted behind its head, likewise."""
        ...

    def observe(self, pending: Branch, verdict: Verdict) -> None:
        """Learn from what became of a pending chain."""
        ...


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
    """Keep tokens while the draft is confident; fork at the first unsure one, wider the less sure (SpecBranch's
    implicit signal)."""

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
        """Plan branches at the token after the pending chain; they run on to full length, to be trimmed once one has
        won."""
        return Plan(self.length, ((len(pending.tokens), self.width),), narrow=True, heads=self.heads, until=self.until)

    def trim(self, branch: Branch) -> Branch:
        """Cut before the first unsure token."""
        sure = next((i for i, c in enumerate(branch.confidence) if c < self.stop_below), len(branch.tokens))
        return branch.cut(0, sure)


class Paper(Confidence):
    """SpecBranch as published: H-RAD's hard signals, none and all, say what is kept; between them, and without it,
    confidence does."""

    def __init__(
        self,
        length: int,
        stop_below: float,
        width: int = 1,
        heads: HeadKind = "top",
        until: Until = "length",
        *,
        hrad: bool = True,
        posterior: bool = True,
    ) -> None:
        """`posterior`: a surviving branch is judged by the signal of the verdict it survived, not by the one before."""
        super().__init__(length, stop_below, width, heads, until)
        self._hrad, self._posterior = hrad, posterior
        self._before: Signal | None = None
        self._now: Signal | None = None

    def chain(self) -> Plan:
        """Plan a chain: nothing where nothing would be taken, all of it where all would."""
        hard = _hard(self._now, self.length)
        if hard == NONE:
            return Plan(0)
        return Plan(self.length) if hard == ALL else super().chain()

    def trim(self, branch: Branch) -> Branch:
        """Keep nothing, all, or what comes before the first unsure token."""
        return self._kept(branch, self._now)

    def inherit(self, branch: Branch) -> Branch:
        """Do the same by the signal of the verdict that the branch survived, or by the one before."""
        return self._kept(branch, self._now if self._posterior else self._before)

    def observe(self, pending: Branch, verdict: Verdict) -> None:
        """Take in the verdict's signal."""
        self._before, self._now = self._now, self._signal(pending, verdict)

    def _signal(self, pending: Branch, verdict: Verdict) -> Signal | None:
        return verdict.signal if self._hrad else None

    def _kept(self, branch: Branch, signal: Signal | None) -> Branch:
        hard = _hard(signal, len(branch.tokens))
        if hard == SOME:
            return super().trim(branch)
        return branch if hard == ALL else branch.cut(0, 0)


class LastLength(Paper):
    """The plainest signal: what became of the last chain becomes of the next, nothing, all, or part of it."""

    def _signal(self, pending: Branch, verdict: Verdict) -> Signal | None:
        taken = len(verdict.path)
        if not pending.tokens or 0 < taken < len(pending.tokens):
            return None
        return Signal.of((1.0 if taken else 0.0,) * self.length)


def _hard(signal: Signal | None, length: int) -> int:
    """What a signal says of a draft of so many tokens, SOME where it says nothing."""
    found = signal.hard(length) if signal is not None else None
    return SOME if found is None else found


class Entropy(Fixed):
    """AdaEDL (arXiv 2410.18351): stop where the entropy's lower bound on acceptance, 1 − sqrt(γ·H), falls under a
    moving threshold."""

    goal = 0.9  # wanted acceptance (α in the paper)
    recall = 0.5  # weight of the past in the running acceptance (β₁)
    calm = 0.9  # weight of the past in the threshold (β₂)
    pace = 0.01  # step of the threshold (ε)

    def __init__(self, length: int, threshold: float = 0.3, heads: HeadKind = "top", until: Until = "length") -> None:
        super().__init__(length, heads, until)
        self.threshold = threshold
        self.acceptance = self.goal

    def chain(self) -> Plan:
        """Plan a chain that ends with the first token whose bound falls under the threshold; at least one is always
        tried."""
        return Plan(self.length, stop_below=self.threshold, keep_unsure=True, measure="entropy")

    def observe(self, pending: Branch, verdict: Verdict) -> None:
        """Move the threshold towards the wanted acceptance."""
        if not pending.tokens:
            return
        rate = len(verdict.path) / len(pending.tokens)
        self.acceptance = self.recall * self.acceptance + (1 - self.recall) * rate
        step = self.pace if self.acceptance <= self.goal else -self.pace
        self.threshold = self.calm * self.threshold + (1 - self.calm) * (self.threshold + step)


def make_policy(config: SpeculativeConfig, kind: PolicyName, heads: HeadKind) -> Policy:
    """Build the policy a configuration asks for, the method's own `kind` if it asks for none."""
    until: Until = "target" if config.until_target else "length"
    length = config.num_speculative_tokens
    named = config.heads or heads
    width = 1 if "branches" in config.without else config.max_branches
    match config.policy or kind:
        case "confidence":
            return Confidence(length, config.stop_below, width, named, until)
        case "paper":
            without = config.without
            signals = {"hrad": "hrad" not in without, "posterior": "posterior" not in without}
            return Paper(length, config.stop_below, width, named, until, **signals)
        case "last":
            return LastLength(length, config.stop_below, width, named, until)
        case "oracle":  # the draft's confidence is the truth there: 1 for a token that is right, 0 for one that is not
            return Confidence(length, 0.5, width, named, until)
        case "entropy":
            return Entropy(length, heads=named, until=until)
        case _:
            return Fixed(length, named, until)
