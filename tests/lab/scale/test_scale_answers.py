"""What a study concludes follows from its figures, in numbers and in words."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from xml.etree import ElementTree

import pytest

from specbranch.clock.profile import CostProfile
from specbranch.lab.scale.answers import limits, overlap_gains, pays_up_to, sentences
from specbranch.lab.scale.fleet import Fleet, FleetResult, percentile
from specbranch.lab.scale.report import charts, record, text
from specbranch.lab.scale.study import ScaleOrder, ScaleStudy, measured_fleets, run_study

COSTS = CostProfile(target=((1, 0.01),), draft=((1, 0.001),))
ORDER = ScaleOrder({"mine": COSTS}, Fleet(COSTS), trips=(0.0005, 0.01), batches=(1,), replicas=(1, 2), workers=(1,))


def study_of(near: float, far: float, local: float = 3.0) -> ScaleStudy:
    """A study whose gains over no draft are given: at 0.5 ms, at 10 ms, and at no distance."""

    def speed(fleet: Fleet) -> float:
        if fleet.draft != "remote":
            return 100.0 * {"none": 1.0, "local": local}[fleet.draft]
        return 100.0 * (near if fleet.round_trip < 0.005 else far) * (1.0 if fleet.overlap else 0.8)

    return ScaleStudy(ORDER, {fleet: FleetResult(fleet, speed(fleet), (1.0, 2.0), 0.5) for fleet in ORDER.fleets()})


def test_the_limit_lies_where_the_gain_falls_to_what_is_asked() -> None:
    assert pays_up_to((1.0, 10.0, 100.0), (3.0, 2.0, 1.0), 1.5) == pytest.approx(10.0**1.5)
    assert pays_up_to((1.0, 10.0), (2.0, 1.5), 1.02) == math.inf
    assert pays_up_to((1.0, 10.0), (1.0, 0.5), 1.02) == 0.0
    assert pays_up_to((1.0, 10.0, 100.0), (1.0, 2.0, 1.0), 1.5) == pytest.approx(10.0**1.5)  # it falls for good there


@pytest.mark.parametrize(
    ("near", "far", "said"),
    [
        (2.0, 0.5, "stops paying at a round trip of 3.54 ms. It is slower than a local draft at any distance."),
        (4.0, 1.0, "stops paying at a round trip of 9.8 ms. It is faster than a local one up to 1.36 ms."),
        (2.0, 1.5, "still pays at a round trip of 10 ms, the longest tried."),
        (1.01, 0.5, "does not pay, however near it is: it brings less than 2% over no draft."),
    ],
)
def test_the_answer_is_a_sentence(near: float, far: float, said: str) -> None:
    study = study_of(near, far)
    assert sentences(study)[0] == f"mine, batch 1: a remote draft {said}"
    assert said in text(study)


def test_overlap_is_compared_at_each_asked_round_trip() -> None:
    study = study_of(2.0, 1.5)
    assert [(one.round_trip, round(one.gain, 6)) for one in overlap_gains(study)] == [(0.0005, 0.25), (0.01, 0.25)]
    assert "mine, batch 1: overlap brings +25% at 0.5 ms, +25% at 10 ms." in sentences(study)


def test_all_results_are_drawn_and_recorded() -> None:
    study = study_of(2.0, 1.5)
    made = charts(study)
    assert list(made) == [f"scale-{what}-mine" for what in ("round-trip", "speed", "replicas", "latency")]
    for drawing in made.values():
        ElementTree.fromstring(drawing)
    found = json.loads(json.dumps(record(study), allow_nan=False))
    assert len(found["fleets"]) == len(ORDER.fleets()) and found["stops_paying"][0]["over_none"] is None
    assert limits(study)[0].over_none == math.inf


def test_a_study_simulates_each_fleet_once_and_charges_replicas_by_their_own_load() -> None:
    order = replace(ORDER, usual=replace(ORDER.usual, method="speculative", requests=1, rate=0.5), speeds=(1.0,))
    order = replace(order, trips=(0.0005,))
    fleets = order.fleets()
    assert len(fleets) == len(set(fleets)) == 7
    assert [fleet.rate for fleet in order.by_replicas("mine", 1)] == [0.5, 1.0]
    told: list[tuple[float, float | None]] = []
    study = run_study(order, 1, lambda what, done, of: told.append((done, of)))
    assert set(study.results) == set(fleets) and told[-1] == (len(fleets), len(fleets))


def test_only_a_planned_method_is_simulated_without_overlap() -> None:
    for method, kinds in (("specbranch", {True, False}), ("pearl", {True})):
        order = replace(ORDER, usual=replace(ORDER.usual, method=method), batches=(4,))
        assert {fleet.overlap for fleet in order.fleets()} == kinds
        assert order.without_draft("mine", 1) in order.fleets()  # what draft speeds are compared with


def test_percentiles_are_of_the_values_themselves() -> None:
    rising = [1.0, 2.0, 3.0, 4.0]
    assert [percentile(rising, share) for share in (0.01, 0.5, 0.51, 0.95, 1.0)] == [1.0, 2.0, 3.0, 4.0, 4.0]


def test_measured_are_the_asked_distances_and_shared_workers() -> None:
    fleets = measured_fleets(Fleet(COSTS))
    assert {fleet.round_trip for fleet in fleets if fleet.draft == "remote"} == {0.0001, 0.0005, 0.002, 0.01}
    assert {fleet.replicas for fleet in fleets} == {1, 2, 4} and len(fleets) == len(set(fleets))
