"""The loop: one round at a time for all live sessions.

Every session's method asks for work (`Orders`), the executor runs it, and every method receives its `Reports`.

Owns which sessions are live. Does not own the queue (`core/scheduler.py`) or how much of a prompt a round prefills
(`core/prefill_budget.py`). Invariant: sessions join, leave, fail, are preempted and are resumed without effect on the
others' tokens. An interrupted step can be repeated, because an executor can carry out the same orders twice.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol
from weakref import proxy

from specbranch.core.costs import MeasuredCosts
from specbranch.core.forest_loop import ForestLoop
from specbranch.core.market import Grant, LaneOffer, RowOffer, granted, let_draft
from specbranch.core.members import Member
from specbranch.core.methods import MethodRounds
from specbranch.core.orders import Orders, Prefill, Reports
from specbranch.core.plain_loop import PlainLoop
from specbranch.core.prefill_budget import Prefills, PromptCosts, RoundLimits, rows_of
from specbranch.core.request import Request
from specbranch.core.runner import TimesForwards
from specbranch.core.session import Session
from specbranch.core.trace import Trace
from specbranch.errors import PoolFull, SpecBranchError

log = logging.getLogger("specbranch")


@dataclass(frozen=True, slots=True)
class KVSlots:
    """The KV slots of one model's cache, for all sequences together."""

    model: Literal["target", "draft"]
    total: int
    free: int
    page: int = 1  # KV slots in a page: the cache hands out whole pages

    def missing(self, length: int, held: int = 0) -> int:
        """Return how many KV slots a sequence of `length` tokens needs beyond the `held` ones, in whole pages."""
        pages_needed, pages_held = -(-length // self.page), -(-held // self.page)
        return (pages_needed - pages_held) * self.page


DraftState = Literal[
    "ready",  # at work or idle
    "starting",  # it loads its model
    "busy",  # its answer is late
    "lost",  # it is gone until it is restarted
    "none",  # there is no draft
]


class Executor(Protocol):
    """Runs orders of several sessions, both models at once if it can."""

    def open(self, session: int, request: Request) -> None:
        """Prepare the workers for a new session."""
        ...

    def run(self, orders: Mapping[int, Orders]) -> dict[int, Reports]:
        """Run one round; returns a report for every session that has orders."""
        ...

    def free(self, session: int) -> None:
        """Free the session's KV cache in both models; harmless if there is none."""
        ...

    def now(self) -> float:
        """Return the time in seconds, on the clock of all spans."""
        ...

    def kv_slots(self) -> tuple[KVSlots, ...]:
        """Return the KV slots of each model that counts them, as far as this process knows them."""
        ...

    @property
    def restarts(self) -> int:
        """How often the executor replaced a lost draft worker."""
        ...

    @property
    def late_captures(self) -> int:
        """How often a model in this process captured a CUDA graph or compiled a kernel in the middle of an answer."""
        ...

    @property
    def draft_state(self) -> DraftState:
        """What the draft can do now; any thread may read it."""
        ...

    def close(self) -> None:
        """Stop the workers."""
        ...


class Loop:
    """Runs sessions to their end, one round at a time."""

    def __init__(
        self,
        executor: Executor,
        trace: Trace | None = None,
        costs: MeasuredCosts | None = None,
        limits: RoundLimits | None = None,
        table: TimesForwards | None = None,
    ) -> None:
        """Make a loop without sessions; `costs` learn from every round, with the rows of all sessions together.

        `table`: the target's own times of forwards, for the budget of prompt tokens.
        """
        self.executor = executor
        self.trace = trace
        self.costs = costs
        self._prefills = Prefills(PromptCosts(costs, table), limits or RoundLimits())
        self.closed = False
        # True: a session that finds no free page repeats its orders after a preemption. False: it fails.
        self.waits_for_pages = False
        self.out_of_pages: dict[int, PoolFull] = {}  # the sessions that found no free page in the last round
        self._live: dict[int, Member] = {}
        self._preempted: dict[int, Member] = {}
        # by a weak reference: what a loop holds must be gone with it at once, without the garbage collector
        self._plain = PlainLoop(executor, self._prefills, proxy(self))
        self._forest = ForestLoop(executor, self._prefills, proxy(self))

    @property
    def limits(self) -> RoundLimits:
        """What one round may hold."""
        return self._prefills.limits

    @limits.setter
    def limits(self, limits: RoundLimits) -> None:
        self._prefills.limits = limits

    @property
    def members(self) -> Mapping[int, Member]:
        """The live sessions; rounds of plain decoding see them."""
        return self._live

    def now(self) -> float:
        """Return the time in seconds, on the clock of all spans."""
        return self.executor.now()

    @property
    def live(self) -> bool:
        """True if any session is unfinished and not preempted."""
        return bool(self._live)

    @property
    def can_step(self) -> bool:
        """True if at least one live session is not paused."""
        return any(not member.paused for member in self._live.values())

    def join(self, session: Session, method: MethodRounds) -> None:
        """Add a session; it takes part from the next round on."""
        session.stats.started, session.batch_size = self.executor.now(), len(self._live) + 1
        session.clock = self._prefills.costs.clock
        if not self._live:  # the time since the last round was idle
            self._prefills.costs.pause()
            if self.costs is not None:
                self.costs.pause()
        try:
            self.executor.open(session.number, session.request)
            session.in_forest = self._forest.takes(session)
            first = next(method)
        except BaseException:
            self.executor.free(session.number)
            raise
        member = self._live[session.number] = Member(session, method, self._prefills.next_turn(), first)
        member.take(first)

    def step(self) -> list[Session]:
        """Run one round; returns the sessions that took part.

        Sessions that only draft run first, as one batch. The others wait, so that all sessions verify in one target
        forward. That forward also prefills a few chunks of other sessions' prompts.
        """
        restarts, late, self.out_of_pages = self.executor.restarts, self.executor.late_captures, {}
        for member in self._live.values():
            member.session.batch_size = len(self._live)
        started = self.executor.now()
        took_part = self._forest.round()
        if took_part is not None:
            self._plain.forget()
        else:
            took_part = self._plain.round()
        if took_part is None:
            took_part = self._ordered_round()
        seconds, restarts = self.executor.now() - started, self.executor.restarts - restarts
        self._count_waiting(took_part, seconds, restarts)
        if captured := self.executor.late_captures - late:
            for session in took_part:
                session.stats.late_captures += captured
        return took_part

    def _ordered_round(self) -> list[Session]:
        """Run one round of what the methods order; returns the sessions that took part."""
        self._plain.forget()
        for member in self._live.values():
            member.renew()
        self._grant_lanes(self._ready())
        self._skip_late_drafts()
        batch = self._draft_only_batch() or self._target_batch()
        if not batch:
            return []
        reports = self._run(batch)
        if self.costs is not None:
            self.costs.observe(batch, reports, prefilled=self._prefills.costs.tokens_ahead > 0)
        verifying = next((report.verifying for report in reports.values() if report.verifying), None)
        decodes = any(orders.verify for orders in batch.values())
        self._prefills.costs.observe(verifying, decodes, self.executor.now())
        took_part = [self._live[number].session for number in reports]
        for number, report in reports.items():
            self.deliver(self._live[number], batch[number], report)
        return took_part

    def preempt(self, session: Session) -> None:
        """Free a live session's KV cache; its orders stand, and run once it is resumed."""
        self.executor.free(session.number)
        self._preempted[session.number] = self._live.pop(session.number)

    def resume(self, session: Session) -> None:
        """Continue a preempted session: both models prefill its tokens again."""
        self.executor.open(session.number, session.request)
        member = self._live[session.number] = self._preempted.pop(session.number)
        member.restart_prefill()

    def set_paused(self, session: Session, paused: bool) -> None:
        """Leave a live session out of all rounds, or let it take part again."""
        self._live[session.number].paused = paused

    def draft_exchanged(self) -> None:
        """Note that the executor has another draft, which holds no token of any session."""
        self._forest.forget()
        self._plain.forget()
        for member in self._live.values():
            member.draft_prefilled = 0

    def uncomputed(self, session: Session) -> int:
        """Return how many tokens of a live session the target has to prefill."""
        member = self._live.get(session.number)
        return member.uncomputed if member else 0

    def remove(self, session: Session) -> None:
        """Remove a session, finished or not, and free its KV cache."""
        member = self._live.pop(session.number, None) or self._preempted.pop(session.number, None)
        if member is None:
            return
        try:
            member.method.close()
        except Exception as error:  # of a method that is not needed any more
            log.error("A method failed while it was closed; its request has ended.", exc_info=error)
        finally:
            session.stats.finished = self.executor.now()
            verify = member.orders.verify if member.orders else None
            if session.finished in (None, "error") and verify and verify.parents is None:
                # No verdict will come for this chain. A tree's tokens count once they are judged.
                session.stats.unused += len(verify.tokens)
            self.executor.free(session.number)

    def close(self) -> None:
        """Stop the workers, for good."""
        self.closed = True
        self.executor.close()

    def _count_waiting(self, took_part: Sequence[Session], seconds: float, restarts: int) -> None:
        """Count the seconds of a round for each decoding session outside it, and draft restarts for all."""
        for number in self._live.keys() - {session.number for session in took_part}:
            if self._live[number].prefill_done:
                self._live[number].session.waited += seconds
        for member in self._live.values() if restarts else ():
            member.session.stats.draft_restarts += restarts

    def _run(self, batch: Mapping[int, Orders]) -> dict[int, Reports]:
        """Run a round; an exception is traced to the sessions that cause it.

        A full page pool is nobody's error: all orders stand, and run again after a preemption. Otherwise every session
        runs alone, and whoever raises again fails. If all of several sessions raise, the models are at fault.
        """
        try:
            return self.executor.run(batch)
        except Exception as error:
            if isinstance(error, PoolFull) and self.waits_for_pages:
                return {number: Reports(error=error) for number in batch}
            if len(self._live) == 1:
                raise
            alone = {number: self._run_alone(number, orders) for number, orders in batch.items()}
            if all(report.error is not None for report in alone.values()) and len(alone) > 1:
                raise  # the models' error, not the sessions'
            log.error("A request failed by a mistake of the program; others go on.", exc_info=error)
            return alone

    def _run_alone(self, number: int, orders: Orders) -> Reports:
        try:
            return self.executor.run({number: orders})[number]
        except Exception as error:  # whatever it is, it is this session's alone
            return Reports(error=error)

    def _draft_only_batch(self) -> dict[int, Orders]:
        """Return the orders of the sessions that only draft."""
        return {
            number: member.orders
            for number, member in self._ready().items()
            if member.orders and member.orders.verify is None
        }

    def _target_batch(self) -> dict[int, Orders]:
        """Grant rows to all offers, then return the orders of a target round: those of all ready sessions, and prefill
        chunks for the others."""
        ready = self._ready()
        self._grant_rows(ready, rows_of(member.orders for member in ready.values() if member.orders))
        batch = {number: member.orders for number, member in self._ready().items() if member.orders}
        members = [member for member in self._live.values() if not member.paused]
        return self._prefills.add(batch, members)

    def deliver(self, member: Member, orders: Orders, reports: Reports) -> None:
        """Hand a session its reports. An error here ends this session alone; the others still get theirs."""
        if isinstance(reports.error, PoolFull) and self.waits_for_pages:
            self.out_of_pages[member.session.number] = reports.error
            member.prefilled = 0  # the worker has freed the pages of an unfinished prefill
            return
        try:
            self._take_reports(member, orders, reports)
        except Exception as error:
            self.fail(member.session, error)
        if member.session.finished:
            self.remove(member.session)

    def fail(self, session: Session, error: Exception) -> None:
        """End one session with an error."""
        if not isinstance(error, SpecBranchError):  # a mistake of ours: the output alone has no traceback
            log.error("A request failed by a mistake of the program; others go on.", exc_info=error)
        session.fail(error)

    def call_watcher(self, session: Session, orders: Orders, reports: Reports, added: int) -> None:
        """Call the watcher of a session's rounds; after an exception it is not called again, and its request goes
        on."""
        try:
            if session.on_round:
                session.on_round(orders, reports, added)
        except Exception as error:
            session.on_round = None
            log.error(
                "An on_round watcher raised an error and is not called again; its request goes on.", exc_info=error
            )

    def _take_reports(self, member: Member, orders: Orders, reports: Reports) -> None:
        """Count and trace a round, then send its reports to the method.

        The method does not hear of a round that only prefilled: the loop gave that order, not the method.
        """
        session, emitted = member.session, member.session.stats.emitted
        session.now = self.executor.now()
        session.launched = session.number in self._plain.launched
        session.stats.note_prompt(session.number, reports)
        if self.trace:
            self.trace.record(session.number, orders, reports)
        member.note_prefill(orders, reports)
        if orders is member.wants or orders.verify or reports.error:
            received = replace(reports, drafting=None) if isinstance(orders.draft, Prefill) else reports
            self._resume_method(member, received)
            self._record_times(session, received, first=emitted == 0)
        if session.on_round:
            self.call_watcher(session, orders, reports, session.stats.emitted - emitted)

    def _resume_method(self, member: Member, received: Reports | Grant) -> None:
        """Send a method what it waits for, and take its next orders or offer."""
        session = member.session
        if isinstance(received, Reports) and received.error:
            session.fail(received.error)
            return
        try:
            member.take(member.method.send(received))
        except StopIteration:
            if not session.finished:
                session.fail(RuntimeError("the method ended before its session"))
        except Exception as error:
            self.fail(session, error)

    def _resume_or_remove(self, member: Member, received: Reports | Grant) -> None:
        """Send a method something outside a round; remove the session if that ends it."""
        self._resume_method(member, received)
        if member.session.finished:
            self.remove(member.session)

    def _ready(self) -> dict[int, Member]:
        """Return the sessions whose prompts are prefilled, so that their own orders can run.

        A session that decodes alone waits for its draft's prefill, too. In a batch it decodes without a draft
        meanwhile, unless its tokens depend on the draft.
        """
        unpaused = {number: member for number, member in self._live.items() if not member.paused}
        if self.limits.prompt_tokens is None:
            return unpaused
        alone = len(unpaused) == 1
        return {
            number: member
            for number, member in unpaused.items()
            if not member.uncomputed and not (member.draft_uncomputed and (alone or member.needs_draft))
        }

    def _skip_late_drafts(self) -> None:
        """Skip draft-only orders of ready sessions whose draft has to prefill first."""
        if self.limits.prompt_tokens is None:
            return
        for member in self._ready().values():
            if member.orders and member.orders.verify is None and member.draft_uncomputed:
                member.draft_behind = True
                self._resume_or_remove(member, Reports())  # an empty report: nothing was drafted

    def answer_offers(self, ready: Mapping[int, Member], rows: int) -> None:
        """Answer all offers of sessions; `rows`: of others in the same forward."""
        self._grant_lanes(ready)
        mine = rows_of(member.orders for member in ready.values() if member.orders)
        self._grant_rows(ready, rows + mine)

    def _grant_lanes(self, ready: Mapping[int, Member]) -> None:
        """Answer every offer to draft before the next verify."""
        wants = {number: member.wants for number, member in ready.items()}
        offers = {number: want for number, want in wants.items() if isinstance(want, LaneOffer)}
        already_drafting = sum(isinstance(want, Orders) and want.verify is None for want in wants.values())
        waiting_rate = sum([want.rate for want in wants.values() if isinstance(want, RowOffer)])  # tokens a second
        self._answer(let_draft(offers, waiting_rate, already_drafting, self.limits.lanes))

    def _grant_rows(self, ready: Mapping[int, Member], rows: int) -> None:
        """Answer every offer of rows to verify; `rows`: of orders in the same forward."""
        offers = {number: member.wants for number, member in ready.items() if isinstance(member.wants, RowOffer)}
        self._answer(granted(offers, rows, self.limits.rows, self.limits.lanes))

    def _answer(self, answers: Mapping[int, Grant]) -> None:
        """Send sessions the answers to their offers, and take what they want then."""
        for number, answer in answers.items():
            self._resume_or_remove(self._live[number], answer)

    def _record_times(self, session: Session, reports: Reports, first: bool) -> None:
        """Add a round's times to a session's statistics; the round of the first token counts as prefill."""
        if not first:
            session.stats.clock(reports)
        elif session.stats.emitted:
            session.stats.first_token = self.executor.now()
