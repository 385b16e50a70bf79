"""The application for Ray Serve's own command: `serve run` with a file that imports `specbranch.cluster.ray_app:app`.

Owns its two deployments; `arguments.py` owns the names in such a file. Ray's proxy is the address here: it takes
connections, and passes requests to a front, which has keys, limits and the log as under `specbranch serve --replicas`.
"""

from __future__ import annotations

from typing import Any

from ray import serve
from ray.serve.handle import DeploymentHandle
from starlette.applications import Starlette

from specbranch.cluster.arguments import parsed
from specbranch.cluster.deployment import RayReplicas, deployed
from specbranch.cluster.front import Front, create_front
from specbranch.cluster.settings import Share
from specbranch.serve.logs import write_json
from specbranch.serve.settings import ServerSettings

FRONT_NAME = "front"  # of the deployment
MOST_FRONT_REQUESTS = 10_000  # at a time in Ray's count: the front's own limits refuse before


@serve.ingress()
class RayFront:
    """The front as a deployment, behind Ray's proxy."""

    def __init__(self, replicas: DeploymentHandle[Any], settings: ServerSettings, most_replicas: int) -> None:
        write_json(settings.log_text)
        self._app = create_front(Front(RayReplicas(replicas), settings, most_replicas), settings)

    def __serve_build_asgi_app__(self) -> Starlette:
        """Return the application. Ray asks for it once this is made."""
        return self._app


def app(arguments: dict[str, Any]) -> Any:
    """Build the application from the arguments of a file: those of `LLM`, of the server and of the replicas."""
    engine, settings, scale = parsed(arguments)
    share = Share(scale.replica_cpus or 1.0, scale.replica_gpus or 0.0)
    front = serve.deployment(
        name=FRONT_NAME, ray_actor_options={"num_cpus": 0}, max_ongoing_requests=MOST_FRONT_REQUESTS
    )
    return front(RayFront).bind(deployed(engine, settings, scale, share), settings, scale.most)
