"""`EngineThread`: the one thread that touches a loaded LLM, and the way of a request there.

Owns the thread, its inbox and the open submissions. Callers check requests in their own threads (`async_engine.py`),
and make text of tokens there, too: after a round the thread says by number which tokens may be taken, to all callers of
an event loop in one message. Invariant: whatever fails here, every caller learns of the end of its request, and no task
ends the thread. A slow consumer delays nobody but itself.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from threading import TIMEOUT_MAX

from specbranch.answer import Answer
from specbranch.core.scheduler import Snapshot
from specbranch.engine import LLM
from specbranch.errors import BadParameter, RequestCancelled, SpecBranchError, engine_failure
from specbranch.submission import Listener, Submission, Wish, call_listeners

log = logging.getLogger("specbranch")

TEND_SECONDS = 1.0  # seconds between two looks at a draft worker on a network while there are no rounds
COUNT_SECONDS = 0.02  # seconds between two snapshots while no request ends
CHUNKS_ALONE = 8  # prefill chunks of a round in which nobody decodes; a new request, or a cancel, waits no longer


@dataclass(slots=True)
class _Inbox:
    """Tasks for the engine's thread between two rounds; other threads add them."""

    changed: threading.Condition = field(default_factory=threading.Condition)
    tasks: list[Callable[[], None]] = field(default_factory=list)
    closing: bool = False
    drain: bool = True
    ended: bool = False


