"""How many looked-up tokens to verify: by hand, and against a search over every plan."""

from __future__ import annotations

import random

import pytest

from specbranch.core.lookup_gain import ENDLESS, looked_rows

DEAR = tuple(0.14 * rows for rows in range(16))  # a CPU's rows: 15 take as long as two plain rounds
LONG_RUN = 1500  # tokens behind which a run is as good as over


def worth_of(count: int, chances: list[float], prices: list[float]) -> float:
    """What a run is worth if the first round verifies so many tokens, and each later one as many as are best."""
    chance = [min(share, ENDLESS) for share in chances]

    values = [0.0] * (LONG_RUN + len(prices) + 1)

    def value(at: int, rows: int) -> float:
        total, here = -prices[rows], 1.0
        for n in range(at, at + rows):
            here *= chance[min(n, len(chance) - 1)]
            total += here
        return total + here * chance[min(at + rows, len(chance) - 1)] * values[at + rows + 1]

    for at in range(LONG_RUN - 1, 0, -1):
        values[at] = max(value(at, rows) for rows in range(len(prices)))
    return value(0, count)


@pytest.mark.parametrize("seed", range(12))
def test_no_other_number_of_rows_brings_more(seed: int) -> None:
    rng = random.Random(seed)
    chances = sorted(rng.uniform(0.05, 0.97) for _ in range(rng.randint(1, 5)))
    row, idle = rng.uniform(0.01, 0.5), rng.choice([0.0, 0.3])
    prices = [idle + row * rows + rng.uniform(0.0, 0.1) * bool(rows) for rows in range(rng.randint(2, 6))]
    found = looked_rows(chances, prices)
    best = max(worth_of(rows, chances, prices) for rows in range(len(prices)))
    assert worth_of(found, chances, prices) == pytest.approx(best, abs=1e-6)


def test_a_doubtful_match_is_tried_with_few_tokens_and_a_sure_one_with_many() -> None:
    run = [0.97, *[0.94] * 4, *[0.96] * 8]
    assert looked_rows([0.53, 0.79, *run], DEAR) in (1, 2)
    assert looked_rows(run, DEAR) >= 12


def test_free_rows_are_all_sent_and_rows_beyond_their_worth_are_not() -> None:
    assert looked_rows([0.5] * 15, (0.0,) * 16) == 15
    assert looked_rows([0.1] * 15, tuple(0.5 * rows for rows in range(16))) == 0


def test_a_round_with_looked_up_tokens_has_to_make_up_for_the_hosts_part() -> None:
    assert looked_rows([0.3] * 4, (0.0, 0.05, 0.1, 0.15, 0.2)) > 0
    assert looked_rows([0.3] * 4, (0.0, 0.65, 0.7, 0.75, 0.8)) == 0
