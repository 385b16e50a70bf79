"""The executor with the draft in a child process and the target in this one, both at work at once.

Owns the child's life, and how long a round waits for it. Invariants: nothing here blocks on the socket. Losing the
child never loses a request: the round goes on without branches. A new child is started after a wait that doubles with
each loss, and gets all sessions once it is ready. A late child is not stopped: rounds go on without branches until it
has answered, and its late answer is dropped.
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
from specbranch.core.warm_up import warming
from specbranch.errors import ModelError, SpecBranchError
from specbranch.exec.child_answers import Asked, BadAnswer
from specbranch.exec.child_speed import ChildLimits, ChildSpeed, amount_of
from specbranch.exec.halves import (
    DecodesWithTarget,
    Made,
    Stretch,
    kv_slots_of,
    parted,
    prefills_of,
    reports_of,
    run_deferred,
)
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

LONGEST_RESTART_WAIT = 60.0  # seconds before a lost child is restarted, at most
MOST_ANSWER = 1 << 26  # bytes of a message from the child; many lanes with distributions need a tenth of it
HANDING_OVER = 0.05  # seconds in which a working child takes an order larger than the socket's buffer
DYING = 0.2  # seconds of waiting for a killed process


class Lost(Exception):
    """The child died, hung or broke."""


@dataclass(slots=True)
class Child:
    """A running draft process and our end of the link to it."""

    process: subprocess.Popen[bytes]
    link: Link
    ready: bool = False
    again: bool = False  # it replaces a lost one
    answered: bool = False  # it has answered at least one order

    @classmethod
    def start(cls, recipe: Recipe, again: bool = False) -> Child:
        """Start a process that makes its worker by a recipe; it sends Ready after that."""
        hello = to_bytes(Hello(tuple(sys.path), recipe))  # first: it raises if the recipe cannot be sent
        ours, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-m", "specbranch.exec.child", str(theirs.fileno())]
            process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
        child = cls(process, Link(ours, MOST_ANSWER), again=again)
        child.link.post(hello)
        return child

    def stop(self, seconds: float) -> None:
        """Close the link, and kill the process unless it ends within `seconds`."""
        self.link.close()
        try:
            self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.process.kill()
            with suppress(subprocess.TimeoutExpired):  # a driver may block it; do not wait for that
                self.process.wait(DYING)


@dataclass(slots=True)
class ChildRound:
    """An order that the child has not answered yet, and its answers so far."""

    ticket: int
    orders: dict[int, DraftOrder]
    by_ratio: frozenset[int] = frozenset()  # its sessions under the ratio rule
    until: float = 0.0  # until when the round waits for it
    limit: float = 0.0  # when the child counts as lost without an answer
    taken_by: float = 0.0  # when the child counts as lost if it has not read the order from the socket
    heads: dict[int, Branch] | None = None
    made: dict[int, Drafted] | None = None
    span: Span | None = None
    target_done: bool = False  # the child was sent TargetDone
    ending: bool = False  # the child was asked for its answer so far
    late: bool = False  # the round went on without its answer

    @property
    def announced(self) -> bool:
        """True if the first heads are known, or will not come any more."""
        return self.heads is not None or self.made is not None


class Process(DecodesWithTarget):
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
        self._warmed = warming((target.runner,))
        self._recipe = recipe
        self._limits = limits or ChildLimits()
        self._pace = ChildSpeed()
        self._sessions: dict[int, Request] = {}
        self._ticket = 0
        self._work: ChildRound | None = None  # the order that the child works on
        self._failures = 0  # in a row, without an answered order between them
        self._started = self._again_at = 0.0  # when the last child was started, and when the next may be
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
        """The process id of the draft worker; None while there is none."""
        return self._child.process.pid if self._child else None

    @property
    def late_captures(self) -> int:
        """How often the target captured a CUDA graph or compiled a kernel in the middle of an answer."""
        return sum([runner.late_captures for runner in self._warmed])

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
        self._send(Open(session, request))

    def run(self, orders: Mapping[int, Orders]) -> dict[int, Reports]:
        """Run one round, both models at once."""
        drafts, verifies = parted(orders)
        work = self._begin(drafts)
        timed = Stretch(self.target, self.now)
        started = self.target.start(verifies, None, prefills_of(orders))
        run_deferred(orders)
        self._await_heads(work, started.scored)
        verdicts = self.target.judge(started.scored, _in_time(work).heads or {}) if started.scored else {}
        timed.end()
        # Not earlier: a forward may only be launched, and `judge` waits for the device.
        self._target_done(work)
        self._await(work, _is_made)
        answer = _in_time(work)
        lost = drafts if answer.made is None else ()
        made, failed, spans = answer.made or {}, started.failed, (answer.span, timed.span())
        return reports_of(orders, made, verdicts, failed, *spans, lost, started.reached)

    def draft_meanwhile(self, drafts: dict[int, DraftOrder]) -> Made:
        """Let the child draft while the target makes a round of plain decoding."""
        work = self._begin(drafts)
        self._await(work, _is_made)
        answer = _in_time(work)
        return Made(answer.made or {}, answer.span, drafts if answer.made is None else ())

    def kv_slots(self) -> tuple[KVSlots, ...]:
        """Return the KV slots of the target, if it counts them; those of the child are unknown here."""
        return kv_slots_of(self.target)

    def free(self, session: int) -> None:
        """Free a session's KV cache in both models."""
        self.target.free(session)
        if self._sessions.pop(session, None):
            self._send(Leave(session))

    def close(self) -> None:
        """Stop the child, for good."""
        self._closed = True
        self._stop_child(0.5)

    def _begin(self, drafts: dict[int, DraftOrder]) -> ChildRound | None:
        """Send the child its work, if it can take any; a round without drafts only receives messages."""
        self._hear()
        self._lose_if_hung()
        if not drafts or not self._available():
            return None
        self._ticket += 1
        work = ChildRound(self._ticket, drafts, frozenset(s for s in drafts if self._sessions[s].by_ratio))
        self._allow(work)
        self._post(Work(work.ticket, drafts))
        self._work = work  # not earlier: an interrupt may leave an answer without a round, not the reverse
        self._hand_over()
        return work

    def _hand_over(self) -> None:
        """Write an order that is larger than the socket's buffer, to a child that reads meanwhile."""
        assert self._child
        link, end = self._child.link, time.monotonic() + HANDING_OVER
        link.pump()
        while link.unsent and (left := end - time.monotonic()) > 0.0:
            link.pump(left)

    def _allow(self, work: ChildRound) -> None:
        """Set the time limits of an order."""
        assert self._child
        now, amount = self.now(), amount_of(work.orders)
        work.until = now + self._pace.patience(amount, self._limits)
        work.taken_by = now + self._limits.hung
        work.limit = now + self._pace.limit(amount, self._limits, first=not self._child.answered)

    def _target_done(self, work: ChildRound | None) -> None:
        if work and work is self._work and any(o.until_target for o in work.orders.values()):
            work.target_done = True
            self._send(TargetDone(work.ticket))

    def _await_heads(self, work: ChildRound | None, scored: Scored | None) -> None:
        """Under the ratio rule wait for the sampled heads: the target judges them with its own rows."""
        orders = work.orders.items() if work and scored else ()
        if any(scored and s in scored and o.announces and self._sessions[s].by_ratio for s, o in orders):
            self._await(work, lambda round_: round_.announced)

    def _await(self, work: ChildRound | None, there: Callable[[ChildRound], bool]) -> None:
        """Wait for a part of the answer; when time is up, ask for the answer so far; then go on without it.

        Lanes are cut between two steps, by the clock. So what they keep never depends on a token drawn after it. A
        whole answer is dropped only if a single step, or prefill, takes too long, whatever its tokens are.
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
        self._send(Enough(work.ticket))

    def _hear(self, seconds: float = 0.0) -> None:
        """Wait at most `seconds` for bytes, and take the child's messages; an invalid one loses the child."""
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
                child.link.drop()  # not earlier: after an interrupt the message is taken again
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
                if work and ticket == work.ticket:  # otherwise it is late, and its round went on without it
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
        """Send stale sessions whole, unless the round goes on without the child."""
        if work.late:
            self._work = None
            return
        work.orders = sent_whole(work.orders, sessions)
        self._allow(work)
        self._post(Work(work.ticket, work.orders))
        if work.target_done:  # it was sent for the work before this one
            self._post(TargetDone(work.ticket))
        if work.ending:
            self._post(Enough(work.ticket))

    def _available(self) -> bool:
        """True if a child can take work now; a lost one is restarted."""
        if self._work is not None and not self._work.late:  # its round was ended by an interrupt or an error
            self._ask_for_answer(self._work)
            self._await(self._work, _is_made)
        if self._child is None:
            self._start_again()
        return self._child is not None and self._child.ready and self._work is None

    def _welcome(self, child: Child) -> None:
        """Open all sessions in a child that has become ready."""
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

    def _send(self, message: WireMessage) -> None:
        """Send a message at once; a child that is not ready gets all sessions later."""
        if self._child is not None and self._child.ready:
            self._post(message)
            self._child.link.pump()

    def _post(self, message: WireMessage) -> None:
        assert self._child
        self._child.link.post(to_bytes(message))

    def _lose_if_hung(self) -> None:
        """Lose a child that has missed a limit."""
        child, work, now = self._child, self._work, self.now()
        if child and not child.ready and now - self._started > self._limits.start:
            self._lose(Lost("the draft process takes too long to load its model"))
        elif child and work and now > work.taken_by and child.link.unsent:
            self._lose(Lost("the draft process does not read its order"))
        elif work and now > work.limit:
            self._lose(Lost("the draft process has missed the time limit of its order"))

    def _lose(self, loss: Lost) -> None:
        self._failures += 1
        # the inner bound: a float overflows at 2 ** 1024
        wait = min(2.0 ** min(self._failures - 1, 10), LONGEST_RESTART_WAIT)
        self._again_at = self.now() + wait
        log.warning("Draft worker lost (%s); decoding goes on without it, and it is tried again in %.0f s.", loss, wait)
        self._stop_child(0.0)

    def _stop_child(self, seconds: float) -> None:
        """Stop the child and drop its work; it has `seconds` to end by itself."""
        self._work = None
        if self._child:
            self._child.stop(seconds)
            self._child = None


def _is_made(work: ChildRound) -> bool:
    return work.made is not None


def _in_time(work: ChildRound | None) -> ChildRound:
    """Return the answer if it came in time; otherwise an empty one."""
    return ChildRound(0, {}) if work is None or work.late else work
