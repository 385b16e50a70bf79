"""Both models one after the other in this process: the reference that every other executor must equal.

Owns no state besides its workers.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import replace

from specbranch.core.orders import Branch, Drafted, DraftOrder, Meanwhile, Orders, Reports, Span, Verify, as_drafted
from specbranch.core.request import Request
from specbranch.core.runner import Done
from specbranch.exec.drafter import Drafter
from specbranch.exec.grower import never
from specbranch.exec.verifier import Verifier


class Serial:
    """Drafts, then verifies."""

    restarts = 0  # a worker in this process is never lost

    def __init__(self, target: Verifier, draft: Drafter | None = None, clock: Callable[[], float] = time.perf_counter) -> None:
        self.target = target
        self.draft = draft
        self.now = clock

    def open(self, session: int, request: Request) -> None:
        """Prepare both workers for a session."""
        self.target.open(session, request)
        if self.draft:
            self.draft.open(session, request)

    def run(self, orders: Mapping[int, Orders]) -> dict[int, Reports]:
        """Carry out one round."""
        heads: dict[int, Branch] = {}
        drafts = {session: o.draft for session, o in orders.items() if o.draft}
        drafted = self._drafts(drafts, heads)
        meanwhile = [o.meanwhile for o in orders.values() if o.meanwhile]
        verified = self._verifies({session: o.verify for session, o in orders.items() if o.verify}, heads, meanwhile)
        none = Reports()
        return {s: _both(drafted.get(s, none), verified.get(s, none)) for s in orders}

    def _drafts(self, orders: dict[int, DraftOrder], heads: dict[int, Branch]) -> dict[int, Reports]:
        """Draft for all sessions; notes each one's first head in `heads`."""
        if not orders or not self.draft:
            return {}
        start, fed = self.now(), self.draft.rows_fed
        drafted = draft_or_whole(self.draft, orders, never, heads)
        span = Span(start, self.now(), self.draft.rows_fed - fed)
        return {session: Reports(**as_drafted(drafted[session]), drafting=span) for session in orders}

    def _verifies(self, orders: dict[int, Verify], heads: Mapping[int, Branch], meanwhile: Sequence[Meanwhile]) -> dict[int, Reports]:
        """Verify for all sessions."""
        if not orders:
            return {}
        start, fed = self.now(), self.target.rows_fed
        scored, failed = self.target.score(orders, heads)
        for task in meanwhile:
            task()
        verdicts = self.target.judge(scored, heads)
        span = Span(start, self.now(), self.target.rows_fed - fed)
        reports = {session: Reports(verdict=verdict, verifying=span) for session, verdict in verdicts.items()}
        return reports | {session: Reports(verifying=span, error=error) for session, error in failed.items()}

    def leave(self, session: int) -> None:
        """Free what a session holds."""
        self.target.leave(session)
        if self.draft:
            self.draft.leave(session)

    def close(self) -> None:
        """Nothing to stop."""


def _both(drafted: Reports, verified: Reports) -> Reports:
    return replace(verified, branches=drafted.branches, tree=drafted.tree, drafting=drafted.drafting)


def draft_or_whole(drafter: Drafter, orders: dict[int, DraftOrder], done: Done, heads: dict[int, Branch]) -> dict[int, Drafted]:
    """Draft; a worker that has lost a sequence is told it whole."""
    stale = {session for session, order in orders.items() if drafter.stale(session, order.on)}
    return drafter.draft(told_whole(orders, stale), done, heads.update)


def told_whole(orders: Mapping[int, DraftOrder], stale: Container[int]) -> dict[int, DraftOrder]:
    """Return the orders, those of the stale sessions with everything that came before."""
    return {session: replace(o, on=o.on.whole()) if session in stale else o for session, o in orders.items()}
