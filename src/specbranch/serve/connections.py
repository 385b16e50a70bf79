"""Connections: how many may be open, in all and from one address, and how long they may take to send a request.

Owns the counts, the clocks of clients that send too slowly or do not read, and the direct way of a stream's bytes to
its client (`BodyWriter`). It knows nothing of requests' contents.
Invariant: a client that sends nothing, or too slowly, is cut off. If there is no room for a new client, the connection
that has waited longest without a whole request is closed. So a new client is refused only if all others are being
answered.
"""

from __future__ import annotations

import asyncio
import json
import logging
import resource
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, get_args

import h11
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

from specbranch.serve.errors import ApiError
from specbranch.serve.settings import ServerSettings

log = logging.getLogger("specbranch.serve")
BACKLOG = 128  # connections that the system holds for us, and that are accepted in one go
RESERVE = 3 * BACKLOG  # open files besides connections: those accepted and not counted yet, models, the log
SLOWEST = 2**14  # bytes a second of a body; slower ones are cut off
Cut = Literal["late", "unread", "crowded", "full"]  # why a connection is refused or cut off
CUT_REASONS: tuple[Cut, ...] = get_args(Cut)
Phase = Literal["header", "body"]
WRITER = "specbranch.writer"  # the key of a request's `BodyWriter` in its scope


class Connections:
    """The open connections of a server, and which of them wait for a request."""

    def __init__(self, settings: ServerSettings) -> None:
        self.read_timeout, self.stall_timeout = settings.read_timeout, settings.timeout
        self.cuts: Counter[str] = Counter()  # by reason
        self._most = settings.max_connections
        # all clients of a unix socket have the same address, which is none
        self._most_each = settings.max_per_address if settings.uds is None else settings.max_connections
        self._of: Counter[str] = Counter()  # by address
        self._open: set[GuardedProtocol] = set()
        self._waiting: dict[str, dict[GuardedProtocol, None]] = {}  # by address; those without a request, oldest first

    def __len__(self) -> int:
        return len(self._open)

    def fit_files(self) -> None:
        """Raise the limit of open files to what the connections need; if that is refused, allow fewer connections."""
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        spare = RESERVE + _open_files()
        needed = self._most + spare
        allowed = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        if soft != resource.RLIM_INFINITY and soft < allowed:
            resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
        if allowed < needed:
            self._most = max(allowed - spare, 1)
            said = "This process may have %d open files, so %d connections are allowed (ulimit -n, --max-connections)."
            log.warning(said, allowed, self._most)

    def enter(self, new: GuardedProtocol) -> bool:
        """Count a connection in. Return False if there is no room and no waiting connection to close."""
        if self._of[new.address] >= self._most_each and not self._make_room(new.address):
            return False
        if len(self._open) >= self._most and not self._make_room(self._of.most_common(1)[0][0]):
            return False
        self._open.add(new)
        self._of[new.address] += 1
        return True

    def leave(self, old: GuardedProtocol) -> None:
        """Count a connection out. One that is out already stays so."""
        if old in self._open:
            self.note(old, waits=False)
            self._open.remove(old)
            self._of[old.address] -= 1
            if not self._of[old.address]:
                del self._of[old.address]

    def note(self, one: GuardedProtocol, waits: bool) -> None:
        """Note if a connection waits for a request; then it may be closed to make room."""
        waiting = self._waiting.setdefault(one.address, {})
        if waits and one in self._open:
            waiting.setdefault(one)
        else:
            waiting.pop(one, None)
        if not waiting:
            del self._waiting[one.address]

    def _make_room(self, address: str) -> bool:
        oldest = next(iter(self._waiting.get(address, ())), None)
        if oldest is None:
            return False
        self.leave(oldest)
        oldest.cut("crowded", "A connection without a request made room for another one.")
        return True


class BodyWriter:
    """Writes the body of a started answer, in HTTP/1.1's chunks, without a task and without h11.

    h11 has written the header before, and writes the end; in between it counts nothing.
    """

    def __init__(self, protocol: GuardedProtocol, cycle: RequestResponseCycle) -> None:
        self._protocol, self._cycle = protocol, cycle

    @property
    def is_gone(self) -> bool:
        """True if the client has left."""
        return self._cycle.disconnected or self._cycle.transport.is_closing()

    def write(self, data: bytes) -> None:
        """Write some bytes; if the client does not read, they wait in memory."""
        self._cycle.transport.write(b"%x\r\n%b\r\n" % (len(data), data))

    def waits(self, callback: Callable[[], None]) -> bool:
        """Return True if the client reads too slowly; then `callback` is called once it has caught up."""
        if not self._cycle.flow.write_paused:
            return False
        self._protocol.on_resume = callback
        return True


