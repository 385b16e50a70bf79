"""`Submission`: a running request as its caller sees it: its text as it comes, its output, the way to cancel it.

Owns how many tokens the caller may take and has taken, and the list of those who wait. It does not own the session:
that is the engine thread's, which only counts tokens here. Text is made in the thread that takes it. Invariant: new
tokens and the end wake everybody who waits, in any thread or event loop. An event loop is woken once a round, for all
its submissions together.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields
from functools import partial
from math import inf
from threading import TIMEOUT_MAX
from typing import Any, Protocol, Self, TypeVar

from specbranch.answer import Answer, Chunk, Output, gather
from specbranch.config import SamplingParams, SpeculativeConfig
from specbranch.core.scheduler import Ticket
from specbranch.core.session import RoundWatcher
from specbranch.decoding import Speculative
from specbranch.errors import BadParameter, SpecBranchError, engine_failure, unknown

log = logging.getLogger("specbranch")
LONG_ANSWER = 1024  # tokens whose text takes milliseconds to make
Given = TypeVar("Given")
Made = TypeVar("Made")
# What to call, and the event loop to call it in; None: the engine's thread calls it, so it has to be quick.
Listener = tuple[asyncio.AbstractEventLoop | None, Callable[[], None]]


class SubmissionEngine(Protocol):
    """The engine, as far as a submission calls it."""

    def post(self, *tasks: Callable[[], None]) -> None:
        """Have the engine's thread run tasks between two rounds."""
        ...

    def drop(self, submission: Submission) -> None:
        """Cancel a request; in the engine's thread."""
        ...

    def go_on(self, submission: Submission) -> None:
        """Resume a paused request, because its consumer has caught up; in the engine's thread."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOptions:
    """How a request of `AsyncLLM` is decoded and scheduled; how it is sampled is in its `SamplingParams`.

    Attributes:
        method: the name of the decoding method. Default None: the method of the `LLM`.
        speculative: settings of the method, a `SpeculativeConfig` or a mapping with its names; False is plain
            decoding. Default None: the settings of the `LLM` if no method is named, else the defaults.
        priority: requests with a higher number start first. Default 0.
        deadline: seconds from now. A request that is not finished by then ends with an error and its text so far.
            Default None: no deadline.
        on_round: called after each round of the first sample with what both models did. The engine's thread calls it,
            so it has to be quick. Default None.
        shown_tokens: special tokens that are part of the text, such as the markers of tool calls. Default: none.
        prediction: the text that the answer is expected to have, or its token ids. Lookup proposes it to the target, so
            what is right of it comes sooner. The answer is the same, whatever the prediction says. Default None.
    """

    method: str | None = None
    speculative: Speculative = None
    priority: int = 0
    deadline: float | None = None
    on_round: RoundWatcher | None = None
    shown_tokens: frozenset[int] = frozenset()
    prediction: str | Sequence[int] | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.priority, int) or isinstance(self.priority, bool):
            raise BadParameter(f"priority is {self.priority!r}; expected a whole number, higher ones first.")
        late = self.deadline
        if late is not None and (not isinstance(late, (int, float)) or isinstance(late, bool) or not late > 0):
            raise BadParameter(f"deadline is {late!r}; expected seconds above 0, or nothing.")

    @property
    def timeout(self) -> float | None:
        """The deadline as seconds that a clock can hold. An infinite deadline is none."""
        return None if self.deadline in (None, inf) else float(min(self.deadline, TIMEOUT_MAX))

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Build from a mapping, refusing keys that do not exist."""
        names = [one.name for one in fields(cls)]
        for name in values:
            if name not in names:
                raise unknown("option of a request", name, names)
        return cls(**values)


@dataclass(frozen=True, slots=True)
class Wish:
    """A request after its caller's thread has checked it."""

    prompt: list[int]
    params: SamplingParams
    config: SpeculativeConfig
    options: RequestOptions
    streams: bool = False
    sample: int | None = None  # the number of one sample; None: all n
    scored: bool = False  # score the prompt's own tokens, and answer nothing
    predicted: tuple[int, ...] = ()  # the tokens that the caller expects


