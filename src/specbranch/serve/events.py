"""Answers to clients that may leave: work that ends when its client leaves, and streams of events.

Owns the watch for a client that has left. Invariant: however a request ends, what it held is released at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from contextlib import aclosing, suppress
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

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


class EventStream(Response):
    """Server-sent events, as they come."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes, None], close: Callable[[], None]) -> None:
        """`close` releases what the events are made from. It is called however the stream ends."""
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._events, self._close = events, close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send them; a client that leaves ends it."""
        try:
            async with aclosing(self._events):
                with suppress(ClientGone):
                    await unless_gone(receive, self._sent(send))
        finally:
            self._close()

    async def _sent(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for event in self._events:
            await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


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
