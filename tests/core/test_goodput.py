"""A batch decodes in the way that brings more tokens a second: by the model at first, later by what is seen."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from specbranch.core.goodput import BLOCK_ROUNDS, LEAST_TRIAL, LEFT_OUT, UNSEEN, Goodput, Outlook, Way
from specbranch.core.round_clock import RoundClock

BATCH = 4
Rates = dict[Way, float]  # tokens a second of one session


class Simulated:
    """Sessions of one batch size on a machine whose true rates are given; the seconds are simulated."""

    def __init__(self, model: Rates, batch_size: int = BATCH, before: Simulated | None = None) -> None:
        """`before`: the same engine at another batch size."""
        self.goodput, self.clock = (before.goodput, before.clock) if before else (Goodput(), RoundClock())
        self.batch_size, self.change = batch_size, 0.0
        self.model: Callable[[int], Outlook] = lambda _: Outlook(model, self.change)

    def run(self, rounds: int, true: Rates, spike: float = 0.0, prompts: float = 0.0) -> list[Way]:
        """Decode so many rounds; returns the way of each.

        The first one takes `spike` seconds more. Each takes `prompts` seconds for prompt tokens.
        """
        ways: list[Way] = []
        for number in range(rounds):
            since = self.clock.rounds
            ways.append(way := self.goodput.choose(self.batch_size, self.clock, self.model))
            tokens = 1 if way == "plain" else 2
            seconds = tokens / true[way] + (0.0 if number else spike) + prompts
            self.clock.end_round(None if prompts else seconds)
            for _ in range(self.batch_size):
                self.goodput.record(self.batch_size, since, way, tokens)
        return ways


def lost(ways: list[Way], true: Rates) -> float:
    """Return the share of the seconds that the best way alone would have saved."""
    tokens = [1 if way == "plain" else 2 for way in ways]
    taken = sum(count / true[way] for way, count in zip(ways, tokens, strict=True))
    return 1.0 - sum(tokens) / max(true.values()) / taken


def rates(plain: float, planned: float) -> Rates:
    return {"plain": plain, "planned": planned}


@pytest.mark.parametrize(
    ("planned", "way"), [(150.0, "planned"), (100.0 / (1.0 + UNSEEN) + 1.0, "planned"), (70.0, "plain")]
)
def test_at_first_the_model_chooses_and_planning_has_the_benefit_of_the_doubt(planned: float, way: Way) -> None:
    assert Goodput().choose(BATCH, RoundClock(), lambda _: Outlook(rates(100.0, planned))) == way


def test_where_the_model_is_right_its_choice_stays() -> None:
    for true in (rates(100.0, 160.0), rates(100.0, 60.0)):
        ways = Simulated(true).run(600, true)
        assert set(ways) == {max(true, key=lambda way: true[way])}


@pytest.mark.parametrize(
    ("model", "true"),
    [(rates(100.0, 150.0), rates(100.0, 80.0)), (rates(100.0, 85.0), rates(100.0, 60.0))],
)
def test_a_way_that_is_seen_slower_is_left_after_a_block(model: Rates, true: Rates) -> None:
    ways = Simulated(model).run(400, true)
    first = BLOCK_ROUNDS + LEFT_OUT
    assert set(ways[:first]) == {"planned"} and ways[first] == "plain"
    assert ways.count("planned") <= 2 * first


def test_without_hope_there_is_no_trial() -> None:
    model = rates(100.0, 75.0)
    assert set(Simulated(model).run(2000, rates(100.0, 150.0))) == {"plain"}


def test_it_comes_back_when_the_text_changes() -> None:
    """Planning is seen slower than the model says; then it is as fast as that."""
    model, bad = rates(100.0, 130.0), rates(100.0, 85.0)
    simulated = Simulated(model)
    assert simulated.run(200, bad)[-1] == "plain"
    assert set(simulated.run(1500, model)[-300:]) == {"planned"}
    assert "plain" in simulated.run(200, bad)[-50:]


@pytest.mark.parametrize("planned", [0.95, 0.8, 0.5])
@pytest.mark.parametrize("hope", [0.8, 1.0, 1.3])
def test_trials_that_lose_take_a_small_share_of_the_time(planned: float, hope: float) -> None:
    """However often the model promises what does not come true."""
    model, true = rates(100.0, 100.0 * hope), rates(100.0, 100.0 * planned)
    simulated = Simulated(model)
    simulated.run(100, true)
    assert lost(simulated.run(6000, true), true) < 0.03


@pytest.mark.parametrize("true", [rates(100.0, 115.0), rates(115.0, 100.0)])
def test_one_slow_round_changes_nothing(true: Rates) -> None:
    simulated, calm = Simulated(true), Simulated(true)
    calm.run(240, true)
    simulated.run(240, true)
    assert simulated.run(200, true, spike=60.0) == calm.run(200, true)


def test_rounds_with_prompt_tokens_say_nothing_about_a_way() -> None:
    """A long prompt makes plain rounds slower; planned ones, seen before it came, are no better for that."""
    model, true = rates(100.0, 110.0), rates(100.0, 85.0)
    simulated = Simulated(model)
    assert simulated.run(60, true)[-1] == "plain"
    assert set(simulated.run(60, true, prompts=0.02)) == {"plain"}
    assert simulated.goodput.seen()[BATCH.bit_length()]["plain"] == pytest.approx((100.0, 100.0))


def test_batch_sizes_are_apart() -> None:
    model, slow = rates(100.0, 130.0), rates(100.0, 60.0)
    many = Simulated(model, 16)
    assert many.run(100, slow)[-1] == "plain"
    few = Simulated(model, 3, many)
    assert "planned" in few.run(40, model), "nothing was seen there"
    assert many.run(1, slow) == ["plain"]
    assert set(many.goodput.seen()) == {(3).bit_length(), (16).bit_length()}


def test_a_batch_that_shrinks_goes_on_as_before_and_tries_within_its_credit() -> None:
    """At each size the model has the same hope, and a batch that ends passes them all in a few rounds."""
    model, slow = rates(100.0, 95.0), rates(100.0, 40.0)
    sizes, found = [64, 40, 20, 10, 5, 3], list[Way]()
    simulated = Simulated(rates(100.0, 60.0), 64)
    for _ in range(40):
        for size in sizes:
            simulated = Simulated(model if size < 64 else rates(100.0, 60.0), size, simulated)
            found += simulated.run(60 if size == 64 else 5, slow)
    assert lost(found, slow) < 0.04


def test_a_trial_ends_early_where_its_first_rounds_teach_the_model_that_it_loses() -> None:
    """One that the model expects no better of than at its start goes on: it is there to see if the model is right."""
    lost_rounds = {}
    for learned in (100.0, 45.0):
        simulated, true = Simulated(rates(100.0, 100.0)), rates(100.0, 45.0)
        first = simulated.run(2, true)
        simulated.model = lambda _, learned=learned: Outlook(rates(100.0, learned))  # type: ignore[misc]
        lost_rounds[learned] = (first + simulated.run(40, true)).count("planned")
    assert lost_rounds[45.0] == LEAST_TRIAL and lost_rounds[100.0] >= LEFT_OUT + BLOCK_ROUNDS


def test_all_sessions_of_a_batch_have_the_same_way_and_the_same_rounds_left() -> None:
    goodput, clock, model = Goodput(), RoundClock(), Outlook(rates(100.0, 60.0))
    assert goodput.choose(BATCH, clock, lambda _: model) == "plain"
    assert goodput.rounds_left(clock) == LEFT_OUT
    for _ in range(LEFT_OUT + 5):
        clock.end_round(0.01)
    for batch_size in (BATCH, BATCH + 1, 2 * BATCH):  # others have joined
        assert goodput.choose(batch_size, clock, lambda _: model) == "plain"
        assert goodput.rounds_left(clock) == BLOCK_ROUNDS - 5
    assert goodput.is_plain(clock)


def test_a_block_ends_at_once_for_a_batch_of_quite_another_size() -> None:
    simulated = Simulated(rates(100.0, 150.0))
    assert set(simulated.run(LEFT_OUT + 2, rates(100.0, 150.0))) == {"planned"}
    assert Simulated(rates(100.0, 60.0), 64, simulated).run(1, rates(100.0, 60.0)) == ["plain"]


def test_a_trial_waits_until_the_credit_covers_that_drafts_catch_up() -> None:
    model, true = rates(100.0, 95.0), rates(100.0, 95.0)
    rounds = {}
    for change in (0.0, 1.0):
        simulated = Simulated(model)
        simulated.run(100, rates(100.0, 60.0))  # the first batch has the benefit of the doubt
        simulated.change = change
        rounds[change] = simulated.run(20000, true).index("planned")
    assert rounds[1.0] > rounds[0.0] + 0.5 * 1.0 / 0.01 / 0.01, "a second at 1 % of rounds of 10 ms"


def test_rounds_of_the_other_way_and_those_right_after_a_change_do_not_count() -> None:
    goodput, clock, model = Goodput(), RoundClock(), Outlook(rates(100.0, 130.0))
    assert goodput.choose(BATCH, clock, lambda _: model) == "planned"
    for _ in range(LEFT_OUT):  # the draft catches up
        clock.end_round(1.0)
        goodput.record(BATCH, clock.rounds - 1, "planned", 1)
    for _ in range(BLOCK_ROUNDS):
        clock.end_round(2 / 130.0)
        goodput.record(BATCH, clock.rounds - 1, "planned", 2)
        goodput.record(BATCH, clock.rounds - 1, "plain", 1)
    goodput.choose(BATCH, clock, lambda _: model)
    seen = goodput.seen()[BATCH.bit_length()]
    assert seen["planned"] == pytest.approx((130.0, 130.0)) and seen["plain"] == (100.0, 100.0)


def test_a_poor_block_does_not_end_a_way_that_was_lately_better() -> None:
    """What the model expects goes by the text of a moment; seen from block to block, rates differ by a factor of 2."""
    batch, expected = Simulated(rates(100.0, 400.0)), {True: 400.0, False: 130.0}
    batch.run(LEFT_OUT, rates(100.0, 190.0))
    ways: list[Way] = []
    for block in range(12):
        good = block % 2 == 0
        batch.model = lambda _, planned=expected[good]: Outlook(rates(100.0, planned))  # type: ignore[misc]
        ways += batch.run(BLOCK_ROUNDS, rates(100.0, 190.0 if good else 90.0))
    assert set(ways) == {"planned"}
    batch.model = lambda _: Outlook(rates(100.0, 130.0))
    assert batch.run(6 * BLOCK_ROUNDS, rates(100.0, 80.0))[-1] == "plain"
