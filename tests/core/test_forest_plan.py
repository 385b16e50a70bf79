"""The plan of rounds in which a device grows the trees: what it costs to begin to draft, and what plain rounds take."""

from __future__ import annotations

import pytest

from specbranch.core.cost_curves import LEAST_OF_LOAD, ForestCosts
from specbranch.core.costs import MeasuredCosts
from specbranch.core.experience import Experience
from specbranch.core.forest import FEW_UNCOMPUTED, ForestPlan
from specbranch.core.forest_plan import catch_up_seconds, forest_plan
from specbranch.core.lookup import Ngrams
from specbranch.core.orders import Span
from specbranch.core.planner import LOOKED, Planner

TEXT = 100


def timed() -> MeasuredCosts:
    """Costs of a device on which drafting pays well."""
    costs = MeasuredCosts(overlap=False, launches_ahead=True)
    for rows, seconds in ((1, 0.010), (64, 0.011)):
        costs.target.set(rows, seconds)
    for width, seconds in ((1, 0.001), (8, 0.00101)):
        costs.step.set(width, seconds)
    return costs


def planned(costs: MeasuredCosts, sessions: int = 4, catching_up: float = 0.0) -> ForestPlan:
    planner = Planner(Experience(costs))
    planner.begin(TEXT, sessions)
    return forest_plan([planner.forest_wish()] * sessions, TEXT, sessions, catching_up)


def test_a_draft_begins_only_where_the_rounds_that_are_left_pay_for_its_catching_up() -> None:
    costs = timed()
    assert planned(costs).steps and planned(costs, catching_up=0.001).steps
    dear = planned(costs, catching_up=0.1)
    assert not dear.steps and dear.gain < planned(costs, catching_up=0.001).gain < planned(costs).gain


def test_few_tokens_are_computed_on_the_way() -> None:
    costs = timed()
    assert catch_up_seconds(costs, FEW_UNCOMPUTED, TEXT) == 0.0
    assert catch_up_seconds(costs, 200, TEXT) == pytest.approx(costs.draft_seconds(200))
    assert catch_up_seconds(MeasuredCosts(), 200, TEXT) == 0.0, "a draft that was never timed"


def test_the_hosts_part_counts_in_plain_rounds_too() -> None:
    """If plain rounds and those of the forest both take 20 ms more than their forwards, neither is better for it."""
    costs = timed()
    for _ in range(40):
        costs.forest.observe(0.03, 0.01, 0.0)
    alone = planned(costs).gain
    end = 0.0
    for _ in range(12):
        end += 0.03
        costs.observe_plain(Span(end - 0.01, end, 4), 4, prefilled=False)
    assert costs.gap("plain", 4) == pytest.approx(0.02, abs=1e-3)
    assert planned(costs).gain > 1.2 > alone


def test_rounds_that_take_less_than_at_load_show_a_host_that_was_slow_and_no_faster_machine() -> None:
    costs, end = timed(), 0.0
    for seconds in [0.02] * 12 + [0.01] * 40:
        end += seconds
        costs.observe_plain(Span(end - 0.01, end, 1), 1, prefilled=False)
    assert costs.factor == pytest.approx(1.0) and costs.gap("plain") == pytest.approx(0.0, abs=1e-6)


def test_what_is_beside_the_forwards_falls_again_if_draft_steps_leave_no_room_for_it() -> None:
    costs = ForestCosts()
    for _ in range(20):
        costs.observe(0.03, 0.01, 0.0)
    assert costs.beside == pytest.approx(0.02)
    for _ in range(20):
        costs.observe(0.015, 0.01, 0.005)
    assert costs.beside == pytest.approx(0.005 * (1.0 - LEAST_OF_LOAD))


def test_a_long_run_of_right_tokens_is_noticed_before_it_ends() -> None:
    text = [*range(30), *range(4)]
    planner = Planner(Experience(timed()), ngrams=Ngrams(text, 4), ngram_sizes=(4, 1))
    planner.follow_lookup(text)
    before = planner.learning.lookup_in_text()
    text += [4, 5, 6]
    planner.follow_lookup(text)
    after = planner.learning.lookup_in_text()
    assert all(now > was for now, was in zip(after[:3], before[:3], strict=True)) and after[3:] == before[3:]
    text += [29]  # and its end tells of all depths behind it
    planner.follow_lookup(text)
    assert len(after) == LOOKED and all(
        now < was for now, was in zip(planner.learning.lookup_in_text()[3:], after[3:], strict=True)
    )