class GuardedProtocol(H11Protocol):
    """HTTP by h11, with clocks: for a header, for a body, and for an answer that nobody reads."""

    def __init__(self, connections: Connections, **given: Any) -> None:
        super().__init__(**given)
        self.address = ""
        self._all = connections
        self._phase: Phase | None = None
        self._since, self._received = 0.0, 0
        self._clock: asyncio.TimerHandle | None = None
        self._stall: asyncio.TimerHandle | None = None
        self.on_resume: Callable[[], None] | None = None  # called when the client reads again
        self._served_app, self.app = self.app, self._with_writer

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Let a client in, or refuse it because there is no room."""
        super().connection_made(transport)
        self.address = self.client[0] if self.client else ""
        if self._all.enter(self):
            self._follow()
        else:
            self.cut("full", "A connection was refused: as many as allowed are being answered.", _no_room())

    def connection_lost(self, exc: Exception | None) -> None:
        """Count it out, and stop the clocks."""
        self._all.leave(self)
        for clock in (self._clock, self._stall):
            if clock is not None:
                clock.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Take new bytes."""
        self._received += len(data)
        super().data_received(data)
        self._follow(len(data))

    def on_response_complete(self) -> None:
        """Continue with the next request."""
        super().on_response_complete()
        self._follow()

    def pause_writing(self) -> None:
        """Start a clock for a client that does not read: it has as long as a request may take."""
        super().pause_writing()
        late = "A connection was closed: its client did not read the answer."
        self._stall = self.loop.call_later(self._all.stall_timeout, self.cut, "unread", late)

    def resume_writing(self) -> None:
        """Stop that clock."""
        super().resume_writing()
        if self._stall is not None:
            self._stall.cancel()
        callback, self.on_resume = self.on_resume, None
        if callback is not None:
            callback()

    def cut(self, reason: Cut, said: str, last: ApiError | None = None) -> None:
        """Close the connection. `last` is an error to send before."""
        self._all.cuts[reason] += 1
        log.info(said)
        if last is None:
            self.transport.abort()
        else:
            self.transport.write(_written(last))
            self.transport.close()

    async def _with_writer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the app, with a writer in the scope of a request whose answer may come in chunks."""
        if scope["http_version"] == "1.1" and scope["method"] != "HEAD":
            scope[WRITER] = BodyWriter(self, self.cycle)
        await self._served_app(scope, receive, send)

    def _follow(self, new: int = 0) -> None:
        """Note what the client has to send next; start its clock if that has changed. `new`: bytes already there."""
        if self.transport.is_closing():
            return
        phase = self._next_phase()
        self._all.note(self, waits=self.conn.their_state in (h11.IDLE, h11.SEND_BODY))
        if phase == self._phase:
            return
        self._phase, self._since, self._received = phase, self.loop.time(), new
        if self._clock is not None:
            self._clock.cancel()
        self._clock = None if phase is None else self.loop.call_later(self._all.read_timeout, self._check)

    def _next_phase(self) -> Phase | None:
        if self.conn.their_state is h11.SEND_BODY:
            return "body"
        # between two requests uvicorn's own clock runs, until the next one starts
        begins = self.cycle is None or self.conn.trailing_data[0]
        return "header" if self.conn.their_state is h11.IDLE and begins else None

    def _check(self) -> None:
        """Cut off a client that is late. A body that arrives quickly enough gets more time."""
        if self.transport.is_closing():
            self.transport.abort()  # the client does not read the rest
            return
        earned = self._received / SLOWEST if self._phase == "body" else 0.0
        left = self._since + self._all.read_timeout + earned - self.loop.time()
        if self._phase == "body" and self.flow.read_paused:
            left = self._all.read_timeout  # the server itself does not read now
        if left > 0:
            self._clock = self.loop.call_later(left, self._check)
            return
        is_silent = self.cycle is None and not self.conn.trailing_data[0]
        is_answered = self._phase == "body" and self.cycle.response_started
        said = "A connection was closed: it sent no whole request in time."
        self.cut("late", said, None if is_silent or is_answered else _too_late(self._all.read_timeout))


def _open_files() -> int:
    try:
        return sum(1 for _ in Path("/proc/self/fd").iterdir())
    except OSError:  # no such folder here
        return BACKLOG


def _no_room() -> ApiError:
    said = "As many connections as this server allows are being answered. Close some of yours, or try again later."
    return ApiError(503, said, "server_error", "too_many_connections", headers={"retry-after": "1"})


def _too_late(seconds: float) -> ApiError:
    said = f"The request did not arrive within {seconds:g} s. Send it at once (or raise --read-timeout)."
    return ApiError(408, said, "timeout_error", "request_too_slow")


def _written(error: ApiError) -> bytes:
    """Return an error as an answer on a connection that has no request yet."""
    body = json.dumps(error.body()).encode()
    headers = {
        **error.headers,
        "content-type": "application/json",
        "content-length": str(len(body)),
        "connection": "close",
    }
    phrase = {408: "Request Timeout", 503: "Service Unavailable"}[error.status]
    lines = [f"HTTP/1.1 {error.status} {phrase}", *(f"{name}: {value}" for name, value in headers.items())]
    return "\r\n".join([*lines, "", ""]).encode() + body
