"""The machine of a case: a virtual clock over its true costs, also for rounds of the forest.

Owns the time. Does not own what forwards take (`true_costs.py`), or what a round of the forest does
(`forest_machine.py`). Invariant: `MachineClock.charged` leaves the time of the spikes themselves out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from specbranch.clock.virtual_clock import MeteredDrafter, VirtualClock
from specbranch.core.forest import ForestOrders
from specbranch.core.forest_loop import ForestReports
from specbranch.core.orders import Orders, Prefill, Reports, Span
from specbranch.exec.verifier import Verifier
from specbranch.lab.regret.forest_machine import ForestMachine
from specbranch.lab.regret.toy_pair import ScriptedDraft, ScriptedTarget, Scripts
from specbranch.lab.regret.true_costs import Progress, TrueCosts


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

    def __init__(self, scripts: Scripts, progress: Progress, forest: bool = False) -> None:
        """`forest`: the device makes rounds of the forest, and launches plain ones ahead."""
        self.costs = TrueCosts(scripts.case, progress, hides_host=forest)
        self._forest = ForestMachine(scripts, self.costs) if forest else None
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

    @property
    def grows_forests(self) -> bool:
        """True if the run wants such rounds."""
        return self._forest is not None

    def joins_forest(self, session: int, length: int) -> bool:
        """Return True: every session of the lab can take part."""
        return True

    def decode_forest(self, orders: ForestOrders, prefills: Mapping[int, Prefill]) -> ForestReports | None:
        """Make a round of the forest; the host is hidden behind it unless it takes longer."""
        assert self._forest is not None
        reached, short = self.target.prefill(prefills)
        flight, launched = self._forest.decode(orders)
        orders.meanwhile()
        started = self._now
        self._now += max(flight.seconds, self.costs.seconds_of_host() * len(orders.texts))
        self._spikes += flight.spiked
        for session, report in flight.reports.items():  # the target holds all but the last token
            self.target.runner.extend(session, (orders.texts[session][-1], *report.tokens[:-1]))
        # Spans of other rounds end before the host's part.
        span = Span(started - self.costs.host, self._now - self.costs.host, flight.rows, self.target.prefill_counts())
        steps = flight.steps if flight.ahead and not prefills else None
        return ForestReports(flight.reports, span, launched, short, reached, steps)

    def leave_forest(self) -> None:
        """Forget what is launched."""
        if self._forest is not None:
            self._forest.leave()

    def free(self, session: int) -> None:
        """Free a session in both models."""
        super().free(session)
        if self._forest is not None:
            self._forest.forget(session)


def prolonged(draft: float, target: float, draft_spike: float, target_spike: float, overlap: bool) -> float:
    """Return how much longer a round took because of spikes; both times include them."""
    if not overlap:
        return draft_spike + target_spike
    return max(draft, target) - max(draft - draft_spike, target - target_spike)


def _longest(spans: Iterable[Span | None]) -> float:
    return max((span.seconds for span in spans if span is not None), default=0.0)
