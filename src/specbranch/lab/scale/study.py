"""The study behind `specbranch analyze scale`: which fleets are simulated, in several processes.

Owns the grid. What a fleet does is `fleet_run.py`'s, presentation `report.py`'s. Invariant: a result is found by its
fleet, whoever computed it, and in whatever order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from specbranch.clock.profile import CostProfile
from specbranch.core.methods import METHODS
from specbranch.lab.processes import in_processes
from specbranch.lab.scale.fleet import Fleet, FleetResult
from specbranch.lab.scale.fleet_run import run_fleet
from specbranch.lab.scale.measured import MeasuredPoint
from specbranch.lab.scale.paced_pair import PACED_TOYS
from specbranch.progress import StepsDone

TRIPS = (0.0001, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05)  # seconds
ASKED_TRIPS = (0.0001, 0.0005, 0.002, 0.01)  # of the table of what overlap brings
BATCHES = (1, 4, 16)
SPEEDS = (0.25, 0.5, 1.0, 2.0, 4.0)
REPLICAS = (1, 2, 4, 8)
WORKERS = (1, 2)
SHARING_TARGETS = (2, 4)  # that are measured with one draft worker
SHARED_BATCH = 4  # of replicas that share draft workers


@dataclass(frozen=True, slots=True)
class ScaleOrder:
    """What is to be simulated."""

    profiles: Mapping[str, CostProfile]
    usual: Fleet  # its method, agreement, sharing and load hold for all
    trips: tuple[float, ...] = TRIPS
    batches: tuple[int, ...] = BATCHES
    speeds: tuple[float, ...] = SPEEDS
    replicas: tuple[int, ...] = REPLICAS
    workers: tuple[int, ...] = WORKERS

    def by_trip(self, profile: str, batch: int, overlap: bool = True) -> list[Fleet]:
        """Return one target with a remote draft, at every round trip."""
        one = self._of(profile, batch=batch, overlap=overlap)
        return [replace(one, round_trip=trip) for trip in self.trips]

    def without_draft(self, profile: str, batch: int) -> Fleet:
        """Return one target that decodes plainly."""
        return replace(self._of(profile, batch), draft="none")

    def with_local_draft(self, profile: str, batch: int) -> Fleet:
        """Return one target with a draft at no distance."""
        return replace(self._of(profile, batch), draft="local")

    def by_speed(self, profile: str, trip: float) -> list[Fleet]:
        """Return one request at a time, with draft steps of every speed."""
        one = self._of(profile, batch=1, round_trip=trip)
        return [replace(one, speed=speed) for speed in self.speeds]

    def by_replicas(self, profile: str, workers: int) -> list[Fleet]:
        """Return replicas that share draft workers; 0 workers: they decode plainly."""
        one = self._of(profile, batch=self.shared_batch, workers=max(workers, 1))
        one = one if workers else replace(one, draft="none")
        rate = self.usual.rate
        return [
            replace(one, replicas=count, rate=None if rate is None else rate * count)
            for count in self.replicas
            if count >= workers
        ]

    @property
    def shared_batch(self) -> int:
        """The batch of replicas that share draft workers."""
        return SHARED_BATCH if SHARED_BATCH in self.batches else self.batches[0]

    def fleets(self) -> list[Fleet]:
        """Return all that is simulated, the largest first: then all processes end at about the same time."""
        found: dict[Fleet, None] = {}
        for name in self.profiles:
            found[self.without_draft(name, 1)] = None
            for batch in self.batches:
                found |= dict.fromkeys([self.without_draft(name, batch), self.with_local_draft(name, batch)])
                for overlap in (True, False):
                    found |= dict.fromkeys(self.by_trip(name, batch, overlap))
            for trip in self.asked_trips:
                found |= dict.fromkeys(self.by_speed(name, trip))
            for workers in (0, *self.workers):
                found |= dict.fromkeys(self.by_replicas(name, workers))
        return sorted(found, key=lambda fleet: -fleet.replicas * fleet.batch)

    @property
    def asked_trips(self) -> tuple[float, ...]:
        """The round trips of the tables."""
        return tuple(trip for trip in ASKED_TRIPS if trip in self.trips) or self.trips

    def _of(self, profile: str, batch: int, overlap: bool = True, workers: int = 1, round_trip: float = -1.0) -> Fleet:
        trip = self.usual.round_trip if round_trip < 0.0 else round_trip
        one = replace(self.usual, profile=self.profiles[profile], batch=batch, workers=workers, round_trip=trip)
        planned = METHODS[one.method].policy == "planner"  # other methods do what they do
        return replace(one, overlap=overlap or not planned, rate=None)


@dataclass(frozen=True, slots=True)
class ScaleStudy:
    """All results."""

    order: ScaleOrder
    results: Mapping[Fleet, FleetResult]
    measured: tuple[MeasuredPoint, ...] = ()

    def speeds(self, fleets: Sequence[Fleet]) -> list[float]:
        """Return the tokens a second of some fleets."""
        return [self.results[fleet].tokens_per_second for fleet in fleets]

    def gains(self, fleets: Sequence[Fleet], over: Fleet) -> list[float]:
        """Return the throughput of some fleets by that of another one."""
        return [speed / self.results[over].tokens_per_second for speed in self.speeds(fleets)]


def measured_fleets(usual: Fleet) -> list[Fleet]:
    """Return the toys that are measured: without a draft, with a remote one at every asked distance, and shared."""
    one = replace(usual, profile=PACED_TOYS, rate=None)
    fleets = [replace(one, draft="none")]
    for trip in ASKED_TRIPS:
        far = replace(one, round_trip=trip)
        fleets += [replace(far, method="speculative"), replace(far, overlap=False), far]
    return [*fleets, *(replace(one, replicas=count) for count in SHARING_TARGETS)]


def run_study(order: ScaleOrder, jobs: int, progress: StepsDone) -> ScaleStudy:
    """Simulate everything and report `progress`."""
    fleets, results = order.fleets(), dict[Fleet, FleetResult]()
    progress("Fleets", 0, len(fleets))
    for result in in_processes(run_fleet, fleets, jobs):
        results[result.fleet] = result
        progress("Fleets", len(results), len(fleets))
    return ScaleStudy(order, results)
