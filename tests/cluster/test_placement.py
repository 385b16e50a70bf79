"""Requests with the same beginning find the same replica, unless it is much busier than the others."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from specbranch.cluster.placement import KNOWN_LOAD, KNOWN_SLACK, NEW_LOAD, Placement, by_rendezvous

NAMES = ("ash", "beech", "cedar", "dogwood")
IDLE = dict.fromkeys(NAMES, 0)


def test_a_replica_that_goes_moves_its_own_keys_alone() -> None:
    keys = [f"key {number}" for number in range(200)]
    before = {key: by_rendezvous(key, NAMES)[0] for key in keys}
    after = {key: by_rendezvous(key, NAMES[1:])[0] for key in keys}
    assert {key for key in keys if before[key] != after[key]} == {key for key in keys if before[key] == NAMES[0]}
    assert min(Counter(before.values()).values()) > 25  # of 50 on average


def test_two_fronts_choose_the_same_home_without_talking() -> None:
    first, second = Placement(), Placement()
    for number in range(50):
        assert first.order(f"key {number}", IDLE) == second.order(f"key {number}", dict(reversed(IDLE.items())))


def test_a_key_stays_where_load_has_placed_it() -> None:
    placement = Placement()
    home = placement.order("talk", IDLE)[0]
    elsewhere = Placement()
    placed = elsewhere.order("talk", {**IDLE, home: 9})[0]
    assert placed != home and elsewhere.order("talk", IDLE)[0] == placed
    assert elsewhere.ways == {"load": 1, "cached": 1} and placement.ways == {"home": 1}


def test_a_request_avoids_the_replicas_that_failed_it() -> None:
    placement = Placement()
    home = placement.order("talk", IDLE)[0]
    order = placement.order("talk", IDLE, [home])
    assert order[-1] == home and placement.order("talk", IDLE)[0] == order[0]
    assert set(placement.order("talk", IDLE, NAMES)) == set(NAMES)  # all have failed: any may try again


def test_a_request_without_a_key_goes_to_the_least_busy() -> None:
    placement = Placement()
    assert placement.order(None, {"ash": 2, "beech": 1, "cedar": 3})[0] == "beech"
    assert placement.ways == {"any": 1}


@given(st.lists(st.integers(0, 12), min_size=40, max_size=200), st.integers(2, 4))
def test_no_replica_gets_more_than_its_bound(keys: list[int], count: int) -> None:
    placement, loads = Placement(), dict.fromkeys(NAMES[:count], 0)
    for key in keys:
        mean = (sum(loads.values()) + 1) / count
        order = placement.order(f"key {key}", loads)
        assert sorted(order) == sorted(loads)
        loads[order[0]] += 1
        assert loads[order[0]] <= max(1.0, NEW_LOAD * mean, KNOWN_LOAD * mean + KNOWN_SLACK) + 1e-9


def test_one_hot_prompt_is_spread_over_the_replicas() -> None:
    placement, loads = Placement(), {"ash": 0, "beech": 0}
    for _ in range(32):
        loads[placement.order("the same", loads)[0]] += 1
    assert max(loads.values()) <= 26
