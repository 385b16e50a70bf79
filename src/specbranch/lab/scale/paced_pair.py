"""A toy pair whose forwards take a profile's seconds of real time: the thread sleeps as if it waited for a device.

Owns both runners. Invariant: tokens are those of the scripts; only the sleeping differs from the regret lab's toys.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from specbranch.clock.profile import CostProfile
from specbranch.core.runner import Feed
from specbranch.lab.regret.toy_pair import ScriptedDraft, ScriptedTarget, Scripts

# What the default toys take: a draft step is a tenth of a target forward, and rows are free up to 16.
PACED_TOYS = CostProfile(
    target=((1, 0.02), (16, 0.02), (32, 0.04)),
    draft=((1, 0.002), (4, 0.002), (5, 0.0022)),
    pair="toys of 20 ms a target forward and 2 ms a draft step",
    note="These are the seconds that the toys sleep.",
)


class PacedTarget(ScriptedTarget):
    """A target that sleeps for each forward."""

    def __init__(self, scripts: Scripts, profile: CostProfile) -> None:
        super().__init__(scripts)
        self._profile = profile

    def feed(self, work: Sequence[Feed]) -> None:
        """Add nodes, slowly."""
        _sleep(self._profile.target_seconds, _rows(work))
        super().feed(work)

    def extend(self, seq: int, tokens: Sequence[int]) -> None:
        """Prefill, slowly."""
        _sleep(self._profile.target_seconds, len(tokens))
        super().extend(seq, tokens)


class PacedDraft(ScriptedDraft):
    """A draft that sleeps for each step."""

    def __init__(self, scripts: Scripts, profile: CostProfile) -> None:
        super().__init__(scripts)
        self._profile = profile

    def feed(self, work: Sequence[Feed]) -> None:
        """Add nodes, slowly."""
        _sleep(self._profile.draft_seconds, _rows(work))
        super().feed(work)

    def extend(self, seq: int, tokens: Sequence[int]) -> None:
        """Prefill, slowly."""
        _sleep(self._profile.draft_seconds, len(tokens))
        super().extend(seq, tokens)


def _rows(work: Sequence[Feed]) -> int:
    return sum(len(item.tokens) for item in work)


def _sleep(seconds: Callable[[int], float], rows: int) -> None:
    if rows:
        time.sleep(seconds(rows))