class EngineThread:
    """Serves requests on an LLM until it is shut down. Any thread may call its public methods, except `drop` and
    `go_on`."""

    def __init__(self, llm: LLM, buffer: int) -> None:
        """Start the thread. `buffer`: how many tokens a stream may run ahead of its consumer."""
        self._llm, self._buffer = llm, buffer
        self._scheduler = llm.scheduler
        self._scheduler.served = True
        loop = self._scheduler.loop
        if loop.limits.prompt_tokens_alone is None:
            loop.limits = replace(loop.limits, prompt_tokens_alone=CHUNKS_ALONE * loop.limits.prefill_chunk)
        self._open: list[Submission] = []  # not over yet; only the thread uses it
        self._inbox = _Inbox()
        self.snapshot = Snapshot()  # counts of requests and tokens
        self._counted = 0.0  # when it was taken
        self._thread = threading.Thread(target=self._serve, name="specbranch", daemon=True)
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        """True as long as requests are served. Once it is False, it stays so."""
        return not self._inbox.ended

    def send(self, *wishes: Wish) -> list[Submission]:
        """Queue requests for the thread, all of them or none."""
        submissions = [Submission(self, wish) for wish in wishes]
        self.post(*(partial(self._admit, submission) for submission in submissions), refuse=True)
        return submissions

    def post(self, *tasks: Callable[[], None], refuse: bool = False) -> None:
        """Have the thread run tasks between two rounds. Once the engine is closed, tasks are dropped. With `refuse`
        they raise a BadParameter instead, already while it closes."""
        with self._inbox.changed:
            if refuse and (self._inbox.closing or self._inbox.ended):
                raise BadParameter("This AsyncLLM was closed; make a new one.")
            if not self._inbox.ended:
                self._inbox.tasks += tasks
                self._inbox.changed.notify_all()

    def shut_down(self, drain: bool = True) -> None:
        """Refuse new requests, finish the running ones, and close the LLM; return when that is done. With `drain`
        false, cancel the running ones instead."""
        with self._inbox.changed:
            self._inbox.closing, self._inbox.drain = True, self._inbox.drain and drain
            self._inbox.changed.notify_all()
        self._thread.join()

    # Only the thread itself calls the methods below.

    def drop(self, submission: Submission) -> None:
        """Cancel a request."""
        self._end_request(submission, RequestCancelled("The request was cancelled."))

    def go_on(self, submission: Submission) -> None:
        """Resume a paused request, because its consumer has caught up."""
        if submission.paused:
            self._set_paused(submission, False)

    def _serve(self) -> None:
        reason: SpecBranchError = RequestCancelled("The engine was closed before the request was finished.")
        try:
            while self._turn():
                pass
        except BaseException as error:  # of any kind: callers must not wait for ever
            reason = engine_failure(error)
        finally:
            self._end(reason)

    def _turn(self) -> bool:
        """Run the tasks of the inbox, then one round. Return False if the thread is to end."""
        tasks = self._wait()
        if tasks is None:
            _run_guarded(self._llm.core.tend_draft)
            return True
        for task in tasks:
            _run_guarded(task)
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
        self._deliver()
        return True

    def _wait(self) -> list[Callable[[], None]] | None:
        """Wait until there is work; return the tasks of the inbox. None: it is time to look after the draft."""
        inbox, tends = self._inbox, self._llm.core.tends_draft
        with inbox.changed:
            while not (inbox.tasks or inbox.closing or self._scheduler.busy):
                left = self._scheduler.seconds_left
                if left is not None and left <= 0.0:
                    break
                if tends and (left is None or left > TEND_SECONDS):
                    if not inbox.changed.wait(TEND_SECONDS):
                        return None
                    continue
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
                ticket = self._llm.core.enqueue(answer, wish.options.priority, wish.options.timeout)
                submission.tickets.append(ticket)
        except Exception as error:  # it concerns this request alone
            self._end_request(submission, error if isinstance(error, SpecBranchError) else engine_failure(error))

    def _answers(self, wish: Wish) -> list[Answer]:
        """Make the unfinished answers of a request."""
        core = self._llm.core
        if wish.scored:
            return [core.make_scoring(wish.prompt, wish.params.logprobs or 0)]
        decoding = self._llm.decoding if wish.config == self._llm.config else core.decoding(wish.config)
        shown = wish.options.shown_tokens
        samples = core.make_samples(wish.prompt, wish.params, decoding, wish.predicted, shown)
        return samples if wish.sample is None else [samples[wish.sample]]

    def _deliver(self) -> None:
        """Tell callers which tokens they may take, in one message for each event loop. Pause streams whose consumer is
        too far behind."""
        news = [(submission, *found) for submission in self._open if (found := submission.look()) is not None]
        ends = any(ended for _, _, ended in news)
        if ends or not self._scheduler.busy or time.monotonic() > self._counted + COUNT_SECONDS:
            self._take_snapshot()  # before the delivery: a caller whose request has ended finds it counted
        listeners: list[Listener] = []
        for submission, count, ended in news:
            listeners += submission.deliver(count, ended, buffer=self._buffer)
            if submission.paused:
                self._set_paused(submission, True)
        call_listeners(listeners)
        if ends:
            over = {submission for submission, _, ended in news if ended}
            self._open = [submission for submission in self._open if submission not in over]
            _run_guarded(self._llm.core.experiences.write)

    def _set_paused(self, submission: Submission, paused: bool) -> None:
        submission.paused = paused
        for ticket in submission.tickets:
            self._scheduler.set_paused(ticket, paused)
        self._take_snapshot()  # now: a paused request may have no further round

    def _end_request(self, submission: Submission, error: SpecBranchError) -> None:
        for ticket in submission.tickets:
            _run_guarded(partial(self._scheduler.cancel, ticket))  # even if this fails, the caller learns of the end
        if submission in self._open:
            self._open.remove(submission)
        call_listeners(submission.deliver(0, error=error))

    def _take_snapshot(self) -> None:
        """Store the counts of requests and tokens for other threads to read."""

        def take() -> None:
            self.snapshot, self._counted = self._scheduler.snapshot(), time.monotonic()

        _run_guarded(take)

    def _fail(self, error: Exception) -> None:
        """End all requests of the batch, or all requests if the batch is empty. A round failed, and nobody knows whose
        fault it was."""
        tickets = self._scheduler.tickets
        struck = [ticket for ticket in tickets if ticket.state == "live"] or tickets
        for ticket in struck:
            if not ticket.session.finished:
                ticket.session.fail(engine_failure(error))
            _run_guarded(partial(self._scheduler.cancel, ticket))  # a failed model may fail again at freeing

    def _end(self, reason: SpecBranchError) -> None:
        """End all requests, and close the LLM."""
        with self._inbox.changed:
            self._inbox.closing = self._inbox.ended = True
            tasks, self._inbox.tasks = self._inbox.tasks, []
        for task in tasks:
            _run_guarded(task)  # a request in the inbox becomes open, and is ended below
        for submission in list(self._open):
            self._end_request(submission, reason)
        self._take_snapshot()
        _run_guarded(self._llm.close)


def _run_guarded(task: Callable[[], object]) -> None:
    """Run a task and log its error: no error may end the thread, because every request needs it."""
    try:
        task()
    except BaseException as error:
        log.error("A task failed in the engine's thread, which goes on.", exc_info=error)
