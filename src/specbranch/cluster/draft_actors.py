"""Draft workers on Ray: actors that serve one draft over links, on nodes with the resource `draft`.

Owns the actors, and how targets find them by name. Ray places them, starts them again elsewhere, and tells targets
where they are; rounds go over links, because a call of an actor takes a millisecond. Invariants: an actor lives as long
as the command that started it. Its secret is made here or taken from the environment, and goes to targets through Ray
alone: it is in no runtime environment, no address and no log.
"""

from __future__ import annotations

import logging
import os
import random
import re
import secrets
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from specbranch.cluster.ray_address import check_reachable
from specbranch.errors import BadParameter, ModelError, SpecBranchError
from specbranch.exec.address import KEY_VARIABLE, LEAST_KEY, LinkAddress
from specbranch.exec.door import bound
from specbranch.exec.draft_server import DraftServer
from specbranch.exec.finding import Found
from specbranch.exec.greeting import Refused
from specbranch.extras import RAY

if TYPE_CHECKING:
    from specbranch.assembly import ModelChoice, ServedDraft
    from specbranch.core.warm_up import ForwardSizes

log = logging.getLogger("specbranch.draft_worker")

RESOURCE = "draft"  # of a node that may hold an actor; each takes one
NAMESPACE = "specbranch"  # of the actors' names
DEFAULT_NAME = "draft"
MOST_ACTORS = 64
ANSWER_SECONDS = 3.0  # for actors to say where they are; a node that is gone says nothing
FOLLOW_SECONDS = 1.0  # between two looks at the actors
RAY_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
START_RAY = f"""ray start --head --resources='{{"{RESOURCE}": 1}}'"""
OURS = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_DEDUP_LOGS": "0"}  # unless the user has set them
# Ray ends a process that has not reached the cluster's head for a minute. A target goes on without a draft instead; the
# number is in seconds, about as many as fit.
OUTLIVE_RAY = "RAY_gcs_rpc_server_reconnect_timeout_s", "2000000"


class Secret:
    """The secret of links, which nothing prints."""

    __slots__ = ("value",)

    def __init__(self, value: bytes) -> None:
        self.value = value

    def __repr__(self) -> str:
        return "Secret()"


@dataclass(frozen=True, slots=True)
class Where:
    """Where an actor listens, and how many targets it has; or why it cannot draft."""

    host: str
    port: int
    secret: Secret
    targets: int = 0
    failure: str = ""


class DraftActor:
    """A draft worker in an actor: its server has a thread of its own, and Ray's calls only ask where it is."""

    def __init__(self, load: Callable[[], ServedDraft], secret: Secret) -> None:
        """`load`: loads the draft; it is called on the actor's node."""
        import ray

        host: str = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
        listener = bound(LinkAddress(host, 0))
        self._where, self._server = Where(host, listener.getsockname()[1], secret), None
        try:
            draft = load()
        except SpecBranchError as error:  # the same with every try: say it instead of trying again
            self._where = replace(self._where, failure=str(error))
            return
        self._server = DraftServer(
            draft.drafter, draft.served, draft.tokens, listener, secret.value, evaluation=draft.evaluation
        )
        threading.Thread(target=self._serve, args=(self._server,), name="specbranch-draft", daemon=True).start()

    def where(self) -> Where:
        """Return where it listens."""
        return self._where if self._server is None else replace(self._where, targets=self._server.targets)

    def _serve(self, server: DraftServer) -> None:
        try:
            server.run()
        except BaseException:
            log.exception("The draft worker has ended.")
        os._exit(1)  # Ray starts it again


def load_draft(choice: ModelChoice, target: str, vocabulary: int | None, sizes: ForwardSizes) -> ServedDraft:
    """Load a draft on an actor's node, with all its cores: Ray would give it one."""
    from specbranch.assembly import make_served_draft

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return make_served_draft(replace(choice, threads=choice.threads or cores), target, vocabulary, sizes)


class OnRay:
    """The draft workers of a name on Ray."""

    is_local = False

    def __init__(self, name: str) -> None:
        self.name, self._name = f"ray://{name}", name
        self._asking = threading.Lock()

    def find(self) -> list[Found]:
        """Return where the actors listen, the one with the fewest targets first."""
        found = [where for where in self._wheres().values() if where is not None and not where.failure]
        if not found:
            raise Refused(
                f"no draft worker named {self._name!r} answers on Ray. Start one: specbranch draft-worker --on-ray 1 "
                f"--ray-name {self._name}"
            )
        found.sort(key=lambda where: (where.targets, random.random()))  # targets that start together spread
        return [Found(LinkAddress(where.host, where.port), where.secret.value) for where in found]

    def _wheres(self) -> dict[str, Where | None]:
        """Ask Ray. Without its head that may take for ever, so one thread asks at a time."""
        if not self._asking.acquire(blocking=False):
            raise Refused("Ray does not answer")
        try:
            return wheres(self._name)
        finally:
            self._asking.release()


def on_ray(name: str) -> OnRay:
    """Return the finder of a name, connected to Ray."""
    if not RAY_NAME.fullmatch(name):
        raise BadParameter(f"The draft workers' name on Ray is {name!r}; expected ray://NAME, such as ray://draft.")
    try:
        connect_ray(None, outlive=True)
    except BadParameter as error:
        raise ModelError(f"There is no draft from ray://{name}: {error}") from None
    return OnRay(name)


