"""Ray Serve's request router with our policy: it runs in the front's process, where requests leave.

Owns which running requests each replica has, as far as this process sent them, and which replicas run. The order comes
from `placement.py`. Invariant: a request is counted at one replica at a time, until Ray reports its end.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from ray.serve._private.common import ReplicaID
from ray.serve._private.replica_result import ReplicaResult
from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from specbranch.cluster.directory import note_router
from specbranch.cluster.leases import ReplicaAddress
from specbranch.cluster.placement import Placement


class PrefixRouter(RequestRouter):
    """Sends requests with the same beginning to the same replica, within bounds of load."""

    def initialize_state(self, **given: Any) -> None:
        """Start with nothing placed. Ray calls this once the router is made."""
        self._placement = Placement()
        self._chosen: dict[str, tuple[str, PendingRequest]] = {}  # by request: not accepted by the replica yet
        self._sent: dict[str, str] = {}  # by request: the replica that runs it
        note_router(self.app_name, self)

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Return replicas, the best first; Ray takes the first that accepts."""
        if pending_request is None:
            return [candidate_replicas]
        by_name = {one.replica_id.unique_id: one for one in candidate_replicas}
        key, avoid = pending_request.args or (None, [])  # a call that is no lease may go anywhere
        order = self._placement.order(key, self._loads(by_name), avoid)
        self._chosen[pending_request.metadata.internal_request_id] = order[0], pending_request
        return [[by_name[name]] for name in order]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: ReplicaResult) -> None:
        """Note that a replica has accepted a request."""
        name = pending_request.metadata.internal_request_id
        self._chosen.pop(name, None)
        self._sent[name] = replica_id.unique_id

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """Note that a request has ended."""
        self._sent.pop(internal_request_id, None)

    @property
    def ways(self) -> Counter[str]:
        """How requests were placed, and how often."""
        return self._placement.ways

    def running(self) -> list[ReplicaAddress]:
        """Return where the replicas are that take requests."""
        return [
            ReplicaAddress(replica=one.replica_id.unique_id, **one.replica_metadata)
            for one in list(self.curr_replicas.values())
            if one.replica_metadata
        ]

    def _loads(self, replicas: dict[str, RunningReplica]) -> dict[str, int]:
        """Count the requests of each replica, those on their way to it included."""
        self._chosen = {name: one for name, one in self._chosen.items() if not one[1].future.cancelled()}
        loads = dict.fromkeys(replicas, 0)
        for name in (*self._sent.values(), *(replica for replica, _ in self._chosen.values())):
            if name in loads:
                loads[name] += 1
        return loads
