"""The loop: every live session says what it wants, the executor does it, every session takes its reports.

Owns which sessions are live, and how much of their texts is still to be read. Invariants: a session joins, leaves,
fails, or is preempted and resumed without the others noticing. A step that was interrupted can be made again: orders
that were carried out may be repeated.
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

DRAFT_PIECES = 4  # that a draft may read in the time of one of the target's, where the target reads none


@dataclass(frozen=True, slots=True)
class KVSlots:
    """The KV slots of a model's cache, for all sequences together, and how many of them nobody holds."""

    of: Literal["target", "draft"]
    total: int
    free: int
    page: int = 1  # KV slots that are taken at once

    def missing(self, length: int, held: int = 0) -> int:
        """How many KV slots a sequence of some length takes beyond those it holds, in whole pages."""
        return (-(-length // self.page) + held // -self.page) * self.page


# of the draft: at work or idle; loading its model; late with an answer; gone until it is restarted; there is none
DraftState = Literal["ready", "starting", "busy", "lost", "none"]


@dataclass(frozen=True, slots=True)
class RoundLimits:
    """What one round may hold.

    Texts are read in chunks of `prefill_chunk` tokens: at most `prompt_tokens` of them beside rows of others, or as
    many as there are others, and at most `prompt_tokens_alone` while nobody decodes; nothing: whole.
    """

    rows: int = MOST_ROWS
    lanes: int = MOST_LANES
    prefill_chunk: int = 256
    prompt_tokens: int | None = None
    prompt_tokens_alone: int | None = None


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

    def kv_slots(self) -> tuple[KVSlots, ...]:
        """The KV slots of each model that counts them, as far as that is known here."""
        ...

    @property
    def restarts(self) -> int:
        """How often a lost draft worker was replaced."""
        ...

    @property
    def draft_state(self) -> DraftState:
        """What the draft can do now; any thread may read it."""
        ...

    def close(self) -> None:
        """Stop the workers."""
        ...


@dataclass(slots=True, eq=False)
class _Seat:
    """A session in the loop: what it wants next, and how far the models have read its text."""

    session: Session
    rounds: MethodRounds
    turn: int  # who is read to next among those whose texts are unread: the lowest
    wants: Orders | Offer
    held: int | None = 0  # tokens that the target has read in chunks; nothing: all that it was told
    draft_held: int = 0  # tokens that the draft was last told, or has read in chunks
    lags: bool = False  # the draft was asked for something, and has too much to read first
    resting: bool = False

    @property
    def orders(self) -> Orders | None:
        """What it wants to be done; nothing while it offers."""
        return self.wants if isinstance(self.wants, Orders) else None

    @property
    def uncomputed(self) -> int:
        """How much of its text the target has still to read, but for the last token, which is a step."""
        return 0 if self.held is None else max(len(self.session.tokens) - 1 - self.held, 0)

    @property
    def draft_uncomputed(self) -> int:
        """The same of the draft, where it is asked for anything; what a round reads by the way does not count."""
        asked = self.lags or (isinstance(self.wants, Orders) and self.wants.draft is not None)
        uncomputed = len(self.session.tokens) - 1 - self.draft_held
        return uncomputed if asked and uncomputed > MOST_UNCOMPUTED else 0

    @property
    def needs_draft(self) -> bool:
        """Whether its text would be another one without what it wants drafted."""
        draft = self.orders.draft if self.orders else None
        return self.session.request.by_ratio and not (isinstance(draft, Draft) and draft.plan.length == 0)

    def prefill(self, held: int, most: int) -> Prefill:
        """An order to read on."""
        tokens = self.session.tokens
        return Prefill(Context(held, tuple(tokens[held : len(tokens) - 1]), tokens), most)

    def restart(self) -> None:
        """The workers hold nothing of it any more."""
        self.held, self.draft_held, self.lags = 0, 0, False


@dataclass(slots=True)
class _Budget:
    """How many tokens of texts a model may still read in a round."""

    left: int
    prefill_chunk: int

    def take(self, uncomputed: int) -> int:
        """Take whole chunks of what is unread, or all of it; returns how many tokens that is."""
        taken = uncomputed if uncomputed <= self.left else self.left // self.prefill_chunk * self.prefill_chunk
        self.left -= taken
        return taken


class Loop:
    """Runs sessions to their end, a round at a time."""

    def __init__(
        self,
        executor: Executor,
        trace: Trace | None = None,
        costs: LearnedCosts | None = None,
        limits: RoundLimits | None = None,
    ) -> None:
        """`costs` learn from every round, once, with the rows of all sessions; without `limits` texts are read
        whole."""
        self.executor = executor
        self.trace = trace
        self.costs = costs
        self.limits = limits or RoundLimits()
        self.closed = False
        # Whether a session for whom there is no memory waits for some, instead of failing. Who they were in the last
        # round: their orders stand.
        self.patient = False
        self.short: dict[int, PoolFull] = {}
        self._live: dict[int, _Seat] = {}
        self._back: dict[int, _Seat] = {}  # of those that were preempted
        self._turns = count()

    @property
    def live(self) -> bool:
        """Whether any session is unfinished."""
        return bool(self._live)

    @property
    def awake(self) -> bool:
        """Whether a step would do anything."""
        return any(not seat.resting for seat in self._live.values())

    def join(self, session: Session, rounds: MethodRounds) -> None:
        """Take a session in; it takes part from the next round on."""
        session.stats.started, session.batch_size = self.executor.now(), len(self._live) + 1
        if self.costs is not None and not self._live:
            self.costs.pause()
        try:
            self.executor.open(session.number, session.request)
            first = next(rounds)
        except BaseException:
            self.executor.leave(session.number)
            raise
        self._live[session.number] = _Seat(session, rounds, next(self._turns), first)

    def step(self) -> list[Session]:
        """Run one round; returns the sessions that took part.

        Those that only draft go first, all together; the others wait, so that the target reads for all at once. Beside
        its rows it reads on in the texts of others, a few chunks a round.
        """
        restarts, self.short = self.executor.restarts, {}
        for seat in self._live.values():
            seat.session.batch_size = len(self._live)
        self._let_draft()
        self._leave_out_drafts()
        now = self._drafting() or self._with_target()
        if not now:
            return []
        begun = self.executor.now()
        reports = self._run(now)
        if self.costs is not None:
            self.costs.observe(now, reports)
        for number, seat in self._live.items():
            if number not in now and seat.held is None:
                seat.session.waited += self.executor.now() - begun
            seat.session.stats.draft_restarts += self.executor.restarts - restarts
        took_part = [self._live[number].session for number in reports]
        for number, report in reports.items():
            seat = self._live[number]
            if isinstance(report.error, PoolFull) and self.patient:
                self.short[number] = report.error
                seat.held = None if seat.held is None else 0  # it has released what it was reading
            else:
                self._advance(seat, now[number], report)
        return took_part

    def preempt(self, session: Session) -> None:
        """Free what a live session holds; what it wants stands, and is done once it is resumed."""
        self.executor.leave(session.number)
        self._back[session.number] = self._live.pop(session.number)

    def resume(self, session: Session) -> None:
        """Go on with a session that was preempted: its text is read again."""
        self.executor.open(session.number, session.request)
        seat = self._live[session.number] = self._back.pop(session.number)
        seat.restart()

    def rest(self, session: Session, resting: bool) -> None:
        """Have a live session take part in no round for a while, or take part again."""
        self._live[session.number].resting = resting

    def uncomputed(self, session: Session) -> int:
        """How much of a live session's text the target has still to read."""
        seat = self._live.get(session.number)
        return seat.uncomputed if seat else 0

    def leave(self, session: Session) -> None:
        """Let a session go, finished or not, and free what it held."""
        seat = self._live.pop(session.number, None) or self._back.pop(session.number, None)
        if seat is None:
            return
        try:
            seat.rounds.close()
        except Exception as error:  # of a method that is not needed any more
            log.error("A method failed while it was closed; its request has ended.", exc_info=error)
        finally:
            session.stats.finished = self.executor.now()
            verify = seat.orders.verify if seat.orders else None
            if session.finished in (None, "error") and verify and verify.parents is None:
                # in flight: no verdict will come; a tree's tokens count once judged
                session.stats.unused += len(verify.tokens)
            self.executor.leave(session.number)

    def close(self) -> None:
        """Stop the workers, for good."""
        self.closed = True
        self.executor.close()

    def _run(self, now: Mapping[int, Orders]) -> dict[int, Reports]:
        """Carry out a round. What one session's orders raise is its own error: each is tried alone then. If the pool is
        full nobody has failed: all orders stand, and are repeated once a session was preempted."""
        try:
            return self.executor.run(now)
        except Exception as error:
            if isinstance(error, PoolFull) and self.patient:
                return {number: Reports(error=error) for number in now}
            if len(self._live) == 1:
                raise
            tried = {number: self._tried(number, orders) for number, orders in now.items()}
            if all(report.error is not None for report in tried.values()) and len(tried) > 1:
                raise  # it is the models' error, not theirs
            log.error("A request failed by a mistake of the program; others go on.", exc_info=error)
            return tried

    def _tried(self, number: int, orders: Orders) -> Reports:
        try:
            return self.executor.run({number: orders})[number]
        except Exception as error:  # whatever it is, it is this session's alone
            return Reports(error=error)

    def _drafting(self) -> dict[int, Orders]:
        """The orders of those that only draft."""
        return {
            number: seat.orders for number, seat in self._ready().items() if seat.orders and seat.orders.verify is None
        }

    def _with_target(self) -> dict[int, Orders]:
        """The orders of a round of the target: of all that have read their texts, and chunks for the others."""
        self._grant_rows()
        limits, now = self.limits, {number: seat.orders for number, seat in self._ready().items() if seat.orders}
        most = limits.prompt_tokens if now else limits.prompt_tokens_alone
        left = sys.maxsize if most is None else max(most, limits.prefill_chunk, len(now))
        target, draft = _Budget(left, limits.prefill_chunk), _Budget(left, limits.prefill_chunk)
        awake = sorted((seat for seat in self._live.values() if not seat.resting), key=lambda seat: seat.turn)
        ready = set(now)
        for seat in (one for one in awake if one.session.number not in ready):
            if orders := self._prefilling(seat, target, draft):
                now[seat.session.number] = orders
        if target.left == left:
            draft.left *= DRAFT_PIECES
        for seat in (one for one in awake if one.session.number in ready and limits.prompt_tokens is not None):
            if seat.draft_uncomputed:
                now[seat.session.number] = self._beside(seat, now[seat.session.number], draft)
        # A step that is begun ahead would be forgotten when the next chunk is read.
        return {n: _unhurried(one) for n, one in now.items()} if any(one.prefill for one in now.values()) else now

    def _beside(self, seat: _Seat, orders: Orders, draft: _Budget) -> Orders:
        """A session's orders while its draft reads on: without what was to be drafted."""
        seat.lags = True
        if not (taken := draft.take(seat.draft_uncomputed)):
            return replace(orders, draft=None)
        seat.turn = next(self._turns)
        return replace(orders, draft=seat.prefill(seat.draft_held, taken))

    def _prefilling(self, seat: _Seat, target: _Budget, draft: _Budget) -> Orders | None:
        """What is read for a session in this round; its own orders, once these find nothing more to read than that."""
        uncomputed, draft_uncomputed = seat.uncomputed, seat.draft_uncomputed
        taken, draft_taken = target.take(uncomputed), draft.take(draft_uncomputed)
        if (taken, draft_taken) == (uncomputed, draft_uncomputed) and seat.orders:
            return seat.orders
        if not taken and not draft_taken:
            return None
        seat.turn = next(self._turns)
        return Orders(
            seat.prefill(seat.draft_held, draft_taken) if draft_taken else None,
            prefill=seat.prefill(seat.held or 0, taken) if taken else None,
        )

    def _advance(self, seat: _Seat, orders: Orders, reports: Reports) -> None:
        """Hand a session its reports; whatever goes wrong, the others have theirs to take."""
        try:
            self._take(seat, orders, reports)
        except Exception as error:
            _blame(seat.session, error)
        if seat.session.finished:
            self.leave(seat.session)

    def _take(self, seat: _Seat, orders: Orders, reports: Reports) -> None:
        session, before = seat.session, seat.session.stats.emitted
        session.now = self.executor.now()
        session.stats.note_prompt(session.number, reports)
        if self.trace:
            self.trace.record(session.number, orders, reports)
        self._note_read(seat, orders, reports)
        if orders is seat.wants or orders.verify or reports.error:
            received = replace(reports, drafting=None) if isinstance(orders.draft, Prefill) else reports
            self._send(seat, received)
            self._clock(session, received, before == 0)
        if session.on_round:
            _watched(session, session.on_round, orders, reports, session.stats.emitted - before)

    def _note_read(self, seat: _Seat, orders: Orders, reports: Reports) -> None:
        """Note how far the models have read; a draft that does not say so is waited for no longer."""
        if orders.verify is not None:
            seat.held = None
        elif reports.reached is not None:
            seat.held = reports.reached
        if orders.draft is not None:
            received = reports.draft_reached
            seat.draft_held = len(seat.session.tokens) if received is None else received
            seat.lags = seat.lags and seat.draft_uncomputed > 0

    def _send(self, seat: _Seat, received: Reports | Grant) -> None:
        session = seat.session
        if isinstance(received, Reports) and received.error:
            session.fail(received.error)
            return
        try:
            seat.wants = seat.rounds.send(received)
        except StopIteration:
            if not session.finished:
                session.fail(RuntimeError("the method ended before its session"))
        except Exception as error:
            _blame(session, error)

    def _ready(self) -> dict[int, _Seat]:
        """The sessions whose texts are read as far as what they want presumes; others are read to in chunks first."""
        awake = {number: seat for number, seat in self._live.items() if not seat.resting}
        if self.limits.prompt_tokens is None:
            return awake
        waits_for_draft = len(awake) == 1  # if it is in a batch it goes on without
        return {
            number: seat
            for number, seat in awake.items()
            if not seat.uncomputed and not (seat.draft_uncomputed and (waits_for_draft or seat.needs_draft))
        }

    def _leave_out_drafts(self) -> None:
        """Draft nothing, in a batch, for sessions whose draft has much to read first and which can do without."""
        if self.limits.prompt_tokens is None:
            return
        for seat in self._ready().values():
            if seat.orders and seat.orders.verify is None and seat.draft_uncomputed:
                seat.lags = True
                self._send(seat, Reports())
                if seat.session.finished:
                    self.leave(seat.session)

    def _let_draft(self) -> None:
        """Say to all that would draft while the target waits whether they may."""
        ready = self._ready()
        offers = {number: seat.wants for number, seat in ready.items() if isinstance(seat.wants, LaneOffer)}
        others = sum(seat.orders is not None and seat.orders.verify is None for seat in ready.values())
        rest = [seat.wants.rate for seat in ready.values() if isinstance(seat.wants, RowOffer)]
        self._answer(let_draft(offers, sum(rest), others, self.limits.lanes))

    def _grant_rows(self) -> None:
        """Grant rows to all that offer some."""
        ready = self._ready()
        offers = {number: seat.wants for number, seat in ready.items() if isinstance(seat.wants, RowOffer)}
        verifies = [seat.orders.verify for seat in ready.values() if seat.orders]
        rows = sum(1 + len(verify.tokens) for verify in verifies if verify)
        self._answer(granted(offers, rows, self.limits.rows, self.limits.lanes))

    def _answer(self, answers: Mapping[int, Grant]) -> None:
        """Tell sessions what became of their offers, and hear what they want then."""
        for number, answer in answers.items():
            seat = self._live[number]
            self._send(seat, answer)
            if seat.session.finished:
                self.leave(seat.session)

    def _clock(self, session: Session, reports: Reports, first: bool) -> None:
        if not first:
            session.stats.clock(reports)
        elif session.stats.emitted:
            session.stats.first_token = self.executor.now()


def _blame(session: Session, error: Exception) -> None:
    """End one session with an error."""
    if not isinstance(error, SpecBranchError):  # a mistake of ours: the output alone has no traceback
        log.error("A request failed by a mistake of the program; others go on.", exc_info=error)
    session.fail(error)


def _watched(session: Session, watcher: RoundWatcher, orders: Orders, reports: Reports, added: int) -> None:
    """Tell a watcher of a round; one that raises is not called again, and its request goes on."""
    try:
        watcher(orders, reports, added)
    except Exception as error:
        session.on_round = None
        log.error("An on_round watcher raised an error and is not called again; its request goes on.", exc_info=error)


def _unhurried(orders: Orders) -> Orders:
    """The same orders, without a hint at what comes next."""
    verify = orders.verify
    if verify is None or not (verify.goes_on or verify.follows):
        return orders
    return replace(orders, verify=replace(verify, goes_on=False, follows=None))
