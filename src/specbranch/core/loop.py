"""The loop: every live session says what it wants, the executor does it, every session takes its reports.

Owns which sessions are live. Invariant: a session joins, leaves or fails without the others noticing. A step that was
interrupted can be made again: orders that were carried out may be repeated.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Protocol

from specbranch.core.costs import LearnedCosts
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

    @property
    def live(self) -> bool:
        """Whether any session is unfinished."""
        return bool(self._live)

    def join(self, session: Session, rounds: MethodRounds) -> None:
        """Take a session in; it takes part from the next round on."""
        session.stats.started = self.executor.now()
        if self.costs is not None and not self._live:
            self.costs.pause()
        try:
            self.executor.open(session.number, session.request)
            orders = next(rounds)
        except BaseException:
            self.executor.leave(session.number)
            raise
        self._live[session.number] = (session, rounds)
        self._orders[session.number] = orders

    def step(self) -> list[Session]:
        """Run one round for every live session; returns those that took part."""
        restarts = self.executor.restarts
        reports = self.executor.run(self._orders)
        if self.costs is not None:
            self.costs.observe(self._orders, reports)
        took_part = [self._live[number][0] for number in reports]
        for number, report in reports.items():
            self._live[number][0].stats.draft_restarts += self.executor.restarts - restarts
            self._advance(number, report)
        return took_part

    def leave(self, session: Session) -> None:
        """Let a session go, finished or not, and free what it held."""
        if session.number in self._live:
            rounds, orders = self._live.pop(session.number)[1], self._orders.pop(session.number)
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
        if self.trace:
            self.trace.record(number, self._orders[number], reports)
        self._send(session, rounds, reports)
        self._clock(session, reports, first)
        if session.finished:
            self.leave(session)

    def _send(self, session: Session, rounds: MethodRounds, reports: Reports) -> None:
        if reports.error:
            session.fail(reports.error)
            return
        try:
            self._orders[session.number] = rounds.send(reports)
        except StopIteration:
            if not session.finished:
                session.fail(RuntimeError("the method ended before its session"))
        except Exception as error:  # whatever it is, the other sessions have their reports to take
            # a mistake of ours: who reads the output alone would see no traceback
            if not isinstance(error, SpecBranchError):
                log.error("A request failed by a mistake of the program; others go on.", exc_info=error)
            session.fail(error)

    def _clock(self, session: Session, reports: Reports, first: bool) -> None:
        if not first:
            session.stats.clock(reports)
        elif session.stats.emitted:
            session.stats.first_token = self.executor.now()
