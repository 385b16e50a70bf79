"""Ray itself: started on this machine and ended with us, or a cluster that runs and goes on without us.

Owns the settings with which Ray starts: no usage statistics, no dashboard, nothing of Ray in our log. Invariants: a Ray
that we started leaves no process behind, however we end. Others on the network can do nothing with it: it listens on
127.0.0.1 where it lets us choose, and everywhere it wants a key that is made anew each time.
"""

from __future__ import annotations

import logging
import os
import secrets
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from specbranch.cluster.ray_address import check_reachable
from specbranch.errors import BadParameter
from specbranch.extras import RAY

log = logging.getLogger("specbranch.cluster")
OBJECT_STORE = 80 * 2**20  # bytes, about the least that Ray takes: nothing of ours is stored there
LOOPBACK = "127.0.0.1"
RAY_STARTS = 3  # Ray gives its daemons half a minute, which a busy machine may exceed
END_RAY_SECONDS = 20.0
ON_LOOPBACK = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0"  # Ray then takes no other address, as it does on those systems
MARK = "SPECBRANCH_RAY"  # in the environment of every process of a Ray of our own: a text that no other one has
RAY_ENVIRONMENT = {  # unless the user has set them
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ENABLE_AUTO_CONNECT": "0",  # a call while Ray ends would start another Ray, which nobody ends
    "RAY_SERVE_LOG_TO_STDERR": "0",
    "RAY_DEDUP_LOGS": "0",
    "RAY_worker_niceness": "0",  # a replica is no background work; by default Ray gives its workers 15
    "RAY_enable_metrics_collection": "0",  # ours are at /metrics
    "RAY_SERVE_CONTROL_LOOP_INTERVAL_S": "0.5",  # seconds between two looks at the replicas; by default 0.1
}


@contextmanager
def ray_session(address: str | None, cpus: float | None = None) -> Iterator[None]:
    """Connect to the Ray cluster at an address, or without one start Ray here, with this many logical CPUs; end it
    afterwards."""
    RAY.require()
    if address is not None:
        check_reachable(address)
    _set_quiet(is_own=address is None)
    import ray

    logging.getLogger("ray").setLevel(logging.ERROR)
    _log_messages()
    files = None
    try:
        _connect(address, cpus)
        files = _own_files() if address is None else None
        yield
    except Exception as error:
        if not isinstance(error, BadParameter):
            files = None  # they may say why
        raise
    finally:
        unless_stuck(ray.shutdown, END_RAY_SECONDS)
        if address is None:
            _end_leftovers()
        if files is not None:
            shutil.rmtree(files, ignore_errors=True)


def _log_messages() -> None:
    """Have messages of Ray's daemons logged. Ray prints them, and has no setting for it."""
    from ray._private import worker

    def to_log(data: dict[str, Any], ignore_prefix: bool) -> None:
        for line in data["lines"]:
            log.warning("Ray: %.200s", line)

    if hasattr(worker, "print_to_stdstream"):
        worker.print_to_stdstream = to_log


def gpus_of_cluster() -> float:
    """Return how many GPUs Ray knows of."""
    import ray

    return float(ray.cluster_resources().get("GPU", 0.0))  # type: ignore[no-untyped-call]


def cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def unless_stuck(work: Callable[[], object], seconds: float) -> None:
    """Do work that may hang, as when Ray's own processes are gone; wait so long at most."""
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(seconds)


def _own_files() -> Path | None:
    """Return the folder that the Ray of this process keeps sockets and logs in; it would stay for ever."""
    from ray._private import worker

    node = getattr(worker, "_global_node", None)
    return Path(node.get_session_dir_path()) if node is not None else None


def _end_leftovers() -> None:
    """End processes of our Ray that are still there, as when its own daemon was ended first."""
    mark = f"{MARK}={os.environ.pop(MARK)}".encode()
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # of others, or gone
            if int(folder.name) != os.getpid() and mark in (folder / "environ").read_bytes().split(b"\0"):
                os.kill(int(folder.name), signal.SIGKILL)


def _connect(address: str | None, cpus: float | None) -> None:
    import ray

    for tries_left in reversed(range(RAY_STARTS if address is None else 1)):
        try:
            if address is None:
                _start(cpus)
            else:
                ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
            return
        except Exception as error:  # Ray raises nothing narrower if its daemons start too slowly
            ray.shutdown()
            if not tries_left:
                said = str(error).strip().rstrip(".")
                if address is None:
                    raise BadParameter(f"Ray could not be started here: {said}.") from None
                advice = "Start a cluster with `ray start --head`, or leave --ray out: then Ray is started here."
                raise BadParameter(f"Ray does not answer at {address!r}: {said}. {advice}") from None


def _start(cpus: float | None) -> None:
    import ray

    ray.init(
        address="local",
        num_cpus=None if cpus is None else max(int(cpus + 0.999), 1),
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
        object_store_memory=OBJECT_STORE,
        _node_ip_address=LOOPBACK,
    )


def _set_quiet(is_own: bool) -> None:
    """Set Ray's environment, which is read when it is imported. A Ray of our own gets a mark and a key of its own."""
    for name, value in RAY_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    if is_own:
        os.environ[MARK] = secrets.token_hex(16)
        os.environ.setdefault(*ON_LOOPBACK)
    if is_own and "RAY_AUTH_MODE" not in os.environ:
        os.environ["RAY_AUTH_MODE"], os.environ["RAY_AUTH_TOKEN"] = "token", secrets.token_hex(32)
