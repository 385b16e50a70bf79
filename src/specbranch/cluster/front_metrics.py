"""The metrics of a front: what it counts itself, besides those of its replicas.

Owns which figure has which name. Invariant: what replicas count, requests that were admitted among it, is not counted
here again.
"""

from __future__ import annotations

from collections.abc import Mapping

from specbranch.cluster.placement import WAYS
from specbranch.serve.connections import CUT_REASONS, Connections
from specbranch.serve.exposition import Series, exposed
from specbranch.serve.limits import REFUSALS, Limits
from specbranch.serve.metrics import METRIC_PREFIX

FRONT = "front"  # the value of the label `replica` for its own metrics


class FrontMetrics:
    """All metrics of one front."""

    def __init__(self) -> None:
        def counter(name: str, about: str) -> Series:
            return Series("counter", f"{METRIC_PREFIX}{name}_total", about)

        self._running = Series("gauge", f"{METRIC_PREFIX}replicas", "Replicas that take requests.")
        self._placed = counter("requests_placed", "Requests sent to a replica, by why to that one.")
        self._resent = counter("requests_resent", "Requests sent again, as a replica ended before its first token.")
        self._lost = counter("streams_lost", "Streams that ended with an error, as their replica ended.")
        self._refused = counter("requests_refused", "Requests that were not let in, by why.")
        self._open = Series("gauge", f"{METRIC_PREFIX}connections_open", "Connections that are open.")
        self._cut = counter("connections_cut", "Connections that were refused or cut off, by why.")
        self._resent.add(0)
        self._lost.add(0)

    def resent(self) -> None:
        """Count a request that is sent again."""
        self._resent.add(1)

    def lost(self) -> None:
        """Count a stream whose replica has ended."""
        self._lost.add(1)

    def text(self, limits: Limits, connections: Connections, replicas: int, ways: Mapping[str, int]) -> str:
        """Write all of it, as Prometheus reads it."""
        self._running.set(replicas)
        self._open.set(len(connections))
        for way in WAYS:
            self._placed.set(ways.get(way, 0), way=way)
        for reason in REFUSALS:
            self._refused.set(limits.refused[reason], reason=reason)
        for reason in CUT_REASONS:
            self._cut.set(connections.cuts[reason], reason=reason)
        return exposed([one for one in vars(self).values() if isinstance(one, Series)], {})