def connect_ray(address: str | None, outlive: bool = False) -> None:
    """Connect to a Ray that runs, unless this process is connected. `outlive`: this process goes on if Ray ends."""
    RAY.require()
    for variable, value in (*OURS.items(), *([OUTLIVE_RAY] if outlive else [])):
        os.environ.setdefault(variable, value)
    where = address or os.environ.get("RAY_ADDRESS") or "auto"
    if (imported := sys.modules.get("ray")) is not None and imported.is_initialized():
        return
    check_reachable(where)
    import ray

    if outlive:
        _hear_no_daemons()
    try:
        ray.init(address=where, log_to_driver=False, logging_level=logging.ERROR)
    except Exception as error:  # of many kinds
        said = str(error).partition("\n")[0][:200].rstrip(".")
        raise BadParameter(
            f"Ray does not answer at {where!r} ({said}). Start it on a node for drafts: {START_RAY}"
        ) from None


def _hear_no_daemons() -> None:
    """Keep Ray from listening for errors of its daemons.

    Without the cluster's head, the thread that listens holds the interpreter's lock for half a minute at a time, and
    no round goes on.
    """
    from ray._private import worker

    if hasattr(worker, "listen_error_messages"):
        worker.listen_error_messages = lambda *_: None


def wheres(name: str) -> dict[str, Where | None]:
    """Return where each actor of a name listens; None: it does not answer, because Ray is starting it, or its node is
    gone."""
    import ray

    asked: dict[Any, str] = {}
    found: dict[str, Where | None] = {}
    try:
        for one in ray.util.list_named_actors(all_namespaces=True):
            actor = one["name"]
            if one["namespace"] == NAMESPACE and re.fullmatch(re.escape(_actor_name(name, "")) + r"\d+", actor):
                asked[ray.get_actor(actor, NAMESPACE).where.remote()] = actor
                found[actor] = None
        ready, _ = ray.wait(list(asked), num_returns=len(asked), timeout=ANSWER_SECONDS) if asked else ([], [])
    except Exception as error:  # an actor is gone since it was listed, or Ray is
        raise Refused(f"Ray does not say where its draft workers are ({type(error).__name__})") from None
    for answer in ready:
        try:
            found[asked[answer]] = ray.get(answer)
        except ray.exceptions.RayError:
            continue
    return found


def secret_of(environment: Mapping[str, str] = os.environ) -> Secret:
    """Return the secret of the environment, or a new one: targets get it through Ray."""
    key = environment.get(KEY_VARIABLE, "").strip().encode()
    if key and len(key) < LEAST_KEY:
        raise BadParameter(f"{KEY_VARIABLE} has {len(key)} characters; expected at least {LEAST_KEY}, or none at all.")
    return Secret(key or secrets.token_hex(32).encode())


@contextmanager
def draft_actors(
    load: Callable[[], ServedDraft], count: int, name: str = DEFAULT_NAME, gpus: float = 0.0
) -> Iterator[None]:
    """Start actors; end them afterwards. Ray is connected."""
    import ray

    if not RAY_NAME.fullmatch(name):
        raise BadParameter(f"--ray-name is {name!r}; expected letters, digits, '.', '_' and '-'.")
    if not 1 <= count <= MOST_ACTORS:
        raise BadParameter(f"--on-ray is {count}; expected 1 to {MOST_ACTORS} draft workers.")
    if wheres(name):
        raise BadParameter(f"There are draft workers named {name!r} on Ray already. Choose another --ray-name.")
    secret = secret_of()
    kind: Any = ray.remote(DraftActor)
    started = [
        kind.options(
            name=_actor_name(name, number),
            namespace=NAMESPACE,
            num_cpus=0,
            num_gpus=gpus,
            resources={RESOURCE: 1},
            max_restarts=-1,
            max_concurrency=8,
        ).remote(load, secret)
        for number in range(count)
    ]
    try:
        yield
    finally:
        for actor in started:
            ray.kill(actor)


def follow(name: str, say: Callable[[str], None], stopped: threading.Event) -> None:
    """Say which actors come and go until it is stopped; raises ModelError if the draft cannot be loaded."""
    before: dict[str, Where | None] = {}
    say(f"Waiting for a node with the resource '{RESOURCE}', and for the draft to be loaded there.")
    while not stopped.is_set():
        try:
            now = wheres(name)
        except Refused:
            now = dict.fromkeys(before)
        for actor, where in sorted(now.items()):
            _say_change(actor, before.get(actor), where, say)
        before = now
        stopped.wait(FOLLOW_SECONDS)


def _say_change(actor: str, before: Where | None, now: Where | None, say: Callable[[str], None]) -> None:
    if now is not None and now.failure:
        raise ModelError(f"{actor} cannot draft: {now.failure}")
    if now is not None and (before is None or (now.host, now.port) != (before.host, before.port)):
        say(f"{actor} serves at {LinkAddress(now.host, now.port)}.")
    if now is None and before is not None:
        say(f"{actor} does not answer. Ray starts it again where the resource '{RESOURCE}' is free.")


def _actor_name(name: str, number: int | str) -> str:
    return f"draft-worker-{name}-{number}"
