"""How many replicas serve, and what each may use.

Owns these names, their defaults and checks. It imports no Ray.
"""

from __future__ import annotations

from dataclasses import dataclass

from specbranch.errors import BadParameter

MOST_REPLICAS = 1024  # more are a mistake in the number


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """Replicas of one model behind one address."""

    replicas: int = 1  # that always run
    max_replicas: int | None = None  # the most that autoscaling starts; None: no autoscaling
    requests_per_replica: int | None = None  # that autoscaling aims at; None: half of the maximum batch size
    replica_cpus: float | None = None  # logical CPUs that Ray reserves for one, and its threads; None: divided evenly
    replica_gpus: float | None = None  # GPUs of one; parts are allowed; None: divided evenly, one at most
    ray_address: str | None = None  # a Ray cluster that runs; None: Ray is started here, and ended with the server

    def __post_init__(self) -> None:
        if not 1 <= self.replicas <= MOST_REPLICAS:
            raise BadParameter(f"replicas is {self.replicas!r}; expected a whole number from 1 to {MOST_REPLICAS}.")
        if self.max_replicas is not None and not self.replicas <= self.max_replicas <= MOST_REPLICAS:
            said = f"max_replicas is {self.max_replicas!r}; expected a whole number from {self.replicas} (replicas)"
            raise BadParameter(f"{said} to {MOST_REPLICAS}.")
        if self.requests_per_replica is not None and self.requests_per_replica < 1:
            raise BadParameter(f"requests_per_replica is {self.requests_per_replica!r}; expected a whole number ≥ 1.")
        for name in ("replica_cpus", "replica_gpus"):
            value = getattr(self, name)
            if value is not None and not 0 <= value <= 4096:
                raise BadParameter(f"{name} is {value!r}; expected a number from 0 to 4096.")

    @property
    def most(self) -> int:
        """The most replicas that may run."""
        return self.max_replicas or self.replicas


@dataclass(frozen=True, slots=True)
class Share:
    """What one replica has of its machine."""

    cpus: float  # logical ones, which Ray reserves
    gpus: float
    host: str | None = None  # the address at which it listens; None: its machine's own

    @property
    def threads(self) -> int:
        """With how many threads it computes."""
        return max(int(self.cpus), 1)
