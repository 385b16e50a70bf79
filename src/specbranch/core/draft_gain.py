"""What a draft is expected to bring in one round: candidates and further steps, each taken only where it pays.

Owns a small dynamic program over depth and reach, as pure arithmetic. Does not own acceptance rates (`experience.py`)
or prices (`costs.py`, `planner.py`). Invariant: the gain grows with acceptance rates and falls with prices.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

REACHES = 10  # values of the reach between 0 and 1 at which the profit of a further step is computed
RARE = 0.01  # share of positions below which a class of candidates is left out


class Kinds(NamedTuple):
    """Classes of candidates: how many of each a position has on average, and how often one is right."""

    per_position: Sequence[float]
    chances: Sequence[float]

    def usual(self) -> list[tuple[float, float]]:
        """Return the classes that are not rare."""
        return [(met, chance) for met, chance in zip(*self, strict=True) if met > RARE]


def draft_gain(first: Kinds, other: Kinds, step: float, rows: Sequence[float]) -> float:
    """Return the tokens that drafting brings beyond the price of all rows, and of all steps but the first.

    `step`: price of a draft step. `rows`: price of one more row of a verify, by the depth of its node. Each depth adds
    the draft's first candidate and others; the first one is extended if that is expected to pay.
    """
    kinds = first.usual(), other.usual()
    further = [0.0] * (REACHES + 1)  # profit of extending a node, by its reach
    for row in reversed(rows[1:]):
        further = [max(_profit(at, row, *kinds, further) - step, 0.0) for at in range(REACHES + 1)]
    return _profit(REACHES, rows[0], *kinds, further)


def _profit(
    at: int, row: float, firsts: list[tuple[float, float]], others: list[tuple[float, float]], further: list[float]
) -> float:
    """Return what the candidates after a node of reach `at / REACHES` bring, with what follows the first of them."""
    profit, price = 0.0, row * REACHES
    for met, chance in others:
        if at * chance > price:
            profit += met * (at * chance - price) / REACHES
    for met, chance in firsts:
        reach = at * chance
        if reach > price:
            below = int(reach)
            above = further[min(below + 1, REACHES)]
            profit += met * ((reach - price) / REACHES + further[below] + (reach - below) * (above - further[below]))
    return profit
