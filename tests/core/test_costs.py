"""What rounds cost is timed at load and corrected by the rounds of all sessions together."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import get_args

import pytest

from specbranch.clock.profile import CostProfile
from specbranch.config import SpeculativeConfig
from specbranch.core.arms import ArmRound
from specbranch.core.cost_curves import TIMES_KEPT, Curve, Recent
from specbranch.core.costs import PLANNING_SECONDS, MeasuredCosts, RunKind
from specbranch.core.experience import Experience
from specbranch.core.loop import Loop
from specbranch.core.methods import METHODS
from specbranch.core.orders import Context, Grow, Orders, Reports, Span, Verdict, Verify
from specbranch.core.rehearsal import (
    LEAST_STEP,
    REHEARSED_LENGTHS,
    REHEARSED_ROWS,
    REHEARSED_WIDTHS,
    RehearsedTimes,
    rehearse,
    rehearsed,
)
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
    assert costs.target.points and max(costs.target.points) >= sessions
    for rows in costs.target.points:
        assert costs.target_seconds(rows) == pytest.approx(STEEP.target_seconds(rows), rel=0.1)
    for width in costs.step.points:  # steps of several widths are booked under their mean
        assert costs.draft_seconds(width) == pytest.approx(STEEP.draft_seconds(width), rel=0.35)


def test_a_round_is_observed_once_however_many_take_part() -> None:
    for sessions in (1, 8):
        costs = learned_in_batch(sessions, "autoregressive")
        (recent,) = [recent for (kind, size), recent in costs.hosts.items() if size == sessions.bit_length()]
        assert kinds(costs) == {"plain"} and len(recent.values) == TIMES_KEPT
        assert costs.target.points == {sessions: pytest.approx(STEEP.target_seconds(sessions))} and costs.factor == 1.0


def test_reading_a_prompt_is_no_round() -> None:
    costs = MeasuredCosts()
    loop = Loop(serial(0.2), costs=costs)
    session = Case((1, 2, 3) * 4, 0.0, 0, Ending("one", max_tokens=1)).session(next_number())
    loop.join(
        session, METHODS["autoregressive"].start(session, SpeculativeConfig(method="autoregressive"), Experience())
    )
    run_out(loop)
    assert not costs.knows_target


@pytest.fixture
def every_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rehearse as users do, not as briefly as tests that load a pair."""
    for name, sizes in (("ROWS", REHEARSED_ROWS), ("WIDTHS", REHEARSED_WIDTHS), ("LENGTHS", REHEARSED_LENGTHS)):
        monkeypatch.setattr(f"specbranch.core.rehearsal.REHEARSED_{name}", sizes)


@pytest.mark.usefixtures("every_size")
@pytest.mark.parametrize("setup", [0.0, 7.0])
def test_a_rehearsal_finds_what_a_profile_charges(setup: float) -> None:
    costs, profile = MeasuredCosts(), replace(STEEP, draft_setup=setup)
    rehearse(virtual_clock(0.2, vocabulary=12, profile=profile), costs, 12, has_draft=True, seconds=1e9)
    assert set(costs.target.points) == set(REHEARSED_ROWS) and rehearsed(costs, has_draft=True)
    assert min(costs.step.points) == min(REHEARSED_WIDTHS) and max(costs.step.points) >= max(REHEARSED_WIDTHS) - 1
    assert costs.draft_setup == pytest.approx(setup, abs=2.0)
    for rows in REHEARSED_ROWS:
        assert costs.target_seconds(rows) == pytest.approx(STEEP.target_seconds(rows))
    for width in REHEARSED_WIDTHS:
        assert costs.draft_seconds(width) == pytest.approx(STEEP.draft_seconds(width), rel=0.35)


def test_a_rehearsal_ends_when_its_time_is_over_and_leaves_nothing_behind() -> None:
    costs, target, draft = MeasuredCosts(), make_verifier(vocabulary=12), make_drafter(0.2, 12)
    rehearse(Serial(target, draft, clock=iter(range(10_000)).__next__), costs, 12, has_draft=True, seconds=20.0)
    assert 0 < len(costs.target.points) + len(costs.step.points) < 8
    assert not target._held and not draft._held


