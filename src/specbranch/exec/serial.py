"""Both models one after the other in this process: the reference that every other executor must equal.

Owns, besides its workers, which sessions go on without a draft. Invariant: a draft that fails never loses a request:
those it was at work for are decoded plainly from then on.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Container, Mapping
from dataclasses import replace
from math import inf

from specbranch.core.loop import Places
from specbranch.core.orders import Branch, Drafted, DraftOrder, Grow, Orders, Reports, Verify
from specbranch.core.request import Request
from specbranch.core.runner import Done
from specbranch.exec.drafter import Announce, Drafter
from specbranch.exec.grower import never
from specbranch.exec.halves import Stretch, Verifying, do_meanwhile, parted, places_of, reads_of, reports_of
from specbranch.exec.verifier import Verifier
from specbranch.exec.worker import Worker

log = logging.getLogger("specbranch")


class Serial:
    """Drafts, then verifies."""

    restarts = 0  # a worker in this process is never made anew

    def __init__(
        self, target: Verifier, draft: Drafter | None = None, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.target = target
        self.draft = draft
        self.now = clock
        self._without: set[int] = set()  # sessions whose draft has failed
        self._drafted_until = -inf  # on the clock

    def open(self, session: int, request: Request) -> None:
        """Prepare both workers for a session."""
        self.target.open(session, request)
        if self.draft:
            self.draft.open(session, request)

    def run(self, orders: Mapping[int, Orders]) -> dict[int, Reports]:
        """Carry out one round."""
        drafts, verifies = parted(orders)
        heads: dict[int, Branch] = {}
        made, drafting = self._drafted(self._received(drafts, verifies), never, heads.update)
        timed = self._stretch(self.target)
        verifying = Verifying(self.target, verifies, heads, timed, reads_of(orders))
        do_meanwhile(orders)
        verdicts = verifying.judged()
        spans = drafting.span() if drafting else None, timed.span()
        return reports_of(orders, made, verdicts, verifying.failed, *spans, self._without, verifying.reached)

    def places(self) -> tuple[Places, ...]:
        """The places of each model that counts them."""
        return places_of(self.target, self.draft)

    def leave(self, session: int) -> None:
        """Free what a session holds."""
        self._without.discard(session)
        self.target.leave(session)
        if self.draft:
            self.draft.leave(session)

    def close(self) -> None:
        """Nothing to stop."""

    def _received(self, drafts: dict[int, DraftOrder], verifies: Mapping[int, Verify]) -> dict[int, DraftOrder]:
        """The orders, a tree's with the target as its receiver, where it grows alone and that is possible."""
        session, order = next(iter(drafts.items()), (0, None))
        if len(drafts) > 1 or verifies or not isinstance(order, Grow) or order.sending is None:
            return drafts
        receiver = self.target.receiver(session, order.on, order.sending)
        return {session: Grow(order.on, order.tree, order.growth, order.number, order.sending, receiver)}

    def _stretch(self, worker: Worker) -> Stretch:
        return Stretch(worker, self.now, after=self._drafted_until if worker is self.target else -inf)

    def _drafted(
        self, orders: dict[int, DraftOrder], done: Done, announce: Announce
    ) -> tuple[dict[int, Drafted], Stretch | None]:
        """Draft for all sessions that have a draft; nothing is timed where there is none."""
        orders = {session: order for session, order in orders.items() if session not in self._without}
        if not orders or not self.draft:
            return {}, None
        timed = self._stretch(self.draft)
        made = self._attempt(self.draft, orders, done, announce)
        self._drafted_until = timed.end(self.draft.grown_at)
        return made, timed

    def _attempt(
        self, drafter: Drafter, orders: dict[int, DraftOrder], done: Done, announce: Announce
    ) -> dict[int, Drafted]:
        """Draft; where a device has no memory left, or a model makes no sense, these sessions go on without."""
        try:
            return draft_or_whole(drafter, orders, done, announce)
        except RuntimeError as error:  # as all are that torch raises
            self._without |= orders.keys()
            said = f"{type(error).__name__}: {error}".partition("\n")[0]
            log.warning("The draft failed (%s); %d request(s) go on without it, in plain decoding.", said, len(orders))
            return {}


def draft_or_whole(
    drafter: Drafter, orders: dict[int, DraftOrder], done: Done, announce: Announce
) -> dict[int, Drafted]:
    """Draft; a worker that has lost a sequence is told it whole."""
    stale = {session for session, order in orders.items() if drafter.stale(session, order.on)}
    return drafter.draft(told_whole(orders, stale), done, announce)


def told_whole(orders: Mapping[int, DraftOrder], stale: Container[int]) -> dict[int, DraftOrder]:
    """Return the orders, those of the stale sessions with everything that came before."""
    return {session: replace(o, on=o.on.whole()) if session in stale else o for session, o in orders.items()}
