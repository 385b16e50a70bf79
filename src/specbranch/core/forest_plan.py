"""The plan of a round of the forest: how many draft steps, and how many rows of the verify, for the whole batch.

Owns the choice. It compares a few pairs of both numbers by the tokens a second that all sessions together are expected
to get. Does not own which nodes get the rows: the device chooses the likeliest ones of all sessions. Invariant: a plan
depends on measured costs and acceptance rates, never on tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from statistics import fmean, median_low

from specbranch.core.costs import Costs
from specbranch.core.forest import ForestPlan, ForestWish
from specbranch.core.market import MOST_LANES, MOST_ROWS
from specbranch.core.planner import LOOKED

STEPS = (0, 1, 2, 3, 4, 5, 6, 8, 10, 12)  # draft steps of a round that are compared
NODES = (0, 1, 3, 7, 15)  # nodes of a session in a verify, on average
MOST_DRAFT_STEPS = STEPS[-1]
ASKING_SESSIONS = 4  # up to so many the host asks the device before each further draft step whether it pays
LATER_CANDIDATES = (
    0.4,
    0.15,
)  # chances of the draft's second and third candidate, as shares of what the first one leaves
FIRST_STEP_ROWS = 2  # committed tokens that the first draft step computes for a session, about
NO_PRICE = 1e-9  # price of a draft step that is launched anyway


def forest_plan(wishes: Sequence[ForestWish], context: float, sessions: int) -> ForestPlan:
    """Plan a round of so many sessions, some of which have wishes; `context`: tokens of a session, on average."""
    if not wishes:
        return ForestPlan(0, 0, sessions)
    costs = wishes[0].costs
    drafting = [wish for wish in wishes if wish.drafts] if costs.knows_draft else []
    looks = next((wish.looks for wish in wishes if wish.looks is not None), None)
    if not costs.knows_target:
        return ForestPlan(0, 0, sessions)
    middle = median_low([wish.right for wish in drafting]) if drafting else 0.0
    looked = fmean([wish.looked if wish.looks else 0.0 for wish in wishes])
    lanes = max(min(MOST_LANES // max(len(drafting), 1), max(wish.growth.lanes for wish in wishes)), 1)
    best, plain = (0.0, 0, 0), sessions / max(costs.target_seconds(sessions, context), 1e-12)
    for steps in STEPS if drafting else (0,):
        drafts = _draft_seconds(costs, context, steps, len(drafting), lanes)
        reaches = sorted(_reaches(middle, steps, looked), reverse=True)
        for nodes in NODES:
            rows = sessions + nodes * len(wishes)
            if rows > MOST_ROWS or (steps and not nodes):
                continue
            tokens = sessions + len(wishes) * sum(reaches[:nodes])
            rate = tokens / max(costs.target_seconds(rows, context) + drafts, 1e-12)
            best = max(best, (rate, -steps, nodes))
    rate, steps, nodes = best
    if rate <= plain:
        return ForestPlan(0, 0, sessions)
    wish = next((wish for wish in drafting if wish.right == middle), wishes[0])
    steps, more, price = -steps, 0, (NO_PRICE,) * lanes
    if steps and sessions <= ASKING_SESSIONS:
        steps, more = 1, MOST_DRAFT_STEPS - 1
        each = rate / len(drafting)
        price = tuple([each * costs.draft_seconds(len(drafting) * width, context) for width in range(1, lanes + 1)])
    growth = replace(wish.growth, step=price, lanes=lanes, free_time=0.0, rows=max(nodes, 1), row_price=0.0)
    return ForestPlan(steps, more, sessions + nodes * len(wishes), growth, looks, rate / plain)


def _draft_seconds(costs: Costs, context: float, steps: int, sessions: int, lanes: int) -> float:
    """Return the seconds of all draft steps of a round."""
    if not steps:
        return 0.0
    first = costs.draft_seconds(sessions * min(FIRST_STEP_ROWS, lanes), context)
    return costs.draft_setup + first + (steps - 1) * costs.draft_seconds(sessions * lanes, context)


def _reaches(right: float, steps: int, looked: float) -> Iterator[float]:
    """Yield the chances of the nodes of a tree after so many draft steps, with looked-up tokens beside them."""
    above = 1.0
    for _ in range(steps):
        yield above * right
        yield from (above * (1.0 - right) * share for share in LATER_CANDIDATES)
        above *= right
    beside = (1.0 - right) if steps else 1.0  # what the draft has not said already
    follows = looked / (1.0 + looked)
    for _ in range(LOOKED):
        beside *= follows
        yield beside
