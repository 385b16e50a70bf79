"""The Triton kernels that choose the rows of the next verify over all sessions of the forest, and write that step.

Four launches, as each needs what all programs of the one before have written. Every session sorts its nodes (`offer`)
and finds their places among those of all sessions (`rank`); one program grants as many as pay, and places the rows
(`grant`); every session writes its rows (`write`). Invariant: the step is that of `granting.send_plainly`, and the sum
of reaches is built in the same order. Needs Triton, so only `granting.py` imports it, when it uses the kernels.
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-def"
# What Triton compiles has no Python types but constexpr.

import triton
import triton.language as tl

from specbranch.core.market import LEAST as _LEAST
from specbranch.models.gpu import forest_layout, tree_layout
from specbranch.models.gpu.forest_rows_kernels import (
    COUNT,
    DECODING,
    FIRST_GROUP,
    LENGTH,
    LIMIT,
    PATH_MOVES,
    PLACES,
    ROW_COUNT,
    SCALARS,
    STATE,
    TARGET_MOVES,
    place,
    weigh_anew,
    write_padding,
    write_rows,
)
from specbranch.models.gpu.tree_kernels import DEPTH, FIELDS, NOWHERE, REACH, ROW, SENT

DEEPEST = tl.constexpr(tree_layout.DEEPEST)
LEAST_REACH = tl.constexpr(_LEAST)
RATE, OTHERS, MOST_ROWS, SECONDS = (
    tl.constexpr(n)
    for n in (
        *(forest_layout.PRICE_SCALARS.index(name) for name in ("rate", "others", "most_rows")),
        forest_layout.SECONDS_AT,
    )
)
PART = tl.constexpr(16)  # nodes that are compared with all others at a time


@triton.jit
def offer(sessions, trees, reaches, offered, depths, SIZE: tl.constexpr, OFFERS: tl.constexpr):
    """Sort the nodes of one session that may be verified, by falling reach; -1 behind the last of them."""
    s = tl.program_id(0)
    session = sessions + s * SCALARS
    k = tl.arange(0, OFFERS)
    tl.store(reaches + s * OFFERS + k, k.to(tl.float64) * 0.0 - 1.0)
    tl.store(depths + s * OFFERS + k, k * 0)
    count = tl.where(tl.load(session + STATE) == DECODING, tl.load(session + COUNT), 0)
    if count > 0:
        nodes = trees + s * SIZE * FIELDS
        weigh_anew(nodes, count, SIZE)
        n = tl.arange(0, SIZE)
        at = nodes + n * FIELDS
        deepest = tl.minimum(tl.load(session + LIMIT) - tl.load(session + LENGTH) - 1, DEEPEST)
        depth = tl.load(at + DEPTH, mask=n < count, other=0.0).to(tl.int32)
        may = (n < count) & (depth <= deepest)
        reach = tl.load(at + REACH, mask=may, other=-1.0)
        rank = tl.zeros((SIZE,), tl.int32)
        for begin in range(0, count, PART):
            m = begin + tl.arange(0, PART)
            there = m < count
            low = tl.load(nodes + m * FIELDS + DEPTH, mask=there, other=0.0).to(tl.int32) <= deepest
            other = tl.load(nodes + m * FIELDS + REACH, mask=there & low, other=-1.0)
            ahead = (other[None, :] > reach[:, None]) | ((other[None, :] == reach[:, None]) & (m[None, :] < n[:, None]))
            rank += tl.sum((ahead & (there & low)[None, :]).to(tl.int32), 1)
        best = may & (rank < OFFERS - 1)  # the last token has a row of its own
        tl.debug_barrier()
        tl.store(reaches + s * OFFERS + rank, reach, mask=best)
        tl.store(offered + s * OFFERS + rank, n, mask=best)
        tl.store(depths + s * OFFERS + rank, depth, mask=best)


@triton.jit
def rank(reaches, ranks, ranked, OFFERS: tl.constexpr, SESSIONS: tl.constexpr):
    """Find the places of one session's nodes among those of all sessions: by reach, then session, then order."""
    s = tl.program_id(0)
    k = tl.arange(0, OFFERS)
    reach = tl.load(reaches + s * OFFERS + k)
    found = tl.zeros((OFFERS,), tl.int32)
    for begin in range(0, SESSIONS * OFFERS, PART):
        m = begin + tl.arange(0, PART)
        other = tl.load(reaches + m)
        ahead = (other[None, :] == reach[:, None]) & (m[None, :] < (s * OFFERS + k)[:, None])
        found += tl.sum(((other[None, :] > reach[:, None]) | ahead).to(tl.int32), 1)
    there = reach >= 0.0
    tl.store(ranks + s * OFFERS + k, tl.where(there, found, NOWHERE))
    tl.store(ranked + found, reach, mask=there)


