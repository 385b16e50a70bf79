"""`AsyncLLM`: one thread owns a loaded LLM; any number of tasks and threads send it requests.

Owns that thread, and the way of a request there; its text comes back by a `Submission`. Invariants: nobody but the
thread touches the models, sessions and answers; whatever happens there, every caller hears of the end of its request,
and no task ends the thread; a slow consumer holds up nobody but itself.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial
from math import inf
from threading import TIMEOUT_MAX
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeGuard, TypeVar, cast

from specbranch.answer import Answer, Chunk, Output, gather
from specbranch.config import SamplingParams
from specbranch.core.loop import DraftState
from specbranch.core.orders import TokenLogprobs
from specbranch.core.scheduler import Snapshot
from specbranch.core.session import RoundWatcher
from specbranch.engine import LLM, MOST, Params, PromptLike, Speculative, batch_size, checked
from specbranch.errors import BadParameter, EngineFailed, RequestCancelled, SpecBranchError
from specbranch.submission import Submission, Wish

if TYPE_CHECKING:
    from specbranch.text.chat_template import Message
    from specbranch.text.tokenizer import Tokenizer

__all__ = ["AsyncLLM", "Submission"]

log = logging.getLogger("specbranch")

Item = TypeVar("Item")
Result = TypeVar("Result")
BUFFER = 256  # tokens that a stream may be ahead of its consumer
CHUNKS_ALONE = 8  # of a prompt in one round while nobody decodes: another request, or a cancel, waits no longer


def _keep(future: Future[Result], task: Callable[[], Result]) -> None:
    """Do a task, unless nobody waits for it any more; what it raises is its caller's."""
    if future.set_running_or_notify_cancel():
        try:
            future.set_result(task())
        except StopIteration as error:  # which no future takes
            future.set_exception(RuntimeError(f"It ended before it had begun: {error!r}"))
        except BaseException as error:
            future.set_exception(error)


def _close(made: Iterator[Any]) -> None:
    if isinstance(made, Generator):
        made.close()


def _answers(llm: LLM, wish: Wish) -> list[Answer]:
    """The answers to be made to a request."""
    if wish.given:
        return [llm.scoring(wish.prompt, wish.params.logprobs or 0)]
    samples = llm.samples(wish.prompt, wish.params)
    return samples if wish.sample is None else [samples[wish.sample]]


@dataclass(slots=True)
class _Inbox:
    """What the thread is to do between two rounds; others put it here."""

    changed: threading.Condition = field(default_factory=threading.Condition)
    tasks: list[Callable[[], None]] = field(default_factory=list)
    closing: bool = False
    drain: bool = True
    ended: bool = False


