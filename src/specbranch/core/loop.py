"""The loop: one round at a time for all live sessions.

Every session's method asks for work (`Orders`), the executor runs it, and every method receives its `Reports`.

Owns which sessions are live and how far both models have prefilled their prompts. Does not own the queue: that is
`core/scheduler.py`. Invariant: sessions join, leave, fail, are preempted and are resumed without effect on the others'
tokens. An interrupted step can be repeated, because an executor can carry out the same orders twice.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import count
from typing import Literal, Protocol

from specbranch.core.costs import MOST_UNCOMPUTED, LearnedCosts
from specbranch.core.market import MOST_LANES, MOST_ROWS, Grant, LaneOffer, Offer, RowOffer, granted, let_draft
from specbranch.core.methods import MethodRounds
from specbranch.core.orders import Context, Draft, Orders, Prefill, Reports
from specbranch.core.request import Request
from specbranch.core.session import RoundWatcher, Session
from specbranch.core.trace import Trace
from specbranch.errors import PoolFull, SpecBranchError

log = logging.getLogger("specbranch")

# In a round in which the target prefills nothing, the draft may prefill this many times its budget for sessions that
# already decode.
DRAFT_PREFILL_FACTOR = 4


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


@dataclass(frozen=True, slots=True)
class RoundLimits:
    """What one round may hold.

    `prompt_tokens` is the prefill budget of a round that also decodes. At least one chunk, and one token for each
    decoding session, always fit. `prompt_tokens_alone` is the budget of a round in which nobody decodes. None: a round
    prefills whole prompts.
    """

    rows: int = MOST_ROWS
    lanes: int = MOST_LANES
    prefill_chunk: int = 256
    prompt_tokens: int | None = None
    prompt_tokens_alone: int | None = None


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


@dataclass(slots=True, eq=False)
class _Member:
    """A session in the loop: what its method asks for next, and how far both models have prefilled its prompt."""

    session: Session
    method: MethodRounds
    prefill_turn: int  # prefill goes round-robin: the lowest turn is next
    wants: Orders | Offer
    prefilled: int = 0  # tokens in the target's KV cache, until `prefill_done`
    prefill_done: bool = False  # the target has verified once: each verify order computes all tokens before it
    draft_prefilled: int = 0  # tokens in the draft's KV cache
    draft_behind: bool = False  # the method asked for a draft, and the draft has to prefill first
    paused: bool = False  # its consumer does not take tokens at present

    @property
    def orders(self) -> Orders | None:
        """What its method asks for; None while it waits for the answer to an offer."""
        return self.wants if isinstance(self.wants, Orders) else None

    @property
    def uncomputed(self) -> int:
        """How many tokens the target has to prefill; the last token goes with the first decode step."""
        return 0 if self.prefill_done else max(len(self.session.tokens) - 1 - self.prefilled, 0)

    @property
    def draft_uncomputed(self) -> int:
        """How many tokens the draft has to prefill for what is asked of it.

        Up to MOST_UNCOMPUTED tokens count as none: a draft step computes them on the way.
        """
        asked = self.draft_behind or (isinstance(self.wants, Orders) and self.wants.draft is not None)
        uncomputed = len(self.session.tokens) - 1 - self.draft_prefilled
        return uncomputed if asked and uncomputed > MOST_UNCOMPUTED else 0

    @property
    def needs_draft(self) -> bool:
        """True if the loop may not skip what the method wants drafted.

        Under the ratio rule the sampled tokens depend on the draft's. A draft of length 0 is prefill alone: it proposes
        nothing, so the loop may skip it.
        """
        draft = self.orders.draft if self.orders else None
        return self.session.request.by_ratio and not (isinstance(draft, Draft) and draft.plan.length == 0)

    def prefill_order(self, start: int, most: int) -> Prefill:
        """Order a model to prefill about `most` tokens from `start` on."""
        tokens = self.session.tokens
        return Prefill(Context(start, tuple(tokens[start : len(tokens) - 1]), tokens), most)

    def restart_prefill(self) -> None:
        """Note that neither model holds any of its tokens."""
        self.prefilled, self.prefill_done, self.draft_prefilled, self.draft_behind = 0, False, 0, False


@dataclass(slots=True)
class _PrefillBudget:
    """How many tokens one model may still prefill in a round."""

    left: int
    prefill_chunk: int
    used: int = 0

    def take(self, uncomputed: int) -> int:
        """Take all uncomputed tokens, or the whole chunks of them that fit; returns how many tokens that is."""
        taken = uncomputed if uncomputed <= self.left else self.left // self.prefill_chunk * self.prefill_chunk
        self.left -= taken
        self.used += taken
        return taken


class Loop:
    """Runs sessions to their end, one round at a time."""

    def __init__(
        self,
        executor: Executor,
        trace: Trace | None = None,
        costs: LearnedCosts | None = None,
        limits: RoundLimits | None = None,
    ) -> None:
        """Make a loop without sessions; `costs` learn from every round, with the rows of all sessions together."""
        self.executor = executor
        self.trace = trace
        self.costs = costs
        self.limits = limits or RoundLimits()
        self.closed = False
        # True: a session that finds no free page repeats its orders after a preemption. False: it fails.
        self.waits_for_pages = False
        self.out_of_pages: dict[int, PoolFull] = {}  # the sessions that found no free page in the last round
        self._live: dict[int, _Member] = {}
        self._preempted: dict[int, _Member] = {}
        self._turns = count()

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
        if self.costs is not None and not self._live:
            self.costs.pause()  # the time since the last round was idle: it is no host time
        try:
            self.executor.open(session.number, session.request)
            first = next(method)
        except BaseException:
            self.executor.free(session.number)
            raise
        self._live[session.number] = _Member(session, method, next(self._turns), first)

    def step(self) -> list[Session]:
        """Run one round; returns the sessions that took part.

        Sessions that only draft run first, as one batch. The others wait, so that all sessions verify in one target
        forward. That forward also prefills a few chunks of other sessions' prompts.
        """
        restarts, late, self.out_of_pages = self.executor.restarts, self.executor.late_captures, {}
        for member in self._live.values():
            member.session.batch_size = len(self._live)
        self._grant_lanes()
        self._skip_late_drafts()
        batch = self._draft_only_batch() or self._target_batch()
        if not batch:
            return []
        started = self.executor.now()
        reports = self._run(batch)
        if self.costs is not None:
            self.costs.observe(batch, reports)
        self._count_waiting(batch, self.executor.now() - started, self.executor.restarts - restarts)
        for number in reports:
            self._live[number].session.stats.late_captures += self.executor.late_captures - late
        took_part = [self._live[number].session for number in reports]
        for number, report in reports.items():
            self._deliver(self._live[number], batch[number], report)
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

    def _count_waiting(self, batch: Mapping[int, Orders], seconds: float, restarts: int) -> None:
        """Count the seconds of a round for each decoding session outside its batch, and draft restarts for all."""
        for number, member in self._live.items():
            if number not in batch and member.prefill_done:
                member.session.waited += seconds
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
        self._grant_rows()
        batch = {number: member.orders for number, member in self._ready().items() if member.orders}
        target_budget, draft_budget = (self._prefill_budget(len(batch)) for _ in ("target", "draft"))
        by_turn = sorted(
            (member for member in self._live.values() if not member.paused), key=lambda member: member.prefill_turn
        )
        decoding = [member for member in by_turn if member.session.number in batch]
        for member in [member for member in by_turn if member.session.number not in batch]:
            if orders := self._prefill_orders(member, target_budget, draft_budget):
                batch[member.session.number] = orders
        if target_budget.used == 0:
            draft_budget.left *= DRAFT_PREFILL_FACTOR
        self._prefill_late_drafts(decoding, batch, draft_budget)
        if any(orders.prefill for orders in batch.values()):
            # The next prefill chunk would discard a decode step that was launched ahead.
            return {number: _without_launch_ahead(orders) for number, orders in batch.items()}
        return batch

    def _prefill_budget(self, decoding: int) -> _PrefillBudget:
        """Return one model's prefill budget for a round in which so many sessions decode."""
        limits = self.limits
        most = limits.prompt_tokens if decoding else limits.prompt_tokens_alone
        tokens = sys.maxsize if most is None else max(most, limits.prefill_chunk, decoding)
        return _PrefillBudget(tokens, limits.prefill_chunk)

    def _prefill_late_drafts(self, decoding: list[_Member], batch: dict[int, Orders], draft: _PrefillBudget) -> None:
        """Have the draft prefill for decoding sessions whose cache it has to catch up on; they draft nothing then."""
        if self.limits.prompt_tokens is None:
            return
        for member in decoding:
            if member.draft_uncomputed:
                number = member.session.number
                batch[number] = self._draft_replaced_by_prefill(member, batch[number], draft)

    def _draft_replaced_by_prefill(self, member: _Member, orders: Orders, draft: _PrefillBudget) -> Orders:
        """Return a session's orders with prefill of the draft, as far as its budget goes, in place of drafting."""
        member.draft_behind = True
        if not (taken := draft.take(member.draft_uncomputed)):
            return replace(orders, draft=None)
        member.prefill_turn = next(self._turns)
        return replace(orders, draft=member.prefill_order(member.draft_prefilled, taken))

    def _prefill_orders(self, member: _Member, target: _PrefillBudget, draft: _PrefillBudget) -> Orders | None:
        """Return prefill orders for a session, or its own orders if the budgets cover all that is uncomputed.

        Orders that verify or draft compute the rest of the prompt themselves.
        """
        uncomputed, draft_uncomputed = member.uncomputed, member.draft_uncomputed
        taken, draft_taken = target.take(uncomputed), draft.take(draft_uncomputed)
        if (taken, draft_taken) == (uncomputed, draft_uncomputed) and member.orders:
            return member.orders
        if not taken and not draft_taken:
            return None
        member.prefill_turn = next(self._turns)
        return Orders(
            draft=member.prefill_order(member.draft_prefilled, draft_taken) if draft_taken else None,
            prefill=member.prefill_order(member.prefilled, taken) if taken else None,
        )

    def _deliver(self, member: _Member, orders: Orders, reports: Reports) -> None:
        """Hand a session its reports. An error here ends this session alone; the others still get theirs."""
        if isinstance(reports.error, PoolFull) and self.waits_for_pages:
            self.out_of_pages[member.session.number] = reports.error
            member.prefilled = 0  # the worker has freed the pages of an unfinished prefill
            return
        try:
            self._take_reports(member, orders, reports)
        except Exception as error:
            _fail(member.session, error)
        if member.session.finished:
            self.remove(member.session)

    def _take_reports(self, member: _Member, orders: Orders, reports: Reports) -> None:
        """Count and trace a round, then send its reports to the method.

        The method does not hear of a round that only prefilled: the loop gave that order, not the method.
        """
        session, emitted = member.session, member.session.stats.emitted
        session.now = self.executor.now()
        session.stats.note_prompt(session.number, reports)
        if self.trace:
            self.trace.record(session.number, orders, reports)
        self._update_prefill(member, orders, reports)
        if orders is member.wants or orders.verify or reports.error:
            received = replace(reports, drafting=None) if isinstance(orders.draft, Prefill) else reports
            self._resume_method(member, received)
            self._record_times(session, received, first=emitted == 0)
        if session.on_round:
            _call_watcher(session, session.on_round, orders, reports, session.stats.emitted - emitted)

    def _update_prefill(self, member: _Member, orders: Orders, reports: Reports) -> None:
        """Note how far both models have prefilled; a draft that reports no length counts as caught up."""
        if orders.verify is not None:
            member.prefill_done = True
        elif reports.reached is not None:
            member.prefilled = reports.reached
        if orders.draft is not None:
            reached = reports.draft_reached
            member.draft_prefilled = len(member.session.tokens) if reached is None else reached
            member.draft_behind = member.draft_behind and member.draft_uncomputed > 0

    def _resume_method(self, member: _Member, received: Reports | Grant) -> None:
        """Send a method what it waits for, and take its next orders or offer."""
        session = member.session
        if isinstance(received, Reports) and received.error:
            session.fail(received.error)
            return
        try:
            member.wants = member.method.send(received)
        except StopIteration:
            if not session.finished:
                session.fail(RuntimeError("the method ended before its session"))
        except Exception as error:
            _fail(session, error)

    def _resume_or_remove(self, member: _Member, received: Reports | Grant) -> None:
        """Send a method something outside a round; remove the session if that ends it."""
        self._resume_method(member, received)
        if member.session.finished:
            self.remove(member.session)

    def _ready(self) -> dict[int, _Member]:
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

    def _grant_lanes(self) -> None:
        """Answer every offer to draft before the next verify."""
        ready = self._ready().values()
        offers = {one.session.number: one.wants for one in ready if isinstance(one.wants, LaneOffer)}
        already_drafting = sum(one.orders is not None and one.orders.verify is None for one in ready)
        waiting_rate = sum([one.wants.rate for one in ready if isinstance(one.wants, RowOffer)])  # tokens a second
        self._answer(let_draft(offers, waiting_rate, already_drafting, self.limits.lanes))

    def _grant_rows(self) -> None:
        """Answer every offer of rows to verify."""
        ready = self._ready()
        offers = {number: member.wants for number, member in ready.items() if isinstance(member.wants, RowOffer)}
        verifies = [member.orders.verify for member in ready.values() if member.orders]
        rows = sum(1 + len(verify.tokens) for verify in verifies if verify)
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


def _fail(session: Session, error: Exception) -> None:
    """End one session with an error."""
    if not isinstance(error, SpecBranchError):  # a mistake of ours: the output alone has no traceback
        log.error("A request failed by a mistake of the program; others go on.", exc_info=error)
    session.fail(error)


def _call_watcher(session: Session, watcher: RoundWatcher, orders: Orders, reports: Reports, added: int) -> None:
    """Call the watcher of a session's rounds; after an exception it is not called again, and its request goes on."""
    try:
        watcher(orders, reports, added)
    except Exception as error:
        session.on_round = None
        log.error("An on_round watcher raised an error and is not called again; its request goes on.", exc_info=error)


def _without_launch_ahead(orders: Orders) -> Orders:
    """Return the same orders without `goes_on` and `follows`: the model launches nothing ahead."""
    verify = orders.verify
    if verify is None or not (verify.goes_on or verify.follows):
        return orders
    return replace(orders, verify=replace(verify, goes_on=False, follows=None))
