"""Rows and lanes go to what promises most, at the price of the whole forward."""

from __future__ import annotations

import random
from itertools import product

import pytest

from specbranch.clock.profile import CostProfile
from specbranch.core.market import LaneOffer, RowOffer, granted, let_draft, pays_alone

FLAT = CostProfile(target=((1, 0.01), (512, 0.011)), draft=((1, 0.001), (64, 0.0011)))
STEEP = CostProfile(target=((1, 0.01), (2, 0.02), (512, 5.12)), draft=((1, 0.01), (2, 0.02)))
MIXED = CostProfile(target=((1, 0.010), (8, 0.012), (16, 0.020), (64, 0.1)), draft=((1, 0.002), (8, 0.003), (64, 0.02)))


def row_offers(seed: int, sessions: int, costs: CostProfile, most: int = 5) -> dict[int, RowOffer]:
    rng = random.Random(seed)
    return {
        number: RowOffer(
            tuple(sorted((rng.uniform(0.03, 1.0) for _ in range(rng.randint(0, most))), reverse=True)),
            rng.uniform(20, 120),
            costs,
            100,
        )
        for number in range(sessions)
    }


def profit(offers: dict[int, RowOffer], counts: dict[int, int], costs: CostProfile) -> float:
    rate = sum(offer.rate for offer in offers.values())
    base, sent = len(offers), sum(counts.values())
    return sum(sum(offers[n].reaches[:count]) for n, count in counts.items()) - rate * (
        costs.target_seconds(base + sent) - costs.target_seconds(base)
    )


@pytest.mark.parametrize("costs", [FLAT, STEEP, MIXED])
@pytest.mark.parametrize("seed", range(12))
def test_no_other_grant_promises_more(seed: int, costs: CostProfile) -> None:
    offers = row_offers(seed, 3, costs, most=4)
    found = {number: grant.count for number, grant in granted(offers).items()}
    every = product(*(range(len(offer.reaches) + 1) for offer in offers.values()))
    best = max(profit(offers, dict(zip(offers, counts, strict=True)), costs) for counts in every)
    assert profit(offers, found, costs) == pytest.approx(best, abs=1e-9)


def test_all_sessions_learn_the_rows_of_the_whole_forward_and_what_its_time_is_worth() -> None:
    offers = row_offers(3, 6, MIXED)
    found = granted(offers, others=2)
    assert {grant.rows for grant in found.values()} == {8 + sum(grant.count for grant in found.values())}
    assert {grant.rate for grant in found.values()} == {sum(offer.rate for offer in offers.values())}


def test_in_a_batch_a_row_is_dearer() -> None:
    one = RowOffer((0.5,) * 15, 90.0, MIXED, 100)
    sent = [granted(dict.fromkeys(range(batch_size), one))[0].count for batch_size in (1, 4, 16)]
    assert sent[0] > sent[1] >= sent[2] == 0


def test_a_row_that_costs_a_whole_forward_is_granted_to_nobody() -> None:
    for grant in granted(row_offers(1, 4, STEEP)).values():
        assert grant.count == 0


def test_nothing_is_granted_without_costs_nor_without_offers() -> None:
    from specbranch.core.costs import MeasuredCosts

    unknown = RowOffer((0.9,), 10.0, MeasuredCosts(), 0)
    assert granted({7: unknown})[7].count == 0 and granted({}) == {} and let_draft({}) == {}


def lanes(gain: float, costs: CostProfile, rate: float = 60.0, uncomputed: int = 1) -> LaneOffer:
    return LaneOffer((gain,), uncomputed, rate, costs, 100)


def allowed(offers: dict[int, LaneOffer], waiting: float = 0.0, others: int = 0) -> set[int]:
    return {number for number, grant in let_draft(offers, waiting, others).items() if grant.may}


def test_a_draft_is_asked_if_all_together_gain_more_than_all_wait() -> None:
    assert allowed({1: lanes(0.5, MIXED)}) == {1} and not allowed({1: lanes(0.1, MIXED)})
    assert not allowed({1: lanes(0.5, MIXED)}, waiting=600.0), "many wait for one"
    assert allowed({number: lanes(0.3, MIXED) for number in range(8)}) == set(range(8)), "they share a step"


def test_those_that_promise_too_little_are_left_out() -> None:
    assert allowed({1: lanes(0.8, STEEP, rate=20.0), 2: lanes(0.05, STEEP, rate=20.0)}) == {1}


def test_beside_others_that_draft_anyway_only_what_is_added_is_paid() -> None:
    assert not allowed({1: lanes(0.1, MIXED)}) and allowed({1: lanes(0.1, MIXED)}, others=4) == {1}


def test_what_is_not_prefilled_for_long_is_paid_over_many_steps() -> None:
    whole = 60.0 * MIXED.draft_seconds(60)
    assert whole > 0.5, "paid at once, it would be more than it can bring"
    for sessions in (1, 4):
        offers = {number: lanes(0.5, MIXED, uncomputed=60) for number in range(sessions)}
        assert allowed(offers) == set(range(sessions))
    assert not allowed({1: lanes(0.1, MIXED, uncomputed=60)}) and not allowed({1: lanes(0.5, MIXED, uncomputed=9000)})


def test_steps_are_priced_by_what_a_second_is_worth_to_all_and_alone_by_the_session_itself() -> None:
    grants = let_draft({number: lanes(0.5, MIXED) for number in range(4)}, waiting=60.0)
    assert grants[0].steps[7] == pytest.approx(300.0 * MIXED.draft_seconds(8))
    assert let_draft({1: lanes(0.5, MIXED)})[1].steps == ()


def test_a_session_alone_learns_the_same_at_once() -> None:
    rng, reported = random.Random(3), set[bool]()
    for costs in (FLAT, STEEP, MIXED) * 60:
        rate = rng.uniform(5.0, 900.0)
        gains = tuple(sorted((rng.random() for _ in range(rng.randint(1, 6))), reverse=True))
        offer = LaneOffer(gains, rng.choice([0, 1, 7]), rate, costs, 100)
        assert pays_alone(offer) == let_draft({4: offer})[4].may
        reported.add(pays_alone(offer))
    assert reported == {True, False}