def test_a_rehearsal_takes_no_token_for_granted_that_does_not_fit() -> None:
    """A context too short for it is found out and left alone."""
    costs, target = MeasuredCosts(), make_verifier(vocabulary=3)
    target.runner.context_length, target.runner._tail = 8, 4  # type: ignore[misc, attr-defined]
    rehearse(Serial(target), costs, 3, has_draft=False, seconds=10.0)
    assert not costs.knows_target


def test_the_slow_down_of_a_step_beside_the_target_is_learned_apart() -> None:
    """Steps of 2 alone take 4 beside it, and a target of 10 takes 1 more for each."""
    costs, on = timed({1: 10.0}, {1: 2.0}), Context(5, (1,))
    grow, verify = Grow(on, NO_TREE, GROWTH), Verify(on)
    tree = Tree(root_scored=True, steps=(1, 1))
    for _ in range(4):
        grown(costs, (1, 1), 4.0)
        verified(costs, 1, 10.0)
        costs.observe(
            {0: Orders(grow, verify)}, {0: Reports(tree=tree, drafting=Span(14.0, 22.0), verifying=Span(14.0, 26.0, 1))}
        )
    assert (costs.draft_seconds(1), costs.target_seconds(1)) == (2.0, 10.0)
    assert (costs.draft_slow_down, costs.slow_down) == (2.0, 1.0)


def test_a_setup_counts_once_for_all_steps() -> None:
    """Drafts take 5 + 2 n, as they did at load: nothing is corrected. Beside the target a step takes 1 more."""
    costs, on = timed({1: 20.0}, {1: 2.0}, setup=5.0), Context(5, (1,))
    for count in (2, 8) * 6:
        grown(costs, (1,) * count, 5.0 + 2 * count)
    assert (costs.draft_setup, costs.draft_seconds(1), costs.factor) == (5.0, 2.0, 1.0)
    tree = Tree(root_scored=True, steps=(1, 1))
    for _ in range(3):
        both = Reports(tree=tree, drafting=Span(0.0, 11.0), verifying=Span(0.0, 20.0, 1))
        costs.observe({0: Orders(Grow(on, NO_TREE, GROWTH), Verify(on))}, {0: both})
    assert costs.draft_slow_down == pytest.approx(1.0)


def test_steps_that_were_never_timed_alone_are_timed_beside_the_target() -> None:
    costs, on, tree = MeasuredCosts(), Context(5, (1,)), Tree(root_scored=True, steps=(1, 1))
    for _ in range(2):
        report = Reports(tree=tree, drafting=Span(14.0, 22.0), verifying=Span(14.0, 26.0, 1))
        costs.observe({0: Orders(Grow(on, NO_TREE, GROWTH), Verify(on))}, {0: report})
    assert (costs.draft_seconds(1), costs.draft_slow_down) == (4.0, 0.0)


