"""Fleets measured on this machine: toys of timed forwards, a real draft worker on loopback, and a relay that delays.

Owns these runs, and the profile that they show. Invariant: everything is real but the models: processes, sockets,
messages, waiting, planning, and the time they take.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from statistics import median

from specbranch.clock.profile import CostProfile
from specbranch.core.costs import MeasuredCosts
from specbranch.core.loop import Executor
from specbranch.exec.process import Process
from specbranch.exec.serial import Serial
from specbranch.exec.verifier import Verifier
from specbranch.lab.regret.toy_pair import Scripts
from specbranch.lab.scale.fleet import Fleet, FleetResult
from specbranch.lab.scale.fleet_run import run_fleet
from specbranch.lab.scale.paced_pair import PacedTarget
from specbranch.lab.scale.paced_worker import PacedWorker, dial
from specbranch.lab.scale.relay import Relay, Weather
from specbranch.lab.scale.replica import Replica, throughput
from specbranch.lab.scale.texts import make_texts
from specbranch.progress import StepsDone

NO_DRAFT = 1.0  # seconds of a draft step, where there is no draft: nobody takes one


@dataclass(frozen=True, slots=True)
class MeasuredTurn:
    """One real run of a fleet, and the same one simulated with what this run measured of machine and link."""

    tokens_per_second: float
    simulated: FleetResult

    @property
    def off(self) -> float:
        """The relative error of the simulation."""
        return self.simulated.tokens_per_second / self.tokens_per_second - 1.0


@dataclass(frozen=True, slots=True)
class MeasuredPoint:
    """A fleet that was measured in several turns; its figures are medians."""

    fleet: Fleet  # with the delay that was asked for
    turns: tuple[MeasuredTurn, ...]

    @property
    def round_trip(self) -> float:
        """Seconds, as the targets measured them."""
        return median(turn.simulated.fleet.round_trip for turn in self.turns)

    @property
    def tokens_per_second(self) -> float:
        """Of all replicas, measured."""
        return median(turn.tokens_per_second for turn in self.turns)

    @property
    def simulated(self) -> float:
        """Tokens a second of the simulation."""
        return median(turn.simulated.tokens_per_second for turn in self.turns)

    @property
    def off(self) -> float:
        """The relative error of the simulation, turn by turn."""
        return median(turn.off for turn in self.turns)

    @property
    def spread(self) -> tuple[float, float]:
        """The lowest and the highest measured tokens a second."""
        speeds = [turn.tokens_per_second for turn in self.turns]
        return min(speeds), max(speeds)


def measure_fleets(fleets: Sequence[Fleet], repeats: int, progress: StepsDone) -> list[MeasuredPoint]:
    """Run fleets for real, in turns, and simulate each run with what it measured."""
    turns: dict[Fleet, list[MeasuredTurn]] = {fleet: [] for fleet in fleets}
    steps = [fleet for _ in range(repeats) for fleet in fleets]
    for done, fleet in enumerate(steps):
        progress("Measuring toys", done, len(steps))
        speed, as_measured = _measured(fleet)
        turns[fleet].append(MeasuredTurn(speed, run_fleet(as_measured)))
    return [MeasuredPoint(fleet, tuple(found)) for fleet, found in turns.items()]


def _measured(fleet: Fleet) -> tuple[float, Fleet]:
    """Run a fleet for real; returns its tokens a second, and the fleet with the costs and round trip that it had."""
    scripts = make_texts(fleet.agreement)
    with _targets(fleet, scripts) as executors:
        replicas = _timed(fleet, scripts, executors)
        first, last = max(one.steady for one in replicas), min(one.ended for one in replicas)
        trips = [executor.round_trip for executor in executors if isinstance(executor, Process)]
        trip = median(trips) if trips else 0.0
        profile = shown_profile(replicas[0].costs)
        return throughput(replicas, first, last), replace(fleet, profile=profile, round_trip=trip)


@contextmanager
def _targets(fleet: Fleet, scripts: Scripts) -> Iterator[list[Executor]]:
    """Yield an executor for each replica; they share the fleet's draft workers."""
    with ExitStack() as stack:
        ports = list[int]()
        for _ in range(fleet.workers if fleet.draft == "remote" else 0):
            worker = stack.enter_context(PacedWorker(fleet.profile, fleet.agreement))
            ports.append(stack.enter_context(Relay(worker.port, Weather(fleet.round_trip / 2))).port)
        executors = list[Executor]()
        for number in range(fleet.replicas):
            target = Verifier(PacedTarget(scripts, fleet.profile))
            made = Process(target, dial(ports[number % len(ports)], scripts.vocabulary)) if ports else Serial(target)
            stack.callback(made.close)
            executors.append(made)
        yield executors


def _timed(fleet: Fleet, scripts: Scripts, executors: Sequence[Executor]) -> list[Replica]:
    """Run all replicas, each in a thread, until every one has done its part."""
    replicas = [Replica(fleet, number, scripts, executor) for number, executor in enumerate(executors)]
    measured, failed = max(fleet.batch, fleet.requests), list[BaseException]()

    def work(replica: Replica) -> None:
        try:
            replica.give_first()
            while not failed and any(len(one.latencies) < measured for one in replicas):
                for _ in range(replica.step()):
                    replica.give()
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=(one,), daemon=True) for one in replicas]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for error in failed:
        raise error
    return replicas


def shown_profile(costs: MeasuredCosts) -> CostProfile:
    """Return what forwards, draft steps and the host took, as a profile."""
    plain = max(costs.gap("plain"), 0.0)
    planned = max(costs.gap("verify"), costs.gap("lookup"))
    return CostProfile(
        target=tuple((rows, costs.target_seconds(rows)) for rows in sorted(costs.target.points)),
        draft=tuple((rows, costs.draft_seconds(rows)) for rows in sorted(costs.step.points)) or ((1, NO_DRAFT),),
        draft_setup=costs.factor * costs.setup,
        host=plain,
        asking=max(planned - plain, 0.0),
        note="Measured in the run itself.",
    )
