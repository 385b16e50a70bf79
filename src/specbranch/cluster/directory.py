"""The routers of this process, and through them the replicas that run.

Owns that table alone. It cannot be in `router.py`: Ray copies that module's classes and their globals into each process
(it pickles them by value), so a table there would be another one in each copy.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Protocol

from specbranch.cluster.leases import ReplicaAddress

_routers: dict[str, SeesReplicas] = {}  # by application


class SeesReplicas(Protocol):
    """A router, as a front sees it."""

    @property
    def ways(self) -> Counter[str]:
        """How requests were placed, and how often."""
        ...

    def running(self) -> Sequence[ReplicaAddress]:
        """Return where the replicas are that take requests."""
        ...


def note_router(application: str, router: SeesReplicas) -> None:
    """Note the router of an application in this process."""
    _routers[application] = router


def router_of(application: str) -> SeesReplicas | None:
    """Return this process's router of an application; None before its first request."""
    return _routers.get(application)