@triton.jit(do_not_specialize=["wide"])
def grant(sessions, places, reaches, ranks, ranked, depths, prices, counts, total, wide, SESSIONS: tl.constexpr,
          OFFERS: tl.constexpr, PER_GROUP: tl.constexpr):  # fmt: skip
    """Grant rows to all sessions, as `core.market.granted`, and place them."""
    s = tl.arange(0, SESSIONS)
    k = tl.arange(0, OFFERS)
    live = tl.load(sessions + s * SCALARS + STATE) == DECODING
    length = tl.load(sessions + s * SCALARS + LENGTH)
    decoding = tl.sum(live.to(tl.int32), 0)
    base = decoding + tl.load(prices + OTHERS).to(tl.int32)
    each = s[:, None] * OFFERS + k[None, :]
    there = tl.sum(tl.sum((tl.load(reaches + each) >= 0.0).to(tl.int32), 1), 0)
    limit = tl.minimum(there, tl.load(prices + MOST_ROWS).to(tl.int32) - base)
    rate = tl.load(prices + RATE)
    plain = tl.load(prices + SECONDS + base)
    promised = rate * 0.0
    most = rate * 0.0
    best = base * 0
    at = base * 0
    going = at < limit
    while going:
        reach = tl.load(ranked + at)
        going = (reach >= LEAST_REACH) | (base <= 1)
        promised += reach
        at += 1
        profit = promised - rate * (tl.load(prices + SECONDS + base + at) - plain)
        better = going & (profit > most)
        best = tl.where(better, at, best)
        most = tl.where(better, profit, most)
        going = going & (at < limit)
    granted = tl.load(ranks + each) < best
    rows = tl.where(live, 1 + tl.sum(granted.to(tl.int32), 1), 0)
    deep = tl.max(tl.where(granted, tl.load(depths + each), 0), 1)
    tl.store(total, place(
        sessions, places, counts, s, rows, length - 1 + rows, length - 1 + deep, deep, wide, PER_GROUP, TARGET_MOVES
    ))  # fmt: skip


@triton.jit(do_not_specialize=["context", "held", "per", "across", "wide", "all_groups", "spare"])
def write(sessions, places, trees, pages, history, moved, offered, now, packed, groups, tables, own, counts, moves,
          context, held, per, across, wide, all_groups, spare, SESSIONS: tl.constexpr, SIZE: tl.constexpr,
          OFFERS: tl.constexpr, PER_GROUP: tl.constexpr):  # fmt: skip
    """Write the rows of one session into the verify; the program behind the last session writes the padding."""
    s = tl.program_id(0)
    if s == SESSIONS:
        last = places + (SESSIONS - 1) * PLACES
        used = tl.load(last + FIRST_GROUP) + (tl.load(last + ROW_COUNT) + PER_GROUP - 1) // PER_GROUP
        write_padding(packed, groups, own, counts, per, wide, used, all_groups, spare, 64)
    else:
        placed = places + s * PLACES
        rows = tl.load(placed + ROW_COUNT)
        if rows > 0:
            nodes = trees + s * SIZE * FIELDS
            n = tl.arange(0, SIZE)
            there = n < tl.load(sessions + s * SCALARS + COUNT)
            tl.store(nodes + n * FIELDS + ROW, n.to(tl.float64) * 0.0, mask=there)
            tl.store(nodes + n * FIELDS + SENT, n.to(tl.float64) * 0.0, mask=there)
            tl.debug_barrier()
            k = tl.arange(0, OFFERS)
            live = k < rows - 1
            number = tl.load(offered + s * OFFERS + k, mask=live, other=NOWHERE)
            order = tl.sum((number[None, :] < number[:, None]).to(tl.int32), 1)
            tl.store(now + s * OFFERS + order, number, mask=live)
            tl.store(nodes + number * FIELDS + ROW, (order + 1).to(tl.float64), mask=live)
            tl.store(nodes + number * FIELDS + SENT, k.to(tl.float64) * 0.0 + 1.0, mask=live)
            tl.debug_barrier()
            write_rows(sessions + s * SCALARS, placed, nodes, now + s * OFFERS, pages + 2 * s * held,
                       history + s * context, moved + s * 4 * PATH_MOVES, packed, groups, tables, own, moves, per,
                       across, tl.load(sessions + s * SCALARS + LENGTH) - 1, 1, True, OFFERS, PER_GROUP,
                       TARGET_MOVES)  # fmt: skip
