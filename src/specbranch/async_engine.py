"""`AsyncLLM`: a loaded LLM for any number of tasks and threads.

Owns what callers see, and the checks of their requests, which run in the callers' threads. Invariant: nothing here
touches models, sessions or answers. The `EngineThread` alone does; text comes back through a `Submission`.
"""

from __future__ import annotations

import asyncio
import secrets
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeGuard, TypeVar, cast

from specbranch.answer import Chunk, Output
from specbranch.config import SamplingParams, SpeculativeConfig, check_batch_size
from specbranch.core.loop import DraftState
from specbranch.core.orders import TokenLogprobs
from specbranch.core.scheduler import Snapshot
from specbranch.decoding import resolve
from specbranch.engine import LLM, MAX_BATCH, Params, as_sampling_params
from specbranch.engine_core import PromptLike
from specbranch.engine_thread import EngineThread
from specbranch.errors import BadParameter, ExchangeUnderWay
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
    """An LLM for many callers at once: their requests are decoded together, in one batch.

    Any thread or task may call it. `async with AsyncLLM(llm) as engine:` closes it at the end of the block.
    """

    def __init__(self, llm: LLM, max_batch: int = MAX_BATCH, buffer: int = BUFFER) -> None:
        """Take over a loaded LLM. From now on nobody else may use it.

        Args:
            llm: the LLM; its method decodes the requests that name none.
            max_batch: the maximum batch size, in samples. Default 64. The KV cache may allow fewer.
            buffer: how many tokens a stream may run ahead of its consumer. Default 256. Beyond, its request is paused
                until the consumer has caught up.
        """
        self._llm = llm
        llm.scheduler.most = check_batch_size(max_batch)
        self._thread = EngineThread(llm, buffer)
        self._exchanging = threading.Lock()  # held while a draft is exchanged

    def submit(
        self,
        prompt: PromptLike | Sequence[Message],
        params: Params = None,
        options: Options = None,
        *,
        streams: bool = False,
        **older: Any,
    ) -> Submission:
        """Send a request and return at once with its `Submission`. Mistakes in the request are raised here.

        Args:
            prompt: a text, token ids, or a conversation: `[{"role": "user", "content": "…"}, …]`.
            params: `SamplingParams`, or a mapping with their names. Default: greedy decoding of up to 256 tokens.
            options: how it is decoded and scheduled, a `RequestOptions` or a mapping with its names.
            streams: True if the caller takes chunks as they come; then `n` has to be 1. Default False: the text comes
                at the end.
            older: names of `options` that were arguments once. They still work, with a DeprecationWarning.
        """
        request = with_older(RequestOptions, options, older, "AsyncLLM.submit")
        return self._thread.send(self._wish(prompt, as_sampling_params(params), request, streams))[0]

    def compile_grammar(self, params: Params = None) -> None:
        """Compile the grammar of a request ahead, and refuse what cannot be followed; in any thread.

        Sending a request does so, too, in the caller's thread. A caller that must not wait calls this elsewhere first.
        """
        self._llm.core.models.grammars.compile(as_sampling_params(params))

    def submit_each(
        self,
        prompt: PromptLike | Sequence[Message],
        params: Params = None,
        options: Options = None,
        *,
        streams: bool = False,
        **older: Any,
    ) -> list[Submission]:
        """Send a request as `submit` does, but return a `Submission` for each of its n samples, so that all may be
        streamed."""
        request = with_older(RequestOptions, options, older, "AsyncLLM.submit_each")
        sampling = as_sampling_params(params)
        seed = secrets.randbits(63) if sampling.seed is None else sampling.seed
        wish = self._wish(prompt, replace(sampling, seed=seed), request)
        return self._thread.send(*(replace(wish, streams=streams, sample=sample) for sample in range(sampling.n)))

    async def score(
        self, prompt: PromptLike, top: int = 0, options: Options = None, **older: Any
    ) -> tuple[TokenLogprobs, ...]:
        """Return the target's log-probability of each token of a text but the first; see `LLM.score`. Cancelling the
        task cancels the request."""
        request = with_older(RequestOptions, options, older, "AsyncLLM.score")
        wish = self._wish(prompt, SamplingParams(logprobs=top), request)
        if len(wish.prompt) < 2:
            return ()
        (submission,) = self._thread.send(replace(wish, scored=True))
        return (await _whole(submission)).logprobs or ()

    async def generate(
        self, prompt: PromptLike | Sequence[Message], params: Params = None, options: Options = None, **older: Any
    ) -> Output:
        """Answer a prompt and return its `Output`; the arguments are those of `submit`. An error that ended the request
        is raised. Cancelling the task cancels the request."""
        request = with_older(RequestOptions, options, older, "AsyncLLM.generate")
        (submission,) = self._thread.send(self._wish(prompt, as_sampling_params(params), request))
        return await _whole(submission)

    def stream(
        self, prompt: PromptLike | Sequence[Message], params: Params = None, options: Options = None, **older: Any
    ) -> AsyncIterator[Chunk]:
        """Answer a prompt; yield its text as chunks as it comes. The arguments are those of `submit`.

        The last chunk carries the `Output`. If an error ended the request, it is raised instead. Closing the iterator
        cancels the request.
        """
        request = with_older(RequestOptions, options, older, "AsyncLLM.stream")
        return self._chunks(self._wish(prompt, as_sampling_params(params), request, streams=True))

    async def _chunks(self, wish: Wish) -> AsyncIterator[Chunk]:
        (submission,) = self._thread.send(wish)
        try:
            async for chunk in submission:
                error = chunk.output.error if chunk.output else None
                if chunk.pieces or chunk.rest or not error:
                    yield replace(chunk, output=None) if error else chunk
                if error is not None:
                    raise error
        finally:
            submission.cancel()

    async def exchange_draft(self, draft: str) -> None:
        """Load another draft while requests run, and exchange it between two rounds; see `LLM.exchange_draft`.

        Running requests go on, and their texts stay the same. An exchange that has begun goes on if the task is
        cancelled. A second one meanwhile is refused.
        """
        if not self._exchanging.acquire(blocking=False):
            raise ExchangeUnderWay("A draft is being loaded already. Send the request again once that is done.")
        # its own task: a cancelled caller must not leave a loaded draft behind that nobody uses
        await asyncio.shield(asyncio.ensure_future(self._exchange(draft)))

    async def _exchange(self, draft: str) -> None:
        try:
            new = await asyncio.to_thread(self._llm.load_draft, draft)
            try:
                await self._done(partial(self._llm.take_draft, new))
            except BaseException:
                new.discard()
                raise
        finally:
            self._exchanging.release()

    async def aside(self, make: Callable[[LLM], Iterator[Item]]) -> AsyncGenerator[Item, None]:
        """Run an iterator over the loaded LLM in the engine's thread; yield its items, one between two rounds.
        Closing this iterator closes that one."""
        made = await self._done(partial(make, self._llm))
        try:
            while (item := await self._done(partial(next, made, None))) is not None:
                yield item
        finally:
            self._thread.post(partial(_close, made))

    async def _done(self, task: Callable[[], Result]) -> Result:
        """Have the engine's thread run a task between two rounds; wait for its result."""
        future: Future[Result] = Future()
        self._thread.post(partial(_keep, future, task), refuse=True)
        return await asyncio.wrap_future(future)

    @property
    def tokenizer(self) -> Tokenizer:
        """The target's; any thread may use it."""
        return self._llm.tokenizer

    @property
    def context_length(self) -> int:
        """The maximum number of tokens of a prompt and its answer together."""
        return self._llm.context_length

    @property
    def vocabulary(self) -> int:
        """The number of token ids that the target scores."""
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
        """The method of requests that name none."""
        return self._llm.method

    @property
    def is_alive(self) -> bool:
        """True as long as requests are served. Once it is False, it stays so."""
        return self._thread.is_alive

    def stats(self) -> Snapshot:
        """Return the counts of requests and tokens as of the last round; from any thread."""
        return self._thread.snapshot

    def shut_down(self, drain: bool = True) -> None:
        """Refuse new requests, finish the running ones, and close the LLM; return when that is done. With `drain`
        false, cancel the running ones instead."""
        self._thread.shut_down(drain)

    async def close(self, drain: bool = True) -> None:
        """Shut down as `shut_down` does, in a task."""
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
        """Check a request in its caller's thread, without touching the models."""
        config, core = self._config(options), self._llm.core
        if streams and params.n > 1:
            raise BadParameter(f"n is {params.n}, but a stream carries one sample. Use generate, or n = 1.")
        ids = core.tokenizer.chat(prompt) if _is_conversation(prompt) else core.encode(cast(PromptLike, prompt))
        core.check_length(ids)
        self.compile_grammar(params)
        predicted = core.encode_prediction(options.prediction)
        return Wish(ids, params, config, options, streams, predicted=predicted)

    def _config(self, options: RequestOptions) -> SpeculativeConfig:
        """Return the settings of a request: its own, or the LLM's if it has none."""
        if options.method is None and options.speculative is None:
            return self._llm.config
        return resolve(options.speculative, options.method, self._llm.core.models.has_draft)


async def _whole(submission: Submission) -> Output:
    """Wait for an output; raise the error that ended it. If the task is cancelled meanwhile, cancel the request."""
    try:
        output = await submission.output()
    finally:
        submission.cancel()
    if output.error is not None:
        raise output.error
    return output


def _keep(future: Future[Result], task: Callable[[], Result]) -> None:
    """Run a task and put its result, or its error, in a future. Skip it if the future was cancelled."""
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
