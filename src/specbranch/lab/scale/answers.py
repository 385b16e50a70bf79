"""What a study of fleets answers: where a remote draft stops paying, and what overlap brings.

Owns these conclusions as values and as sentences. Invariant: every figure comes from simulated rounds; only the point
between two simulated round trips is interpolated.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from specbranch.lab.scale.study import ScaleStudy

PAYS = 1.02  # times as many tokens a second from which on a draft pays: less would not be noticed


@dataclass(frozen=True, slots=True)
class Limit:
    """Up to which round trip a remote draft pays: 0 never, infinite at any that was tried."""

    profile: str
    batch: int
    over_none: float  # seconds; against no draft
    over_local: float  # against a draft at no distance
    longest: float  # that was tried


@dataclass(frozen=True, slots=True)
class OverlapGain:
    """What overlap brings at a round trip, in tokens a second."""

    profile: str
    batch: int
    round_trip: float
    none: float  # without a draft
    serial: float  # with a draft, without overlap
    overlapped: float

    @property
    def gain(self) -> float:
        """The share by which overlap is faster."""
        return self.overlapped / self.serial - 1.0


def limits(study: ScaleStudy) -> list[Limit]:
    """Return the limit for each profile and batch."""
    order = study.order
    return [_limit(study, name, batch) for name in order.profiles for batch in order.batches]


def _limit(study: ScaleStudy, name: str, batch: int) -> Limit:
    order = study.order
    remote, none, local = (
        order.by_trip(name, batch),
        order.without_draft(name, batch),
        order.with_local_draft(name, batch),
    )
    over_none = pays_up_to(order.trips, study.gains(remote, none), PAYS)
    over_local = pays_up_to(order.trips, study.gains(remote, local), 1.0)
    return Limit(name, batch, over_none, over_local, max(order.trips))


def pays_up_to(trips: Sequence[float], gains: Sequence[float], least: float) -> float:
    """Return the round trip at which the gain falls to `least` for good; 0: it never reaches it, infinite: it stays
    above."""
    points = sorted(zip(trips, gains, strict=True))
    if points[-1][1] >= least:
        return math.inf
    for (near, high), (far, low) in reversed(list(pairwise(points))):
        if high >= least:
            share = (high - least) / (high - low)
            return near * math.exp(share * math.log(far / near))
    return 0.0


def overlap_gains(study: ScaleStudy) -> list[OverlapGain]:
    """Return what overlap brings for each profile and batch, at the round trips that are asked about."""
    found: list[OverlapGain] = []
    for name in study.order.profiles:
        for batch in study.order.batches:
            found += _overlap_gains(study, name, batch)
    return found


def _overlap_gains(study: ScaleStudy, name: str, batch: int) -> list[OverlapGain]:
    order = study.order
    (none,) = study.speeds([order.without_draft(name, batch)])
    serial = study.speeds(order.by_trip(name, batch, overlap=False))
    overlapped = study.speeds(order.by_trip(name, batch))
    rows = zip(order.trips, serial, overlapped, strict=True)
    return [OverlapGain(name, batch, trip, none, *both) for trip, *both in rows if trip in order.asked_trips]


def sentences(study: ScaleStudy) -> list[str]:
    """Return the answers in words."""
    return [_of_limit(limit) for limit in limits(study)] + [_of_overlap(study, name) for name in study.order.profiles]


def _of_limit(limit: Limit) -> str:
    start = f"{limit.profile}, batch {limit.batch}: a remote draft"
    if limit.over_none == math.inf:
        return f"{start} still pays at a round trip of {milliseconds(limit.longest)}, the longest tried."
    if limit.over_none == 0.0:
        return f"{start} does not pay, however near it is: it brings less than {PAYS - 1:.0%} over no draft."
    stops = f"{start} stops paying at a round trip of {milliseconds(limit.over_none)}"
    if limit.over_local in (0.0, math.inf):
        never = "It is slower than a local draft at any" if limit.over_local == 0.0 else "It is faster than a local one"
        return f"{stops}. {never}{' distance' if limit.over_local == 0.0 else ' at all tried'}."
    return f"{stops}. It is faster than a local one up to {milliseconds(limit.over_local)}."


def _of_overlap(study: ScaleStudy, name: str) -> str:
    parts = [
        f"{one.gain:+.0%} at {milliseconds(one.round_trip)}"
        for one in overlap_gains(study)
        if (one.profile, one.batch) == (name, study.order.batches[0])
    ]
    return f"{name}, batch {study.order.batches[0]}: overlap brings {', '.join(parts)}."


def milliseconds(seconds: float) -> str:
    """Return a time as text."""
    return f"{1e3 * seconds:.3g} ms"
