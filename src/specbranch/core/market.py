"""How sessions share a forward: which of them draft, and how many rows of each the target verifies.

Owns the decision, no state. Rows go to the highest expected gain, at the price for the whole batch. Invariant: a grant
depends on offers and numbers of rows, never on tokens; every session gets the row of its next token.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from heapq import heapify, heappop, heapreplace
from statistics import fmean

from specbranch.core.costs import Costs

MOST_ROWS = 512  # rows of a target forward
MOST_LANES = 64  # rows of a draft step that several sessions share
WIDTHS = (1, 2, 4, 8, 16)  # rows of each session that are compared for a first step in a batch
LEAST = 0.02  # reach below which a batch verifies no node
USUAL = 2  # uncomputed tokens of a draft that drafts in every round
ONCE = 0.02  # share of the seconds for more uncomputed tokens than that which the first step has to pay


@dataclass(frozen=True, slots=True)
class RowOffer:
    """What a session wants verified in the next round, best first. The answer is a `RowGrant`."""

    reaches: tuple[float, ...]  # the probability that the target reaches each node
    rate: float  # expected tokens a second of this session: what a second is worth
    costs: Costs
    context: float  # tokens before these nodes


@dataclass(frozen=True, slots=True)
class RowGrant:
    """How many of its nodes a session may verify, in a forward of `rows` rows in all."""

    count: int
    rows: int
    rate: float  # expected tokens a second of all sessions together
    steps: tuple[float, ...] = ()  # prices of draft steps during the verify, by rows of all; empty: as for a lone one


@dataclass(frozen=True, slots=True)
class LaneOffer:
    """What a session wants drafted while the target waits. The answer is a `LaneGrant`."""

    gains: tuple[float, ...]  # expected tokens from computing each of its best nodes, best first
    uncomputed: int  # committed tokens that the draft has to compute first; 0: it can start with the nodes
    rate: float  # expected tokens a second of this session
    costs: Costs
    context: float
    once: float = ONCE  # share of the seconds for more uncomputed tokens than usual that the first step has to pay


@dataclass(frozen=True, slots=True)
class LaneGrant:
    """Says if a session may draft, with the prices of steps by rows of all sessions; empty: as for a lone one."""

    may: bool
    steps: tuple[float, ...] = ()


Offer = RowOffer | LaneOffer
Grant = RowGrant | LaneGrant


def let_draft(
    offers: Mapping[int, LaneOffer], waiting: float = 0.0, others: int = 0, lanes: int = MOST_LANES
) -> dict[int, LaneGrant]:
    """Return who may draft in the next round.

    All sessions wait for those that draft. `waiting`: expected tokens a second of the sessions that have made no offer.
    `others`: sessions that draft anyway. `lanes`: most rows of a shared step.
    """
    first = next(iter(offers.values()), None)
    if first is None or not first.costs.knows_draft:
        return dict.fromkeys(offers, LaneGrant(False))
    costs, context = first.costs, fmean(offer.context for offer in offers.values())
    rate = waiting + sum(offer.rate for offer in offers.values())
    ranked = sorted(offers, key=lambda session: -offers[session].gains[0])
    chosen = set(ranked[: _best_group([offers[session] for session in ranked], rate, others)])
    steps: tuple[float, ...] = ()
    if chosen and (len(offers) > 1 or waiting or others):
        rate = waiting + sum(offer.rate for offer in offers.values())
        # A lone session gets no more lanes than its tree may have, so that a device can extend the tree by itself.
        steps = step_prices(costs, rate, context, lanes if len(chosen) + others > 1 else WIDTHS[-1])
    return {session: LaneGrant(session in chosen, steps) for session in offers}


def pays_alone(offer: LaneOffer) -> bool:
    """True if a lone session may draft: what `let_draft` will answer, known sooner."""
    return _best_group([offer], offer.rate, 0) > 0


def profit_price(offer: LaneOffer) -> float:
    """Return the price in tokens of a lone session's first step."""
    return offer.rate * _seconds(offer, offer.uncomputed, offer.uncomputed, 0)


def _best_group(ranked: list[LaneOffer], rate: float, others: int) -> int:
    """Return how many of the best sessions should draft: the number with the highest profit for all."""
    best, most = 0, 0.0
    widest = max(1 if offer.uncomputed else len(offer.gains) for offer in ranked)
    alone = len(ranked) + others == 1
    for width in range(1, widest + 1) if alone else (one for one in WIDTHS if one <= widest):
        gain, rows, whole = 0.0, others, others
        for count, offer in enumerate(ranked, start=1):
            gain += sum(offer.gains[:width])
            nodes = min(width, len(offer.gains))
            rows += min(offer.uncomputed, USUAL) or nodes
            whole += offer.uncomputed or nodes
            profit = gain - rate * _seconds(offer, rows, whole, others)
            if profit > most:
                best, most = count, profit
    return best


def _seconds(offer: LaneOffer, rows: int, whole: int, others: int) -> float:
    """Return the seconds that a first step adds to the `others`'. Prefill beyond the usual is paid over many steps."""
    costs, context = offer.costs, offer.context
    usual = costs.draft_seconds(rows, context)
    once = offer.once * (costs.draft_seconds(whole, context) - usual) if whole > rows else 0.0
    if others:
        return usual + once - costs.draft_seconds(others, context)
    return usual + once + costs.draft_setup + costs.draft_host


def step_prices(costs: Costs, rate: float, context: float, widest: int) -> tuple[float, ...]:
    """Return the prices of draft steps in tokens, by rows, if a second is worth `rate` tokens."""
    return tuple([rate * costs.draft_seconds(width, context) for width in range(1, widest + 1)])


def granted(
    offers: Mapping[int, RowOffer], others: int = 0, most_rows: int = MOST_ROWS, lanes: int = MOST_LANES
) -> dict[int, RowGrant]:
    """Return how many of its nodes each session may verify; `others`: rows that are in the same forward anyway.

    Nodes are granted by falling reach over all sessions. The number is the one with the highest profit: expected tokens
    minus added seconds, times the rate of all sessions.
    """
    first, base = next(iter(offers.values()), None), len(offers) + others
    if first is None or not first.costs.knows_target:
        return dict.fromkeys(offers, RowGrant(0, base, 0.0))
    costs, context = first.costs, fmean(offer.context for offer in offers.values())
    plain = costs.target_seconds(base, context)
    rate = sum(offer.rate for offer in offers.values())
    order, best, most, promised = list[int](), 0, 0.0, 0.0
    for session, reach in _by_reach(offers, most_rows - base):
        if reach < LEAST and base > 1:
            break
        order.append(session)
        promised += reach
        profit = promised - rate * (costs.target_seconds(base + len(order), context) - plain)
        if profit > most:
            best, most = len(order), profit
    counts = Counter(order[:best])
    shared = costs.overlap and costs.knows_draft and base > 1
    steps = step_prices(costs, rate, context, lanes) if shared else ()
    return {session: RowGrant(counts[session], base + best, rate, steps) for session in offers}


def _by_reach(offers: Mapping[int, RowOffer], most: int) -> list[tuple[int, float]]:
    """Return the best nodes of all sessions, each behind those before it in its session."""
    heads = [(-offer.reaches[0], session, 0) for session, offer in offers.items() if offer.reaches]
    heapify(heads)
    found: list[tuple[int, float]] = []
    while heads and len(found) < most:
        reach, session, at = heads[0]
        found.append((session, -reach))
        reaches = offers[session].reaches
        if at + 1 < len(reaches):
            heapreplace(heads, (-reaches[at + 1], session, at + 1))
        else:
            heappop(heads)
    return found
