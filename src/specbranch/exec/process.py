"""The draft in a child process, the target in this one, both at work at once.

Owns the child's life. Invariant: losing the child never loses a request: the round goes on without branches, a new
child is started beside after a wait that doubles with each loss, and once it is ready it is told the sessions anew.
"""

from __future__ import annotations

import logging
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from specbranch.core.loop import DraftState, Places
from specbranch.core.orders import Branch, Drafted, DraftOrder, Orders, Reports, Span
from specbranch.core.request import Request
from specbranch.errors import ModelError, SpecBranchError
from specbranch.exec.halves import Stretch, do_meanwhile, parted, places_of, reads_of, reports_of
from specbranch.exec.messages import (
    Broken,
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
from specbranch.exec.serial import told_whole
from specbranch.exec.verifier import Scored, Verifier
from specbranch.exec.wire import BadMessage, Wire, to_bytes

log = logging.getLogger("specbranch")

HUNG_AFTER = 60.0  # seconds without an answer after which a child counts as lost
PREFILL_ALLOWANCE = 0.1  # seconds more for each token it may have to read first
START_WITHIN = 600.0  # seconds in which a child must have made its worker
LONGEST_WAIT = 60.0  # seconds before a lost child is started again, however often it was lost


class Lost(Exception):
    """The child died, hung or broke."""


@dataclass(slots=True)
class Child:
    """A running draft process and our end of the line to it."""

    process: subprocess.Popen[bytes]
    line: Wire
    ready: bool = False
    torn: bool = False  # a message was left half read

    @classmethod
    def start(cls, recipe: Recipe) -> Child:
        """Start a process that makes its worker by a recipe; it says Ready when that is done."""
        hello = Hello(tuple(sys.path), recipe)
        to_bytes(hello)  # what cannot be sent needs no process
        ours, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-m", "specbranch.exec.child", str(theirs.fileno())]
            process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
        child = cls(process, Wire(ours.detach()))
        child.send(hello)
        return child

    def send(self, message: WireMessage) -> None:
        """Send, or raise Lost."""
        try:
            self.line.send(message)
        except OSError as error:
            raise Lost("the draft process hung up") from error

    def receive(self, seconds: float) -> WireMessage:
        """Return the next message, or raise Lost if it does not come."""
        try:
            if not self.line.poll(seconds):
                raise Lost(f"the draft process did not answer within {seconds:.1f} s")
            self.torn = True
            message = self.line.receive()
            self.torn = False
        except (EOFError, OSError) as error:
            raise Lost("the draft process ended") from error
        except BadMessage as error:
            raise Lost(f"the draft process cannot be understood: {error}") from error
        if isinstance(message, Broken):
            raise Lost(f"the draft process failed: {message.reason}")
        self.ready = self.ready or isinstance(message, Ready)
        return message

    def stop(self) -> None:
        """Hang up and make sure the process is gone."""
        self.line.close()
        try:
            self.process.wait(0.5)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


@dataclass(slots=True)
class ChildRound:
    """What the child has said in the round under way."""

    ticket: int
    orders: dict[int, DraftOrder]
    heads: dict[int, Branch] | None = None
    made: dict[int, Drafted] | None = None
    span: Span | None = None
    target_done: bool = False  # and the child was told so


class Process:
    """Verifies here while a child drafts."""

    def __init__(
        self,
        target: Verifier,
        recipe: Recipe,
        hung_after: float = HUNG_AFTER,
        start_within: float = START_WITHIN,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.target = target
        self.restarts = 0
        self.now = clock
        self._recipe = recipe
        self._hung_after = hung_after
        self._sessions: dict[int, Request] = {}
        self._ticket = 0
        self._start_within = start_within
        self._failures = 0  # in a row, without a round drafted between them
        self._started = self._again_at = 0.0  # when the last child was, and from when on the next may be
        self._closed = False
        self._child: Child | None = None
        try:
            self._child = Child.start(recipe)
            self._child.receive(start_within)
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
        child = self._child
        if child is None or child.process.poll() is not None:
            return "lost"
        return "ready" if child.ready else "starting"

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
        reached, short = self.target.read_on(reads_of(orders))
        do_meanwhile(orders)
        self._await_heads(work, scored)
        verdicts = self.target.judge(scored, (work.heads if work else None) or {})
        timed.end()
        # not earlier: a forward may have been launched only, and it is judging that waits for a device
        self._target_done(work)
        self._await_branches(work)
        made, drafting = (work.made, work.span) if work else (None, None)
        lost = drafts if made is None else ()
        return reports_of(orders, made or {}, verdicts, failed | short, drafting, timed.span(), lost, reached)

    def places(self) -> tuple[Places, ...]:
        """The places of the target, if it counts them; those of the child are not known here."""
        return places_of(self.target)

    def leave(self, session: int) -> None:
        """Free what a session holds."""
        self.target.leave(session)
        if self._sessions.pop(session, None):
            self._tell(Leave(session))

    def close(self) -> None:
        """Stop the child, for good."""
        self._closed = True
        self._stop_child()

    def _stop_child(self) -> None:
        if self._child:
            self._child.stop()
            self._child = None

    def _begin(self, drafts: dict[int, DraftOrder]) -> ChildRound | None:
        if not drafts or not self._available():
            return None
        self._ticket += 1
        work = ChildRound(self._ticket, drafts)
        return work if self._tell(Work(work.ticket, drafts)) else None

    def _target_done(self, work: ChildRound | None) -> None:
        if work and any(o.until_target for o in work.orders.values()):
            work.target_done = self._tell(TargetDone(work.ticket))

    def _await_heads(self, work: ChildRound | None, scored: Scored) -> None:
        """Under the ratio rule wait for the sampled heads, which are judged together with the target's rows."""
        if work is None:
            return
        wanted = any(s in scored and o.announces and self._sessions[s].by_ratio for s, o in work.orders.items())
        while wanted and work.heads is None and work.made is None and self._child:
            self._hear(work)

    def _await_branches(self, work: ChildRound | None) -> None:
        while work is not None and work.made is None and self._child:
            self._hear(work)

    def _hear(self, work: ChildRound) -> None:
        """Take one message of the child's into the round; a lost child leaves the round without branches."""
        assert self._child
        unread = max(len(order.on.tail) for order in work.orders.values())
        try:
            message = self._child.receive(self._hung_after + unread * PREFILL_ALLOWANCE)
        except Lost as loss:
            self._lose(loss)
            return
        match message:
            case HeadsDrawn(ticket, heads) if ticket == work.ticket:
                work.heads = heads
            case RoundDrafted(ticket, made, span) if ticket == work.ticket:
                work.made, work.span = made, span
                self._failures = 0
            case StaleHolding(ticket, stale) if ticket == work.ticket:
                work.orders = told_whole(work.orders, stale)
                self._tell(Work(ticket, work.orders))
                if work.target_done:  # told before, but not of this work
                    self._target_done(work)

    def _available(self) -> bool:
        """Whether a child can take work now; a lost one is replaced, and a new one that has become ready is told the
        sessions."""
        if self._child and self._child.torn:
            self._lose(Lost("an interrupt left a message half read"))
        if self._child is None:
            self._start_again()
        child = self._child
        if child and not child.ready:
            self._welcome(child)
        return self._child is not None and self._child.ready

    def _welcome(self, child: Child) -> None:
        """Take a new child into service if it is ready; give up one that takes too long."""
        late = self.now() - self._started > self._start_within
        if not late and not child.line.poll():
            return
        try:
            child.receive(0)
        except Lost as loss:
            self._lose(loss)
            return
        self.restarts += 1
        for session, request in self._sessions.items():
            self._tell(Open(session, request))
        log.warning("The draft worker was restarted; drafting resumes.")

    def _start_again(self) -> None:
        if self.now() < self._again_at:
            return
        self._started = self.now()
        try:
            self._child = Child.start(self._recipe)
        except (Lost, OSError) as error:
            self._lose(Lost(f"no new process could be made: {error}"))

    def _tell(self, message: WireMessage) -> bool:
        if self._child is None or not self._child.ready:
            return False
        try:
            self._child.send(message)
        except Lost as loss:
            self._lose(loss)
            return False
        return True

    def _lose(self, loss: Lost) -> None:
        self._failures += 1
        wait = min(2.0 ** min(self._failures - 1, 10), LONGEST_WAIT)  # the inner bound: a float ends at 2 ** 1024
        self._again_at = self.now() + wait
        log.warning("Draft worker lost (%s); decoding goes on without it, and it is tried again in %.0f s.", loss, wait)
        self._stop_child()
