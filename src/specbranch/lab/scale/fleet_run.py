"""A run of a fleet on virtual time.

Owns how its parts are put together, and the load on it. Invariant: a run depends on its fleet alone, so it is the same
in every process and on every machine.
"""

from __future__ import annotations

from math import log

from specbranch.clock.virtual_clock import MeteredDrafter
from specbranch.core.loop import Executor
from specbranch.exec.verifier import Verifier
from specbranch.lab.regret.case import Draws
from specbranch.lab.regret.toy_pair import ScriptedDraft, ScriptedTarget, Scripts
from specbranch.lab.scale.channel import Mailbox, SimulatedLink
from specbranch.lab.scale.draft_device import DraftDevice
from specbranch.lab.scale.draft_side import DraftSide
from specbranch.lab.scale.fleet import Fleet, FleetResult
from specbranch.lab.scale.replica import Replica, throughput
from specbranch.lab.scale.simulation import Signal, Simulation
from specbranch.lab.scale.target_side import LocalDraft, RemoteTarget, TimedVerifier
from specbranch.lab.scale.texts import make_texts

ARRIVALS = 2  # times as many requests arrive, with open arrivals: waiting shows only after some of them


def run_fleet(fleet: Fleet) -> FleetResult:
    """Run a fleet until every replica has decoded its part of the load."""
    return FleetRun(fleet).run()


class FleetRun:
    """A fleet at work. Its actors: replicas, arrivals; as servants the devices of draft workers, and their links."""

    def __init__(self, fleet: Fleet) -> None:
        self.fleet, self.simulation = fleet, Simulation()
        self._scripts: Scripts = make_texts(fleet.agreement)
        workers = fleet.workers if fleet.draft == "remote" else 0
        self._devices = [
            DraftDevice(self.simulation, fleet.profile, fleet.speed, fleet.sharing) for _ in range(workers)
        ]
        self._replicas: list[Replica] = []  # that are ready
        self._changed = Signal(self.simulation)  # a replica is ready, or has a request
        self._measured = max(fleet.batch, fleet.requests)  # requests of each replica
        self._arriving = fleet.rate is not None
        self._begun = self._ended = 0.0

    def run(self) -> FleetResult:
        """Run it."""
        for device in self._devices:
            self.simulation.add(device.run, servant=True)
        for number in range(self.fleet.replicas):
            self._add_replica(number)
        if self._arriving:
            self.simulation.add(self._arrive)
        self.simulation.run()
        return self._result()

    def _result(self) -> FleetResult:
        first = max(one.steady for one in self._replicas) if self.fleet.rate is None else self._begun
        latencies = sorted(seconds for one in self._replicas for seconds in one.latencies)
        drafting = sum(device.busy for device in self._devices) / max(len(self._devices), 1) / self._ended
        return FleetResult(self.fleet, throughput(self._replicas, first, self._ended), tuple(latencies), drafting)

    def _add_replica(self, number: int) -> None:
        links = list[SimulatedLink]()
        if self.fleet.draft == "remote":
            links.append(self._linked(self._devices[number % len(self._devices)]))
        self.simulation.add(lambda: self._work(number, *links))

    def _linked(self, device: DraftDevice) -> SimulatedLink:
        """Return a link to a device, and add the servant at its other end."""
        simulation, one_way = self.simulation, self.fleet.round_trip / 2
        there, back = Mailbox(simulation, one_way), Mailbox(simulation, one_way)
        simulation.add(DraftSide(simulation, device, ScriptedDraft(self._scripts), there, back).run, servant=True)
        return SimulatedLink(simulation, there, back, self.fleet.round_trip)

    def _executor(self, link: SimulatedLink | None) -> Executor:
        target, profile = ScriptedTarget(self._scripts), self.fleet.profile
        if link is not None:
            return RemoteTarget(TimedVerifier(target, self.simulation, profile), link, self.simulation, profile)
        draft = MeteredDrafter(ScriptedDraft(self._scripts)) if self.fleet.draft == "local" else None
        return LocalDraft(Verifier(target), draft, self.simulation, profile)

    def _work(self, number: int, link: SimulatedLink | None = None) -> None:
        """Be a replica."""
        replica = Replica(self.fleet, number, self._scripts, self._executor(link))
        self._replicas.append(replica)
        self._wait_for_others()
        if self.fleet.rate is None:
            replica.give_first()
        while replica.unfinished or self._arriving:
            if not replica.unfinished:
                self.simulation.wait(self._changed)
                continue
            ended = replica.step()
            self._ended = self.simulation.now()
            if self.fleet.rate is None:
                self._go_on(replica, ended)

    def _go_on(self, replica: Replica, ended: int) -> None:
        """Have a client whose request has ended send the next one, until every replica has done its part."""
        for _ in range(ended):
            replica.give()
        if ended and all(len(one.latencies) >= self._measured for one in self._replicas):
            self.simulation.stop()
            self.simulation.sleep(0.0)

    def _wait_for_others(self) -> None:
        self._changed.send()
        while len(self._replicas) < self.fleet.replicas:
            self.simulation.wait(self._changed)

    def _arrive(self) -> None:
        """Send requests at random moments, each to the replica with the fewest."""
        self._wait_for_others()
        assert self.fleet.rate is not None
        self._begun, draws = self.simulation.now(), Draws("arrivals")
        for _ in range(ARRIVALS * self._measured * self.fleet.replicas):
            self.simulation.sleep(-log(1.0 - draws.between((0.0, 1.0))) / self.fleet.rate)
            min(self._replicas, key=lambda one: one.unfinished).give()
            self._changed.send()
        self._arriving = False
        self._changed.send()
