"""Replicas on their way up: until all of them run, or it is known why they cannot.

Owns what is said meanwhile and afterwards, in our sentences. Invariant: a wait for something that Ray does not have is
told in the log; a model that cannot be loaded is an error that names it.
"""

from __future__ import annotations

import logging
import threading
from typing import Any

from ray import serve
from ray.serve.handle import DeploymentHandle

from specbranch.cluster.deployment import REPLICA_NAME
from specbranch.errors import BadParameter, ModelError

log = logging.getLogger("specbranch.serve")
ASK_RAY_SECONDS = 5.0  # between two looks at what Ray says
MOST_SAID = 600  # characters of what Ray says


def running(app: Any, name: str) -> DeploymentHandle[Any]:
    """Start an application, and wait until its replicas run."""
    is_over = threading.Event()
    threading.Thread(target=_tell, args=(name, is_over), name="specbranch-waits", daemon=True).start()
    try:
        handle = serve.run(app, name=name, route_prefix=None)
    except RuntimeError as error:  # the only kind that Ray has for it
        said = _last_line(_message(name)) or str(error)
        raise ModelError(f"The replicas could not be started: {said}. Ray's files say more.") from error
    finally:
        is_over.set()
    if (failure := handle.failure.remote().result()) is not None:
        raise BadParameter(failure)
    return handle


def _tell(name: str, is_over: threading.Event) -> None:
    """Log what Ray says of replicas that do not start, each sentence once."""
    before = ""
    while not is_over.wait(ASK_RAY_SECONDS):
        try:
            said = _message(name)
        except Exception:  # of any kind, once Ray ends
            return
        if said and said != before:
            log.warning("Replicas are not up yet. Ray: %s", said[:MOST_SAID])
        before = said


def _message(name: str) -> str:
    """Return what Ray says of the replicas; nothing if all is as it should be."""
    application = serve.status().applications.get(name)
    replicas = application.deployments.get(REPLICA_NAME) if application is not None else None
    return replicas.message.strip() if replicas is not None else ""


def _last_line(text: str) -> str:
    """Return the last line of a traceback: it says what went wrong."""
    return text.rpartition("\n")[2].strip()[:MOST_SAID].rstrip(".")
