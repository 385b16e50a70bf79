"""Policies that use a signal: the prediction of a predictor (H-RAD), or the last verdict.

Owns what SpecBranch's paper does with H-RAD's classes none, some and all. Invariant: without a signal both decide by
confidence alone.
"""

from __future__ import annotations

from specbranch.config import HeadKind, SpeculativeConfig
from specbranch.core.forecast import ALL, NONE, SOME, Signal
from specbranch.core.orders import Branch, Plan, Until, Verdict
from specbranch.core.policy import Confidence, Policy, PolicyKind, until_of, width_of


class Paper(Confidence):
    """SpecBranch as published: H-RAD's hard signals none and all decide what is kept; otherwise confidence does."""

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
        """Plan with H-RAD or without.

        `posterior`: a branch that was hit is trimmed by the signal of that same verdict, not of the one before.
        """
        super().__init__(length, stop_below, width, heads, until)
        self._hrad, self._posterior = hrad, posterior
        self._before: Signal | None = None
        self._now: Signal | None = None

    def chain(self) -> Plan:
        """Plan a chain: nothing for NONE, full length for ALL, up to the first unsure token otherwise."""
        hard = _hard(self._now, self.length)
        if hard == NONE:
            return Plan(0)
        return Plan(self.length) if hard == ALL else super().chain()

    def trim(self, branch: Branch) -> Branch:
        """Keep nothing, all, or the tokens before the first unsure one."""
        return self._kept(branch, self._now)

    def inherit(self, branch: Branch) -> Branch:
        """Do the same for a branch that was hit, by the signal of that verdict or of the one before."""
        return self._kept(branch, self._now if self._posterior else self._before)

    def observe(self, pending: Branch, verdict: Verdict) -> None:
        """Remember the verdict's signal."""
        self._before, self._now = self._now, self._signal(pending, verdict)

    def _signal(self, pending: Branch, verdict: Verdict) -> Signal | None:
        return verdict.signal if self._hrad else None

    def _kept(self, branch: Branch, signal: Signal | None) -> Branch:
        hard = _hard(signal, len(branch.tokens))
        if hard == SOME:
            return super().trim(branch)
        return branch if hard == ALL else branch.cut(0, 0)


class LastLength(Paper):
    """The simplest signal: the next chain fares as the last one did: none, all, or some of it is accepted."""

    def _signal(self, pending: Branch, verdict: Verdict) -> Signal | None:
        taken = len(verdict.path)
        if not pending.tokens or 0 < taken < len(pending.tokens):
            return None
        return Signal.of((1.0 if taken else 0.0,) * self.length)


def _hard(signal: Signal | None, length: int) -> int:
    """Return a signal's class for a draft of `length` tokens, SOME if it has none."""
    found = signal.hard(length) if signal is not None else None
    return SOME if found is None else found


def _paper(config: SpeculativeConfig, heads: HeadKind) -> Policy:
    return Paper(
        config.num_speculative_tokens,
        config.stop_below,
        width_of(config),
        heads,
        until_of(config),
        hrad="hrad" not in config.without,
        posterior="posterior" not in config.without,
    )


def _last(config: SpeculativeConfig, heads: HeadKind) -> Policy:
    return LastLength(config.num_speculative_tokens, config.stop_below, width_of(config), heads, until_of(config))


PAPER = PolicyKind(_paper, ("hrad", "branches", "posterior"), signal_part="hrad", needs_branches=True)
LAST = PolicyKind(_last, needs_branches=True)
