"""A lease: the right to send one request straight to a replica. Ray counts it as a running request of the replica.

Owns the leases of one replica, and the check that a request comes from the front. Ray carries two small messages of a
lease; the request and its answer go by HTTP between the front and the replica. So an answer's events cost no Ray call.
Invariant: a lease ends when its request does, or if no request comes.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections import deque
from collections.abc import AsyncIterator
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field
from hmac import compare_digest
from typing import Any

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from specbranch.serve.errors import ApiError
from specbranch.serve.logs import JsonLines
from specbranch.serve.notes import note_of

LEASE_HEADER, SECRET_HEADER = "x-specbranch-lease", "x-specbranch-secret"
UNUSED_SECONDS = 10.0  # in which a lease waits for its request
MOST_LINES = 1000  # of the log that wait for a request to take them along


@dataclass(frozen=True, slots=True)
class ReplicaAddress:
    """Where a replica takes requests, and the secret without which it takes none."""

    replica: str
    host: str
    port: int
    secret: str = field(repr=False)


@dataclass(frozen=True, slots=True)
class Granted:
    """A lease, as the front receives it."""

    address: ReplicaAddress
    id: str


@dataclass(frozen=True, slots=True)
class Ended:
    """What is known once a request has ended: facts for its line in the log, and new lines of the replica's log."""

    facts: dict[str, Any]
    lines: tuple[dict[str, Any], ...]


@dataclass(slots=True)
class _Lease:
    begun: Future[None] = field(default_factory=Future)
    ended: Future[dict[str, Any]] = field(default_factory=Future)


class Leases:
    """The open leases of a replica. The server's thread tells of requests, another one waits."""

    def __init__(self, lines: deque[dict[str, Any]]) -> None:
        self._open: dict[str, _Lease] = {}
        self._lines = lines

    async def lend(self, address: ReplicaAddress) -> AsyncIterator[Granted | Ended]:
        """Yield a lease, and what is known at its end."""
        name, lease = secrets.token_hex(16), _Lease()
        self._open[name] = lease
        try:
            yield Granted(address, name)
            facts = await self._facts(lease)
            yield Ended(facts, tuple(self._lines.popleft() for _ in range(len(self._lines))))
        finally:
            self._open.pop(name, None)

    def begin(self, name: str) -> None:
        """Note that the request of a lease is here."""
        if (lease := self._open.get(name)) is not None:
            with suppress(InvalidStateError):  # it was too late
                lease.begun.set_result(None)

    def end(self, name: str, facts: dict[str, Any]) -> None:
        """Note that the request of a lease has ended."""
        if (lease := self._open.get(name)) is not None:
            with suppress(InvalidStateError):
                lease.ended.set_result(facts)

    async def _facts(self, lease: _Lease) -> dict[str, Any]:
        try:
            await asyncio.wait_for(asyncio.wrap_future(lease.begun), UNUSED_SECONDS)
        except TimeoutError:
            return {}
        return await asyncio.wrap_future(lease.ended)


class Leased:
    """Lets only requests of the front in, and tells the leases of their beginning and end."""

    def __init__(self, app: ASGIApp, leases: Leases, secret: str) -> None:
        self._app, self._leases, self._secret = app, leases, secret

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        if not compare_digest(headers.get(SECRET_HEADER, "").encode(), self._secret.encode()):
            said = "This is a replica, which takes requests of its front alone. Ask there."
            await ApiError(401, said, "authentication_error", "replica").response(scope)(scope, receive, send)
            return
        name = headers.get(LEASE_HEADER, "")
        self._leases.begin(name)
        try:
            await self._app(scope, receive, send)
        finally:
            self._leases.end(name, dict(note_of(scope).facts))


class KeptLines(logging.Handler):
    """Keeps warnings and errors of a replica, until a request takes them along to the front's log."""

    def __init__(self, with_text: bool) -> None:
        super().__init__(logging.WARNING)
        self._format = JsonLines(with_text)
        self.lines: deque[dict[str, Any]] = deque(maxlen=MOST_LINES)

    def emit(self, record: logging.LogRecord) -> None:
        """Keep one line."""
        self.lines.append(self._format.fields(record))
