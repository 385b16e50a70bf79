"""The front: the one address of several replicas. It has keys, limits, connections and the log; replicas have models.

Owns a request's way to a replica and back, and when it is sent again. It knows Ray only as somebody who lends replicas
(`Replicas`). Invariant: a request whose client has received nothing is sent to another replica if its own one ends; a
stream that has begun ends with an error object. Either way its client hears the end.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Protocol
from urllib.parse import quote

from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from specbranch import __version__
from specbranch.cluster.beginnings import beginning_key
from specbranch.cluster.front_metrics import FRONT, FrontMetrics
from specbranch.cluster.leases import Ended, ReplicaAddress
from specbranch.cluster.merging import merged
from specbranch.cluster.relaying import RelayedEvents, lost
from specbranch.cluster.upstream import Asked, ReplicaLost, Upstream
from specbranch.serve.app import add_layers
from specbranch.serve.bodies import SHORT_BODY
from specbranch.serve.connections import Connections
from specbranch.serve.errors import SERVER, ApiError, add_handlers
from specbranch.serve.events import GONE, ClientGone, PushedEvents, unless_gone
from specbranch.serve.limits import Admitted, Limits
from specbranch.serve.notes import RequestNote, note_of
from specbranch.serve.operations import PROMETHEUS
from specbranch.serve.settings import ServerSettings
from specbranch.serve.text_work import TextWork

log = logging.getLogger("specbranch.serve")
MOST_TRIES = 3  # replicas that may end while they answer one request: it might be the request
LATE_SECONDS = 15.0  # that a replica has to report a deadline; then the front does
ASK_SECONDS = 5.0  # for a replica's metrics or state
FACT_SECONDS = 2.0  # for what the log says of a request
ELSEWHERE = (429, 503)  # of a replica: another one may have room
METHODS_SERVED = ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"]  # a replica refuses what it does not take
DRAFT_STATES_FROM_WORST = ("lost", "starting", "busy", "ready", "none")


class Lease(Protocol):
    """The right to send one request to a replica."""

    id: str

    @property
    def address(self) -> ReplicaAddress:
        """Where the request goes."""
        ...

    def watch(self, upstream: Upstream) -> None:
        """Have the answer end if it becomes known that the replica has."""
        ...

    async def ended(self) -> Ended:
        """Wait until the replica has counted the request out."""
        ...


class Replicas(Protocol):
    """Lends replicas."""

    @property
    def ways(self) -> dict[str, int]:
        """How requests were placed, and how often."""
        ...

    def running(self) -> Sequence[ReplicaAddress]:
        """Return all that take requests."""
        ...

    async def lend(self, key: str | None, avoid: Sequence[str]) -> Lease:
        """Wait for a replica: the best one for a prompt's beginning, if possible none of those to avoid."""
        ...


class Front:
    """Takes requests at one address, and sends each to a replica."""

    def __init__(self, replicas: Replicas, settings: ServerSettings, most_replicas: int) -> None:
        self._replicas, self._settings = replicas, settings
        room = most_replicas * (settings.max_batch + settings.max_queue)
        self.limits = Limits(replace(settings, max_queue=room - settings.max_batch))
        self.connections = Connections(settings)
        self.metrics = FrontMetrics()
        self._reading = TextWork()

    async def forward(self, request: Request) -> Response:
        """Answer by a replica."""
        note = note_of(request.scope)
        try:
            body = await request.body()
        except ClientDisconnect:
            return Response(status_code=GONE)
        note.body_bytes = len(body)
        is_work = request.method == "POST"
        admitted = self.limits.admit(note.key, 1) if is_work else None
        try:
            key = await self._key(body) if is_work else None
            work = _Forwarded(self, self._replicas, _asked(request, note, body), request.url.path, note, admitted)
            return await unless_gone(request.receive, work.answered(key, self._settings.timeout + LATE_SECONDS))
        except BaseException as error:
            if admitted is not None:
                admitted.leave()
            if isinstance(error, ClientGone):
                return Response(status_code=GONE)
            raise

    async def health(self, request: Request) -> Response:
        """Report that the front is alive; replicas that are not are started again."""
        return JSONResponse({"status": "ok"})

    async def ready(self, request: Request) -> Response:
        """Report if requests are accepted: by how many replicas, and the worst state of their drafts."""
        found = await asyncio.gather(*(self._ask(one, b"/ready") for one in self._replicas.running()))
        states = [state for one in found if one is not None and (state := _object(one)).get("status") == "ready"]
        takes = bool(states) and not self.limits.closing
        drafts = {one.get("draft") for one in states}
        draft = next((state for state in DRAFT_STATES_FROM_WORST if state in drafts), "none")
        status = "ready" if takes else "closing" if self.limits.closing else "starting"
        return JSONResponse({"status": status, "draft": draft, "replicas": len(states)}, 200 if takes else 503)

    async def version(self, request: Request) -> Response:
        """Which version this is."""
        return JSONResponse({"version": __version__})

    async def tell_prometheus(self, request: Request) -> Response:
        """Return the metrics of all replicas, and the front's own."""
        running = self._replicas.running()
        found = await asyncio.gather(*(self._ask(one, b"/metrics") for one in running))
        texts = {one.replica: text.decode() for one, text in zip(running, found, strict=True) if text is not None}
        texts[FRONT] = self.metrics.text(self.limits, self.connections, len(running), self._replicas.ways)
        return PlainTextResponse(merged(texts), media_type=PROMETHEUS)

    async def _key(self, body: bytes) -> str | None:
        if len(body) <= SHORT_BODY:
            return beginning_key(body)
        return await self._reading.do(len(body), lambda: beginning_key(body))

    async def _ask(self, address: ReplicaAddress, path: bytes) -> bytes | None:
        """Return what a replica says of itself; None if it says nothing in time."""
        upstream: Upstream | None = None
        try:
            async with asyncio.timeout(ASK_SECONDS):
                upstream = await Upstream.sent(address, Asked("GET", path, (), b"", ""))
                await upstream.head()
                return await upstream.body()
        except (ReplicaLost, TimeoutError):
            return None
        finally:
            if upstream is not None:
                upstream.close()


