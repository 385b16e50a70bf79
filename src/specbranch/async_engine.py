"""`AsyncLLM`: a loaded LLM for any number of tasks and threads.

Owns what callers see, and the checks of their requests, in their own threads. Invariant: nothing here touches models,
sessions and answers: the `EngineThread` alone does, and text comes back by a `Submission`.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeGuard, TypeVar, cast

from specbranch.answer import Chunk, Output
from specbranch.config import SamplingParams, SpeculativeConfig, batch_size
from specbranch.core.loop import DraftState
from specbranch.core.orders import TokenLogprobs
from specbranch.core.scheduler import Snapshot
from specbranch.decoding import resolve
from specbranch.engine import LLM, MAX_BATCH, Params, checked
from specbranch.engine_core import PromptLike
from specbranch.engine_thread import EngineThread
from specbranch.errors import BadParameter
from specbranch.older_names import with_older
from specbranch.submission import RequestOptions, Submission, Wish

if TYPE_CHECKING:
    from specbranch.text.chat_template import Message
    from specbranch.text.tokenizer import Tokenizer

__all__ = ["AsyncLLM", "RequestOptions", "Submission"]

Item = TypeVar("Item")
Result = TypeVar("Result")
Options = RequestOptions | Mapping[str, Any] | None
BUFFER = 256  # tokens that a stream may be ahead of its consumer


class AsyncLLM:
    """An LLM for many callers at once."""

    def __init__(self, llm: LLM, max_batch: int = MAX_BATCH, buffer: int = BUFFER) -> None:
        """Take over a loaded LLM, which nobody else may use from now on.

        `max_batch`: requests decoded at once; memory may allow fewer. `buffer`: tokens that a stream may be ahead of
        its consumer; beyond, its request rests until they were taken.
        """
        self._llm = llm
        llm.scheduler.most = batch_size(max_batch)
        self._thread = EngineThread(llm, buffer)

    def submit(
        self,
        prompt: PromptLike | Sequence[Message],
        params: Params = None,
        options: Options = None,
        *,
        streams: bool = False,
        **older: Any,
    ) -> Submission:
        """Send a request: a text, token ids, or a conversation; from any thread. What is wrong with it is raised here.

        `options`: how it is decoded and scheduled, a `RequestOptions` or a mapping with its names. `streams`: the
        caller takes chunks as they come, of one sample only. `older`: names of options were arguments once; they still
        work, with a DeprecationWarning.
        """
        asked = with_older(RequestOptions, options, older, "AsyncLLM.submit")
        return self._thread.send(self._wish(prompt, checked(params), asked, streams))[0]

    def submit_each(
        self,
        prompt: PromptLike | Sequence[Message],
        params: Params = None,
        options: Options = None,
        *,
        streams: bool = False,
        **older: Any,
    ) -> list[Submission]:
        """Send a request each of whose n samples has a submission of its own, so that all may be streamed; see
        `submit`."""
        asked, sampling = with_older(RequestOptions, options, older, "AsyncLLM.submit_each"), checked(params)
        seed = secrets.randbits(63) if sampling.seed is None else sampling.seed
        wish = self._wish(prompt, replace(sampling, seed=seed), asked)
        return self._thread.send(*(replace(wish, streams=streams, sample=sample) for sample in range(sampling.n)))

    async def score(
        self, prompt: PromptLike, top: int = 0, options: Options = None, **older: Any
    ) -> tuple[TokenLogprobs, ...]:
        """Return how likely the target finds each token of a text but the first, with the `top` likeliest tokens at
        each position. Cancelling the task cancels the request."""
        asked = with_older(RequestOptions, options, older, "AsyncLLM.score")
        wish = self._wish(prompt, SamplingParams(logprobs=top), asked)
        if len(wish.prompt) < 2:
            return ()
        (submission,) = self._thread.send(replace(wish, scored=True))
        return (await _whole(submission)).logprobs or ()

    async def generate(
        self, prompt: PromptLike | Sequence[Message], params: Params = None, options: Options = None, **older: Any
    ) -> Output:
        """Answer a prompt; see `submit`. An error that ended the request is raised. Cancelling the task cancels the
        request."""
        asked = with_older(RequestOptions, options, older, "AsyncLLM.generate")
        (submission,) = self._thread.send(self._wish(prompt, checked(params), asked))
        return await _whole(submission)

    def stream(
        self, prompt: PromptLike | Sequence[Message], params: Params = None, options: Options = None, **older: Any
    ) -> AsyncIterator[Chunk]:
        """Answer a prompt as its text comes; see `submit`. Closing the iterator cancels the request. The last chunk
        carries the output; an error that ended the request is raised instead of it."""
        asked = with_older(RequestOptions, options, older, "AsyncLLM.stream")
        return self._chunks(self._wish(prompt, checked(params), asked, streams=True))

    async def _chunks(self, wish: Wish) -> AsyncIterator[Chunk]:
        (submission,) = self._thread.send(wish)
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
            self._thread.post(partial(_close, made))

    async def _done(self, task: Callable[[], Result]) -> Result:
        """Have the thread do something between two rounds, and wait for it."""
        future: Future[Result] = Future()
        self._thread.post(partial(_keep, future, task), refuse=True)
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
        return self._thread.is_alive

    def stats(self) -> Snapshot:
        """What there is to do and was done, as of the last round; from any thread."""
        return self._thread.snapshot

    def shut_down(self, drain: bool = True) -> None:
        """Take no more requests, finish those there are, or with `drain` false cancel them, and close the LLM; returns
        when that is done."""
        self._thread.shut_down(drain)

    async def close(self, drain: bool = True) -> None:
        """The same for a task."""
        await asyncio.to_thread(self.shut_down, drain)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        await self.close(drain=error is None)

    def _wish(
        self,
        prompt: PromptLike | Sequence[Message],
        params: SamplingParams,
        options: RequestOptions,
        streams: bool = False,
    ) -> Wish:
        """Check a request, in its caller's thread: nothing here touches the models."""
        config, core = self._config(options), self._llm.core
        if streams and params.n > 1:
            raise BadParameter(f"n is {params.n}, but a stream carries one sample. Use generate, or n = 1.")
        ids = core.tokenizer.chat(prompt) if _is_conversation(prompt) else core.ids(cast(PromptLike, prompt))
        core.check_length(ids)
        return Wish(ids, params, config, options, streams)

    def _config(self, options: RequestOptions) -> SpeculativeConfig:
        """Return how a request is decoded: as by the LLM unless it says otherwise."""
        if options.method is None and options.speculative is None:
            return self._llm.config
        return resolve(options.speculative, options.method, self._llm.core.models.has_draft)


async def _whole(submission: Submission) -> Output:
    """Wait for an output, and raise what ended it; who is cancelled meanwhile cancels the request."""
    try:
        output = await submission.output()
    finally:
        submission.cancel()
    if output.error is not None:
        raise output.error
    return output


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


def _is_conversation(prompt: PromptLike | Sequence[Message]) -> TypeGuard[Sequence[Message]]:
    return isinstance(prompt, Sequence) and any(isinstance(message, Mapping) for message in prompt)
