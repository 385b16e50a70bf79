"""The draft in a child process, the target in this one, both at work at once.

Owns the child's life, and how long a round waits for it. Invariants: nothing here blocks on the socket. Losing the
child never loses a request: the round goes on without branches, a new child is started beside after a wait that doubles
with each loss, and once it is ready it is sent the sessions anew. A child that is late is left alone: rounds go on
without branches until it has answered, and its late answer is dropped.
"""

from __future__ import annotations

import logging
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass

from specbranch.core.loop import DraftState, KVSlots
from specbranch.core.orders import Branch, Drafted, DraftOrder, Orders, Reports, Span
from specbranch.core.request import Request
from specbranch.errors import ModelError, SpecBranchError
from specbranch.exec.child_answers import Asked, BadAnswer
from specbranch.exec.child_speed import ChildLimits, ChildSpeed, amount_of
from specbranch.exec.halves import Stretch, kv_slots_of, parted, prefills_of, reports_of, run_deferred
from specbranch.exec.link import Link, LinkLost
from specbranch.exec.messages import (
    Broken,
    Enough,
    HeadsDrawn,
    Hello,
    Leave,
    Open,
    Ready,
    Recipe,
    RoundDrafted,
    StaleHolding,
    TargetDone,
    WireMessage,
    Work,
)
from specbranch.exec.serial import sent_whole
from specbranch.exec.verifier import Scored, Verifier
from specbranch.exec.wire import BadMessage, from_bytes, to_bytes

log = logging.getLogger("specbranch")

LONGEST_RESTART_WAIT = 60.0  # seconds before a lost child is started again, however often it was lost
MOST_ANSWER = 1 << 26  # bytes of a message from the child; the laws of many lanes come to a tenth of that
HANDING_OVER = 0.05  # seconds in which a child that reads takes an order that is larger than the socket's buffer
DYING = 0.2  # seconds that a killed process is waited for


class Lost(Exception):
    """The child died, hung or broke."""


@dataclass(slots=True)
class Child:
    """A running draft process and our end of the link to it."""

    process: subprocess.Popen[bytes]
    link: Link
    ready: bool = False
    again: bool = False  # it replaces one that was lost
    answered: bool = False  # an order, at least once

    @classmethod
    def start(cls, recipe: Recipe, again: bool = False) -> Child:
        """Start a process that makes its worker by a recipe; it says Ready when that is done."""
        hello = to_bytes(Hello(tuple(sys.path), recipe))  # what cannot be sent needs no process
        ours, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-m", "specbranch.exec.child", str(theirs.fileno())]
            process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
        child = cls(process, Link(ours, MOST_ANSWER), again=again)
        child.link.post(hello)
        return child

    def stop(self, seconds: float) -> None:
        """Hang up, and kill the process unless it ends by itself within so many seconds."""
        self.link.close()
        try:
            self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.process.kill()
            with suppress(subprocess.TimeoutExpired):  # a driver may hold it up; nobody waits for that
                self.process.wait(DYING)


@dataclass(slots=True)
class ChildRound:
    """An order that the child has not answered yet, and what it has said so far."""

    ticket: int
    orders: dict[int, DraftOrder]
    by_ratio: frozenset[int] = frozenset()  # those of its sessions that are decoded by the ratio rule
    until: float = 0.0  # by when the round waits for it
    limit: float = 0.0  # by when it must have answered, or the child is lost
    taken_by: float = 0.0  # by when it must have been read from the socket
    heads: dict[int, Branch] | None = None
    made: dict[int, Drafted] | None = None
    span: Span | None = None
    target_done: bool = False  # and the child was sent that
    ending: bool = False  # the child was asked for what there is
    late: bool = False  # the round has gone on without it

    @property
    def announced(self) -> bool:
        """Whether the first heads are known, or will not come any more."""
        return self.heads is not None or self.made is not None


