"""A server as a process: it listens, tells where, and on a signal lets answers finish.

Owns uvicorn's settings and the way a server ends.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable
from types import FrameType

import uvicorn
from fastapi import FastAPI

from specbranch.async_engine import AsyncLLM
from specbranch.engine import LLM
from specbranch.serve.app import create_app
from specbranch.serve.logs import write_json
from specbranch.serve.settings import ServerSettings

log = logging.getLogger("specbranch.serve")
KEPT_ALIVE = 30  # seconds that a connection stays open without a request


class GracefulServer(uvicorn.Server):
    """A server that takes nothing new once it is told to stop, and says so."""

    def __init__(self, app: FastAPI, settings: ServerSettings, tell: Callable[[str], None] | None = None) -> None:
        """`tell` hears where the server listens."""
        config = uvicorn.Config(
            app,
            host=settings.host,
            port=settings.port,
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_keep_alive=KEPT_ALIVE,
            timeout_graceful_shutdown=max(round(settings.grace), 1),
        )
        super().__init__(config)
        self._limits, self._tell = app.state.serving.limits, tell

    @property
    def address(self) -> str:
        """Where it listens."""
        host, port, *_ = self.servers[0].sockets[0].getsockname()
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, and tell where."""
        await super().startup(sockets)
        if self.started and self._tell is not None:
            self._tell(self.address)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Take no more requests; answers under way are finished, unless a second signal comes."""
        self.stop()
        super().handle_exit(sig, frame)

    def stop(self) -> None:
        """The same for whoever runs it in a thread."""
        self._limits.closing = True
        self.should_exit = True


def serve(llm: LLM, settings: ServerSettings, tell: Callable[[str], None]) -> None:
    """Serve a loaded LLM until a signal comes."""
    write_json(settings.log_text)
    app = create_app(AsyncLLM(llm, max_batch=settings.max_batch), settings)
    GracefulServer(app, settings, tell).run()
