"""The target's side on virtual time: a verifier whose forwards take a profile's seconds, and the executors over it.

Owns what the target and its host take. Invariant: rounds are those of the real executor (`exec/process.py`): how long
it waits for a draft, what it does without one, and what it learns of the way. Only forwards, host and network are
modelled.
"""

from __future__ import annotations

from collections.abc import Mapping
from statistics import fmean

from specbranch.clock.profile import CostProfile
from specbranch.clock.virtual_clock import MeteredDrafter, RoundStarts, VirtualClock
from specbranch.core.draft_evaluation import DraftEvaluation
from specbranch.core.orders import Branch, Orders, Prefill, Reports, Verdict, Verify
from specbranch.core.runner import Runner
from specbranch.errors import SpecBranchError
from specbranch.exec.children import Child
from specbranch.exec.dialling import DIALLED_LIMITS, LONGEST_REDIAL_WAIT
from specbranch.exec.halves import parted, prefills_of
from specbranch.exec.messages import Served
from specbranch.exec.process import Process
from specbranch.exec.verifier import OnVerdicts, Scored, Started, Verifier
from specbranch.lab.scale.channel import SimulatedLink
from specbranch.lab.scale.simulation import Simulation


class TimedVerifier(Verifier):
    """A target whose forwards let time pass: a verify until its verdicts, prefill at once."""

    def __init__(self, runner: Runner, simulation: Simulation, profile: CostProfile) -> None:
        super().__init__(runner)
        self._simulation, self._profile = simulation, profile
        self._done = 0.0  # when the verdicts are there

    def start(
        self, orders: Mapping[int, Verify], heads: Mapping[int, Branch] | None, reads: Mapping[int, Prefill]
    ) -> Started:
        """Start the target's half of a round."""
        self._done = self._simulation.now()
        fed = self.rows_fed
        started = super().start(orders, heads, reads)
        prefilled, self._prefilled = self._prefilled, 0
        self._takes(self.rows_fed - fed - prefilled, orders)
        self._takes(prefilled, reads)
        if started.scored is None:
            self._simulation.sleep_until(self._done)
        return started

    def prefill(self, orders: Mapping[int, Prefill]) -> tuple[dict[int, int], dict[int, SpecBranchError]]:
        """Prefill further: a forward of its own."""
        fed = self.rows_fed
        found = super().prefill(orders)
        self._prefilled = self.rows_fed - fed
        return found

    _prefilled = 0  # rows of the last prefill

    def judge(
        self, scored: Scored, heads: Mapping[int, Branch], on_verdicts: OnVerdicts | None = None
    ) -> dict[int, Verdict]:
        """Wait for the verdicts, and take them."""
        self._simulation.sleep_until(self._done)
        return super().judge(scored, heads, on_verdicts)

    def _takes(self, rows: int, sessions: Mapping[int, object]) -> None:
        if rows:
            context = fmean(len(self.slots(session).prefix) for session in sessions)
            self._done += self._profile.target_seconds(rows, context)


class SimulatedWorker:
    """Where the draft worker of a simulated target comes from: it is there from the beginning."""

    name = "the simulated draft worker"
    unavailable = "There is no simulated draft"
    limits = DIALLED_LIMITS
    longest_wait = LONGEST_REDIAL_WAIT
    eager = True
    served: Served | None = None
    evaluation: DraftEvaluation | None = None

    def __init__(self, link: SimulatedLink) -> None:
        self._link = link

    def start(self, again: bool = False) -> Child:
        """Return the link."""
        return Child(self._link, again=again)


class RemoteTarget(Process):
    """The executor of a target whose draft is elsewhere, with a host that takes time."""

    def __init__(
        self, target: TimedVerifier, link: SimulatedLink, simulation: Simulation, profile: CostProfile
    ) -> None:
        self._simulation, self._profile, self._starts = simulation, profile, RoundStarts()
        super().__init__(target, SimulatedWorker(link), clock=simulation.now)

    def run(self, orders: Mapping[int, Orders]) -> dict[int, Reports]:
        """Run one round between the host's planning and the rest of its work."""
        drafts, verifies = parted(orders)
        beginning = self._starts.beginning(verifies, prefills_of(orders))
        self._simulation.sleep(self._profile.host_seconds(beginning) - self._profile.host)
        reports = super().run(orders)
        verdicts = {session: report.verdict for session, report in reports.items() if report.verdict is not None}
        self._starts.note(drafts, verifies, verdicts)
        self._simulation.sleep(self._profile.host)
        return reports


class LocalDraft(VirtualClock):
    """The executor of a target whose draft is at no distance, or that has none."""

    def __init__(
        self, target: Verifier, draft: MeteredDrafter | None, simulation: Simulation, profile: CostProfile
    ) -> None:
        super().__init__(target, draft, profile)
        self._simulation = simulation
        self.now = simulation.now

    def run(self, orders: Mapping[int, Orders]) -> dict[int, Reports]:
        """Run one round, and let its time pass for everybody."""
        self._now = self._simulation.now()
        reports = super().run(orders)
        self._simulation.sleep_until(self._now)
        return reports