class Submission:
    """A running request: its text as it comes, its output, and the way to cancel it.

    Any thread or task may use it. If several iterate over it, each chunk goes to one of them.
    """

    def __init__(self, engine: SubmissionEngine, wish: Wish) -> None:
        self.wish = wish
        self.answers: list[Answer] = []  # made by the engine's thread; read by the thread that takes the text
        self.tickets: list[Ticket] = []  # only the engine's thread uses it
        self.paused = False  # the engine's thread sets it
        self._engine = engine
        self._changing = threading.Lock()  # held for the counts and listeners below
        self._count = 0  # tokens of a stream that may be taken
        self._taken = 0  # tokens that were taken
        self._ended = False  # the engine is done with its sessions
        self._error: SpecBranchError | None = None
        self._listeners: list[Listener] = []  # called once
        self._subscriber: Listener | None = None  # called again and again
        self._called = False  # the subscriber was called and has taken nothing since
        self._last_taken = False  # the last chunk was taken
        self._awaited = 0  # callers that wait for the whole output and take no chunks meanwhile
        self._reading = threading.Lock()  # held by the one thread that makes text
        self._output: Output | None = None

    def cancel(self) -> None:
        """Cancel the request; it ends within a round. A request that is over stays as it is."""
        if not self._is_over():
            self._engine.post(partial(self._engine.drop, self))

    def result(self, timeout: float | None = None) -> Output:
        """Wait for the output and return it; if an error ended the request, `Output.error` has it.

        Raises a TimeoutError after `timeout` seconds; None, the default, waits without limit. The error of a request
        that has no output, such as a cancelled one, is raised. Meanwhile a stream may run ahead of its consumer by any
        number of tokens.
        """
        end = None if timeout is None else time.monotonic() + timeout
        with self._whole():
            while not self._is_over():
                left = None if end is None else end - time.monotonic()
                if not self._wait(self._is_over, left):
                    raise TimeoutError(f"The request is not finished after {timeout:g} s; it goes on unless cancelled.")
        return self._finished()

    async def output(self) -> Output:
        """Wait for the output as `result` does, in a task."""
        with self._whole():
            while not self._is_over():
                await self._news(self._is_over)
        if self._error is None and sum(answer.count for answer in self.answers) > LONG_ANSWER:
            return await asyncio.to_thread(self._finished)  # its text takes long: the event loop goes on meanwhile
        return self._finished()

    def __iter__(self) -> Iterator[Chunk]:
        """Yield chunks as they come, in a thread. The last one carries the output, with its error if it has one."""
        while not self._last_taken:
            self._wait(self._has_news)
            if (chunk := self.take()) is not None:
                yield chunk

    async def __aiter__(self) -> AsyncIterator[Chunk]:
        """Yield chunks as they come, in a task."""
        while not self._last_taken:
            await self._news(self._has_news)
            if (chunk := self.take()) is not None:
                yield chunk

    def take(self) -> Chunk | None:
        """Return all new text as a chunk, without waiting; None if there is none. The last chunk carries the output.
        The error of a request that has no output is raised."""
        with self._reading:
            with self._changing:
                self._called = False
                if self._last_taken or not self._has_news():
                    return None
                before, self._taken = self._taken, self._count
                count, ended, resumes = self._count, self._is_over(), self.paused
                self._last_taken = ended
            if resumes:
                self._engine.post(partial(self._engine.go_on, self))
            if not ended:
                return Chunk(self._made(self.answers[0].take, count))
        output = self._finished()
        return self.answers[0].last_chunk(before, output) if self.wish.streams else Chunk((), output)

    def subscribe(self, callback: Callable[[], None]) -> None:
        """Have `callback` called in the running event loop whenever there is something to take: after a call, not
        again before something was taken. There is one subscriber."""
        loop = asyncio.get_running_loop()
        with self._changing:
            self._subscriber, self._called = (loop, callback), self._has_news()
            if self._called:
                loop.call_soon(callback)

    # The engine's thread calls the next two.

    def look(self) -> tuple[int, bool] | None:
        """Return how many tokens of a stream there are, and True if the request is finished; None without news."""
        if not self.wish.streams:
            return (0, True) if all(answer.session.finished for answer in self.answers) else None
        answer = self.answers[0]
        count, ended = answer.count, answer.session.finished is not None
        return (count, ended) if ended or count > self._count else None

    def deliver(
        self, count: int, ended: bool = False, error: SpecBranchError | None = None, buffer: float = inf
    ) -> list[Listener]:
        """Let the caller take `count` tokens in all, and the end if it is there. Set `paused` if the caller is behind
        by more than `buffer` tokens. Return the listeners, which `call_listeners` calls."""
        with self._changing:
            if not self._is_over():
                self._count, self._ended, self._error = max(count, self._count), ended, error
                self.paused = count - self._taken > buffer and not (self._is_over() or self._awaited)
            listeners, self._listeners = self._listeners, []
            if self._subscriber is not None and not self._called:
                self._called = True
                listeners.append(self._subscriber)
        return listeners

    @contextmanager
    def _whole(self) -> Iterator[None]:
        """Resume the request, and keep it running while a caller waits for its end."""
        with self._changing:
            self._awaited += 1
        self._engine.post(partial(self._engine.go_on, self))
        try:
            yield
        finally:
            with self._changing:
                self._awaited -= 1

    def _is_over(self) -> bool:
        return self._ended or self._error is not None

    def _has_news(self) -> bool:
        return self._count > self._taken or self._is_over() or self._last_taken

    def _finished(self) -> Output:
        """Return the output of a request that is over; make it if this is the first call."""
        with self._reading:
            if self._error is not None:
                raise self._error
            if self._output is None:
                self._output = self._made(lambda answers: gather([one.output() for one in answers]), self.answers)
            return self._output

    def _made(self, make: Callable[[Given], Made], given: Given) -> Made:
        """Make text. If that fails, the request ends with an error, and others go on."""
        try:
            return make(given)
        except Exception as error:
            log.error("The text of a request could not be made; others go on.", exc_info=error)
            self.cancel()
            with self._changing:
                self._error = self._error or engine_failure(error)
            raise self._error from error

    async def _news(self, there: Callable[[], bool]) -> None:
        """Wait until `there` holds, or the next news."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()
        listener = loop, partial(_settle, future)
        if self._listen(listener, there):
            try:
                await future
            finally:
                self._unlisten(listener)

    def _wait(self, there: Callable[[], bool], seconds: float | None = None) -> bool:
        """Do as `_news`, in a thread. Return False if neither came within `seconds`."""
        news = threading.Event()
        listener: Listener = None, news.set
        if not self._listen(listener, there):
            return True
        try:
            return news.wait(None if seconds is None else max(min(seconds, TIMEOUT_MAX), 0.0))
        finally:
            self._unlisten(listener)

    def _listen(self, listener: Listener, there: Callable[[], bool]) -> bool:
        with self._changing:
            if there():
                return False
            self._listeners.append(listener)
            return True

    def _unlisten(self, listener: Listener) -> None:
        """Remove a listener that was not called: its caller waits no longer."""
        with self._changing:
            if listener in self._listeners:
                self._listeners.remove(listener)


def call_listeners(listeners: Iterable[Listener]) -> None:
    """Wake threads that wait, and have each event loop call its listeners: one wake-up for each loop, however many
    listeners it has."""
    by_loop: dict[asyncio.AbstractEventLoop | None, list[Callable[[], None]]] = {}
    for loop, callback in listeners:
        by_loop.setdefault(loop, []).append(callback)
    for loop, callbacks in by_loop.items():
        if loop is None:
            _call_all(callbacks)
            continue
        with suppress(RuntimeError):  # it was closed
            loop.call_soon_threadsafe(_call_all, callbacks)


def _call_all(callbacks: Iterable[Callable[[], None]]) -> None:
    for callback in callbacks:
        try:
            callback()
        except Exception as error:  # it concerns this listener alone
            log.error("A listener of a request failed; others go on.", exc_info=error)


def _settle(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