class AsyncLLM:
    """An LLM for many callers at once."""

    def __init__(self, llm: LLM, max_batch: int = MOST, buffer: int = BUFFER) -> None:
        """Take over a loaded LLM, which nobody else may use from now on.

        `max_batch`: requests decoded at once; memory may allow fewer. `buffer`: tokens that a stream may be ahead of
        its consumer; beyond, its request rests until they were taken.
        """
        self._llm, self._buffer = llm, buffer
        self._scheduler = llm.scheduler
        self._scheduler.most, self._scheduler.served = batch_size(max_batch), True
        loop = self._scheduler.loop
        loop.limits = replace(loop.limits, prompt_tokens_alone=CHUNKS_ALONE * loop.limits.prefill_chunk)
        self._open: list[Submission] = []  # the thread's own
        self._inbox = _Inbox()
        self._snapshot = Snapshot()
        self._thread = threading.Thread(target=self._serve, name="specbranch", daemon=True)
        self._thread.start()

    def submit(
        self,
        prompt: PromptLike | Sequence[Message],
        params: Params = None,
        *,
        method: str | None = None,
        speculative: Speculative = None,
        priority: int = 0,
        deadline: float | None = None,
        streams: bool = False,
        on_round: RoundWatcher | None = None,
    ) -> Submission:
        """Send a request: a text, token ids, or a conversation; from any thread. What is wrong with it is raised here.

        `method`, `speculative`: another way to decode than the LLM's own, on the same models; `speculative=False` is
        plain decoding. Higher priorities go first. `deadline`: seconds in which it has to be finished; else it ends
        with an error and what it has. `streams`: its chunks will be taken as they come, one sample only. `on_round` is
        told what both models did in each round of its first sample, in the engine's thread: it has to be quick.
        """
        wish = self._wish(prompt, params, method, speculative, priority, deadline, streams)
        return self._sent(replace(wish, on_round=on_round))[0]

    def submit_each(
        self,
        prompt: PromptLike | Sequence[Message],
        params: Params = None,
        *,
        method: str | None = None,
        speculative: Speculative = None,
        priority: int = 0,
        deadline: float | None = None,
        streams: bool = False,
    ) -> list[Submission]:
        """Send a request each of whose n samples has a submission of its own, so that all may be streamed; see
        `submit`."""
        asked = checked(params)
        seed = secrets.randbits(63) if asked.seed is None else asked.seed
        wish = self._wish(prompt, replace(asked, seed=seed), method, speculative, priority, deadline)
        return self._sent(*(replace(wish, streams=streams, sample=sample) for sample in range(asked.n)))

    async def score(
        self, prompt: PromptLike, top: int = 0, *, priority: int = 0, deadline: float | None = None
    ) -> tuple[TokenLogprobs, ...]:
        """Return how likely the target finds each token of a text but the first, with the `top` likeliest in its
        place. Cancelling the task cancels the request."""
        params = SamplingParams(logprobs=top)
        wish = self._wish(prompt, params, None, None, priority, deadline)
        if len(wish.prompt) < 2:
            return ()
        (submission,) = self._sent(replace(wish, given=tuple(wish.prompt[1:])))
        return (await _whole(submission)).logprobs or ()

    async def generate(
        self,
        prompt: PromptLike | Sequence[Message],
        params: Params = None,
        *,
        method: str | None = None,
        speculative: Speculative = None,
        priority: int = 0,
        deadline: float | None = None,
    ) -> Output:
        """Answer a prompt; see `submit`. An error that ended the request is raised. Cancelling the task cancels the
        request."""
        (submission,) = self._sent(self._wish(prompt, params, method, speculative, priority, deadline))
        return await _whole(submission)

    def stream(
        self,
        prompt: PromptLike | Sequence[Message],
        params: Params = None,
        *,
        method: str | None = None,
        speculative: Speculative = None,
        priority: int = 0,
        deadline: float | None = None,
    ) -> AsyncIterator[Chunk]:
        """Answer a prompt as its text comes; see `submit`. Closing the iterator cancels the request. The last chunk
        carries the output; an error that ended the request is raised instead of it."""
        return self._chunks(self._wish(prompt, params, method, speculative, priority, deadline, streams=True))

    async def _chunks(self, wish: Wish) -> AsyncIterator[Chunk]:
        (submission,) = self._sent(wish)
        try:
            async for chunk in submission:
                error = chunk.output.error if chunk.output else None
                if chunk.pieces or not error:
                    yield replace(chunk, output=None) if error else chunk
                if error is not None:
                    raise error
        finally:
            submission.cancel()

    async def aside(self, make: Callable[[LLM], Iterator[Item]]) -> AsyncGenerator[Item, None]:
        """Have the thread make something else on the loaded models, an item between two rounds; closing the iterator
        closes what makes them."""
        made = await self._done(partial(make, self._llm))
        try:
            while (item := await self._done(partial(next, made, None))) is not None:
                yield item
        finally:
            self.post(partial(_close, made))

    async def _done(self, task: Callable[[], Result]) -> Result:
        """Have the thread do something between two rounds, and wait for it."""
        future: Future[Result] = Future()
        self.post(partial(_keep, future, task), refuse=True)
        return await asyncio.wrap_future(future)

    @property
    def tokenizer(self) -> Tokenizer:
        """The target's; any thread may use it."""
        return self._llm.tokenizer

    @property
    def context_length(self) -> int:
        """How many tokens prompt and answer may have together."""
        return self._llm.context_length

    @property
    def vocabulary(self) -> int:
        """How many token ids the target scores."""
        return self._llm.vocabulary

    @property
    def target(self) -> str:
        """The name of the target."""
        return self._llm.target

    @property
    def draft_state(self) -> DraftState:
        """What the draft can do now; see `LLM.draft_state`. Any thread may read it."""
        return self._llm.draft_state

    @property
    def method(self) -> str:
        """How requests are decoded that do not say how."""
        return self._llm.method

    @property
    def is_alive(self) -> bool:
        """Whether requests are served; once this is over it is over for good."""
        return not self._inbox.ended

    def stats(self) -> Snapshot:
        """What there is to do and was done, as of the last round; from any thread."""
        return self._snapshot

    def shut_down(self, drain: bool = True) -> None:
        """Take no more requests, finish those there are, or with `drain` false cancel them, and close the LLM; returns
        when that is done."""
        with self._inbox.changed:
            self._inbox.closing, self._inbox.drain = True, self._inbox.drain and drain
            self._inbox.changed.notify_all()
        self._thread.join()

    async def close(self, drain: bool = True) -> None:
        """The same for a task."""
        await asyncio.to_thread(self.shut_down, drain)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        await self.close(drain=error is None)

    def post(self, *tasks: Callable[[], None], refuse: bool = False) -> None:
        """Have the thread do something between two rounds. Once the engine is closed there is nothing left to do, and
        what must not be lost is refused."""
        with self._inbox.changed:
            if refuse and (self._inbox.closing or self._inbox.ended):
                raise BadParameter("This AsyncLLM was closed; make a new one.")
            if not self._inbox.ended:
                self._inbox.tasks += tasks
                self._inbox.changed.notify_all()

    def _wish(
        self,
        prompt: PromptLike | Sequence[Message],
        given: Params,
        method: str | None,
        speculative: Speculative,
        priority: int,
        deadline: float | None,
        streams: bool = False,
    ) -> Wish:
        """Check a request, in its caller's thread: nothing here touches the models."""
        params, config = checked(given), self._llm.resolved(method, speculative)
        if streams and params.n > 1:
            raise BadParameter(f"n is {params.n}, but a stream carries one sample. Use generate, or n = 1.")
        if not isinstance(priority, int) or isinstance(priority, bool):
            raise BadParameter(f"priority is {priority!r}; expected a whole number, higher ones first.")
        within = _seconds(deadline)
        ids = self._llm.tokenizer.chat(prompt) if _is_conversation(prompt) else self._llm.ids(cast(PromptLike, prompt))
        self._llm.check_length(ids)
        return Wish(ids, params, config, priority, within, streams)

    def _sent(self, *wishes: Wish) -> list[Submission]:
        """Send requests, all of them or none."""
        submissions = [Submission(self, wish) for wish in wishes]
        self.post(*(partial(self._admit, submission) for submission in submissions), refuse=True)
        return submissions

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
            llm = self._llm if wish.config == self._llm.config else self._llm.using(speculative=wish.config)
            submission.answers = _answers(llm, wish)
            submission.answers[0].session.on_round = wish.on_round
            self._open.append(submission)
            for answer in submission.answers:
                submission.tickets.append(llm.enqueue(answer, wish.priority, wish.within))
        except Exception as error:  # it is this request's own
            self._let_go(submission, error if isinstance(error, SpecBranchError) else _failure(error))

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
            _done_alone(self._llm.keep_experience)

    def _deliver_or_fail(self, submission: Submission) -> None:
        try:
            self._deliver(submission)
        except Exception as error:  # it is this request's own
            log.error("The text of a request could not be made; others go on.", exc_info=error)
            self._let_go(submission, _failure(error))

    def _rest(self, submission: Submission, resting: bool) -> None:
        submission.resting = resting
        for ticket in submission.tickets:
            self._scheduler.rest(ticket, resting)
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
            self._snapshot = self._scheduler.snapshot()

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