class _Forwarded:
    """One request on its way."""

    def __init__(
        self, front: Front, replicas: Replicas, asked: Asked, path: str, note: RequestNote, admitted: Admitted | None
    ) -> None:
        self._front, self._replicas, self._asked, self._path = front, replicas, asked, path
        self._note, self._admitted = note, admitted
        self._avoid: list[str] = []  # replicas that ended, or had no room

    async def answered(self, key: str | None, within: float) -> Response:
        """Return the answer: whole, or a stream that has begun."""
        end = time.monotonic() + within
        try:
            async with asyncio.timeout(within):
                return await self._tried(key, end)
        except TimeoutError:
            if self._replicas.running():
                raise ApiError(408, "No replica answered in time.", "timeout_error", "deadline_passed") from None
            said = "No replica runs at the moment. Try again later."
            raise ApiError(503, said, SERVER, "no_replica", headers={"retry-after": "5"}) from None

    async def _tried(self, key: str | None, end: float) -> Response:
        tries = 0
        while tries < MOST_TRIES:
            lease = await self._replicas.lend(key, self._avoid)
            try:
                if (response := await self._once(lease, end)) is not None:
                    return response
            except ReplicaLost as error:
                log.warning("A request is sent again: %s", error)
                self._front.metrics.resent()
                tries += 1
                self._note.facts["resent"] = tries
            self._avoid.append(lease.address.replica)
        raise lost()

    async def _once(self, lease: Lease, end: float) -> Response | None:
        """Return the answer of one replica; None if it has no room and another may."""
        upstream = await Upstream.sent(lease.address, self._asked, lease.id)
        lease.watch(upstream)
        try:
            head = await upstream.head()
            kind = dict(head.headers).get(b"content-type", b"")
            if kind.startswith(b"text/event-stream"):
                return _Stream(self, lease, upstream, end)
            body = await upstream.body()
            if head.status_code in ELSEWHERE and self._others(lease):
                return None
        except BaseException:
            upstream.close()
            raise
        await self.end(lease)
        response = Response(body, head.status_code)
        response.raw_headers += [one for one in head.headers if one[0] not in (b"content-length", *SET_BY_FRONT)]
        return response

    def stream(self, upstream: Upstream) -> PushedEvents:
        """Return the events of a stream that has begun."""
        return PushedEvents(RelayedEvents(upstream, self._path, self._lost), upstream.close)

    async def end(self, lease: Lease) -> None:
        """Count the request out, and take what the replica knows of it into the log."""
        if self._admitted is not None:
            self._admitted.leave()
        self._note.facts["replica"] = lease.address.replica
        with suppress(TimeoutError, ReplicaLost):
            async with asyncio.timeout(FACT_SECONDS):
                ended = await lease.ended()
                self._note.facts.update(ended.facts)
                _log(ended, lease.address.replica)

    def _lost(self) -> None:
        self._front.metrics.lost()
        self._note.facts["lost"] = True

    def _others(self, lease: Lease) -> bool:
        tried = {*self._avoid, lease.address.replica}
        return any(one.replica not in tried for one in self._replicas.running())


SET_BY_FRONT = frozenset((b"date", b"server", b"connection", b"transfer-encoding", b"x-request-id"))


class _Stream(Response):
    """A stream that has begun; its client may leave, and its replica may end."""

    def __init__(self, forwarded: _Forwarded, lease: Lease, upstream: Upstream, end: float) -> None:
        super().__init__()
        self._forwarded, self._lease, self._upstream, self._end = forwarded, lease, upstream, end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it. A replica that says nothing until the deadline counts as ended."""
        left = max(self._end - time.monotonic(), 0.0)
        clock = asyncio.get_running_loop().call_later(left, self._upstream.lose)
        try:
            await self._forwarded.stream(self._upstream)(scope, receive, send)
        finally:
            clock.cancel()
            await self._forwarded.end(self._lease)


def create_front(front: Front, settings: ServerSettings) -> Starlette:
    """Make the application of a front."""
    own = {
        "/health": front.health,
        "/ready": front.ready,
        "/version": front.version,
        "/metrics": front.tell_prometheus,
    }
    routes = [Route(path, endpoint) for path, endpoint in own.items()]
    app = Starlette(routes=[*routes, Route("/{path:path}", front.forward, methods=METHODS_SERVED)])
    app.state.serving = front
    add_handlers(app)
    add_layers(app, settings, front.limits)
    return app


def _asked(request: Request, note: RequestNote, body: bytes) -> Asked:
    query = request.scope["query_string"]
    path = request.scope.get("raw_path") or quote(request.scope["path"]).encode()  # not every server has the first
    target = path + (b"?" + query if query else b"")
    return Asked(request.method, target, request.scope["headers"], body, note.id)


def _object(text: bytes) -> dict[str, str]:
    found = json.loads(text)
    return found if isinstance(found, dict) else {}


def _log(ended: Ended, replica: str) -> None:
    """Write a replica's lines into the log of the front."""
    for line in ended.lines:
        fields = {name: value for name, value in line.items() if name not in ("time", "level", "message")}
        level = logging.getLevelNamesMapping().get(str(line["level"]).upper(), logging.WARNING)
        log.log(level, "%s", line["message"], extra={"facts": {**fields, "replica": replica}})
