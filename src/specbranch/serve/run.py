"""A server as a process: it takes its port, says where it listens, and on a signal lets answers finish.

Owns uvicorn's settings, the sockets and the way a server ends.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import socket
import time
from functools import partial
from types import FrameType
from typing import Any, Protocol

import uvicorn
from starlette.applications import Starlette

from specbranch.async_engine import AsyncLLM
from specbranch.engine import LLM
from specbranch.errors import BadParameter
from specbranch.serve.app import create_app
from specbranch.serve.connections import BACKLOG, Connections, GuardedProtocol
from specbranch.serve.limits import Limits
from specbranch.serve.logs import write_json
from specbranch.serve.settings import ServerSettings
from specbranch.serve.unix_socket import UnixSocket

log = logging.getLogger("specbranch.serve")
KEPT_ALIVE = 30  # seconds that a connection stays open without a request
DRAIN_LOOK = 0.05  # seconds between two checks if all is answered


class Counts(Protocol):
    """What a server counts."""

    @property
    def limits(self) -> Limits:
        """Its requests."""
        ...

    @property
    def connections(self) -> Connections:
        """Its connections."""
        ...


class GracefulServer(uvicorn.Server):
    """A server that, once it is to stop, finishes its answers and refuses new requests with a sentence meanwhile."""

    def __init__(
        self, app: Starlette, settings: ServerSettings, unix: UnixSocket | None = None, has_lifespan: bool = True
    ) -> None:
        """Serve an application whose state has the counts of a server: its `limits` and `connections`.

        `unix`: the unix socket that it listens at, whose file is removed at the end. `has_lifespan`: the application
        has something to do at its start or end.
        """
        serving: Counts = app.state.serving
        protocol: Any = partial(GuardedProtocol, serving.connections)
        config = uvicorn.Config(
            app,
            host=settings.host,
            port=settings.port,
            http=protocol,
            lifespan="on" if has_lifespan else "off",
            loop="asyncio",  # uvloop, if it happens to be installed, reports errors of listening later
            ws="none",
            backlog=BACKLOG,
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_keep_alive=KEPT_ALIVE,
        )
        super().__init__(config)
        self._unix = unix
        self._limits, self._connections, self._grace = serving.limits, serving.connections, settings.grace

    @property
    def address(self) -> str:
        """Where it listens."""
        if self._unix is not None:
            return f"unix:{self._unix.path}"
        host, port, *_ = self.servers[0].sockets[0].getsockname()
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, and log where."""
        self._connections.fit_files()
        await super().startup(sockets)
        if self.started:
            log.info("Serving at %s", self.address, extra={"facts": {"address": self.address}})

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Finish what was admitted, while new requests get a 503; then close."""
        end = time.monotonic() + self._grace
        while self._limits.requests and not self.force_exit and time.monotonic() < end:
            await asyncio.sleep(DRAIN_LOOK)
        self.config.timeout_graceful_shutdown = max(round(end - time.monotonic()), 1)
        try:
            await super().shutdown(sockets)
        finally:
            if self._unix is not None:
                self._unix.remove()  # here: behind this, the signal that stopped the server ends the process

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Take no more requests. Running answers are finished, unless a second signal comes."""
        is_second = self.should_exit
        super().handle_exit(sig, frame)  # first: uvicorn takes a Ctrl-C of a server that stops for a second one
        self.stop()
        self.force_exit = is_second

    def stop(self) -> None:
        """Stop as a signal does, if the server runs in a thread."""
        self._limits.closing = True
        self.should_exit = True


def bound(settings: ServerSettings) -> list[socket.socket]:
    """Bind the port at all addresses of the host, before anything is loaded; it does not listen yet. A unix socket is
    only checked: it exists as soon as it is bound, and then clients expect an answer."""
    found: list[socket.socket] = []
    if (unix := UnixSocket.of(settings)) is not None:
        unix.check()
        return found
    port = settings.port
    try:
        for family, address in _addresses(settings.host):
            one = socket.socket(family, socket.SOCK_STREAM)
            found.append(one)
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                one.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            one.bind((address, port))
            port = one.getsockname()[1]  # one that was free is the same at all addresses
    except OSError as error:
        for one in found:
            one.close()
        raise _not_bound(settings, error) from None
    return found


def opened(settings: ServerSettings, sockets: list[socket.socket]) -> tuple[UnixSocket | None, list[socket.socket]]:
    """Return the sockets to listen at, once the server is about to answer: those that are bound, or a unix socket."""
    unix = UnixSocket.of(settings)
    return (None, sockets) if unix is None else (unix, [unix.bind()])


def serve(llm: LLM, settings: ServerSettings, sockets: list[socket.socket]) -> None:
    """Serve a loaded LLM at sockets that are bound, until a signal comes."""
    write_json(settings.log_text)
    unix, listening = opened(settings, sockets)
    app = create_app(AsyncLLM(llm, max_batch=settings.max_batch), settings)
    try:
        GracefulServer(app, settings, unix).run(listening)
    except OSError as error:  # another server was quicker to listen
        raise _not_bound(settings, error) from None


def _addresses(host: str) -> list[tuple[socket.AddressFamily, str]]:
    found = socket.getaddrinfo(host.strip("[]"), None, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    return list(dict.fromkeys((family, str(address[0])) for family, _, _, _, address in found))


def _not_bound(settings: ServerSettings, error: OSError) -> BadParameter:
    """Say why the server cannot listen, and what to do."""
    host, port = settings.host, settings.port
    if isinstance(error, socket.gaierror):
        return BadParameter(f"host is {host!r}, which is no address of this machine ({error.strerror}). Give another.")
    if error.errno == errno.EADDRINUSE:
        said = f"Port {port} of {host} is taken: another server listens there."
        return BadParameter(f"{said} End that one, or choose another port: --port {_other(port)}, or 0 for a free one.")
    if error.errno == errno.EACCES:
        return BadParameter(f"Port {port} of {host} is not open to this user. Choose one above 1023 (--port).")
    if error.errno == errno.EADDRNOTAVAIL:
        return BadParameter(f"host is {host!r}, which is no address of this machine. Give one that it has (--host).")
    said = os.strerror(error.errno) if error.errno else str(error)
    return BadParameter(f"The server cannot listen at port {port} of {host} ({said}). Choose others: --host, --port.")


def _other(port: int) -> int:
    return port + 1 if port < 65535 else port - 1
