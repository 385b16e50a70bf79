"""The scheduler: requests wait in a queue, are admitted when there is memory for them, and leave.

Owns the queue, admission, deadlines, and preemption when memory runs short; rounds are the Loop's. Invariants: each
request's tokens are as if it were alone; a request that has left, however it did, holds no memory.

The bound on waiting: higher priorities go first, and within a priority requests are admitted in the order of arrival;
none is overtaken by a later one. Assume that at most M requests decode at once, none takes more than R rounds, and
there is memory for M. Then a request with k others before it is admitted after at most ⌊k / M⌋ · R rounds. If memory is
short, the oldest request of the highest priority is never preempted. So it is admitted after at most k · R rounds of
its own kind. Once prefilled, a request takes part in every round of the target. While m prompts are not prefilled, one
of p chunks is done within m · p such rounds, however long the others are.
"""

from __future__ import annotations

import time
from bisect import insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Literal

from specbranch.core.loop import KVSlots, Loop
from specbranch.core.methods import MethodRounds
from specbranch.core.session import Session
from specbranch.errors import CacheFull, DeadlinePassed

SLOTS_AHEAD = 64  # KV slots beyond its tokens that a request needs to be admitted, and that live ones keep reserved

TicketState = Literal["waiting", "live", "over"]


@dataclass(slots=True, eq=False)
class Ticket:
    """A request from submission to its end."""

    session: Session
    start: Callable[[], MethodRounds]
    priority: int
    arrival: int
    submitted: float
    within: float | None  # its timeout in seconds
    deadline: float | None  # on the executor's clock
    counted: bool  # it counts against the batch limit
    state: TicketState = "waiting"
    was_live: bool = False  # before: it was preempted
    paused: bool = False
    paused_since: tuple[float, float] = (0.0, 0.0)  # by the executor's clock, and by the wall clock
    emitted: int = 0  # tokens that the scheduler has counted

    @property
    def order(self) -> tuple[int, int]:
        """Its position in the queue: lower goes first."""
        return -self.priority, self.arrival


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What a scheduler has to do, and has done."""

    running: int = 0
    waiting: int = 0
    prefilling: int = 0  # of those running: their prompts are not computed yet
    resting: int = 0  # of those running: paused, because their consumer takes no tokens
    rounds: int = 0
    tokens: int = 0  # emitted
    prompt_tokens: int = 0  # of requests that were admitted
    submitted: int = 0
    finished: int = 0
    failed: int = 0  # past their deadline, or by an error
    cancelled: int = 0
    preemptions: int = 0  # requests preempted for want of memory, each time
    draft_restarts: int = 0  # times that the draft's process was restarted
    late_captures: int = 0  # CUDA graphs captured and kernels compiled in the middle of an answer
    kv_slots: tuple[KVSlots, ...] = ()


@dataclass(slots=True)
class _Counts:
    rounds: int = 0
    tokens: int = 0
    prompt_tokens: int = 0
    submitted: int = 0
    finished: int = 0
    failed: int = 0
    cancelled: int = 0
    preemptions: int = 0


@dataclass(slots=True, eq=False)
class Scheduler:
    """Decides which requests are live; one thread calls it. `most`: requests decoded at once; None: as many as fit.

    Schedulers may share their models, and so the memory: requests of the `first` scheduler get memory before all
    others.
    """

    loop: Loop
    most: int | None = None
    ahead: int = SLOTS_AHEAD
    first: Scheduler | None = None  # None: this one is the first
    served: bool = False  # a thread runs its rounds, so waiting for its memory comes to an end
    blocking: bool = False  # its caller runs only its own rounds, so waiting for others would never end
    wall: Callable[[], float] = time.monotonic
    guests: list[Scheduler] = field(default_factory=list)  # the other schedulers that have requests now
    _waiting: list[Ticket] = field(default_factory=list)  # the queue, in order
    _live: dict[int, Ticket] = field(default_factory=dict)  # by session
    _timed: list[Ticket] = field(default_factory=list)  # unfinished requests with a deadline
    _counts: _Counts = field(default_factory=_Counts)
    _short: bool = False  # memory ran out: no request is admitted before one has left

    def __post_init__(self) -> None:
        self.loop.waits_for_pages = True

    def submit(
        self,
        session: Session,
        start: Callable[[], MethodRounds],
        priority: int = 0,
        within: float | None = None,
        counted: bool = True,
    ) -> Ticket:
        """Put a request in the queue; one that can never fit has failed already when this returns.

        `start` makes its method once it is admitted. `within`: its timeout in seconds.
        """
        now = self.loop.executor.now()
        deadline = None if within is None else now + within
        ticket = Ticket(session, start, priority, self._counts.submitted, now, within, deadline, counted)
        self._counts.submitted += 1
        if self.first is not None and self not in self.first.guests:
            self.first.guests.append(self)
        target = next((kv_slots for kv_slots in self.loop.executor.kv_slots() if kv_slots.model == "target"), None)
        if target is not None and len(session.tokens) > target.total:
            session.fail(_never_fits(session, target))
            self._end(ticket)
        else:
            insort(self._waiting, ticket, key=lambda one: one.order)
            self._timed += [ticket] if deadline is not None else []
        return ticket

    def cancel(self, ticket: Ticket) -> None:
        """Cancel a request; harmless if it is over."""
        if ticket.state != "over":
            self._end(ticket)

    def set_paused(self, ticket: Ticket, paused: bool) -> None:
        """Leave a request out of all rounds, or let it take part again."""
        if ticket.deadline is not None:
            ticket.deadline -= self._lag(ticket)  # so far, a modelled clock has stood still for this long
        ticket.paused_since = self.loop.executor.now(), self.wall()
        ticket.paused = paused
        if ticket.state == "live":
            self.loop.set_paused(ticket.session, paused)

    @property
    def busy(self) -> bool:
        """True if there is anything to do now."""
        return self.loop.can_step or any(not ticket.paused for ticket in self._waiting)

    @property
    def tickets(self) -> list[Ticket]:
        """All requests that are not over."""
        return [*self._live.values(), *self._waiting]

    @property
    def seconds_left(self) -> float | None:
        """Seconds to the first deadline; None: there is none."""
        return min((self._left(ticket) for ticket in self._timed), default=None)

    def step(self) -> list[Session]:
        """Run one round; returns the sessions that took part."""
        self._expire()
        self._admit()
        took_part = self.loop.step() if self.loop.can_step else []
        self._counts.rounds += bool(took_part)
        for session in took_part:
            if ticket := self._live.get(session.number):
                self._count(ticket)
        for ticket in [ticket for ticket in self._live.values() if ticket.session.finished]:
            self._end(ticket)  # in this round, or it failed before
        if took_part and self.loop.out_of_pages:
            self._make_room(took_part)
        return took_part

    def snapshot(self) -> Snapshot:
        """Return what there is to do, and what was done."""
        counts, live = self._counts, self._live.values()
        return Snapshot(
            running=len(live),
            waiting=len(self._waiting),
            prefilling=sum(self.loop.uncomputed(ticket.session) > 0 for ticket in live),
            resting=sum(ticket.paused for ticket in live),
            rounds=counts.rounds,
            tokens=counts.tokens,
            prompt_tokens=counts.prompt_tokens,
            submitted=counts.submitted,
            finished=counts.finished,
            failed=counts.failed,
            cancelled=counts.cancelled,
            preemptions=counts.preemptions,
            draft_restarts=self.loop.executor.restarts,
            late_captures=self.loop.executor.late_captures,
            kv_slots=self.loop.executor.kv_slots(),
        )

    def _expire(self) -> None:
        """End requests past their deadline, with the tokens they have."""
        if not self._timed:
            return
        now = self.loop.executor.now()
        # every round looks at every deadline: a call for each would cost more than the look
        due = [one for one in self._timed if one.paused or (one.deadline is not None and one.deadline <= now)]
        for ticket in due:
            if self._left(ticket) <= 0.0:
                ticket.session.fail(_too_late(ticket))
                self._end(ticket)

    def _left(self, ticket: Ticket) -> float:
        if ticket.deadline is None:
            return inf
        return ticket.deadline - self.loop.executor.now() - self._lag(ticket)

    def _lag(self, ticket: Ticket) -> float:
        """Return the seconds by which the executor's clock fell behind the wall clock during a pause.

        A modelled clock stands still while nothing is computed.
        """
        if not ticket.paused:
            return 0.0
        clock, wall = ticket.paused_since
        return max(self.wall() - wall - (self.loop.executor.now() - clock), 0.0)

    def _admit(self) -> None:
        """Admit the first requests in the queue, as long as there is room."""
        while (ticket := next((one for one in self._waiting if not one.paused), None)) and self._has_room(ticket):
            self._waiting.remove(ticket)
            self._begin(ticket)

    def _begin(self, ticket: Ticket) -> None:
        session = ticket.session
        ticket.state, self._live[session.number] = "live", ticket
        try:
            if ticket.was_live:
                self.loop.resume(session)
                self.loop.set_paused(session, ticket.paused)
            else:
                self.loop.join(session, ticket.start())
                session.stats.queued = session.stats.started - ticket.submitted
                self._counts.prompt_tokens += session.request.prompt_length
        except Exception as error:  # it is this request's own
            session.fail(error)
            self._end(ticket)
        ticket.was_live = True

    def _has_room(self, ticket: Ticket) -> bool:
        running = [one for one in self._live.values() if not one.paused]
        if ticket.counted and self.most is not None and sum(one.counted for one in running) >= self.most:
            return False
        if self._fits(ticket):
            return not (self._short and running)
        if self._preempt_idle(running=bool(running)):
            return self._has_room(ticket)
        return not self._live and not self._waits  # alone it may try

    def _preempt_idle(self, running: bool) -> bool:
        """Preempt a paused request, or one of a guest while nothing runs here; returns True if there was one."""
        for one in reversed(self._sharing):
            if one._live and (one._last().paused or (one in self.guests and not running)):
                one._preempt(one._last())
                return True
        return False

    @property
    def _sharing(self) -> list[Scheduler]:
        """All schedulers on these models that may have requests, this one included."""
        first = self.first or self
        return [first, *first.guests]

    @property
    def _waits(self) -> bool:
        """True if other schedulers hold memory that this one may wait for."""
        may_wait = self.first is not None and self.first.served and not self.blocking
        return may_wait and any(one._live for one in self._sharing if one is not self)

    def _fits(self, ticket: Ticket) -> bool:
        """True if each model has KV slots for the request and some more, besides those reserved for live requests."""
        length = len(ticket.session.tokens) + self._ahead(ticket.session)
        for kv_slots in self.loop.executor.kv_slots():
            need = kv_slots.missing(length)
            promised = sum(one.promised(kv_slots) for one in self._sharing)
            if need > kv_slots.free - promised and (kv_slots.model == "target" or need <= kv_slots.total):
                return False
        return True

    def promised(self, kv_slots: KVSlots) -> int:
        """Return how many free KV slots of a model are reserved for its live requests."""
        return sum(self._promised(kv_slots, ticket.session) for ticket in self._live.values())

    def _promised(self, kv_slots: KVSlots, session: Session) -> int:
        length = len(session.tokens)
        held = length - 1 - self.loop.uncomputed(session)  # the last token is a decode step
        return kv_slots.missing(length + self._ahead(session), held)

    def _ahead(self, session: Session) -> int:
        return min(self.ahead, max(session.room, 1))

    def _make_room(self, took_part: Sequence[Session]) -> None:
        """Preempt the youngest request of the lowest priority, so that others get its pages.

        A request that is alone fails, unless it may wait for other schedulers.
        """
        if any(session.finished for session in took_part):
            return  # a request that ended in this round has freed pages
        self._short = True
        if self._preempt_idle(running=False):
            return
        if len(self._live) > 1 or self._waits:
            self._preempt(self._last())
            return
        for ticket in list(self._live.values()):
            ticket.session.fail(self.loop.out_of_pages[ticket.session.number])
            self._end(ticket)

    def _last(self) -> Ticket:
        """Return who is preempted first: a paused request, else the youngest of the lowest priority."""
        return max(self._live.values(), key=lambda one: (one.paused, one.order))

    def _preempt(self, ticket: Ticket) -> None:
        self.loop.preempt(ticket.session)
        del self._live[ticket.session.number]
        ticket.state = "waiting"
        self._counts.preemptions += 1
        insort(self._waiting, ticket, key=lambda one: one.order)

    def _end(self, ticket: Ticket) -> None:
        """Remove a request, and free its memory."""
        session = ticket.session
        if ticket.state == "live":
            self._count(ticket)
            del self._live[session.number]
            self._short = False
        elif ticket in self._waiting:
            self._waiting.remove(ticket)
        if ticket in self._timed:
            self._timed.remove(ticket)
        ticket.state = "over"
        if self.first is not None and not self.tickets:
            self.first.guests.remove(self)
        self._counts.finished += session.finished in ("stop", "length")
        self._counts.failed += session.finished == "error"
        self._counts.cancelled += session.finished is None
        self.loop.remove(session)

    def _count(self, ticket: Ticket) -> None:
        emitted = ticket.session.stats.emitted
        self._counts.tokens += emitted - ticket.emitted
        ticket.emitted = emitted


def _never_fits(session: Session, kv_slots: KVSlots) -> CacheFull:
    return CacheFull(
        f"The prompt has {len(session.tokens)} tokens, but the cache has {kv_slots.total} KV slots for all requests "
        "together. Shorten the prompt, or raise cache_tokens (--cache-tokens)."
    )


def _too_late(ticket: Ticket) -> DeadlinePassed:
    return DeadlinePassed(
        f"The request was not finished within its {ticket.within:g} s; it has {ticket.session.stats.emitted} tokens. "
        "Give it more time, ask for fewer tokens, or send fewer requests at once."
    )
