"""How many looked-up tokens to verify in one round: those that are left wait for the next, if the first ones are right.

Owns a small dynamic program over the tokens of one proposal, as pure arithmetic. Does not own acceptance rates
(`experience.py`) or prices (`costs.py`, `planner.py`). Invariant: doubtful tokens are verified only if they save more
than the one round in which they could be verified later, behind a longer match.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from operator import mul

ENDLESS = 0.99  # chance of a looked-up token at most, so that every run of them has an end


def looked_rows(chances: Sequence[float], prices: Sequence[float]) -> int:
    """Return how many looked-up tokens to verify; 0: a plain round is better.

    `chances`: of each token, if those before it are right; the last one holds for all that follow. `prices`: of rounds
    that verify 0, 1, … of them, in tokens beyond the one that a round brings anyway.

    A run of right tokens goes on behind any of these rounds. So what is compared is the worth of a run to its end:
    tokens that are not verified now are lost only if the run ends, otherwise they take a part of one more round.
    """
    most = len(prices)
    likely = [min(chance, ENDLESS) for chance in chances]
    likely += [likely[-1]] * most
    reaches = [1.0, *accumulate(likely, mul)]  # chance that a run has so many tokens
    brought = [0.0, *accumulate(reaches[1:])]  # tokens of a run up to there
    steady = _steady(likely[-1], prices)
    # For a run that has `at` tokens, all times the chance of that: what has come by then, and what comes behind.
    ahead = [had + reach * steady for had, reach in zip(brought, reaches[1:], strict=False)]
    found: list[float] = []
    changes = next((at for at in range(len(chances) - 1, 0, -1) if chances[at] != chances[-1]), 0)
    for at in range(changes, -1, -1):  # from there on the worth is steady
        reach = reaches[at]
        found = [all_in_all - reach * price for all_in_all, price in zip(ahead[at:], prices, strict=False)]
        if at:
            ahead[at - 1] = brought[at - 1] + max(found) - brought[at]
    return found.index(max(found))


def _steady(chance: float, prices: Sequence[float]) -> float:
    """Return the worth of a run that goes on with one chance, whatever has come of it."""
    best, reach, brought = 0.0, 1.0, 0.0
    for price in prices:
        reach *= chance
        best = max(best, (brought - price) / (1.0 - reach))
        brought += reach
    return best
