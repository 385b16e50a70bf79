"""Toys measured on this machine run through a real worker, and come with their simulation."""

from __future__ import annotations

from dataclasses import replace

import pytest

from specbranch.clock.profile import CostProfile
from specbranch.lab.scale.fleet import Fleet
from specbranch.lab.scale.measured import measure_fleets
from specbranch.lab.scale.report import measured_rows

QUICK = CostProfile(target=((1, 0.004), (64, 0.004)), draft=((1, 0.0005), (64, 0.0005)))


@pytest.mark.slow
def test_toys_are_measured_over_a_real_link_and_simulated_with_what_was_measured() -> None:
    one = Fleet(QUICK, requests=1, method="speculative", round_trip=0.004)
    fleets = [replace(one, draft="none"), one, replace(one, replicas=2)]
    points = measure_fleets(fleets, 1, lambda what, done, of: None)
    assert [point.fleet for point in points] == fleets
    assert points[0].round_trip == 0.0 and all(point.round_trip >= 0.004 for point in points[1:])
    profile = (
        points[1].turns[0].simulated.fleet.profile
    )  # that was measured: nothing sleeps shorter than it is asked to
    assert profile.target_seconds(1) >= 0.004 and profile.draft_seconds(1) >= 0.0005
    assert all(point.tokens_per_second > 0 and point.simulated > 0 for point in points)
    assert [row[:2] for row in measured_rows(points)[1:]] == [
        ["no draft", "–"],
        ["speculative", "4 ms"],
        ["speculative, 2 targets share a worker", "4 ms"],
    ]
