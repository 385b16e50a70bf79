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
from statistics import fmean

from specbranch.core.costs import Costs

MOST_ROWS = 512  # of a forward
MOST_LANES = 64  # nodes of a draft step that several sessions share
WIDTHS = (1, 2, 4, 8, 16)  # nodes of each session that are looked at for a first step
LEAST = 0.02  # in a batch nothing is sent that is reached so seldom
USUAL = 2  # tokens that a draft has to read first if it drafts in every round
ONCE = 0.02  # share of the time for what is unread beyond that which one step has to pay


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
    steps: tuple[float, ...] = ()  # what steps of the draft beside it cost, by the nodes of all; none: as if alone


@dataclass(frozen=True, slots=True)
class LaneOffer:
    """What a session would have its draft read while the target waits; it is told whether it may."""

    gains: tuple[float, ...]  # tokens that reading each of its best nodes promises, best first
    uncomputed: int  # tokens to be read before the first; 0: none, the nodes themselves are read at once
    rate: float  # tokens a second that the session's time is worth
    first_rate: float  # the same, for its first step: where that opens the way to others it may cost less
    costs: Costs
    context: float


@dataclass(frozen=True, slots=True)
class LaneGrant:
    """Whether a session may draft, and what steps cost, by the nodes of all that do; none: as if alone."""

    may: bool
    steps: tuple[float, ...] = ()


Offer = RowOffer | LaneOffer
Grant = RowGrant | LaneGrant


def let_draft(
    offers: Mapping[int, LaneOffer], waiting: float = 0.0, others: int = 0, lanes: int = MOST_LANES
) -> dict[int, LaneGrant]:
    """Return who may draft in the next round.

    All sessions wait for those that do: `waiting` is what a second of the rest is worth, in tokens; `others` draft
    anyway. A step that they share has at most so many `lanes`.
    """
    first = next(iter(offers.values()), None)
    if first is None or not first.costs.knows_draft:
        return dict.fromkeys(offers, LaneGrant(False))
    costs, context = first.costs, fmean(offer.context for offer in offers.values())
    rate = waiting + sum(offer.first_rate for offer in offers.values())
    ranked = sorted(offers, key=lambda session: -offers[session].gains[0])
    chosen = set(ranked[: _best_group([offers[session] for session in ranked], rate, others)])
    steps: tuple[float, ...] = ()
    if chosen and (len(offers) > 1 or waiting or others):
        rate = waiting + sum(offer.rate for offer in offers.values())
        # One alone has no more lanes than its tree, so that a device can grow it by itself.
        steps = step_prices(costs, rate, context, lanes if len(chosen) + others > 1 else WIDTHS[-1])
    return {session: LaneGrant(session in chosen, steps) for session in offers}


def pays_alone(offer: LaneOffer) -> bool:
    """Whether a session that is alone may draft: what `let_draft` says of it, sooner."""
    return _best_group([offer], offer.first_rate, 0) > 0


def _best_group(ranked: list[LaneOffer], rate: float, others: int) -> int:
    """How many of the sessions that promise most to let draft: as many as promise most beyond what they cost all."""
    best, most = 0, 0.0
    widest = max(1 if offer.uncomputed else len(offer.gains) for offer in ranked)
    alone = len(ranked) + others == 1
    for width in range(1, widest + 1) if alone else (one for one in WIDTHS if one <= widest):
        gain, rows, whole = 0.0, others, others
        for count, offer in enumerate(ranked, start=1):
            gain += sum(offer.gains[:width])
            nodes = min(width, len(offer.gains))
            rows += min(offer.uncomputed, offer.uncomputed if alone else USUAL) or nodes
            whole += offer.uncomputed or nodes
            profit = gain - rate * _seconds(offer, rows, whole, others)
            if profit > most:
                best, most = count, profit
    return best


def _seconds(offer: LaneOffer, rows: int, whole: int, others: int) -> float:
    """What a first step takes beyond that of others; what is unread for long is read once, for many steps."""
    costs, context = offer.costs, offer.context
    usual = costs.draft_seconds(rows, context)
    once = ONCE * (costs.draft_seconds(whole, context) - usual) if whole > rows else 0.0
    return usual + once - costs.draft_seconds(others, context) if others else usual + once + costs.draft_setup


def step_prices(costs: Costs, rate: float, context: float, widest: int) -> tuple[float, ...]:
    """What steps of the draft cost, by the nodes they read, if a second is worth so many tokens."""
    return tuple([rate * costs.draft_seconds(width, context) for width in range(1, widest + 1)])


def granted(
    offers: Mapping[int, RowOffer], others: int = 0, most_rows: int = MOST_ROWS, lanes: int = MOST_LANES
) -> dict[int, RowGrant]:
    """Return how many of its tokens each session may send; `others` are rows that go into the same forward anyway.

    Tokens are taken by their reach, over all sessions, as long as another one brings more than its row costs all of
    them: the time it adds, at the rate at which they emit tokens together.
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
