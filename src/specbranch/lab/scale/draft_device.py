"""The device of a draft worker on virtual time, for the orders of several targets.

Owns which orders share a forward, and what a draft step takes. What is drafted is the service's (`draft_side.py`).
Invariant: one forward runs at a time; orders that share the device change each other's times, never their tokens.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Literal, get_args

from specbranch.clock.profile import CostProfile
from specbranch.lab.scale.simulation import Signal, Simulation

Sharing = Literal["steps", "turns"]  # orders of several targets join in each step; or one is drafted after the other
SHARINGS: tuple[Sharing, ...] = get_args(Sharing)


@dataclass(slots=True, eq=False)
class _Step:
    """What one order wants of the next forward."""

    rows: int
    context: float  # mean tokens behind which they are
    least: float  # seconds that it takes at least
    done: bool = False


class DraftDevice:
    """Runs the draft steps of all targets of a worker."""

    def __init__(self, simulation: Simulation, profile: CostProfile, speed: float, sharing: Sharing) -> None:
        """`speed`: how many times as fast as in the profile a draft step is."""
        self._simulation, self._profile, self._speed, self._sharing = simulation, profile, speed, sharing
        self._waiting: deque[object] = deque()  # orders that have not begun
        self._active: set[object] = set()
        self._asked: list[_Step] = []
        self._begun, self._stepped, self._wanted = (Signal(simulation) for _ in range(3))
        self.busy = 0.0  # seconds of forwards

    @property
    def setup(self) -> float:
        """Seconds of an order before its first step."""
        return self._profile.draft_setup

    def run(self) -> None:
        """Run forwards, one after the other, each for all orders that are ready for it."""
        while True:
            while not self._asked:
                self._simulation.wait(self._wanted)
            asked, self._asked = self._asked, []
            seconds = self._seconds(asked)
            self._simulation.sleep(seconds)
            self.busy += seconds
            for step in asked:
                step.done = True
            self._stepped.send()
            self._simulation.sleep(0.0)  # who goes on at once is in the next forward

    def begin(self, order: object) -> None:
        """Wait until an order may begin."""
        self._waiting.append(order)
        self._admit()
        while order not in self._active:
            self._simulation.wait(self._begun)

    def end(self, order: object) -> None:
        """Let others begin."""
        self._active.discard(order)
        self._admit()

    def forward(self, rows: int, context: float, hears: bool = False) -> None:
        """Wait for a forward with these rows, and with those of other orders; `hears`: the host receives each step."""
        step = _Step(rows, context, self._profile.hearing if hears else 0.0)
        self._asked.append(step)
        self._wanted.send()
        while not step.done:
            self._simulation.wait(self._stepped)

    def _admit(self) -> None:
        while self._waiting and (self._sharing == "steps" or not self._active):
            self._active.add(self._waiting.popleft())
        self._begun.send()

    def _seconds(self, asked: Sequence[_Step]) -> float:
        rows, context = sum(step.rows for step in asked), fmean(step.context for step in asked)
        return max(self._profile.draft_seconds(rows, context) / self._speed, *(step.least for step in asked))
