"""What rounds cost is learned of all sessions together."""

from __future__ import annotations

from dataclasses import replace

import pytest

from specbranch.clock.profile import CostProfile
from specbranch.config import SpeculativeConfig
from specbranch.core import rehearsal
from specbranch.core.costs import MeasuredCosts
from specbranch.core.experience import Experience
from specbranch.core.loop import Loop
from specbranch.core.methods import METHODS
from specbranch.core.orders import Context, Grow, Orders, Reports, Span, Verify
from specbranch.core.rehearsal import REHEARSED_ROWS, REHEARSED_WIDTHS, rehearse
from specbranch.core.trees import NO_TREE, Growth, Tree
from specbranch.exec.serial import Serial
from toybench import Case, Ending, make_drafter, make_verifier, next_number, run_out, serial, virtual_clock

GROWTH = Growth((1.0,), Experience().insight.chances())
STEEP = CostProfile(target=((1, 10.0), (33, 42.0)), draft=((1, 2.0), (33, 18.0)), overlap=False)


def learned_in_batch(sessions: int, method: str) -> MeasuredCosts:
    costs = MeasuredCosts(overlap=False)
    loop = Loop(virtual_clock(0.2, profile=STEEP), costs=costs)
    for seed in range(sessions):
        session = Case((seed % 6, 1, 2), 0.7, seed, Ending("long", max_tokens=60)).session(next_number())
        config = SpeculativeConfig(method=method, num_speculative_tokens=3)
        loop.join(session, METHODS[method].start(session, config, Experience(costs)))
    run_out(loop)
    return costs


@pytest.mark.parametrize("method", ["autoregressive", "speculative", "specbranch"])
@pytest.mark.parametrize("sessions", [1, 4, 8])
def test_times_are_booked_under_the_rows_of_all_sessions(sessions: int, method: str) -> None:
    costs = learned_in_batch(sessions, method)
    for rows in costs.times["target"]:
        assert costs.target_seconds(rows) == pytest.approx(STEEP.target_seconds(rows), rel=1e-6)
    assert max(costs.times["target"]) >= sessions
    for width in costs.times["step"]:  # steps of several widths are booked under their mean
        assert costs.draft_seconds(width) == pytest.approx(STEEP.draft_seconds(width), rel=0.35)


def test_a_round_is_observed_once_however_many_take_part() -> None:
    rounds = {
        sessions: sum(map(len, learned_in_batch(sessions, "autoregressive").times["target"].values()))
        for sessions in (1, 8)
    }
    assert rounds[1] == rounds[8] > 10


def test_reading_a_prompt_is_no_round() -> None:
    costs = MeasuredCosts()
    loop = Loop(serial(0.2), costs=costs)
    session = Case((1, 2, 3) * 4, 0.0, 0, Ending("one", max_tokens=1)).session(next_number())
    loop.join(
        session, METHODS["autoregressive"].start(session, SpeculativeConfig(method="autoregressive"), Experience())
    )
    run_out(loop)
    assert not costs.knows_target


@pytest.mark.parametrize("setup", [0.0, 7.0])
def test_a_rehearsal_finds_what_a_profile_charges(setup: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rehearsal, "REHEARSAL_TURNS", 3)
    costs, profile = MeasuredCosts(), replace(STEEP, draft_setup=setup)
    rehearse(virtual_clock(0.2, vocabulary=12, profile=profile), costs, 12, has_draft=True, seconds=1e9)
    assert set(costs.times["target"]) == set(REHEARSED_ROWS)
    assert min(costs.times["step"]) == min(REHEARSED_WIDTHS) and max(costs.times["step"]) >= max(REHEARSED_WIDTHS) - 1
    assert costs.draft_setup == pytest.approx(setup, abs=2.0)
    for rows in REHEARSED_ROWS:
        assert costs.target_seconds(rows) == pytest.approx(STEEP.target_seconds(rows))
    for width in REHEARSED_WIDTHS:
        assert costs.draft_seconds(width) == pytest.approx(STEEP.draft_seconds(width), rel=0.35)


def test_a_rehearsal_ends_when_its_time_is_over_and_leaves_nothing_behind() -> None:
    costs, target, draft = MeasuredCosts(), make_verifier(vocabulary=12), make_drafter(0.2, 12)
    rehearse(Serial(target, draft, clock=iter(range(10_000)).__next__), costs, 12, has_draft=True, seconds=20.0)
    assert sum(len(times) for by_rows in costs.times.values() for times in by_rows.values()) < 8
    assert not target._held and not draft._held


def test_a_rehearsal_takes_no_token_for_granted_that_does_not_fit() -> None:
    """A context too short for it is found out and left alone."""
    costs, target = MeasuredCosts(), make_verifier(vocabulary=3)
    target.runner.context_length, target.runner._tail = 8, 4  # type: ignore[misc, attr-defined]
    rehearse(Serial(target), costs, 3, has_draft=False, seconds=10.0)
    assert not costs.knows_target


