"""The loop: every live session says what it wants, the executor does it, every session takes its reports.

Owns which sessions are live. Invariant: a session joins, leaves or fails without the others noticing. A step that was
interrupted can be made again: orders that were carried out may be repeated.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Protocol

from specbranch.core.costs import LearnedCosts
from specbranch.core.market import Grant, LaneOffer, Offer, RowOffer, granted, let_draft
from specbranch.core.methods import MethodRounds
from specbranch.core.orders import Orders, Reports
from specbranch.core.request import Request
from specbranch.core.session import Session
from specbranch.core.trace import Trace
from specbranch.errors import SpecBranchError

log = logging.getLogger("specbranch")


class Executor(Protocol):
    """Carries out orders of several sessions, both models at once if it can."""

    def open(self, session: int, request: Request) -> None:
        """Prepare the workers for a new session."""
        ...

    def run(self, orders: Mapping[int, Orders]) -> dict[int, Reports]:
        """Carry out one round; a report for every session that ordered."""
        ...

    def leave(self, session: int) -> None:
        """Free what the session held; harmless if it held nothing."""
        ...

    def now(self) -> float:
        """Seconds on the clock that spans are measured by."""
        ...

    @property
    def restarts(self) -> int:
        """How often a lost draft worker was replaced."""
        ...

    def close(self) -> None:
        """Stop the workers."""
        ...


class Loop:
    """Runs sessions to their end, a round at a time."""

    def __init__(self, executor: Executor, trace: Trace | None = None, costs: LearnedCosts | None = None) -> None:
        """`costs` learn from every round, once, with the rows of all sessions."""
        self.executor = executor
        self.trace = trace
        self.costs = costs
        self.closed = False
        self._live: dict[int, tuple[Session, MethodRounds]] = {}
        self._orders: dict[int, Orders] = {}
        self._offers: dict[int, Offer] = {}

    @property
    def live(self) -> bool:
        """Whether any session is unfinished."""
        return bool(self._live)

    def join(self, session: Session, rounds: MethodRounds) -> None:
        """Take a session in; it takes part from the next round on."""
        session.stats.started, session.company = self.executor.now(), len(self._live) + 1
        if self.costs is not None and not self._live:
            self.costs.pause()
        try:
            self.executor.open(session.number, session.request)
            first = next(rounds)
        except BaseException:
            self.executor.leave(session.number)
            raise
        self._live[session.number] = (session, rounds)
        self._take(session.number, first)

    def step(self) -> list[Session]:
        """Run one round; returns the sessions that took part.

        Those that only draft go first, all together; the others wait, so that the target reads for all at once.
        """
        restarts = self.executor.restarts
        for session, _ in self._live.values():
            session.company = len(self._live)
        self._let_draft()
        drafting = {number: orders for number, orders in self._orders.items() if orders.verify is None}
        if not drafting:
            self._grant_rows()
        now = drafting or dict(self._orders)
        begun = self.executor.now()
        reports = self.executor.run(now)
        if self.costs is not None:
            self.costs.observe(now, reports)
        for number, (session, _) in self._live.items():
            if number not in now:
                session.waited += self.executor.now() - begun
        for session, _ in self._live.values():
            session.stats.draft_restarts += self.executor.restarts - restarts
        took_part = [self._live[number][0] for number in reports]
        for number, report in reports.items():
            self._advance(number, report)
        return took_part

    def leave(self, session: Session) -> None:
        """Let a session go, finished or not, and free what it held."""
        if session.number in self._live:
            rounds, orders = self._live.pop(session.number)[1], self._orders.pop(session.number, Orders())
            self._offers.pop(session.number, None)
            try:
                rounds.close()
            finally:
                session.stats.finished = self.executor.now()
                if session.finished in (None, "error") and orders.verify and orders.verify.parents is None:
                    # in flight: no verdict will come; a tree's tokens count once judged
                    session.stats.unused += len(orders.verify.tokens)
                self.executor.leave(session.number)

    def close(self) -> None:
        """Stop the workers, for good."""
        self.closed = True
        self.executor.close()

    def _advance(self, number: int, reports: Reports) -> None:
        session, rounds = self._live[number]
        first = session.stats.emitted == 0
        session.stats.note_prompt(number, reports)
        if self.trace:
            self.trace.record(number, self._orders[number], reports)
        self._send(session, rounds, reports)
        self._clock(session, reports, first)
        if session.finished:
            self.leave(session)

    def _send(self, session: Session, rounds: MethodRounds, told: Reports | Grant) -> None:
        if isinstance(told, Reports) and told.error:
            session.fail(told.error)
            return
        try:
            self._take(session.number, rounds.send(told))
        except StopIteration:
            if not session.finished:
                session.fail(RuntimeError("the method ended before its session"))
        except Exception as error:  # whatever it is, the other sessions have their reports to take
            # a mistake of ours: who reads the output alone would see no traceback
            if not isinstance(error, SpecBranchError):
                log.error("A request failed by a mistake of the program; others go on.", exc_info=error)
            session.fail(error)

    def _take(self, number: int, what: Orders | Offer) -> None:
        """Note what a session wants next."""
        if isinstance(what, Offer):
            self._offers[number] = what
            self._orders.pop(number, None)
        else:
            self._orders[number] = what
            self._offers.pop(number, None)

    def _let_draft(self) -> None:
        """Say to all that would draft while the target waits whether they may."""
        offers = {number: offer for number, offer in self._offers.items() if isinstance(offer, LaneOffer)}
        others = sum(orders.verify is None for orders in self._orders.values())
        rest = [offer for offer in self._offers.values() if isinstance(offer, RowOffer)]
        self._answer(let_draft(offers, sum(offer.rate for offer in rest), others))

    def _grant_rows(self) -> None:
        """Grant rows to all that offer some."""
        offers = {number: offer for number, offer in self._offers.items() if isinstance(offer, RowOffer)}
        rows = sum(1 + len(orders.verify.tokens) for orders in self._orders.values() if orders.verify)
        self._answer(granted(offers, rows))

    def _answer(self, answers: Mapping[int, Grant]) -> None:
        """Tell sessions what became of their offers, and hear what they want then."""
        for number, answer in answers.items():
            session, rounds = self._live[number]
            self._send(session, rounds, answer)
            if session.finished:
                self.leave(session)

    def _clock(self, session: Session, reports: Reports, first: bool) -> None:
        if not first:
            session.stats.clock(reports)
        elif session.stats.emitted:
            session.stats.first_token = self.executor.now()
