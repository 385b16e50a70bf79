"""The machine of a case: a virtual clock over its true costs, with first-time spikes and slow stretches.

Owns the time. Invariant: no planner reads these costs. It learns from the spans of its rounds, in which spikes and slow
stretches show. `MachineClock.charged` leaves the time of the spikes themselves out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal

from specbranch.clock.profile import Beginning, CostProfile, Points
from specbranch.clock.virtual_clock import MeteredDrafter, VirtualClock
from specbranch.core.orders import Orders, Reports, Span
from specbranch.exec.verifier import Verifier
from specbranch.lab.regret.case import SLOW_FACTOR, SPIKE_SECONDS, Case, Draws
from specbranch.lab.regret.toy_pair import ScriptedDraft, ScriptedTarget, Scripts

Model = Literal["target", "draft"]
Progress = Callable[[], float]  # the share of all tokens that is emitted
MANY_ROWS = 256  # a second point of each cost curve; beyond it the slope goes on


class TrueCosts(CostProfile):
    """The costs of a case. They change with time, so they also take what was run before."""

    __slots__ = ("_case", "_met", "_progress", "draft_steps", "forwards", "spiked")
    _case: Case
    _progress: Progress
    _met: set[tuple[Model, int]]
    spiked: dict[Model, float]  # seconds of spikes in this round
    forwards: list[int]  # rows of all target forwards
    draft_steps: list[int]

    def __init__(self, case: Case, progress: Progress) -> None:
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
        """Charge a draft step, likewise."""
        seconds = self._factor * super().draft_seconds(width)
        if context is None:
            return seconds
        self.draft_steps.append(width)
        return seconds + self._spike("draft", width)

    def host_seconds(self, begun: Beginning) -> float:
        """Charge the host's part of a round."""
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


class _PromptsUncharged(Verifier):
    """A target whose prefill takes no time: only decoding is compared."""

    def _extend(self, session: int, tokens: Sequence[int]) -> None:
        self.runner.extend(session, tokens)


class _DraftPromptsUncharged(MeteredDrafter):
    """A draft whose prefill takes no time."""

    def _extend(self, session: int, tokens: Sequence[int]) -> None:
        self.runner.extend(session, tokens)


class MachineClock(VirtualClock):
    """An executor on the machine of a case."""

    def __init__(self, scripts: Scripts, progress: Progress) -> None:
        self.costs = TrueCosts(scripts.case, progress)
        target, draft = ScriptedTarget(scripts), ScriptedDraft(scripts)
        super().__init__(_PromptsUncharged(target), _DraftPromptsUncharged(draft), self.costs)
        self._spikes = 0.0

    @property
    def charged(self) -> float:
        """Seconds so far, without spikes."""
        return self.now() - self._spikes

    def run(self, orders: Mapping[int, Orders]) -> dict[int, Reports]:
        """Carry out one round, and find out by how much spikes have prolonged it."""
        self.costs.begin_round()
        reports = super().run(orders)
        spiked = self.costs.spiked
        if any(spiked.values()):
            draft = _longest(report.drafting for report in reports.values())
            target = _longest(report.verifying for report in reports.values())
            self._spikes += prolonged(draft, target, spiked["draft"], spiked["target"], self.costs.overlap)
        return reports


def prolonged(draft: float, target: float, draft_spike: float, target_spike: float, overlap: bool) -> float:
    """Return how much longer a round took because of spikes; both times include them."""
    if not overlap:
        return draft_spike + target_spike
    return max(draft, target) - max(draft - draft_spike, target - target_spike)


def _longest(spans: Iterable[Span | None]) -> float:
    return max((span.seconds for span in spans if span is not None), default=0.0)
