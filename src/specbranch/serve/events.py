"""Answers to clients that may leave: work that ends when its client leaves, and streams of events.

Owns the watch for a client that has left, and how events are written. Invariant: however a request ends, what it held
is released at once. An event that was taken from its source is written; a client that reads slowly leaves the rest in
the source.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from contextlib import aclosing, suppress
from typing import Any, Protocol, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from specbranch.serve.connections import WRITER, BodyWriter

T = TypeVar("T")
GONE = 499  # the status in the log of a request whose client has left; nobody hears it
STREAMED: dict[int | str, dict[str, Any]] = {200: {"content": {"text/event-stream": {}}}}  # for the OpenAPI document
DONE = b"data: [DONE]\n\n"


class ClientGone(Exception):
    """The client has left."""


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Await work for a client whose body was read. If the client leaves, cancel it and raise ClientGone."""
    task, watch = asyncio.ensure_future(work), asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait((task, watch), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        await _end(task)
        await _end(watch)


class _SentEvents(Response):
    """Server-sent events; a subclass knows where they come from."""

    media_type = "text/event-stream"

    def __init__(self, close: Callable[[], None]) -> None:
        """`close` releases what the events are made from. It is called however the stream ends."""
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._close = close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send them; a client that leaves ends it."""
        try:
            with suppress(ClientGone):
                await unless_gone(receive, self._sent(scope.get(WRITER), send))
        finally:
            self._close()

    async def _sent(self, writer: BodyWriter | None, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await self._send_events(writer, send)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send_events(self, writer: BodyWriter | None, send: Send) -> None:
        raise NotImplementedError


class EventStream(_SentEvents):
    """Server-sent events of an iterator."""

    def __init__(self, events: AsyncGenerator[bytes, None], close: Callable[[], None]) -> None:
        super().__init__(close)
        self._events = events

    async def _send_events(self, writer: BodyWriter | None, send: Send) -> None:
        async with aclosing(self._events):
            async for event in self._events:
                await send({"type": "http.response.body", "body": event, "more_body": True})


class EventSource(Protocol):
    """What events are taken from, without waiting."""

    on_news: Callable[[], None] | None  # called in this event loop when there is something to take

    @property
    def is_over(self) -> bool:
        """True if the last event was taken."""
        ...

    def take(self) -> bytes:
        """Return all events that are there, as one text; nothing if there are none."""
        ...


class PushedEvents(_SentEvents):
    """Server-sent events that are written as soon as their source calls, without a task switch for each."""

    def __init__(self, source: EventSource, close: Callable[[], None]) -> None:
        super().__init__(close)
        self._source = source

    async def _send_events(self, writer: BodyWriter | None, send: Send) -> None:
        if writer is not None:
            await _Pump(self._source, writer).whole()
            return
        news = asyncio.Event()  # another server than ours, or an older client
        self._source.on_news = news.set
        while not self._source.is_over:
            news.clear()
            if events := self._source.take():
                await send({"type": "http.response.body", "body": events, "more_body": True})
            else:
                await news.wait()


class _Pump:
    """Moves events from a source to a client: everything that is there, whenever the client can take it."""

    def __init__(self, source: EventSource, writer: BodyWriter) -> None:
        self._source, self._writer = source, writer
        self._done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        source.on_news = self._run

    async def whole(self) -> None:
        """Wait until all events are written. A client that leaves has to be noticed elsewhere."""
        self._run()
        await self._done

    def _run(self) -> None:
        if self._done.done() or self._writer.is_gone or self._writer.waits(self._run):
            return
        try:
            if events := self._source.take():
                self._writer.write(events)
            if self._source.is_over:
                self._done.set_result(None)
        except Exception as error:  # it concerns this stream alone
            self._done.set_exception(error)


def event(data: str) -> bytes:
    """Return one event."""
    return b"data: " + data.encode() + b"\n\n"


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _end(task: Awaitable[Any]) -> None:
    assert isinstance(task, asyncio.Future)
    task.cancel()
    await asyncio.wait((task,))
    if not task.cancelled():
        task.exception()  # it was raised already, or nobody is left to hear it
