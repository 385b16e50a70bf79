"""How much is admitted: requests at a time, of all and of each key, and bytes of a body.

Owns the counts of running requests. It does not own connections: see `connections.py`. Invariant: an admitted request
is counted out exactly once, however it ends. A refused request costs next to nothing.
"""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from specbranch.serve.errors import ApiError, shutting_down, too_many
from specbranch.serve.keys import OPEN_PATHS
from specbranch.serve.settings import ServerSettings

WEIGHT = 0.1  # of a new request in the mean of how long they take
REFUSALS = ("closing", "size", "queue", "key")  # why a request was refused
LONGEST_RETRY_AFTER = 60  # seconds: the longest wait that a refusal recommends


@dataclass(slots=True)
class Admitted:
    """An admitted request of `samples` samples."""

    limits: Limits
    key: str | None
    samples: int
    since: float = field(default_factory=time.monotonic)
    is_over: bool = False

    def leave(self) -> None:
        """Count it out. A second call has no effect."""
        if not self.is_over:
            self.is_over = True
            self.limits.count_out(self)


class Limits:
    """Admits requests while there is room."""

    def __init__(self, settings: ServerSettings) -> None:
        self._settings = settings
        self._of_key: Counter[str] = Counter()
        self._mean = 0.0  # seconds that a request took
        self.samples = 0  # running or queued
        self.requests = 0
        self.refused: Counter[str] = Counter()  # by reason
        self.closing = False

    def admit(self, key: str | None, samples: int) -> Admitted:
        """Admit a request, or refuse it. Call this before its prompt is tokenised."""
        self.check(key, samples)
        self.samples += samples
        self.requests += 1
        self._of_key[key or ""] += 1
        return Admitted(self, key, samples)

    def check(self, key: str | None, samples: int = 1) -> None:
        """Refuse a request for which there is no room."""
        if self.closing:
            raise self.is_closing()
        most = self._settings.max_batch + self._settings.max_queue
        if samples > most:
            said = f"The request has {samples} samples (n times its prompts); this server takes {most} at a time."
            raise self._refusal("size", ApiError(400, f"{said} Ask for fewer."))
        if self.samples + samples > most:
            said = f"The queue is full: {self.samples} answers are being written or wait. Try again later."
            raise self._refusal("queue", too_many(said, self._wait(), "queue_full"))
        if key is not None and self._of_key[key] >= self._settings.max_per_key:
            said = f"This key has {self._of_key[key]} requests under way, which is the most. Wait for one of them."
            raise self._refusal("key", too_many(said, self._wait(), "too_many_requests"))

    def count_out(self, admitted: Admitted) -> None:
        """Note that a request has ended."""
        self.samples -= admitted.samples
        self.requests -= 1
        self._of_key[admitted.key or ""] -= 1
        self._of_key += Counter()  # keys without requests are forgotten
        self._mean += WEIGHT * (time.monotonic() - admitted.since - self._mean)

    def is_closing(self) -> ApiError:
        """Refuse a request, as the server is being stopped."""
        return self._refusal("closing", shutting_down())

    def _wait(self) -> int:
        return max(1, min(round(self._mean), LONGEST_RETRY_AFTER))

    def _refusal(self, reason: str, error: ApiError) -> ApiError:
        self.refused[reason] += 1
        return error


class Closing:
    """Refuses requests while the server is being stopped, before it reads their bodies. /health and the like still
    answer."""

    def __init__(self, app: ASGIApp, limits: Limits) -> None:
        self._app, self._limits = app, limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or refuse it."""
        if scope["type"] == "http" and self._limits.closing and scope["path"] not in OPEN_PATHS:
            await self._limits.is_closing().response(scope)(scope, receive, send)
        else:
            await self._app(scope, receive, send)


class BodyLimit:
    """Refuses bodies of more bytes than are allowed, as soon as that is known."""

    def __init__(self, app: ASGIApp, most: int) -> None:
        self._app, self._most = app, most

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, and count its body."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        said = dict(scope["headers"]).get(b"content-length", b"0")
        if said.isdigit() and int(said) > self._most:
            await self._error().response(scope)(scope, receive, send)
            return
        read = 0

        async def counted() -> Message:
            nonlocal read
            message = await receive()
            read += len(message.get("body", b""))
            if read > self._most:
                raise HTTPException(413, str(self._error()))  # the only kind that FastAPI passes on from a body
            return message

        await self._app(scope, counted, send)

    def _error(self) -> ApiError:
        return ApiError(413, f"The body is longer than {self._most} bytes. Send less text (or raise --max-body).")