def test_forwards_that_are_padded_to_one_size_share_their_times() -> None:
    costs = MeasuredCosts(padded=lambda rows: 1 if rows == 1 else -(-rows // 16) * 16)
    for rows, seconds in ((1, 1.0), (5, 4.0), (17, 9.0)) * 2:
        verified(costs, rows, seconds)
    assert [costs.target_seconds(rows) for rows in (1, 2, 16, 17, 32)] == [1.0, 4.0, 4.0, 9.0, 9.0]
    for width, seconds in ((5, 2.0), (9, 4.0)) * 2:  # those of the draft are not padded like this
        grown(costs, (width,), seconds)
    assert costs.draft_seconds(7) == 3.0


# --- a curve of points ---


def test_the_first_time_of_a_new_size_is_not_believed() -> None:
    for times in ((90.0, 1.0), (1.0, 90.0)):  # a setup in the first forward, or a hitch in the second
        curve = Curve(0.05)
        assert curve.meet(4, times[0]) and not curve.points
        assert curve.meet(4, times[1]) and curve.points == {4: 1.0}
        assert not curve.meet(4, 5.0) and curve.points == {4: 1.0}, "a known size is only corrected"


def test_a_size_between_two_timed_ones_is_not_met_but_interpolated() -> None:
    curve = Curve(0.05)
    curve.set(2, 1.0)
    curve.set(8, 4.0)
    assert not curve.meet(5, 90.0) and curve.seconds(5) == 2.5
    assert curve.meet(16, 90.0) and curve.meet(1, 90.0) and curve.seconds(16) == 8.0
    assert [curve.covers(rows) for rows in (1, 2, 8, 9)] == [False, True, True, False]


def test_until_two_sizes_are_timed_a_further_row_adds_the_usual_share() -> None:
    curve = Curve(0.05)
    assert curve.seconds(4) == 0.0
    curve.set(1, 1.0)
    assert curve.seconds(5) == pytest.approx(1.2)


# --- rounds correct what was timed ---


def verified(costs: MeasuredCosts, rows: int, seconds: float) -> None:
    orders = {0: Orders(verify=Verify(Context(9, (1,))))}
    costs.observe(orders, {0: Reports(verifying=Span(0.0, seconds, rows))})


def grown(costs: MeasuredCosts, steps: tuple[int, ...], seconds: float) -> None:
    orders = {0: Orders(draft=Grow(Context(9, (1,)), NO_TREE, GROWTH))}
    costs.observe(orders, {0: Reports(tree=Tree((), True, steps), drafting=Span(0.0, seconds, sum(steps)))})


def timed(target: dict[int, float], step: dict[int, float], setup: float = 0.0) -> MeasuredCosts:
    """Costs as a rehearsal leaves them."""
    costs = MeasuredCosts()
    for rows, seconds in target.items():
        costs.target.set(rows, seconds)
    for width, seconds in step.items():
        costs.step.set(width, seconds)
    costs.setup = setup
    return costs


def test_a_time_in_which_something_was_set_up_hardly_changes_a_price() -> None:
    """A spike of 3 s, for a forward of 10 ms and for steps of 2 ms."""
    costs = timed({1: 0.010, 16: 0.012}, {1: 0.002, 8: 0.003})
    verified(costs, 12, 3.0)
    grown(costs, (8, 1, 1, 1), 3.0)
    assert costs.target.seconds(12) == pytest.approx(timed({1: 0.010, 16: 0.012}, {}).target.seconds(12), rel=0.02)
    assert costs.step.seconds(1) == pytest.approx(0.002, rel=0.02)
    assert costs.target_seconds(1) == pytest.approx(0.010, rel=0.15)
    for _ in range(12):
        verified(costs, 1, 0.010)
    assert costs.target_seconds(1) == pytest.approx(0.010, rel=0.03), "the machine is as fast as before"


def test_a_slow_machine_changes_no_ratio_between_draft_and_target() -> None:
    costs = timed({1: 0.010, 16: 0.012}, {1: 0.002, 8: 0.003}, setup=0.001)
    for _ in range(20):  # everything takes twice as long
        grown(costs, (1, 1), 2 * (0.001 + 0.004))
        verified(costs, 4, 2 * 0.0104)
    assert costs.factor == pytest.approx(2.0, rel=0.15)
    assert costs.target_seconds(4) == pytest.approx(0.0208, rel=0.03)
    for rows, width in ((1, 1), (4, 1), (16, 8)):
        ratio = timed({1: 0.010, 16: 0.012}, {1: 0.002, 8: 0.003})
        usual = ratio.step.seconds(width) / ratio.target.seconds(rows)
        assert costs.draft_seconds(width) / costs.target_seconds(rows) == pytest.approx(usual, rel=0.1)
    for _ in range(20):
        grown(costs, (1, 1), 0.001 + 0.004)
        verified(costs, 4, 0.0104)
    assert costs.target_seconds(4) == pytest.approx(0.0104, rel=0.03), "and back"


def test_what_was_timed_wrongly_is_corrected_in_time() -> None:
    """The draft alone takes three times what was timed."""
    costs = timed({1: 0.010, 16: 0.012}, {1: 0.002, 8: 0.002})
    for _ in range(300):
        grown(costs, (1, 1), 0.012)
        verified(costs, 1, 0.010)
    assert costs.draft_seconds(1) / costs.target_seconds(1) == pytest.approx(0.6, rel=0.05)


# --- gaps of the host ---


def kinds(costs: MeasuredCosts) -> set[str]:
    return {kind for kind, _ in costs.hosts}


def rounds(costs: MeasuredCosts, count: int, sessions: int = 1) -> None:
    """Rounds with a gap of 1 before a plain verify, 2 before a looked-up one, 3 before a draft and 4 behind it."""
    on, now = Context(9, (1,)), 0.0
    draft, plain, looked = Orders(Grow(on, NO_TREE, GROWTH)), Orders(verify=Verify(on)), Orders(verify=Verify(on, (5,)))
    for orders, gap in ((plain, 1.0), (looked, 2.0), (draft, 3.0), (looked, 4.0)) * count:
        span = Span(now + gap, now + gap + 10.0, sessions)
        report = Reports(tree=Tree(root_scored=True), drafting=span) if orders is draft else Reports(verifying=span)
        costs.observe(dict.fromkeys(range(sessions), orders), dict.fromkeys(range(sessions), report))
        now = span.end


def test_the_hosts_time_is_learned_by_kind_of_run() -> None:
    costs = MeasuredCosts()
    rounds(costs, 5)
    assert [costs.gap(kind) for kind in get_args(RunKind)] == [1.0, 2.0, 3.0, 4.0]
    assert (costs.host, costs.ahead_saves) == (1.0, 1.0)
    assert costs.draft_host == 6.0 and costs.host_of_drafting(1) == 7.0


def test_a_batch_has_gaps_of_its_own_and_those_of_the_nearest_size_until_then() -> None:
    costs = MeasuredCosts()
    assert costs.gap("plain") == 0.0
    rounds(costs, 3)
    assert costs.gap("draft", 16) == 48.0, "a plan is made for each session"
    costs.hosts["draft", (8).bit_length()] = Recent()
    costs.hosts["draft", (8).bit_length()].add(30.0)
    assert (costs.gap("draft", 16), costs.gap("draft", 8), costs.gap("draft", 1)) == (60.0, 30.0, 3.0)
    assert costs.gap("plain", 8) == 1.0, "of the kind, before those of the size"


def test_what_a_device_hides_does_not_grow_with_the_sessions() -> None:
    """A negative gap is no time of planning: scaled up, it would make a run of a large batch cost less than nothing."""
    costs = MeasuredCosts(launches_ahead=True)
    costs.hosts["lookup", 1] = Recent([-0.0004] * 9)
    assert costs.gap("lookup", 64) == costs.gap("lookup", 1) == -0.0004
    costs.hosts["verify", 7] = Recent([-0.0064] * 9)
    assert costs.gap("verify", 1) == pytest.approx(-0.0001)


def test_a_step_launched_ahead_that_was_almost_done_makes_no_large_forward_cheap() -> None:
    """Beyond the sizes timed at load the time of two rounds counts for good, so it has to be possible."""
    costs = MeasuredCosts(launches_ahead=True)
    for rows, seconds in ((1, 0.005), (64, 0.008)):
        costs.target.set(rows, seconds)
    for start in (0.0, 0.011, 0.022):
        costs.observe_plain(Span(start + 0.0105, start + 0.011, 128), 128, prefilled=False)
    assert costs.covers(128) and costs.target_seconds(128) >= costs.target_seconds(64)


def test_planning_takes_a_little_time_until_it_is_timed() -> None:
    costs = MeasuredCosts()
    for at in range(3):
        costs.observe(
            {0: Orders(verify=Verify(Context(9, (1,))))}, {0: Reports(verifying=Span(12 * at, 12 * at + 10, 1))}
        )
    planning = [costs.gap(kind, 8) for kind in get_args(RunKind) if kind != "plain"]
    assert planning == [8 * PLANNING_SECONDS] * 3 and (costs.gap("plain", 8), costs.draft_host) == (2.0, 2.0)


def test_a_planned_batch_that_verifies_nothing_is_no_plain_run() -> None:
    """The host has planned for all its sessions; plain decoding, to which plans are compared, takes less."""
    costs, verify = MeasuredCosts(), Verify(Context(9, (1,)))
    planned = ArmRound(NO_TREE, [], 2, 10, 2)
    for gap, orders in ((1.0, Orders(verify=verify)), (5.0, Orders(verify=verify, planned=planned))):
        costs.pause()
        for at in range(3):
            span = Span(at * (10.0 + gap), at * (10.0 + gap) + 10.0, 2)
            costs.observe(dict.fromkeys((0, 1), orders), dict.fromkeys((0, 1), Reports(verifying=span)))
    assert (costs.gap("plain", 2), costs.gap("lookup", 2)) == pytest.approx((1.0, 5.0))


def test_a_pause_is_no_time_of_the_host() -> None:
    costs = MeasuredCosts()
    for at in range(4):
        costs.pause()
        costs.observe(
            {0: Orders(verify=Verify(Context(9, (1,))))}, {0: Reports(verifying=Span(99.0 * at, 99.0 * at + 1))}
        )
    assert not costs.hosts


# --- times of a rehearsal ---


def draft_report(width: int, steps: int, seconds: float) -> Reports:
    return Reports(tree=Tree(root_scored=True, steps=(width,) * steps), drafting=Span(0.0, seconds))


def test_setup_and_steps_of_a_rehearsed_draft_are_told_apart() -> None:
    times, costs = RehearsedTimes(), MeasuredCosts()
    for width, step in ((1, 2.0), (8, 3.0)):
        for steps in REHEARSED_LENGTHS:
            for spike in (0.0, 500.0, 0.0):  # of three times the median counts
                times.take(draft_report(width, steps, 5.0 + steps * step + spike))
    times.give(costs)
    assert costs.step.points == {1: 2.0, 8: 3.0} and costs.setup == 5.0 and not costs.knows_target


def test_the_way_to_a_draft_elsewhere_is_paid_once_a_round_and_is_no_part_of_a_step() -> None:
    times, costs = RehearsedTimes(), MeasuredCosts()
    for steps in REHEARSED_LENGTHS:
        span = Span(0.0, 5.0 + 2.0 * steps + 40.0, link=40.0)
        times.take(Reports(tree=Tree(root_scored=True, steps=(1,) * steps), drafting=span))
    times.give(costs)
    assert costs.step.points == {1: 2.0} and costs.setup == 5.0 and costs.draft_setup == 45.0
    grow = Orders(Grow(Context(9, (1,)), NO_TREE, GROWTH))
    tree = Tree(root_scored=True, steps=(1, 1))
    for at in range(40):  # the way gets longer; the draft does not get slower
        span = Span(99.0 * at, 99.0 * at + 5.0 + 4.0 + 60.0, link=60.0)
        costs.observe({0: grow}, {0: Reports(tree=tree, drafting=span)})
    assert costs.draft_setup == 65.0 and costs.draft_seconds(1) == pytest.approx(2.0) and costs.factor == 1.0


def test_noise_makes_no_step_of_a_rehearsed_draft_free() -> None:
    times, costs = RehearsedTimes(), MeasuredCosts()
    few, many = REHEARSED_LENGTHS
    times.take(draft_report(1, few, 13.0))
    times.take(draft_report(1, many, 12.0))  # quicker than fewer steps
    times.give(costs)
    assert costs.step.points == {1: LEAST_STEP * 12.0 / many} and costs.setup == 13.0 - few * costs.step.seconds(1)


def test_with_drafts_of_one_length_all_of_it_is_steps() -> None:
    times, costs = RehearsedTimes(), MeasuredCosts()
    times.take(draft_report(1, 2, 6.0))
    times.give(costs)
    assert costs.step.points == {1: 3.0} and costs.setup == 0.0


def test_a_rehearsed_forward_takes_the_shortest_of_its_times() -> None:
    times, costs = RehearsedTimes(), MeasuredCosts()
    for seconds in (90.0, 1.0, 1.5):
        times.take(Reports(verdict=Verdict((), 5), verifying=Span(0.0, seconds, 4)))
    times.take(Reports(verifying=Span(0.0, 9.0, 8)))  # a forward without a verdict is prefill
    times.give(costs)
    assert costs.target.points == {4: 1.0}


def run_of(costs: MeasuredCosts, at: float, seconds: float, orders: Orders, rows: int, steps: tuple[int, ...]) -> float:
    """Observe a run of a lone session that ends `seconds` after `at`, its span only a part of that; returns its end."""
    end, span = at + seconds, Span(at + 0.7 * seconds, at + seconds, rows)
    tree = replace(NO_TREE, steps=steps) if steps else None
    drafts = orders.verify is None
    costs.observe(
        {1: orders}, {1: Reports(drafting=span if drafts else None, verifying=None if drafts else span, tree=tree)}
    )
    return end


def test_where_rounds_are_launched_ahead_a_kind_of_run_costs_what_its_whole_runs_take() -> None:
    """The verify behind a draft is slow there, as the device waits for the host; looked-up tokens are not."""
    costs = MeasuredCosts(overlap=False, padded=lambda rows: 1 if rows == 1 else 16, launches_ahead=True)
    for rows, seconds in ((1, 1.3), (16, 1.4)):
        costs.target.set(rows, seconds)
    costs.step.set(1, 0.2)
    plain, found = Orders(verify=Verify(Context(9, (1,)))), Orders(verify=Verify(Context(9, (1,)), (2, 3)))
    draft, read = Orders(Grow(Context(9, (1,)), NO_TREE, GROWTH)), Orders(Grow(Context(0, (1,) * 40), NO_TREE, GROWTH))
    at = run_of(costs, 0.0, 9.0, plain, 1, ())
    for turn in range(40):
        at = run_of(costs, at, 1.36, plain, 1, ())
        at = run_of(costs, at, 30.0 if turn == 0 else 1.53, found, 3, ())  # the first one includes a setup
        if turn % 4 == 0:
            at = run_of(costs, at, 12.0, read, 40, (1,))  # the draft prefills a prompt …
            at = run_of(costs, at, 9.0, draft, 1, (1,))  # … and may still be at it here
            at = run_of(costs, at, 2.6, found, 3, ())
            at = run_of(costs, at, 1.2, draft, 1, (1,))
            at = run_of(costs, at, 2.6, found, 3, ())
    whole = {kind: costs.target_seconds(1 if kind == "plain" else 3) + costs.gap(kind) for kind in ("plain", "lookup")}
    assert whole["plain"] == pytest.approx(1.36, rel=0.03) and whole["lookup"] == pytest.approx(1.53, rel=0.03)
    drafted = costs.draft_seconds(1) + costs.target_seconds(3) + costs.host_of_drafting(1)
    assert drafted == pytest.approx(1.2 + 2.6, rel=0.05), "without the prompts that were prefilled"
    assert costs.factor == pytest.approx(1.0, rel=0.1) and not costs.plain_due


def test_a_machine_that_is_slow_for_a_while_changes_no_comparison_where_rounds_are_launched_ahead() -> None:
    costs = MeasuredCosts(overlap=False, launches_ahead=True)
    for rows, seconds in ((1, 1.3), (16, 1.4)):
        costs.target.set(rows, seconds)
    plain, found = Orders(verify=Verify(Context(9, (1,)))), Orders(verify=Verify(Context(9, (1,)), (2,) * 15))
    at = run_of(costs, 0.0, 1.4, plain, 1, ())
    for slow in (1.0, 2.0):
        for _ in range(30):
            at = run_of(costs, at, slow * 1.4, plain, 1, ())
            if slow == 1.0:
                at = run_of(costs, at, 1.6, found, 16, ())
    assert costs.target_seconds(1) + costs.gap("plain") == pytest.approx(2.8, rel=0.05)
    assert costs.target_seconds(16) + costs.gap("lookup") == pytest.approx(3.2, rel=0.1)


def test_uneven_rounds_change_no_comparison() -> None:
    """Now and then a round is slow; a thousand plain ones must not make rows look dear that nobody verifies."""
    costs, random = MeasuredCosts(overlap=False), Random(3)
    for rows, seconds in ((1, 10.0), (2, 12.0), (16, 30.0)):
        costs.target.set(rows, seconds)
    at = 0.0
    for _ in range(1000):
        seconds = 10.0 * (1.0 + random.expovariate(3.0))
        costs.observe({1: Orders(verify=Verify(Context(9, (1,))))}, {1: Reports(verifying=Span(at, at + seconds, 1))})
        at += seconds
    assert costs.target_seconds(2) / costs.target_seconds(1) == pytest.approx(1.2)
    assert 0.9 < costs.factor < 1.7
