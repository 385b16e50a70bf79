"""The true costs of a case: what forwards take, with first-time spikes and slow stretches.

Owns the seconds. Invariant: no planner reads them; it learns from the spans of its rounds, in which spikes and slow
stretches show.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from specbranch.clock.profile import Beginning, CostProfile, Points
from specbranch.lab.regret.case import SLOW_FACTOR, SPIKE_SECONDS, Case, Draws

Model = Literal["target", "draft"]
Progress = Callable[[], float]  # the share of all tokens that is emitted
MANY_ROWS = 256  # a second point of each cost curve; beyond it the slope goes on


class TrueCosts(CostProfile):
    """The costs of a case. They change with time, so they also take what was run before."""

    __slots__ = ("_case", "_hides_host", "_met", "_progress", "draft_steps", "forwards", "spiked")
    _case: Case
    _hides_host: bool
    _progress: Progress
    _met: set[tuple[Model, int]]
    spiked: dict[Model, float]  # seconds of spikes in this round
    forwards: list[int]  # rows of all target forwards
    draft_steps: list[int]

    def __init__(self, case: Case, progress: Progress, hides_host: bool = False) -> None:
        """`hides_host`: the machine launches plain rounds ahead, so they take no time of the host."""
        draft = case.target * case.draft_share
        super().__init__(
            target=_curve(case.target, case.row_share, case.free_rows),
            draft=_curve(draft, case.lane_share, 1),
            host=case.host,
            overlap=case.overlap,
            draft_setup=case.draft_setup,
            slow_down=0.02 * case.target if case.overlap else 0.0,
        )
        own: dict[str, object] = {
            "_case": case,
            "_progress": progress,
            "_hides_host": hides_host,
            "_met": set(),
            "forwards": [],
            "draft_steps": [],
        }
        for name, value in own.items():
            object.__setattr__(self, name, value)
        self.begin_round()

    def begin_round(self) -> None:
        """Forget the spikes of the round before."""
        object.__setattr__(self, "spiked", {"target": 0.0, "draft": 0.0})

    def target_seconds(self, tokens: int, context: float | None = None) -> float:
        """Charge a target forward; without a context it is only a question."""
        seconds = self._factor * super().target_seconds(tokens)
        if context is None:
            return seconds
        self.forwards.append(tokens)
        return seconds + self._spike("target", tokens)

    def draft_seconds(self, width: int, context: float | None = None) -> float:
        """Charge a draft step in the same way."""
        seconds = self._factor * super().draft_seconds(width)
        if context is None:
            return seconds
        self.draft_steps.append(width)
        return seconds + self._spike("draft", width)

    def host_seconds(self, begun: Beginning) -> float:
        """Charge the host's part of a round."""
        return 0.0 if self._hides_host and begun is Beginning.BY_ITSELF else self.seconds_of_host()

    def seconds_of_host(self) -> float:
        """Return the host's part of a round of one session."""
        return self._factor * self.host

    @property
    def _factor(self) -> float:
        done = self._progress() if self._case.slow else 0.0
        return SLOW_FACTOR if any(start <= done < end for start, end in self._case.slow) else 1.0

    def _spike(self, model: Model, rows: int) -> float:
        """Return the seconds of a first time, 0 after it; sizes up to a power of two share one."""
        kind = model, (rows - 1).bit_length()
        if not self._case.spike or kind in self._met:
            return 0.0
        self._met.add(kind)
        seconds = Draws(f"spike {self._case.seed} {kind}").by_ratio((SPIKE_SECONDS[0], self._case.spike))
        self.spiked[model] += seconds
        return seconds


def _curve(seconds: float, share: float, free_rows: int) -> Points:
    return (
        (1.0, seconds),
        (float(free_rows + 1), seconds * (1.0 + share)),
        (float(MANY_ROWS), seconds * (1.0 + share * (MANY_ROWS - free_rows))),
    )
