"""The executor with the draft in another process and the target in this one, both at work at once.

The draft's process ("child") is started here, or listens on a network; `children` and `dialling` have both. Owns when a
child is started or reached again, and how long a round waits for it. Invariants: nothing here blocks on the link.
Losing the child never loses a request: the round goes on without branches. A new child is started after a wait that
doubles with each loss, and gets all sessions once it is ready. A late child is not stopped: rounds go on without
branches until it has answered, and its late answer is dropped. A child says how long it worked, never when: its clock
may be another machine's.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from specbranch.core.draft_evaluation import DraftEvaluation
from specbranch.core.loop import DraftState, KVSlots
from specbranch.core.orders import Branch, Drafted, DraftOrder, Effort, Orders, Reports, Span
from specbranch.core.request import Request
from specbranch.core.warm_up import warming
from specbranch.errors import ModelError, SpecBranchError
from specbranch.exec.child_answers import Asked, BadAnswer
from specbranch.exec.child_speed import ChildLimits, ChildSpeed, amount_of
from specbranch.exec.children import Child, DraftSource, Spawn
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
from specbranch.exec.link import LinkLost
from specbranch.exec.messages import (
    Broken,
    Enough,
    HeadsDrawn,
    Leave,
    Open,
    Ready,
    Recipe,
    RoundDrafted,
    Served,
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
HANDING_OVER = 0.05  # seconds in which a working child takes an order larger than the socket's buffer


class Lost(Exception):
    """The child died, hung or broke."""


@dataclass(slots=True)
class ChildRound:
    """An order that the child has not answered yet, and its answers so far."""

    ticket: int
    orders: dict[int, DraftOrder]
    by_ratio: frozenset[int] = frozenset()  # its sessions under the ratio rule
    sent: float = 0.0  # when it was sent
    until: float = 0.0  # until when the round waits for it
    limit: float = 0.0  # when the child counts as lost without an answer
    taken_by: float = 0.0  # when the child counts as lost if it has not read the order from the socket
    heads: dict[int, Branch] | None = None
    made: dict[int, Drafted] | None = None
    span: Span | None = None
    target_done: bool = False  # the child was sent TargetDone
    ending: bool = False  # the child was asked for its answer so far
    late: bool = False  # the round went on without its answer
    waiting: bool = False  # the round waits for it just now, so what comes has just arrived

    @property
    def announced(self) -> bool:
        """True if the first heads are known, or will not come any more."""
        return self.heads is not None or self.made is not None


@dataclass(frozen=True, slots=True)
class ReadyDraft:
    """The process of a draft that has loaded its model and has no work yet."""

    source: Spawn
    child: Child

    def discard(self) -> None:
        """End the process: it is not needed."""
        self.child.stop(0.0)


class Process(DecodesWithTarget):
    """Verifies here while a child drafts."""

    def __init__(
        self,
        target: Verifier,
        source: Recipe | DraftSource,
        limits: ChildLimits | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`source`: where the draft's worker comes from; of a recipe, a process is made here."""
        self.target = target
        self.restarts = 0
        self.now = clock
        self._warmed = warming((target.runner,))
        self._source: DraftSource = Spawn(source) if isinstance(source, Recipe) else source
        self._limits = limits or self._source.limits
        self._pace = ChildSpeed()
        self._sessions: dict[int, Request] = {}
        self._ticket = 0
        self._work: ChildRound | None = None  # the order that the child works on
        self._failures = 0  # in a row, without an answered order between them
        self._started = self._again_at = 0.0  # when the last child was started, and when the next may be
        self._closed = False
        self._child: Child | None = None
        try:
            self._child = self._source.start()
            self._await_first(self._child)
        except Lost as loss:
            self.close()
            raise ModelError(f"{self._source.unavailable}: {loss}.") from loss

    @property
    def child_pid(self) -> int | None:
        """The process id of the draft worker; None while there is none, or none that was started here."""
        return self._child.process.pid if self._child and self._child.process else None

    @property
    def served(self) -> Served | None:
        """What a worker on a network has said of its draft; None if the draft's process was started here."""
        return self._source.served

    @property
    def evaluation(self) -> DraftEvaluation | None:
        """The draft's evaluation, if a worker on a network has sent it."""
        return self._source.evaluation

    @property
    def round_trip(self) -> float:
        """Seconds of an order and its answer on their way, about."""
        return self._pace.trip

    @property
    def late_captures(self) -> int:
        """How often the target captured a CUDA graph or compiled a kernel in the middle of an answer."""
        return sum([runner.late_captures for runner in self._warmed])

    @property
    def draft_state(self) -> DraftState:
        """What the draft can do now; a child that has ended counts as lost before a round finds out."""
        child, work = self._child, self._work
        if child is None or child.has_exited:
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

    @property
    def exchanges_draft(self) -> bool:
        """True if the draft's process was started here, so that another one can take its place."""
        return isinstance(self._source, Spawn)

    def start_draft(self, recipe: Recipe) -> ReadyDraft:
        """Start the process of another draft beside the one at work, and wait until it is ready; in any thread."""
        source = Spawn(recipe, self._limits)
        child = source.start()
        try:
            _await_ready(child, time.monotonic() + self._limits.start)
        except BaseException as error:
            child.stop(0.0)
            if isinstance(error, (Lost, LinkLost, BadMessage)):
                raise ModelError(f"The process of the new draft could not start: {error}.") from error
            raise
        return ReadyDraft(source, child)

    def exchange_draft(self, ready: ReadyDraft) -> None:
        """Let another draft work from the next round on; it is sent the text of a session with its first order."""
        if self._closed:
            raise SpecBranchError("This executor was closed; make a new one.")
        self._stop_child(0.0)
        self._source, self._child, self._pace = ready.source, ready.child, ChildSpeed()
        self._failures, self._again_at, self._started = 0, 0.0, self.now()
        self._welcome(ready.child)

    def kv_slots(self) -> tuple[KVSlots, ...]:
        """Return the KV slots of the target, if it counts them; those of the child are unknown here."""
        return kv_slots_of(self.target)

    def free(self, session: int) -> None:
        """Free a session's KV cache in both models."""
        self.target.free(session)
        if self._sessions.pop(session, None):
            self._send(Leave(session))

    @property
    def tends_draft(self) -> bool:
        """True if `tend` has something to do."""
        return self._source.eager

    def tend(self) -> None:
        """Notice a lost worker, and reach it again, while there are no rounds."""
        self._hear()
        self._lose_if_hung()
        if self._source.eager and self._child is None and not self._closed:
            self._start_again()

    def close(self) -> None:
        """Stop the child, for good."""
        self._closed = True
        self._stop_child(0.5)

    def _begin(self, drafts: dict[int, DraftOrder]) -> ChildRound | None:
        """Send the child its work, if it can take any; a round without drafts only receives messages."""
        self.tend()
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
        work.sent = now = self.now()
        amount = amount_of(work.orders)
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
        if work is not None and not there(work):
            self._hear()  # what has come before this moment was on its way for an unknown time
        while work is not None and work is self._work and not work.late and not there(work):
            left = work.until - self.now()
            if left > 0.0:
                work.waiting = True
                self._hear(left)
                work.waiting = False
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
            # a worker on a network that was not reached has not ended
            said = str(error) if child.process is None and not child.ready else f"{self._source.name} ended: {error}"
            raise Lost(said) from error
        except (BadMessage, BadAnswer) as error:
            raise Lost(f"{self._source.name} cannot be understood: {error}") from error

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
                raise Lost(f"{self._source.name} failed: {reason[:500]}")
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
            case RoundDrafted(_, made, effort):
                asked.check_round(made, effort)
                work.span = self._placed(work, made, effort)
                self._failures, child.answered = 0, True
                work.made = made
                self._work = None

    def _placed(self, work: ChildRound, made: dict[int, Drafted], effort: Effort) -> Span:
        """Return a round's work on our clock: it began when it was ordered, and part of the time was the way.

        Only the time of an answer that was waited for shows how long the way is. No work takes longer than its answer.
        """
        passed = max(self.now() - work.sent, 0.0)
        effort = replace(effort, seconds=min(effort.seconds, passed))
        beyond = passed - effort.seconds
        if work.waiting:
            self._pace.learn_trip(beyond)
        self._pace.learn(made, effort)
        return effort.placed(work.sent, beyond if work.waiting else min(self._pace.trip, beyond))

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
        if child.link.round_trip:
            self._pace.learn_trip(child.link.round_trip)
        if child.again:
            self.restarts += 1
            log.warning("The draft worker is back; drafting resumes.")

    def _start_again(self) -> None:
        if self.now() < self._again_at:
            return
        self._started = self.now()
        try:
            self._child = self._source.start(again=True)
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
            self._lose(Lost(f"{self._source.name} takes too long to load its model"))
        elif child and work and now > work.taken_by and child.link.unsent:
            self._lose(Lost(f"{self._source.name} does not read its order"))
        elif work and now > work.limit:
            self._lose(Lost(f"{self._source.name} has missed the time limit of its order"))

    def _lose(self, loss: Lost) -> None:
        self._failures += 1
        # the inner bound: a float overflows at 2 ** 1024
        wait = min(2.0 ** min(self._failures - 1, 10), LONGEST_RESTART_WAIT, self._source.longest_wait)
        self._again_at = self.now() + wait
        # a worker that stays away is no news; one that was started here and fails again is
        level = logging.INFO if self._failures > 1 and self._child and self._child.process is None else logging.WARNING
        log.log(
            level, "Draft worker lost (%s); decoding goes on without it, and it is tried again in %.0f s.", loss, wait
        )
        self._stop_child(0.0)

    def _stop_child(self, seconds: float) -> None:
        """Stop the child and drop its work; it has `seconds` to end by itself."""
        self._work = None
        if self._child:
            self._child.stop(seconds)
            self._child = None


def _await_ready(child: Child, end: float) -> None:
    """Wait until a child has loaded its model; raise an error that says why it cannot."""
    while (data := child.link.peek()) is None:
        if (left := end - time.monotonic()) <= 0.0:
            raise Lost("its model is not loaded in time")
        child.link.pump(left)
    message = from_bytes(data)
    child.link.drop()
    if isinstance(message, Broken):
        raise Lost(message.reason[:500])
    if not isinstance(message, Ready):
        raise Lost(f"it said {type(message).__name__} instead of Ready")


def _is_made(work: ChildRound) -> bool:
    return work.made is not None


def _in_time(work: ChildRound | None) -> ChildRound:
    """Return the answer if it came in time; otherwise an empty one."""
    return ChildRound(0, {}) if work is None or work.late else work
