"""Work on texts: JSON, chat templates, tokens. It takes long where they are long, and the loop must not wait for it.

Owns the threads it is done in. Invariant: of requests with long bodies one is worked on at a time (for each kind of
work), so that those with short ones find a thread, and the loop its turn.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")
LONG_BODY = 2**16  # bytes of a body


class TextWork:
    """Where work of one kind is done."""

    def __init__(self) -> None:
        self._long = asyncio.Semaphore(1)

    async def do(self, size: int, work: Callable[[], T]) -> T:
        """Do work for a request whose body has so many bytes, in a thread."""
        if size <= LONG_BODY:
            return await asyncio.to_thread(work)
        async with self._long:
            return await _to_its_end(asyncio.to_thread(work))


async def _to_its_end(work: Coroutine[Any, Any, T]) -> T:
    """Wait for a thread, also if that is cancelled: it works on, so its place is not free before."""
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait((task,))
        raise
