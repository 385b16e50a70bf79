"""What a draft is expected to bring: by hand where that is possible, and falling with prices."""

from __future__ import annotations

import pytest

from specbranch.core.draft_gain import Kinds, draft_gain

NONE = Kinds((), ())
FREE = (0.0,) * 8


def always(chance: float) -> Kinds:
    """One candidate at each position."""
    return Kinds((1.0,), (chance,))


def test_free_steps_bring_the_whole_chain() -> None:
    assert draft_gain(always(0.5), NONE, 0.0, FREE) == pytest.approx(sum(0.5**n for n in range(1, 9)), rel=0.02)


def test_a_step_that_costs_more_than_it_brings_is_not_made() -> None:
    assert draft_gain(always(0.5), NONE, 0.5, FREE) == pytest.approx(0.5), "the first step alone"
    assert draft_gain(always(0.9), NONE, 0.5, FREE) > 0.9 + 0.81 - 0.5


def test_rows_count_by_what_they_bring_beyond_their_price() -> None:
    assert draft_gain(always(0.5), NONE, 9.0, (0.2,) * 8) == pytest.approx(0.3)
    assert draft_gain(always(0.5), NONE, 0.0, (0.6,) * 8) == 0.0
    assert draft_gain(always(0.5), Kinds((3.0,), (0.1,)), 9.0, FREE) == pytest.approx(0.8)


def test_a_draft_that_knows_when_it_is_right_brings_more() -> None:
    knows, rows = Kinds((0.5, 0.5), (0.05, 0.95)), (0.4,) * 8
    assert draft_gain(knows, NONE, 0.1, rows) > draft_gain(always(0.5), NONE, 0.1, rows)


@pytest.mark.parametrize("chance", [0.2, 0.6, 0.95])
def test_the_gain_falls_with_every_price_and_grows_with_the_chance(chance: float) -> None:
    usual = draft_gain(always(chance), always(0.1), 0.1, (0.05,) * 8)
    assert draft_gain(always(chance), always(0.1), 0.2, (0.05,) * 8) <= usual
    assert draft_gain(always(chance), always(0.1), 0.1, (0.1,) * 8) <= usual
    assert draft_gain(always(chance + 0.04), always(0.1), 0.1, (0.05,) * 8) >= usual