async def _whole(submission: Submission) -> Output:
    """Wait for an output, and raise what ended it; who is cancelled meanwhile cancels the request."""
    try:
        output = await submission.output()
    finally:
        submission.cancel()
    if output.error is not None:
        raise output.error
    return output


def _done_alone(task: Callable[[], object]) -> None:
    """Do something in the engine's thread, which no error in it may end: every request needs it."""
    try:
        task()
    except BaseException as error:
        log.error("A task failed in the engine's thread, which goes on.", exc_info=error)


def _seconds(deadline: float | None) -> float | None:
    """Return a deadline in seconds; infinity is none."""
    if deadline is None or (isinstance(deadline, float) and deadline == inf):
        return None
    if not isinstance(deadline, (int, float)) or isinstance(deadline, bool) or not deadline > 0:
        raise BadParameter(f"deadline is {deadline!r}; expected seconds above 0, or nothing.")
    return float(min(deadline, TIMEOUT_MAX))


def _failure(error: BaseException) -> EngineFailed:
    said = f"{type(error).__name__}: {error}".partition("\n")[0]
    return EngineFailed(f"The engine failed while it was at work ({said}). Send the request again.")


def _is_conversation(prompt: PromptLike | Sequence[Message]) -> TypeGuard[Sequence[Message]]:
    return isinstance(prompt, Sequence) and any(isinstance(message, Mapping) for message in prompt)
