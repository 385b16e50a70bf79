"""The overlapping executor in one process: one thread, and a stream for each model, on one device or two.

Owns the order of a round: the target starts first and works by itself; the draft works meanwhile, on a device or on the
host; then the verdicts are taken. Invariants: nothing waits for the target as long as there is something to draft;
tokens are those of the serial executor.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from specbranch.core.orders import Orders, Reports
from specbranch.exec.halves import Stretch, Verifying, parted, prefills_of, reports_of, run_deferred
from specbranch.exec.serial import Serial
from specbranch.exec.worker import Worker


class Streams(Serial):
    """Starts the target, drafts meanwhile, then takes the verdicts."""

    grows_forests = False  # there the draft waits for each verdict

    def run(self, orders: Mapping[int, Orders]) -> dict[int, Reports]:
        """Run one round, both models at once."""
        drafts, verifies = parted(orders)
        # such a step may have started before the round, and another one follows it
        ahead = any(order.goes_on for order in verifies.values())
        timed = Stretch(self.target, self.now) if ahead else self._stretch(self.target)
        awaited = any(order.announces for order in drafts.values())
        verifying = Verifying(self.target, verifies, None if awaited else {}, timed, prefills_of(orders))
        run_deferred(orders)
        made, drafting = self._drafted(self._received(drafts, verifies), verifying.ready, verifying.add_heads)
        self._make_ready(verifies, verifying.ready)
        verdicts = verifying.judged(partial(self._read_ahead, verifies))
        spans = drafting.span() if drafting else None, timed.span()
        return reports_of(orders, made, verdicts, verifying.failed, *spans, self._without, verifying.reached)

    def _stretch(self, worker: Worker) -> Stretch:
        """Time a worker by its device's clock, if it has one: the host only knows when it looks."""
        return Stretch(worker, self.now, getattr(worker.runner, "note", None))
