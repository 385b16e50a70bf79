"""A batch decodes in the way that brings more tokens a second: by the model at first, later by what is seen."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from specbranch.core.goodput import BLOCK_ROUNDS, LEFT_OUT, UNSEEN, Goodput, Way

BATCH = 4
Rates = dict[Way, float]  # tokens a second of one session


class Simulated:
    """Sessions of one batch size on a machine whose true rates are given; the seconds are simulated."""

    def __init__(self, model: Rates, batch_size: int = BATCH, goodput: Goodput | None = None) -> None:
        self.goodput, self.batch_size = goodput or Goodput(), batch_size
        self.model: Callable[[], Rates] = lambda: model

    def run(self, rounds: int, true: Rates, spike: float = 0.0) -> list[Way]:
        """Decode so many rounds; the first one takes `spike` seconds more. Returns the way of each."""
        ways: list[Way] = []
        for number in range(rounds):
            ways.append(way := self.goodput.choose(self.batch_size, self.model))
            tokens = 1 if way == "plain" else 2
            seconds = tokens / true[way] + (0.0 if number else spike)
            for _ in range(self.batch_size):
                self.goodput.record(self.batch_size, way, tokens, seconds, self.model)
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
    assert Goodput().choose(BATCH, lambda: rates(100.0, planned)) == way


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


def test_batch_sizes_are_apart() -> None:
    goodput, model = Goodput(), rates(100.0, 130.0)
    many = Simulated(model, 16, goodput)
    assert many.run(100, rates(100.0, 60.0))[-1] == "plain"
    assert goodput.choose(3, lambda: model) == "planned", "nothing was seen there"
    assert goodput.choose(17, lambda: model) == "plain", "of about the same size"
    Simulated(model, 3, goodput).run(100, model)
    assert many.run(1, rates(100.0, 60.0)) == ["plain"]
    assert set(goodput.seen()) == {(3).bit_length(), (16).bit_length()}


def test_rounds_of_the_other_way_and_those_right_after_a_change_do_not_count() -> None:
    goodput, model = Goodput(), rates(100.0, 130.0)
    assert goodput.choose(BATCH, lambda: model) == "planned"
    for _ in range(LEFT_OUT * BATCH):  # the draft catches up
        goodput.record(BATCH, "planned", 1, 1.0, lambda: model)
    for _ in range(100 * BATCH):  # started before the choice
        goodput.record(BATCH, "plain", 1, 1.0, lambda: model)
    for _ in range(BLOCK_ROUNDS * BATCH):
        goodput.record(BATCH, "planned", 2, 2 / 130.0, lambda: model)
    seen = goodput.seen()[BATCH.bit_length()]
    assert seen["planned"] == pytest.approx((130.0, 130.0)) and seen["plain"] == (100.0, 100.0)
