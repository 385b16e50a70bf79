"""Both models in this process at work at once: one thread, and a stream for each model, on one device or two.

Owns the order of a round: the target is started first, and works by itself; the draft works beside it, on a device or
on the host, until the verdicts are there; then they are taken. Invariants: nothing waits for the target before there is
nothing left to draft; what is said is what the serial executor says.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from specbranch.core.orders import Orders, Reports
from specbranch.exec.halves import Stretch, Verifying, parted, prefills_of, reports_of, run_deferred
from specbranch.exec.serial import Serial
from specbranch.exec.worker import Worker


class Streams(Serial):
    """Starts the target, drafts beside it, then takes the verdicts."""

    def run(self, orders: Mapping[int, Orders]) -> dict[int, Reports]:
        """Carry out one round, both models at once."""
        drafts, verifies = parted(orders)
        # such a step may have begun before the round, and another follows it
        ahead = any(order.goes_on for order in verifies.values())
        timed = Stretch(self.target, self.now) if ahead else self._stretch(self.target)
        awaited = any(order.announces for order in drafts.values())
        verifying = Verifying(self.target, verifies, None if awaited else {}, timed, prefills_of(orders))
        run_deferred(orders)
        made, drafting = self._drafted(self._received(drafts, verifies), verifying.ready, verifying.tell)
        self._make_ready(verifies, verifying.ready)
        verdicts = verifying.judged(partial(self._read_ahead, verifies))
        spans = drafting.span() if drafting else None, timed.span()
        return reports_of(orders, made, verdicts, verifying.failed, *spans, self._without, verifying.reached)

    def _stretch(self, worker: Worker) -> Stretch:
        """A device that works by itself tells its own times: the host sees only when it looks."""
        return Stretch(worker, self.now, getattr(worker.runner, "note", None))
