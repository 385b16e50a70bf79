"""The deployment of replicas in Ray Serve, and leases by its handle.

Owns what Ray is told of the deployment: resources, health checks, autoscaling, draining, the router. Invariant: a lease
is one streaming call of Ray, which ends with its request or its replica.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from ray import serve
from ray.exceptions import RayError
from ray.serve.config import AutoscalingConfig, RequestRouterConfig
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle

from specbranch.cluster.directory import router_of
from specbranch.cluster.leases import Ended, Granted, ReplicaAddress
from specbranch.cluster.replica import EngineArguments, Replica
from specbranch.cluster.router import PrefixRouter
from specbranch.cluster.settings import Scale, Share
from specbranch.cluster.upstream import ReplicaLost, Upstream
from specbranch.serve.settings import ServerSettings

HEALTH_PERIOD, HEALTH_TIMEOUT = 2.0, 30.0  # seconds between checks; after which a silent replica is ended
UPSCALE_DELAY, DOWNSCALE_DELAY = 5.0, 120.0  # seconds that more, or fewer, replicas have been wanted
START_TRIES = 2  # of a replica whose process ends while it loads
REPLICA_NAME = "replica"  # of the deployment


def deployed(engine: EngineArguments, settings: ServerSettings, scale: Scale, share: Share) -> Any:
    """Return the application of the replicas."""
    autoscaling = AutoscalingConfig(
        min_replicas=scale.replicas,
        max_replicas=scale.most,
        target_ongoing_requests=scale.requests_per_replica or max(settings.max_batch // 2, 1),
        upscale_delay_s=UPSCALE_DELAY,
        downscale_delay_s=DOWNSCALE_DELAY,
    )
    replicas = serve.deployment(
        name=REPLICA_NAME,
        num_replicas=scale.replicas if scale.max_replicas is None else None,
        autoscaling_config=None if scale.max_replicas is None else autoscaling,
        ray_actor_options={"num_cpus": share.cpus, "num_gpus": share.gpus},
        max_ongoing_requests=4 * (settings.max_batch + settings.max_queue),  # a replica's own limits refuse before
        health_check_period_s=HEALTH_PERIOD,
        health_check_timeout_s=HEALTH_TIMEOUT,
        graceful_shutdown_wait_loop_s=0.5,
        graceful_shutdown_timeout_s=settings.grace,
        max_constructor_retry_count=START_TRIES,
        request_router_config=RequestRouterConfig(request_router_class=PrefixRouter),  # type: ignore[arg-type]
    )
    return replicas(Replica).bind(engine, settings, share)


class RayLease:
    """A lease that Ray watches."""

    def __init__(self, granted: Granted, rest: Any) -> None:
        self.address, self.id = granted.address, granted.id
        self._upstream: Upstream | None = None
        self._rest = asyncio.ensure_future(self._read(rest))
        self._rest.add_done_callback(_heard)

    @classmethod
    async def of(cls, handle: DeploymentHandle[Any], key: str | None, avoid: Sequence[str]) -> RayLease:
        """Wait for a replica."""
        call: Any = handle.options(method_name="lease", stream=True).remote(key, list(avoid))
        try:
            return cls(await anext(call), call)
        except (RayError, RayServeException, StopAsyncIteration) as error:
            raise ReplicaLost(f"A replica was chosen and has ended ({type(error).__name__}).") from None
        except asyncio.CancelledError:
            call.cancel()
            raise

    def watch(self, upstream: Upstream) -> None:
        """Have the answer end if Ray reports that the replica has."""
        self._upstream = upstream
        if self._rest.done() and self._rest.exception() is not None:
            upstream.lose()

    async def ended(self) -> Ended:
        """Wait until the replica has counted the request out."""
        return await asyncio.shield(self._rest)

    async def _read(self, rest: Any) -> Ended:
        try:
            async for part in rest:
                return part  # type: ignore[no-any-return]
        except (RayError, RayServeException):
            if self._upstream is not None:
                self._upstream.lose()
        raise ReplicaLost("The replica of a request has ended.")


def _heard(task: asyncio.Future[Ended]) -> None:
    """Take note of a task's error: a request that was sent again waits for none."""
    if not task.cancelled():
        task.exception()


class RayReplicas:
    """The replicas of an application, lent by Ray."""

    def __init__(self, handle: DeploymentHandle[Any]) -> None:
        self._handle, self._application = handle, handle.app_name
        self._is_started = False  # a call was made

    @property
    def ways(self) -> dict[str, int]:
        """How requests were placed by this process."""
        router = router_of(self._application)
        return {} if router is None else dict(router.ways)

    def running(self) -> Sequence[ReplicaAddress]:
        """Return all replicas that take requests, as this process knows them."""
        router = router_of(self._application)
        if router is None:
            self._start_router()
        return [] if router is None else router.running()

    def _start_router(self) -> None:
        """Have Ray make this process's router, by the first call: it makes none before."""
        if not self._is_started:
            self._is_started = True
            self._handle.failure.remote()

    async def lend(self, key: str | None, avoid: Sequence[str]) -> RayLease:
        """Wait for a replica."""
        return await RayLease.of(self._handle, key, avoid)