class Process:
    """Verifies here while a child drafts."""

    def __init__(
        self,
        target: Verifier,
        recipe: Recipe,
        limits: ChildLimits | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.target = target
        self.restarts = 0
        self.now = clock
        self._recipe = recipe
        self._limits = limits or ChildLimits()
        self._pace = ChildSpeed()
        self._sessions: dict[int, Request] = {}
        self._ticket = 0
        self._work: ChildRound | None = None  # what the child is at work on
        self._failures = 0  # in a row, without a round drafted between them
        self._started = self._again_at = 0.0  # when the last child was, and from when on the next may be
        self._closed = False
        self._child: Child | None = None
        try:
            self._child = Child.start(recipe)
            self._await_first(self._child)
        except Lost as loss:
            self.close()
            raise ModelError(f"The draft worker could not start: {loss}.") from loss

    @property
    def child_pid(self) -> int | None:
        """The process id of the draft worker, None while there is none."""
        return self._child.process.pid if self._child else None

    @property
    def draft_state(self) -> DraftState:
        """What the draft can do now; a child that has ended counts as lost before a round finds out."""
        child, work = self._child, self._work
        if child is None or child.process.poll() is not None:
            return "lost"
        if not child.ready:
            return "starting"
        return "busy" if work and work.late else "ready"

    def open(self, session: int, request: Request) -> None:
        """Prepare both workers for a session."""
        if self._closed:
            raise SpecBranchError("This executor was closed; make a new one.")
        self.target.open(session, request)
        self._sessions[session] = request
        self._tell(Open(session, request))

    def run(self, orders: Mapping[int, Orders]) -> dict[int, Reports]:
        """Carry out one round, both models at once."""
        drafts, verifies = parted(orders)
        work = self._begin(drafts)
        timed = Stretch(self.target, self.now)
        scored, failed = self.target.score(verifies)
        reached, short = self.target.prefill(prefills_of(orders))
        run_deferred(orders)
        self._await_heads(work, scored)
        verdicts = self.target.judge(scored, _in_time(work).heads or {})
        timed.end()
        # not earlier: a forward may have been launched only, and it is judging that waits for a device
        self._target_done(work)
        self._await(work, _is_made)
        answer = _in_time(work)
        lost = drafts if answer.made is None else ()
        return reports_of(orders, answer.made or {}, verdicts, failed | short, answer.span, timed.span(), lost, reached)

    def kv_slots(self) -> tuple[KVSlots, ...]:
        """The KV slots of the target, if it counts them; those of the child are not known here."""
        return kv_slots_of(self.target)

    def leave(self, session: int) -> None:
        """Free what a session holds."""
        self.target.leave(session)
        if self._sessions.pop(session, None):
            self._tell(Leave(session))

    def close(self) -> None:
        """Stop the child, for good."""
        self._closed = True
        self._stop_child(0.5)

    def _begin(self, drafts: dict[int, DraftOrder]) -> ChildRound | None:
        """Send the child its work, if it can take any; a round without drafts only looks what the child says."""
        self._hear()
        self._lose_if_hung()
        if not drafts or not self._available():
            return None
        self._ticket += 1
        work = ChildRound(self._ticket, drafts, frozenset(s for s in drafts if self._sessions[s].by_ratio))
        self._allow(work)
        self._post(Work(work.ticket, drafts))
        self._work = work  # not earlier: an interrupt may leave an answer that nobody waits for, not the reverse
        self._hand_over()
        return work

    def _hand_over(self) -> None:
        """Write an order that is larger than the socket's buffer, to a child that reads."""
        assert self._child
        link, end = self._child.link, time.monotonic() + HANDING_OVER
        link.pump()
        while link.unsent and (left := end - time.monotonic()) > 0.0:
            link.pump(left)

    def _allow(self, work: ChildRound) -> None:
        """Give the child time for what was ordered."""
        assert self._child
        now, amount = self.now(), amount_of(work.orders)
        work.until = now + self._pace.patience(amount, self._limits)
        work.taken_by = now + self._limits.hung
        work.limit = now + self._pace.limit(amount, self._limits, first=not self._child.answered)

    def _target_done(self, work: ChildRound | None) -> None:
        if work and work is self._work and any(o.until_target for o in work.orders.values()):
            work.target_done = True
            self._tell(TargetDone(work.ticket))

    def _await_heads(self, work: ChildRound | None, scored: Scored) -> None:
        """Under the ratio rule wait for the sampled heads, which are judged together with the target's rows."""
        orders = work.orders.items() if work else ()
        if any(s in scored and o.announces and self._sessions[s].by_ratio for s, o in orders):
            self._await(work, lambda round_: round_.announced)

    def _await(self, work: ChildRound | None, there: Callable[[ChildRound], bool]) -> None:
        """Wait for something of a round until its time is up; then ask for what there is; then go on without it.

        Lanes are cut between two steps, by the clock, so that what they keep never depends on a token drawn after it.
        A whole answer is dropped only if a single step, or reading, takes too long, whatever token comes of it.
        """
        while work is not None and work is self._work and not work.late and not there(work):
            left = work.until - self.now()
            if left > 0.0:
                self._hear(left)
            elif not work.ending:
                self._ask_for_answer(work)
            else:
                work.late = True

    def _ask_for_answer(self, work: ChildRound) -> None:
        work.ending = True
        work.until = self.now() + self._pace.last_patience(self._limits)
        self._tell(Enough(work.ticket))

    def _hear(self, seconds: float = 0.0) -> None:
        """Move bytes, after waiting at most so long for some, and take in what the child says; lose it if that makes
        no sense."""
        if self._child is not None:
            try:
                self._listen(self._child, seconds)
            except Lost as loss:
                self._lose(loss)

    def _listen(self, child: Child, seconds: float) -> None:
        try:
            child.link.pump(seconds)
            while (data := child.link.peek()) is not None:
                self._take(child, from_bytes(data))
                child.link.drop()  # not earlier: what an interrupt kept from being taken in is heard again
        except LinkLost as error:
            raise Lost(f"the draft process ended: {error}") from error
        except (BadMessage, BadAnswer) as error:
            raise Lost(f"the draft process cannot be understood: {error}") from error

    def _await_first(self, child: Child) -> None:
        """Wait until the first child is ready, or raise Lost."""
        end = self.now() + self._limits.start
        while not child.ready:
            if (left := end - self.now()) <= 0.0:
                raise Lost(f"its model is not loaded after {self._limits.start:.0f} s")
            self._listen(child, left)

    def _take(self, child: Child, message: WireMessage) -> None:
        work = self._work
        match message:
            case Broken(reason):
                raise Lost(f"the draft process failed: {reason[:500]}")
            case Ready() if not child.ready:
                self._welcome(child)
            case HeadsDrawn(ticket) | RoundDrafted(ticket) | StaleHolding(ticket) if 0 < ticket <= self._ticket:
                if work and ticket == work.ticket:  # else it is late, and its round was given up
                    self._take_answer(child, work, message)
            case _:
                raise BadAnswer(f"it said {type(message).__name__} out of turn")

    def _take_answer(self, child: Child, work: ChildRound, message: HeadsDrawn | RoundDrafted | StaleHolding) -> None:
        asked = Asked(work.orders, work.by_ratio, self.target.runner.vocabulary)
        match message:
            case HeadsDrawn(_, heads):
                asked.check_heads(heads)
                work.heads = heads
            case StaleHolding(_, sessions):
                asked.check_stale(sessions)
                self._send_whole(work, sessions)
            case RoundDrafted(_, made, span):
                asked.check_round(made, span)
                self._pace.learn(made, span)
                self._failures, child.answered = 0, True
                work.made, work.span = made, span
                self._work = None

    def _send_whole(self, work: ChildRound, sessions: tuple[int, ...]) -> None:
        """Send the sessions whole of which the child holds too little, unless nobody waits for the round."""
        if work.late:
            self._work = None
            return
        work.orders = sent_whole(work.orders, sessions)
        self._allow(work)
        self._post(Work(work.ticket, work.orders))
        if work.target_done:  # sent before, but not of this work
            self._post(TargetDone(work.ticket))
        if work.ending:
            self._post(Enough(work.ticket))

    def _available(self) -> bool:
        """Whether a child can take work now; a lost one is replaced."""
        if self._work is not None and not self._work.late:  # of a round that an interrupt or an error ended
            self._ask_for_answer(self._work)
            self._await(self._work, _is_made)
        if self._child is None:
            self._start_again()
        return self._child is not None and self._child.ready and self._work is None

    def _welcome(self, child: Child) -> None:
        """Take a child into service: it is sent the sessions."""
        for session, request in self._sessions.items():
            self._post(Open(session, request))
        child.ready = True
        if child.again:
            self.restarts += 1
            log.warning("The draft worker was restarted; drafting resumes.")

    def _start_again(self) -> None:
        if self.now() < self._again_at:
            return
        self._started = self.now()
        try:
            self._child = Child.start(self._recipe, again=True)
        except OSError as error:
            self._lose(Lost(f"no new process could be made: {error}"))

    def _tell(self, message: WireMessage) -> None:
        """Send a message; a child that is not ready will be sent the sessions."""
        if self._child is not None and self._child.ready:
            self._post(message)
            self._child.link.pump()

    def _post(self, message: WireMessage) -> None:
        assert self._child
        self._child.link.post(to_bytes(message))

    def _lose_if_hung(self) -> None:
        """Give up a child that has missed its limit."""
        child, work, now = self._child, self._work, self.now()
        if child and not child.ready and now - self._started > self._limits.start:
            self._lose(Lost("the draft process takes too long to load its model"))
        elif child and work and now > work.taken_by and child.link.unsent:
            self._lose(Lost("the draft process does not read its order"))
        elif work and now > work.limit:
            self._lose(Lost("the draft process has missed the time limit of its order"))

    def _lose(self, loss: Lost) -> None:
        self._failures += 1
        # the inner bound: a float ends at 2 ** 1024
        wait = min(2.0 ** min(self._failures - 1, 10), LONGEST_RESTART_WAIT)
        self._again_at = self.now() + wait
        log.warning("Draft worker lost (%s); decoding goes on without it, and it is tried again in %.0f s.", loss, wait)
        self._stop_child(0.0)

    def _stop_child(self, seconds: float) -> None:
        """Let the child go, with what it was at work on; it has so many seconds to end by itself."""
        self._work = None
        if self._child:
            self._child.stop(seconds)
            self._child = None


def _is_made(work: ChildRound) -> bool:
    return work.made is not None


def _in_time(work: ChildRound | None) -> ChildRound:
    """What the child said in time; nothing where it was late or has no work."""
    return ChildRound(0, {}) if work is None or work.late else work
