"""A request of the front to a replica, by HTTP/1.1, and its answer as it arrives.

Owns the connection: one for each request. Invariant: an answer is either whole or lost; nothing waits for a connection
that has ended. While nobody takes what has arrived, nothing more is read, so a slow client slows its own answer alone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

import h11

from specbranch.cluster.leases import LEASE_HEADER, SECRET_HEADER, ReplicaAddress
from specbranch.errors import SpecBranchError

READ_AHEAD = 2**16  # bytes of an answer that may wait to be taken
CONNECT_SECONDS = 10.0
RawHeaders = Sequence[tuple[bytes, bytes]]
OWN_HEADERS = frozenset(  # of one connection alone, or the front's business: not passed on
    name.encode()
    for name in (
        *("connection", "keep-alive", "te", "trailer", "transfer-encoding", "upgrade", "expect", "date", "server"),
        *("host", "authorization", "proxy-authorization", "content-length", "x-request-id"),
        *(LEASE_HEADER, SECRET_HEADER),
    )
)


class ReplicaLost(SpecBranchError):
    """A replica ended before its answer was whole."""


@dataclass(frozen=True, slots=True)
class Asked:
    """A request as it is sent to a replica."""

    method: str
    target: bytes  # path and query
    headers: RawHeaders
    body: bytes
    id: str  # of the request, in logs


class Upstream(asyncio.Protocol):
    """One answer of a replica."""

    def __init__(self) -> None:
        self._parser = h11.Connection(h11.CLIENT)
        self._transport: asyncio.Transport | None = None
        self._taken: list[bytes] = []  # what has arrived and waits
        self._ahead = 0  # bytes of it
        self._head: asyncio.Future[h11.Response] = asyncio.get_running_loop().create_future()
        self.is_whole = self.is_lost = False
        self.on_news: Callable[[], None] | None = None  # called when there is something to take, or the end

    @classmethod
    async def sent(cls, address: ReplicaAddress, asked: Asked, lease: str = "") -> Upstream:
        """Send a request."""
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                _, made = await loop.create_connection(cls, address.host, address.port)
        except OSError as error:
            raise ReplicaLost(f"Replica {address.replica} takes no connection ({error}).") from None
        made._send(_request(address, asked, lease), asked.body)
        return made

    async def head(self) -> h11.Response:
        """Wait for the status and the headers."""
        return await asyncio.shield(self._head)

    async def body(self) -> bytes:
        """Wait for the whole body."""
        news, parts = asyncio.Event(), []
        self.on_news = news.set
        while not self.is_whole:
            news.clear()
            parts.append(self.take())
            if self.is_lost:
                raise ReplicaLost("A replica ended in the middle of its answer.")
            if not self.is_whole:
                await news.wait()
        return b"".join([*parts, self.take()])

    def take(self) -> bytes:
        """Return what has arrived since the last call."""
        taken, self._taken, self._ahead = b"".join(self._taken), [], 0
        if self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()
        return taken

    def close(self) -> None:
        """End the request, if it has not ended. The replica then frees what it held."""
        self.on_news = None
        if self._transport is not None:
            self._transport.abort()

    def lose(self) -> None:
        """End the request, as its replica has ended or says nothing."""
        if self._transport is not None:
            self._transport.abort()
        self._end()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Note the connection."""
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is no subclass

    def data_received(self, data: bytes) -> None:
        """Take new bytes."""
        self._parse(data)
        if self._ahead > READ_AHEAD and self._transport is not None:
            self._transport.pause_reading()
        self._tell()

    def connection_lost(self, exc: Exception | None) -> None:
        """Note the end."""
        self._end()

    def _send(self, request: h11.Request, body: bytes) -> None:
        sent = [self._parser.send(event) for event in (request, h11.Data(data=body), h11.EndOfMessage())]
        assert self._transport is not None
        self._transport.write(b"".join(part for part in sent if part))

    def _parse(self, data: bytes) -> None:
        try:
            self._parser.receive_data(data)
            while (event := self._parser.next_event()) not in (h11.NEED_DATA, h11.PAUSED):
                self._take_event(event)
                if self.is_whole:
                    return
        except h11.RemoteProtocolError:
            self._end()

    def _take_event(self, event: object) -> None:
        if isinstance(event, h11.Response):
            self._head.set_result(event)
        elif isinstance(event, h11.Data):
            self._taken.append(bytes(event.data))
            self._ahead += len(event.data)
        elif isinstance(event, h11.EndOfMessage):
            self.is_whole = True
            assert self._transport is not None
            self._transport.close()

    def _end(self) -> None:
        if self.is_whole or self.is_lost:
            return
        self.is_lost = True
        if not self._head.done():
            self._head.set_exception(ReplicaLost("A replica ended before its answer began."))
            self._head.exception()  # nobody may be left to hear it
        self._tell()

    def _tell(self) -> None:
        if self.on_news is not None:
            self.on_news()


def _request(address: ReplicaAddress, asked: Asked, lease: str) -> h11.Request:
    """Return a request as the front sends it: with the secret, and without what is the front's business."""
    kept = [(name, value) for name, value in asked.headers if name.lower() not in OWN_HEADERS]
    ours = {
        "host": "localhost",
        "connection": "close",
        "content-length": str(len(asked.body)),
        "x-request-id": asked.id,
        SECRET_HEADER: address.secret,
        LEASE_HEADER: lease,
    }
    named = [(name.encode(), value.encode()) for name, value in ours.items()]
    return h11.Request(method=asked.method.encode(), target=asked.target, headers=[*kept, *named])
