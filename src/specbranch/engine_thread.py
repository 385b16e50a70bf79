"""`EngineThread`: the one thread that touches a loaded LLM, and the way of a request there.

Owns the thread, its inbox and the submissions that are not over. Callers check requests in their own threads
(`async_engine.py`); text goes back by a `Submission`. Invariants: whatever happens here, every caller hears of the end
of its request, and no task ends the thread; a slow consumer holds up nobody but itself.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from threading import TIMEOUT_MAX

from specbranch.answer import Answer, gather
from specbranch.core.scheduler import Snapshot
from specbranch.engine import LLM
from specbranch.errors import BadParameter, EngineFailed, RequestCancelled, SpecBranchError
from specbranch.submission import Submission, Wish

log = logging.getLogger("specbranch")

CHUNKS_ALONE = 8  # of a prompt in one round while nobody decodes: another request, or a cancel, waits no longer


@dataclass(slots=True)
class _Inbox:
    """What the thread is to do between two rounds; others put it here."""

    changed: threading.Condition = field(default_factory=threading.Condition)
    tasks: list[Callable[[], None]] = field(default_factory=list)
    closing: bool = False
    drain: bool = True
    ended: bool = False


class EngineThread:
    """Serves requests on an LLM until it is shut down. Any thread may call its public methods, but for `drop` and
    `go_on`."""

    def __init__(self, llm: LLM, buffer: int) -> None:
        """Start. `buffer`: tokens that a stream may be ahead of its consumer."""
        self._llm, self._buffer = llm, buffer
        self._scheduler = llm.scheduler
        self._scheduler.served = True
        loop = self._scheduler.loop
        loop.limits = replace(loop.limits, prompt_tokens_alone=CHUNKS_ALONE * loop.limits.prefill_chunk)
        self._open: list[Submission] = []  # the thread's own
        self._inbox = _Inbox()
        self.snapshot = Snapshot()  # what there is to do and was done, as of the last round
        self._thread = threading.Thread(target=self._serve, name="specbranch", daemon=True)
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        """Whether requests are served; once this is over it is over for good."""
        return not self._inbox.ended

    def send(self, *wishes: Wish) -> list[Submission]:
        """Take requests, all of them or none."""
        submissions = [Submission(self, wish) for wish in wishes]
        self.post(*(partial(self._admit, submission) for submission in submissions), refuse=True)
        return submissions

    def post(self, *tasks: Callable[[], None], refuse: bool = False) -> None:
        """Have the thread do something between two rounds. Once the engine is closed there is nothing left to do, and
        what must not be lost is refused."""
        with self._inbox.changed:
            if refuse and (self._inbox.closing or self._inbox.ended):
                raise BadParameter("This AsyncLLM was closed; make a new one.")
            if not self._inbox.ended:
                self._inbox.tasks += tasks
                self._inbox.changed.notify_all()

    def shut_down(self, drain: bool = True) -> None:
        """Take no more requests, finish those there are, or with `drain` false cancel them, and close the LLM; returns
        when that is done."""
        with self._inbox.changed:
            self._inbox.closing, self._inbox.drain = True, self._inbox.drain and drain
            self._inbox.changed.notify_all()
        self._thread.join()

    # What follows is done by the thread alone.

    def drop(self, submission: Submission) -> None:
        """Cancel a request."""
        self._let_go(submission, RequestCancelled("The request was cancelled."))

    def go_on(self, submission: Submission) -> None:
        """Go on with a request whose consumer has caught up."""
        if submission.resting:
            self._rest(submission, False)

    def _serve(self) -> None:
        reason: SpecBranchError = RequestCancelled("The engine was closed before the request was finished.")
        try:
            while self._turn():
                pass
        except BaseException as error:  # whatever it is, callers are not to wait for ever
            reason = _failure(error)
        finally:
            self._end(reason)

    def _turn(self) -> bool:
        """Do what came in, then one round; returns whether to go on."""
        for task in self._wait():
            _done_alone(task)
        if self._inbox.closing:
            for submission in list(self._open):
                if not self._inbox.drain:
                    return False
                self.go_on(submission)
            if not self._open:
                return False
        try:
            self._scheduler.step()
        except Exception as error:
            self._fail(error)
        self._note()  # whoever hears of an end finds it counted
        for submission in list(self._open):
            self._deliver_or_fail(submission)
        return True

    def _wait(self) -> list[Callable[[], None]]:
        """Wait until there is something to do; returns what came in."""
        inbox = self._inbox
        with inbox.changed:
            while not (inbox.tasks or inbox.closing or self._scheduler.busy):
                left = self._scheduler.seconds_left
                if left is not None and left <= 0.0:
                    break
                inbox.changed.wait(None if left is None else min(left, TIMEOUT_MAX))
            tasks, inbox.tasks = inbox.tasks, []
        return tasks

    def _admit(self, submission: Submission) -> None:
        wish = submission.wish
        try:
            submission.answers = self._answers(wish)
            submission.answers[0].session.on_round = wish.options.on_round
            self._open.append(submission)
            for answer in submission.answers:
                ticket = self._llm.core.enqueue(answer, wish.options.priority, wish.options.within)
                submission.tickets.append(ticket)
        except Exception as error:  # it is this request's own
            self._let_go(submission, error if isinstance(error, SpecBranchError) else _failure(error))

    def _answers(self, wish: Wish) -> list[Answer]:
        """Return the answers to be made to a request."""
        core = self._llm.core
        if wish.scored:
            return [core.scoring(wish.prompt, wish.params.logprobs or 0)]
        decoding = self._llm.decoding if wish.config == self._llm.config else core.decoding(wish.config)
        samples = core.samples(wish.prompt, wish.params, decoding)
        return samples if wish.sample is None else [samples[wish.sample]]

    def _deliver(self, submission: Submission) -> None:
        """Tell a caller what is new."""
        answers = submission.answers
        over = all(answer.session.finished for answer in answers)
        if submission.wish.streams:
            chunk = answers[0].chunk()
            if (chunk.pieces or over) and submission.tell(chunk.pieces, chunk.output) > self._buffer and not over:
                self._rest(submission, True)
        elif over:
            submission.tell((), gather([answer.output() for answer in answers]))
        if over:
            self._open.remove(submission)
            _done_alone(self._llm.core.experiences.write)

    def _deliver_or_fail(self, submission: Submission) -> None:
        try:
            self._deliver(submission)
        except Exception as error:  # it is this request's own
            log.error("The text of a request could not be made; others go on.", exc_info=error)
            self._let_go(submission, _failure(error))

    def _rest(self, submission: Submission, resting: bool) -> None:
        submission.resting = resting
        for ticket in submission.tickets:
            self._scheduler.set_paused(ticket, resting)
        self._note()  # there may be no further round to take it

    def _let_go(self, submission: Submission, error: SpecBranchError) -> None:
        for ticket in submission.tickets:
            _done_alone(partial(self._scheduler.cancel, ticket))  # whatever happens, the caller hears of the end
        if submission in self._open:
            self._open.remove(submission)
        submission.tell((), error=error)

    def _note(self) -> None:
        """Note what there is to do and was done, for other threads to read."""

        def note() -> None:
            self.snapshot = self._scheduler.snapshot()

        _done_alone(note)

    def _fail(self, error: Exception) -> None:
        """End all requests that were live, or all if none was: a round went wrong, and it is not known for whom."""
        tickets = self._scheduler.tickets
        struck = [ticket for ticket in tickets if ticket.state == "live"] or tickets
        for ticket in struck:
            if not ticket.session.finished:
                ticket.session.fail(_failure(error))
            _done_alone(partial(self._scheduler.cancel, ticket))  # a model that failed may fail again at freeing

    def _end(self, reason: SpecBranchError) -> None:
        """Let all go, and close."""
        with self._inbox.changed:
            self._inbox.closing = self._inbox.ended = True
            tasks, self._inbox.tasks = self._inbox.tasks, []
        for task in tasks:
            _done_alone(task)  # a request that came last is told of the end, too
        for submission in list(self._open):
            self._let_go(submission, reason)
        self._note()
        _done_alone(self._llm.close)


def _done_alone(task: Callable[[], object]) -> None:
    """Do something in the engine's thread, which no error in it may end: every request needs it."""
    try:
        task()
    except BaseException as error:
        log.error("A task failed in the engine's thread, which goes on.", exc_info=error)


def _failure(error: BaseException) -> EngineFailed:
    said = f"{type(error).__name__}: {error}".partition("\n")[0]
    return EngineFailed(f"The engine failed while it was at work ({said}). Send the request again.")
