"""Who may send how much to a forward that all sessions share: rows of the target and lanes of the draft go to what
promises most, at the price of the whole.

Owns the decision, no state. Invariant: what is granted depends on offers and on the number of rows, never on tokens; a
session is always granted the row of its next token.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from heapq import heapify, heappop, heapreplace

from specbranch.core.costs import Costs

MOST_ROWS = 512  # of a forward


@dataclass(frozen=True, slots=True)
class RowOffer:
    """What a session would have verified in the next round, best first; it is told how many of these it may send."""

    reaches: tuple[float, ...]  # how likely the target comes to each
    rate: float  # tokens a second that the session counts on: what its time is worth
    costs: Costs
    context: float  # tokens before them


@dataclass(frozen=True, slots=True)
class RowGrant:
    """How many of its tokens a session may send, to a forward of so many rows."""

    count: int
    rows: int
    rate: float  # tokens a second that all sessions count on together


@dataclass(frozen=True, slots=True)
class LaneOffer:
    """What a session would have its draft read while the target waits; it is told what a second is worth to all who
    wait, in tokens, or 0: not now."""

    gains: tuple[float, ...]  # tokens that reading each of its best nodes promises, best first
    unread: int  # tokens to be read before the first; 0: none, the nodes themselves are read at once
    rate: float  # tokens a second that the session's time is worth
    costs: Costs
    context: float


Offer = RowOffer | LaneOffer


def let_draft(offers: Mapping[int, LaneOffer], waiting: float, others: int = 0) -> dict[int, float]:
    """Return what a second is worth to all sessions, for each that may draft in the next round, else 0.

    All sessions wait for those that draft: `waiting` is what a second of all others is worth, in tokens; `others` draft
    anyway.
    """
    first = next(iter(offers.values()), None)
    if first is None or not (first.costs.knows_draft or others):
        return dict.fromkeys(offers, 0.0)
    costs, context = first.costs, sum(offer.context for offer in offers.values()) / len(offers)
    rate = waiting + sum(offer.rate for offer in offers.values())
    ranked = sorted(offers, key=lambda session: -offers[session].gains[0])
    best, most = 0, 0.0
    for count in range(1, len(ranked) + 1):
        group = [offers[session] for session in ranked[:count]]
        profit = max(_profit(group, width, rate, costs, context, others) for width in range(1, _widest(group) + 1))
        if profit > most:
            best, most = count, profit
    chosen = set(ranked[:best])
    return {session: rate if session in chosen else 0.0 for session in offers}


def _widest(group: list[LaneOffer]) -> int:
    return max(1 if offer.unread else len(offer.gains) for offer in group)


def _profit(group: list[LaneOffer], width: int, rate: float, costs: Costs, context: float, others: int) -> float:
    """What a first step of all brings beyond what it costs all."""
    gain = sum(sum(offer.gains[:width]) for offer in group)
    rows = others + sum(offer.unread or min(width, len(offer.gains)) for offer in group)
    free = costs.draft_seconds(others, context) if others else 0.0
    return gain - rate * (costs.draft_seconds(rows, context) - free)


def granted(offers: Mapping[int, RowOffer], others: int = 0) -> dict[int, RowGrant]:
    """Return how many of its tokens each session may send; `others` are rows that go into the same forward anyway.

    Tokens are taken by their reach, over all sessions, as long as another one brings more than its row costs all of
    them: the time it adds, at the rate at which they emit tokens together.
    """
    first, base = next(iter(offers.values()), None), len(offers) + others
    if first is None or not first.costs.knows_target:
        return dict.fromkeys(offers, RowGrant(0, base, 0.0))
    costs, context = first.costs, sum(offer.context for offer in offers.values()) / len(offers)
    plain = costs.target_seconds(base, context)
    rate = sum(offer.rate for offer in offers.values())
    order, best, most, promised = list[int](), 0, 0.0, 0.0
    for session, reach in _by_reach(offers, MOST_ROWS - base):
        order.append(session)
        promised += reach
        profit = promised - rate * (costs.target_seconds(base + len(order), context) - plain)
        if profit > most:
            best, most = len(order), profit
    counts = Counter(order[:best])
    return {session: RowGrant(counts[session], base + best, rate) for session in offers}


def _by_reach(offers: Mapping[int, RowOffer], most: int) -> list[tuple[int, float]]:
    """The best tokens of all sessions, each after those before it in its session."""
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
