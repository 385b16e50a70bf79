"""One replica: an engine and its server, in an actor of Ray Serve.

Owns the life of both in their process. The models are loaded here, so nothing large is pickled. Requests come by HTTP
with a lease (`leases.py`); Ray sees only the leases. Invariant: the actor says it is well only while its engine is.
"""

from __future__ import annotations

import logging
import os
import secrets
import threading
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from typing import Any

from specbranch.cluster.leases import Ended, Granted, KeptLines, Leased, Leases, ReplicaAddress
from specbranch.cluster.settings import Share
from specbranch.errors import SpecBranchError
from specbranch.serve.settings import ServerSettings

LISTEN_SECONDS = 60.0
FAILURE_SECONDS = 60.0  # in which a replica that could not load counts as well, so that it can be asked why


@dataclass(frozen=True, slots=True)
class EngineArguments:
    """Arguments of `LLM`, as they are sent to a replica."""

    values: dict[str, Any] = field(default_factory=dict)


class Replica:
    """Serves requests that have a lease."""

    def __init__(self, engine: EngineArguments, settings: ServerSettings, share: Share) -> None:
        os.environ["OMP_NUM_THREADS"] = str(share.threads)  # torch is not loaded yet; a draft process inherits it
        kept = KeptLines(settings.log_text)
        logging.getLogger("specbranch").addHandler(kept)
        self._leases, self._secret = Leases(kept.lines), secrets.token_urlsafe(32)
        self._failure: str | None = None
        self._failed_at = 0.0
        try:
            self._serve(engine, behind_front(settings, share.host or _own_host()))
        except SpecBranchError as error:  # the same with every try: say it instead of trying again
            self._failure, self._failed_at = str(error), time.monotonic()

    def record_replica_metadata(self) -> dict[str, Any]:
        """Tell fronts where this replica takes requests."""
        if self._failure is not None:
            return {}
        address = self._address
        return {"host": address.host, "port": address.port, "secret": address.secret}

    async def lease(self, key: str | None, avoid: list[str]) -> AsyncIterator[Granted | Ended]:
        """Lend this replica to one request. Its router has read key and avoid."""
        if self._failure is not None:
            raise RuntimeError(self._failure)
        async for part in self._leases.lend(self._address):
            yield part

    async def failure(self) -> str | None:
        """Return why the models could not be loaded; None if they were."""
        return self._failure

    async def check_health(self) -> None:
        """Raise if the engine has ended, so that Ray starts another replica."""
        if self._failure is not None:
            if time.monotonic() - self._failed_at > FAILURE_SECONDS:
                raise RuntimeError(self._failure)
            return
        if not (self._engine.is_alive and self._thread.is_alive()):
            raise RuntimeError("The engine of this replica has ended.")

    def __del__(self) -> None:
        """End the server and the engine. Ray calls this once no lease is open."""
        if self._failure is None:
            self._server.stop()
            self._thread.join()

    def _serve(self, engine: EngineArguments, own: ServerSettings) -> None:
        """Load the models and listen."""
        from specbranch.async_engine import AsyncLLM
        from specbranch.engine import LLM
        from specbranch.serve.app import create_app
        from specbranch.serve.run import GracefulServer, bound

        (one,) = bound(own)
        self._engine = AsyncLLM(LLM(**engine.values), max_batch=own.max_batch)
        app = create_app(self._engine, own)
        app.add_middleware(Leased, leases=self._leases, secret=self._secret)
        self._server = GracefulServer(app, own)
        self._thread = threading.Thread(target=self._server.run, args=([one],), name="server", daemon=True)
        self._thread.start()
        self._await_listening()
        self._address = ReplicaAddress(_own_name(), own.host, one.getsockname()[1], self._secret)

    def _await_listening(self) -> None:
        end = time.monotonic() + LISTEN_SECONDS
        while not self._server.started:
            if not self._thread.is_alive() or time.monotonic() > end:
                raise RuntimeError("The server of this replica did not start.")
            time.sleep(0.01)


def behind_front(settings: ServerSettings, host: str) -> ServerSettings:
    """Return the settings of a replica's server: the front has keys, host names and connections."""
    most = 2 * (settings.max_batch + settings.max_queue) + 64  # connections, all of them from fronts
    return replace(settings, host=host, port=0, keys=None, allowed_hosts=(), max_connections=most, max_per_address=most)


def _own_host() -> str:
    from ray.util import get_node_ip_address

    return str(get_node_ip_address())  # type: ignore[no-untyped-call]


def _own_name() -> str:
    from ray import serve

    return serve.get_replica_context().replica_tag
