"""`Submission`: a running request as its caller sees it: its text as it comes, its output, the way to cancel it.

Owns the text that the caller has not taken yet, and the list of those who wait. It does not own the session: that is
the engine thread's. Invariant: new text and the end wake everybody who waits, in any thread or event loop.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields
from functools import partial
from math import inf
from threading import TIMEOUT_MAX
from typing import Any, Protocol, Self

from specbranch.answer import Answer, Chunk, Output, Piece
from specbranch.config import SamplingParams, SpeculativeConfig
from specbranch.core.scheduler import Ticket
from specbranch.core.session import RoundWatcher
from specbranch.decoding import Speculative
from specbranch.errors import BadParameter, SpecBranchError, unknown


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
    """

    method: str | None = None
    speculative: Speculative = None
    priority: int = 0
    deadline: float | None = None
    on_round: RoundWatcher | None = None

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


class Submission:
    """A running request: its text as it comes, its output, and the way to cancel it.

    Any thread or task may use it. If several iterate over it, each chunk goes to one of them.
    """

    def __init__(self, engine: SubmissionEngine, wish: Wish) -> None:
        self.wish = wish
        self.answers: list[Answer] = []  # only the engine's thread uses this and the next two
        self.tickets: list[Ticket] = []
        self.paused = False
        self._engine = engine
        self._changed = threading.Condition()
        self._pieces: list[Piece] = []
        self._output: Output | None = None
        self._error: SpecBranchError | None = None
        self._woken: list[tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]] = []
        self._taken = False  # the last chunk was taken
        self._awaited = 0  # callers that wait for the whole output and take no chunks meanwhile

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
        with self._whole(), self._changed:
            if not self._changed.wait_for(self._is_over, None if timeout is None else min(timeout, TIMEOUT_MAX)):
                raise TimeoutError(f"The request is not finished after {timeout:g} s; it goes on unless cancelled.")
            return self._finished()

    async def output(self) -> Output:
        """Wait for the output as `result` does, in a task."""
        with self._whole():
            while not self._is_over():
                await self._news(self._is_over)
            return self._finished()

    def __iter__(self) -> Iterator[Chunk]:
        """Yield chunks as they come, in a thread. The last one carries the output, with its error if it has one."""
        while not self._taken:
            with self._changed:
                self._changed.wait_for(self._has_news)
            if (chunk := self._take()) is not None:
                yield chunk

    async def __aiter__(self) -> AsyncIterator[Chunk]:
        """Yield chunks as they come, in a task."""
        while not self._taken:
            await self._news(self._has_news)
            if (chunk := self._take()) is not None:
                yield chunk

    def deliver(
        self, pieces: Sequence[Piece], output: Output | None = None, error: SpecBranchError | None = None
    ) -> int:
        """Add new text, and the end if it is there; wake everybody who waits. Return by how many tokens the consumer
        is behind, or 0 if somebody waits for the whole output."""
        with self._changed:
            if not self._is_over():
                self._pieces += pieces
                self._output, self._error = output, error
            self._changed.notify_all()
            woken, self._woken = self._woken, []
            behind = 0 if self._awaited else len(self._pieces)
        for loop, future in woken:
            with suppress(RuntimeError):  # its loop was closed
                loop.call_soon_threadsafe(_settle, future)
        return behind

    @contextmanager
    def _whole(self) -> Iterator[None]:
        """Resume the request, and keep it running while a caller waits for its end."""
        with self._changed:
            self._awaited += 1
        self._engine.post(partial(self._engine.go_on, self))
        try:
            yield
        finally:
            with self._changed:
                self._awaited -= 1

    def _is_over(self) -> bool:
        return self._output is not None or self._error is not None

    def _has_news(self) -> bool:
        return bool(self._pieces) or self._is_over() or self._taken

    def _finished(self) -> Output:
        if self._output is None:
            assert self._error is not None
            raise self._error
        return self._output

    def _take(self) -> Chunk | None:
        """Return all new text as a chunk, or None if there is none."""
        with self._changed:
            if self._taken or not self._has_news():
                return None
            pieces, self._pieces = self._pieces, []
            self._taken = self._is_over()
        if self._taken:
            return Chunk(tuple(pieces), self._finished())
        self._engine.post(partial(self._engine.go_on, self))
        return Chunk(tuple(pieces))

    async def _news(self, there: Callable[[], bool]) -> None:
        """Wait until `there` holds, or the next news."""
        loop = asyncio.get_running_loop()
        with self._changed:
            if there():
                return
            future: asyncio.Future[None] = loop.create_future()
            self._woken.append((loop, future))
        await future


def _settle(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
