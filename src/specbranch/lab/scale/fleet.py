"""A fleet: replicas of a target, the draft workers they share, the network between them, and the load.

Owns the settings (`Fleet`) and the figures of a run (`FleetResult`). Invariant: the settings say all that a run depends
on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from typing import Literal

from specbranch.clock.profile import CostProfile
from specbranch.config import SpeculativeConfig
from specbranch.core.methods import METHODS, PLAIN
from specbranch.lab.scale.draft_device import Sharing

DraftPlace = Literal["none", "local", "remote"]  # none; at no distance, as in the profile; in a draft worker


@dataclass(frozen=True, slots=True)
class Fleet:
    """Replicas of a target, the draft workers they share, the network, and the load."""

    profile: CostProfile
    draft: DraftPlace = "remote"
    method: str = "specbranch"
    overlap: bool = True  # the draft works during a verify, too
    replicas: int = 1
    workers: int = 1
    batch: int = 1  # requests that a replica decodes at once
    round_trip: float = 0.0005  # seconds of an order and its answer on their way
    speed: float = 1.0  # how many times as fast as in the profile a draft step is
    sharing: Sharing = "steps"
    agreement: float = 0.7  # how often the draft's first candidate is the target's token
    rate: float | None = None  # requests a second that arrive; None: each client sends one after the other
    draft_tokens: int = 5  # of a method with a fixed length
    requests: int = 4  # of each replica that are measured, at least

    @property
    def config(self) -> SpeculativeConfig:
        """The method and its settings. Lookup is left out: its gain has nothing to do with where a draft is."""
        if self.draft == "none":
            return SpeculativeConfig(method=PLAIN)
        if METHODS[self.method].policy != "planner":
            return SpeculativeConfig(method=self.method, num_speculative_tokens=self.draft_tokens)
        return SpeculativeConfig(method=self.method, without=("lookup",) if self.overlap else ("lookup", "overlap"))


@dataclass(frozen=True, slots=True)
class FleetResult:
    """What a fleet did."""

    fleet: Fleet
    tokens_per_second: float  # of all replicas
    latencies: tuple[float, ...]  # seconds of whole requests, in rising order
    drafting: float = 0.0  # share of the time that the devices of the draft workers computed

    def latency(self, share: float) -> float:
        """Return the latency that this share of all requests did not exceed."""
        return percentile(self.latencies, share)


def percentile(rising: Sequence[float], share: float) -> float:
    """Return the value that this share of all values does not exceed."""
    return rising[max(ceil(share * len(rising)), 1) - 1]
