"""The plan of a round of the forest: how many draft steps, and how many rows of the verify, for the whole batch.

Owns the choice. It compares a few pairs of both numbers by the tokens a second that all sessions together are expected
to get. Does not own which nodes get the rows: the device chooses the likeliest ones of all sessions. Invariant: a plan
depends on measured costs and acceptance rates, never on tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import accumulate
from statistics import fmean, median_low

from specbranch.core.costs import Costs
from specbranch.core.forest import FEW_UNCOMPUTED, ForestPlan, ForestWish
from specbranch.core.market import MOST_LANES, MOST_ROWS
from specbranch.core.trees import Growth

STEPS = (0, 1, 2, 3, 4, 5, 6, 8, 10, 12)  # draft steps of a round that are compared
FOREST_WIDTHS = (2, 4, 8)  # rows of a session in a draft step; two, because an accepted leaf comes with the bonus token
NODES = (0, 1, 3, 7, 15)  # nodes of a session in a verify, on average
MOST_DRAFT_STEPS = STEPS[-1]
ASKING_SESSIONS = (
    1  # up to so many the host asks the device before each further draft step: any of them gets it for all
)
ASKING_SECONDS = 1e-4  # that a device waits for the host where it is asked, measured on one H200
LATER_CANDIDATES = (0.65, 0.25)  # the second and third candidate, as shares of what is right beyond the first one
NO_PRICE = 1e-9  # price of a draft step that is launched anyway
LEAST_GAIN = 1.05  # times plain decoding that a batch has to be expected to gain: a change costs a few rounds
# Sessions of a batch that decodes so, at most. With 64 on one H200 nine of ten requests decode at 0.98 of plain
# decoding's rate, and whole batches end later: the verify has more rows than are free, and the host is busy.
MOST_FOREST_SESSIONS = 16
FEW_SESSIONS = 4  # up to so many their methods hear of each round, and a burst of prompts does not interrupt them
PLAN_ROUNDS = 4  # rounds for which a plan holds, or a probe: the draft is asked where it is not expected to pay


def forest_plan(wishes: Sequence[ForestWish], context: float, sessions: int, catching_up: float = 0.0) -> ForestPlan:
    """Plan a round of so many sessions, some of which have wishes; `context`: tokens of a session, on average.

    `catching_up`: seconds that each round with draft steps pays of what the draft has to compute first.
    """
    if not wishes or not wishes[0].costs.knows_target or sessions > MOST_FOREST_SESSIONS:
        return ForestPlan(0, 0, sessions)
    costs, drafting = wishes[0].costs, _drafting(wishes)
    looks = next((wish.looks for wish in wishes if wish.looks is not None), None)
    looked = [fmean(depth) for depth in zip(*[wish.looked for wish in wishes], strict=True)] or [0.0] * NODES[-1]
    middle = median_low([(wish.right, wish.covered) for wish in drafting]) if drafting else (0.0, 0.0)
    sizes = [(nodes, rows) for nodes in NODES if (rows := sessions + nodes * len(wishes)) <= MOST_ROWS]
    beside = costs.factor * costs.forest.beside
    verifies = [(nodes, max(costs.target_seconds(rows, context) + beside, 1e-12)) for nodes, rows in sizes]
    count, best = len(wishes), (0.0, 0, 0, 0)
    beyond = _beyond(*middle, looked)
    for lanes, step in [(0, 0.0), *_lanes(drafting, context)]:
        once = catching_up if lanes else 0.0
        drafted = _drafted(round(middle[0], 2), round(middle[1], 2), lanes) if lanes else ()
        for steps in STEPS[1:] if lanes else STEPS[:1]:
            found = sorted([*drafted[steps - 1], *beyond[:steps], *looked[steps:]], reverse=True) if steps else looked
            reaches = [0.0, *accumulate(found)]
            spent = once + step * (steps + _lead(steps, step / costs.forest.drafting, sessions))
            rates = [(sessions + count * reaches[nodes]) / (verify + spent) for nodes, verify in verifies]
            if (top := max(rates)) >= best[0]:
                best = max(best, (top, -steps, verifies[rates.index(top)][0], lanes))
    rate, steps, nodes, lanes = best
    plain_seconds = max(costs.target_seconds(sessions, context) + costs.gap("plain", sessions), 1e-12)
    plain = sessions / plain_seconds
    if sessions > 1 and rate <= LEAST_GAIN * plain:
        return ForestPlan(0, 0, sessions, gain=plain_seconds / verifies[0][1])
    wish = next((wish for wish in drafting if (wish.right, wish.covered) == middle), wishes[0])
    steps, more, price, lead = -steps, 0, NO_PRICE, 0
    if steps and sessions <= ASKING_SESSIONS:
        alone = costs.draft_seconds(len(drafting) * lanes, context)
        lead = _lead(steps, alone, sessions)
        steps, more, price = 1, MOST_DRAFT_STEPS - 1, rate * costs.forest.drafting * alone / len(drafting)
    growth = _growth(wish, max(lanes, 1), price, max(nodes, 1))
    return ForestPlan(steps, more, sessions + nodes * len(wishes), growth, looks, rate / plain, lead)


def catch_up_seconds(costs: Costs, uncomputed: int, context: float) -> float:
    """Return the seconds in which a draft computes so many tokens of a session; a few of them come on the way."""
    return costs.draft_seconds(uncomputed, context) if uncomputed > FEW_UNCOMPUTED and costs.knows_draft else 0.0


def _lead(steps: int, alone: float, sessions: int) -> int:
    """Return how many steps are launched before the device is asked whether the one before them had nodes.

    `alone`: seconds of a step on the device. One step more than is wanted may cost less than a wait in each step.
    """
    return int(sessions <= ASKING_SESSIONS and steps * ASKING_SECONDS > alone)


def probing(plan: ForestPlan, wishes: Sequence[ForestWish], context: float) -> ForestPlan | None:
    """Return a plan that asks the draft once in each round, if the credit for probes covers that; it is paid then."""
    drafting = _drafting(wishes)
    if plan.steps + plan.more or not drafting:
        return None
    lanes, step = _lanes(drafting, context)[0]
    if not drafting[0].pay_probe(PLAN_ROUNDS * step):
        return None
    growth = (
        _growth(drafting[0], lanes, NO_PRICE, 1)
        if plan.growth is None
        else replace(plan.growth, lanes=lanes, step=(NO_PRICE,) * lanes)
    )
    return replace(plan, steps=1, growth=growth)


def _drafting(wishes: Sequence[ForestWish]) -> list[ForestWish]:
    """Return the wishes of sessions for which the draft may work."""
    return [wish for wish in wishes if wish.drafts and wish.costs.knows_target and wish.costs.knows_draft]


def _lanes(drafting: Sequence[ForestWish], context: float) -> list[tuple[int, float]]:
    """Return the rows of a session in a draft step that are compared, with the seconds of such a step.

    A device computes all rows of a step, also those that are not used.
    """
    if not drafting:
        return []
    costs, most = drafting[0].costs, max(wish.growth.lanes for wish in drafting)
    widths = [lanes for lanes in FOREST_WIDTHS if lanes <= most and lanes * len(drafting) <= MOST_LANES] or [1]
    each = [costs.forest.drafting * costs.draft_seconds(len(drafting) * lanes, context) for lanes in widths]
    return list(zip(widths, each, strict=True))


def _growth(wish: ForestWish, lanes: int, price: float, nodes: int) -> Growth:
    return replace(wish.growth, step=(price,) * lanes, lanes=lanes, free_time=0.0, rows=nodes, row_price=0.0)


def _beyond(right: float, covered: float, looked: Sequence[float]) -> list[float]:
    """Return what looked-up tokens bring, by depth, that the draft's nodes of that depth have not.

    `looked`: how often lookup is right, by depth.
    """
    return [share * (1.0 - covered * right**at) for at, share in enumerate(looked)]


@lru_cache(maxsize=512)
def _drafted(right: float, covered: float, lanes: int) -> tuple[tuple[float, ...], ...]:
    """Return the chances of the likeliest drafted nodes, by draft steps: each extends the likeliest leaves."""
    shares = (right, *[max(covered - right, 0.0) * share for share in LATER_CANDIDATES])
    nodes, leaves, found = list[float](), [1.0], list[tuple[float, ...]]()
    for _ in range(MOST_DRAFT_STEPS):
        new = [reach * share for reach in leaves[:lanes] for share in shares]
        nodes = sorted([*nodes, *new], reverse=True)[: NODES[-1]]
        leaves = sorted([*leaves[lanes:], *new], reverse=True)[: NODES[-1]]
        found.append(tuple(nodes))
    return tuple(found)
