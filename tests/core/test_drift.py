"""The drift of a text: what may be chance does not count, what cannot be does, and it is forgotten."""

from __future__ import annotations

import random

import pytest

from specbranch.core.drift import Drift
from specbranch.core.trees import shifted

USUAL = (0.3, 0.8)


def read(drift: Drift, count: int, share: float, seed: int = 0) -> float:
    """Judge candidates of the second class; returns their chance behind them."""
    rng = random.Random(seed)
    for _ in range(count):
        drift.pass_tokens(1)
        drift.observe(1, rng.random() < share)
    return shifted(USUAL[1], drift.against(USUAL))


def test_a_text_as_usual_hardly_drifts() -> None:
    found = [read(Drift(), 40, 0.8, seed) for seed in range(200)]
    assert sum(chance == pytest.approx(0.8) for chance in found) > 150, "as long as it may be chance"
    assert sum(found) / len(found) == pytest.approx(0.8, abs=0.02)


@pytest.mark.parametrize("share", [0.2, 0.3, 0.4])
def test_another_kind_of_text_is_noticed_within_50_tokens_and_forgotten_as_fast(share: float) -> None:
    halfway = (USUAL[1] + share) / 2
    found = [read(Drift(), 50, share, seed) for seed in range(100)]
    assert abs(sum(found) / len(found) - USUAL[1]) > abs(halfway - USUAL[1])
    for seed in range(20):
        drift = Drift()
        read(drift, 50, share, seed)
        read(drift, 50, USUAL[1], seed + 1)
        drift.pass_tokens(50)
        assert shifted(USUAL[1], drift.against(USUAL)) == pytest.approx(USUAL[1], abs=0.15)


def test_what_was_learned_meanwhile_does_not_count_twice() -> None:
    drift = Drift()
    assert read(drift, 50, 0.3) < 0.6
    assert drift.against((0.3, 0.3)) == 0.0, "by now that is usual"


def test_without_a_verdict_there_is_none() -> None:
    drift = Drift()
    drift.pass_tokens(10)
    assert drift.against(USUAL) == 0.0
