"""Work on texts: JSON, chat templates, tokens. Long texts take long, and the event loop must not wait for them.

Owns the threads of this work. Invariant: for each kind of work, one request with a long body is worked on at a time.
So short requests find a thread, and the event loop gets its turn.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")
LONG_BODY = 2**16  # bytes of a body


class TextWork:
    """Does work of one kind in threads."""

    def __init__(self) -> None:
        self._long = asyncio.Semaphore(1)

    async def do(self, size: int, work: Callable[[], T]) -> T:
        """Do work in a thread, for a request whose body has `size` bytes."""
        if size <= LONG_BODY:
            return await asyncio.to_thread(work)
        async with self._long:
            return await _to_its_end(asyncio.to_thread(work))


async def _to_its_end(work: Coroutine[Any, Any, T]) -> T:
    """Wait for a thread, even if the waiting task is cancelled: the thread works on, and its slot is free only
    then."""
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait((task,))
        raise
