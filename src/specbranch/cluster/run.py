"""Replicas behind one address as a process: the front, with Ray under it.

Owns the order in which things start and end. Invariant: the front takes requests only once a replica can, and Ray ends
only once the front has answered.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import FrameType
from typing import Any

from specbranch.cluster.ray_start import LOOPBACK, cores, gpus_of_cluster, ray_session, unless_stuck
from specbranch.cluster.settings import Scale, Share
from specbranch.errors import BadParameter, MissingPackage
from specbranch.extras import RAY
from specbranch.serve.logs import write_json
from specbranch.serve.settings import ServerSettings

log = logging.getLogger("specbranch.serve")
END_SECONDS = 20.0  # for replicas without requests to end


def serve_replicas(
    arguments: dict[str, Any], settings: ServerSettings, scale: Scale, sockets: list[socket.socket]
) -> None:
    """Serve models by replicas at sockets that are bound, until a signal comes. `arguments`: those of `LLM`."""
    cpus = scale.replica_cpus if scale.replica_cpus is not None else max(cores() // scale.most, 1)
    with _ended_by_sigterm() as listen, ray_session(scale.ray_address, cpus * scale.most):
        listen()  # Ray has set a handler of its own
        write_json(settings.log_text)
        share = Share(cpus, gpus_of_each(scale, gpus_of_cluster()), LOOPBACK if scale.ray_address is None else None)
        _serve(arguments, settings, scale, share, sockets)


def _serve(
    arguments: dict[str, Any],
    settings: ServerSettings,
    scale: Scale,
    share: Share,
    sockets: list[socket.socket],
) -> None:
    try:
        from ray import serve
    except ImportError as error:  # Ray without its own extra
        raise MissingPackage(f"Replicas need Ray Serve ({error}). Install it with: {RAY.command}.") from None

    from specbranch.cluster.deployment import RayReplicas, deployed
    from specbranch.cluster.front import Front, create_front
    from specbranch.cluster.replica import EngineArguments
    from specbranch.cluster.starting import running
    from specbranch.serve.run import GracefulServer, opened

    name = f"specbranch-{sockets[0].getsockname()[1] if sockets else 'unix'}-{os.getpid()}"
    _quiet_ray()
    serve.start(proxy_location="Disabled")
    must_delete = scale.ray_address is not None  # a Ray of our own ends anyhow; until replicas run, this may be stuck
    try:
        app = deployed(EngineArguments(arguments), settings, scale, share)
        log.info("Loading %d replicas, with %g CPUs and %g GPUs each.", scale.replicas, share.cpus, share.gpus)
        handle, must_delete = running(app, name), True
        front = Front(RayReplicas(handle), settings, scale.most)
        unix, listening = opened(settings, sockets)
        GracefulServer(create_front(front, settings), settings, unix, has_lifespan=False).run(listening)
    finally:
        if must_delete:
            unless_stuck(partial(serve.delete, name), END_SECONDS)


def gpus_of_each(scale: Scale, there: float) -> float:
    """Return the GPUs of one replica: an even part of those that are there, and one at most."""
    each = scale.replica_gpus
    if each is None:
        even = there / scale.most
        return min(1.0, round(even - 5e-5, 4)) if even > 0 else 0.0
    if scale.ray_address is None and each * scale.replicas > there:  # a cluster may get more
        said = f"{scale.replicas} replicas with {each:g} GPUs each need {each * scale.replicas:g} GPUs, and Ray finds"
        raise BadParameter(f"{said} {there:g} on this machine. Lower --replica-gpus or --replicas.")
    return each


def _quiet_ray() -> None:
    """Keep Ray's remarks out of our log; its warnings stay in its own files."""
    for name in ("ray", "ray.serve", "ray.data"):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [logging.NullHandler()], False


@contextmanager
def _ended_by_sigterm() -> Iterator[Callable[[], object]]:
    """Let SIGTERM end this block as Ctrl-C does, so that everything is ended first; then end by the signal.

    What is yielded sets this up again.
    """

    def end(number: int, frame: FrameType | None) -> None:
        raise _Terminated

    try:
        signal.signal(signal.SIGTERM, end)
        yield partial(signal.signal, signal.SIGTERM, end)
    except _Terminated:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTERM)


class _Terminated(BaseException):
    """SIGTERM came."""