def test_the_slow_down_of_a_step_beside_the_target_is_learned_apart() -> None:
    """Steps of 2 alone take 4 beside it, and a target of 10 takes 1 more for each."""
    costs, on = MeasuredCosts(), Context(5, (1,))
    grow, verify = Grow(on, NO_TREE, GROWTH), Verify(on)
    tree = Tree(root_scored=True, steps=(1, 1))
    for _ in range(4):
        costs.observe({0: Orders(grow)}, {0: Reports(tree=tree, drafting=Span(0.0, 4.0))})
        costs.observe({0: Orders(verify=verify)}, {0: Reports(verifying=Span(4.0, 14.0, 1))})
        costs.observe(
            {0: Orders(grow, verify)}, {0: Reports(tree=tree, drafting=Span(14.0, 22.0), verifying=Span(14.0, 26.0, 1))}
        )
    assert (costs.draft_seconds(1), costs.target_seconds(1)) == (2.0, 10.0)
    assert (costs.draft_slow_down, costs.slow_down) == (2.0, 1.0)


def test_what_comes_once_for_all_steps_is_learned_apart_from_them() -> None:
    """Drafts of 2 and 8 steps take 5 + 2 n; beside the target a step takes 1 more."""
    costs, on = MeasuredCosts(), Context(5, (1,))
    for _ in range(6):
        for count in (2, 8):
            tree = Tree(root_scored=True, steps=(1,) * count)
            costs.observe(
                {0: Orders(Grow(on, NO_TREE, GROWTH))}, {0: Reports(tree=tree, drafting=Span(0.0, 5 + 2 * count))}
            )
    assert costs.draft_setup == pytest.approx(5.0) and costs.draft_seconds(1) == pytest.approx(2.0)
    verify, tree = Verify(on), Tree(root_scored=True, steps=(1, 1))
    for _ in range(3):
        costs.observe({0: Orders(verify=verify)}, {0: Reports(verifying=Span(0.0, 20.0, 1))})
        both = Reports(tree=tree, drafting=Span(0.0, 11.0), verifying=Span(0.0, 20.0, 1))
        costs.observe({0: Orders(Grow(on, NO_TREE, GROWTH), verify)}, {0: both})
    assert costs.draft_slow_down == pytest.approx(1.0)


def test_steps_that_were_never_timed_alone_are_timed_beside_the_target() -> None:
    costs, on, tree = MeasuredCosts(), Context(5, (1,)), Tree(root_scored=True, steps=(1, 1))
    for _ in range(2):
        report = Reports(tree=tree, drafting=Span(14.0, 22.0), verifying=Span(14.0, 26.0, 1))
        costs.observe({0: Orders(Grow(on, NO_TREE, GROWTH), Verify(on))}, {0: report})
    assert (costs.draft_seconds(1), costs.draft_slow_down) == (4.0, 0.0)


def test_forwards_that_are_padded_to_one_size_share_their_times() -> None:
    costs = MeasuredCosts(padded=lambda rows: 1 if rows == 1 else -(-rows // 16) * 16)
    for rows, seconds in ((1, 1.0), (5, 3.0), (16, 5.0), (9, 4.0), (17, 9.0)):
        costs.take("target", rows, seconds)
    assert [costs.target_seconds(rows) for rows in (1, 2, 16, 17, 32)] == [1.0, 4.0, 4.0, 9.0, 9.0]
    costs.take("step", 5, 2.0)  # those of the draft are not padded like this
    costs.take("step", 9, 4.0)
    assert costs.draft_seconds(7) == 3.0


def verified(costs: MeasuredCosts, rows: int, seconds: float) -> None:
    orders = {0: Orders(verify=Verify(Context(9, (1,))))}
    costs.observe(orders, {0: Reports(verifying=Span(0.0, seconds, rows))})


def grown(costs: MeasuredCosts, steps: tuple[int, ...], seconds: float) -> None:
    orders = {0: Orders(draft=Grow(Context(9, (1,)), NO_TREE, GROWTH))}
    costs.observe(orders, {0: Reports(tree=Tree((), True, steps), drafting=Span(0.0, seconds, sum(steps)))})


def test_a_time_in_which_something_was_set_up_is_not_believed() -> None:
    costs = MeasuredCosts()
    for _ in range(3):
        for rows in (1, 16):
            verified(costs, rows, 1.0)
        grown(costs, (1, 1), 0.4)
    verified(costs, 12, 1.0)  # the first of about as many rows is dropped anyway
    verified(costs, 13, 90.0)
    grown(costs, (13, 1, 1, 1), 0.8)
    grown(costs, (14, 1, 1, 1), 70.0)
    assert costs.target_seconds(13) == 1.0 and costs.draft_seconds(4) < 0.5
    verified(costs, 13, 1.0)
    verified(costs, 13, 90.0)
    assert costs.target_seconds(13) == 1.0, "one now and then is not believed either"


def test_what_has_become_slower_is_believed_when_it_is_met_again() -> None:
    costs = MeasuredCosts()
    for _ in range(3):
        verified(costs, 4, 1.0)
        grown(costs, (1, 1), 0.4)
    for _ in range(40):
        verified(costs, 4, 9.0)
        grown(costs, (1, 1), 4.0)
    assert costs.target_seconds(4) == 9.0 and costs.draft_seconds(1) > 1.0
