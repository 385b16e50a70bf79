"""Simulated fleets agree with what can be computed by hand, and their texts are the target's own."""

from __future__ import annotations

from dataclasses import replace

import pytest

from specbranch.clock.profile import CostProfile
from specbranch.exec.verifier import Verifier
from specbranch.lab.regret.case import REQUEST_TOKENS
from specbranch.lab.regret.toy_pair import ScriptedTarget
from specbranch.lab.replay.decode import Diverged
from specbranch.lab.scale.fleet import Fleet, FleetResult
from specbranch.lab.scale.fleet_run import run_fleet
from specbranch.lab.scale.replica import Replica
from specbranch.lab.scale.simulation import Simulation
from specbranch.lab.scale.target_side import LocalDraft
from specbranch.lab.scale.texts import make_texts

COSTS = CostProfile(target=((1, 0.01), (64, 0.01)), draft=((1, 0.001), (64, 0.001)))  # rows are free
FIXED = Fleet(COSTS, method="speculative", draft_tokens=5, requests=1)


def seconds(fleet: Fleet) -> float:
    """Of the measured requests of a fleet of one target that decodes them one after the other."""
    return sum(run_fleet(fleet).latencies)


def expected(fleet: Fleet) -> float:
    """Tokens a second by the closed form: every round has γ draft steps, the way, and a forward; prefill is free."""
    accepted = sum(fleet.agreement**count for count in range(1, fleet.draft_tokens + 1))
    a_round = COSTS.target_seconds(6) + fleet.draft_tokens * COSTS.draft_seconds(1) + fleet.round_trip
    return (accepted + 1.0) / a_round


def test_each_serial_round_waits_for_the_way_once() -> None:
    near, middle, far = (seconds(replace(FIXED, round_trip=trip)) for trip in (0.0, 0.002, 0.008))
    rounds = (middle - near) / 0.002
    assert rounds == pytest.approx(round(rounds), abs=1e-6) and 20 < rounds < REQUEST_TOKENS
    assert far - near == pytest.approx(rounds * 0.008)


@pytest.mark.slow
@pytest.mark.parametrize(("agreement", "trip"), [(0.5, 0.0005), (0.9, 0.01)])
def test_serial_throughput_agrees_with_the_closed_form(agreement: float, trip: float) -> None:
    fleet = replace(FIXED, agreement=agreement, round_trip=trip, requests=16)
    assert run_fleet(fleet).tokens_per_second == pytest.approx(expected(fleet), rel=0.05)


def test_without_a_draft_a_token_takes_a_forward() -> None:
    result = run_fleet(replace(FIXED, draft="none"))
    assert result.latencies == pytest.approx([0.01 * REQUEST_TOKENS]) and result.drafting == 0.0
    assert result.tokens_per_second == pytest.approx(100.0)


def test_drafts_that_are_further_away_than_several_forwards_bring_nothing() -> None:
    none = run_fleet(replace(FIXED, draft="none"))
    far = replace(FIXED, round_trip=0.4)
    planned = run_fleet(replace(far, method="specbranch"))
    assert planned.tokens_per_second < 1.001 * none.tokens_per_second
    assert planned.tokens_per_second > 0.6 * none.tokens_per_second  # the planner tries it once in a text …
    assert run_fleet(far).tokens_per_second < 0.2 * none.tokens_per_second  # … and a fixed method does not


def shared(sharing: str, replicas: int) -> FleetResult:
    """Fixed drafts of a worker so slow that it is always busy."""
    return run_fleet(replace(FIXED, replicas=replicas, sharing=sharing, speed=0.05, round_trip=0.0))


@pytest.mark.slow
def test_a_busy_worker_serves_as_many_turns_as_one_target_and_its_steps_serve_all() -> None:
    turns, steps = shared("turns", 3), shared("steps", 3)
    one = shared("steps", 1)
    assert turns.drafting > 0.99  # it has no time left, so no further target is served
    assert turns.tokens_per_second == pytest.approx(one.tokens_per_second * (0.1 + 0.01) / 0.1, rel=0.1)
    assert steps.tokens_per_second > 2.5 * one.tokens_per_second  # rows are free here
    assert turns.latency(0.5) > 2.0 * steps.latency(0.5)


def test_requests_that_arrive_faster_than_they_are_served_wait() -> None:
    plain = replace(FIXED, draft="none", requests=3)  # serves 0.77 requests a second
    calm, rushed = (run_fleet(replace(plain, rate=rate)) for rate in (0.02, 20.0))
    assert calm.latency(0.5) == pytest.approx(0.01 * REQUEST_TOKENS)
    assert rushed.latency(0.95) > 4 * calm.latency(0.5) and len(rushed.latencies) == 6


def test_a_run_is_the_same_every_time() -> None:
    fleet = replace(FIXED, replicas=2, method="pearl")
    assert run_fleet(fleet) == run_fleet(fleet)


def test_a_text_that_is_not_the_targets_own_is_an_error() -> None:
    simulation = Simulation()

    def work() -> None:
        fleet = replace(FIXED, draft="none")
        texts = make_texts(0.7)
        others = replace(texts, requests=tuple(replace(one, answer=one.answer[1:]) for one in texts.requests))
        replica = Replica(fleet, 0, others, LocalDraft(Verifier(ScriptedTarget(texts)), None, simulation, COSTS))
        replica.give(8)
        while replica.unfinished:
            replica.step()

    simulation.add(work)
    with pytest.raises(Diverged, match="another text"):
        simulation.run()
