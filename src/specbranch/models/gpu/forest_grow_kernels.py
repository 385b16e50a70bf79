"""The Triton kernels that grow the trees of the forest: `core.trees.GrowingTree` on every session, then the step.

Three launches between two draft steps: every session adds what its rows of the last step propose, and chooses its next
nodes (`grow`, one warp a session); one program places the rows of all sessions (`place_drafts`); every session writes
its rows (`write_drafts`). Invariant: trees and steps are those of `forest_growing.grow_plainly`. Needs Triton, so only
`forest_growing.py` imports it, when it uses the kernels.
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-def"
# What Triton compiles has no Python types but constexpr.

import triton
import triton.language as tl

from specbranch.models.gpu import forest_layout
from specbranch.models.gpu.forest_rows_kernels import (
    COUNT,
    DECODING,
    DRAFT_LENGTH,
    DRAFT_MOVES,
    DRAFTS,
    FIRST_GROUP,
    FIRST_ROW,
    LENGTH,
    LIMIT,
    PATH_MOVES,
    PLACES,
    ROOT_SCORED,
    ROW_COUNT,
    SCALARS,
    STATE,
    TAIL,
    place,
    write_padding,
    write_rows,
)
from specbranch.models.gpu.look_kernels import FIRST_AT, LOOKED_AT, ODDS_AT, OTHER_AT, class_of
from specbranch.models.gpu.tree_kernels import (
    ABSENT,
    BEFORE,
    CHANCE,
    CHUNK,
    CONFIDENCE,
    DEPTH,
    ENTRIES,
    FIELDS,
    FIRST_OF,
    KNOWN,
    LANES,
    LOOK,
    NOWHERE,
    OTHER_OF,
    PARENT,
    RANK,
    REACH,
    READ,
    ROOT,
    ROW,
    SAID,
    SENT,
    SLOT,
    STANDINGS,
    TOKEN,
)

WORTH, LEAST, ROW_PRICE, CHILDREN, SENT_NODES, DEEPEST, MOST, PACES, TAIL_LIMIT = (
    tl.constexpr(n) for n in range(len(forest_layout.GROWTH_SCALARS))
)
PRICES, WANTS = tl.constexpr(len(forest_layout.GROWTH_SCALARS)), tl.constexpr(len(forest_layout.WANT_FIELDS))


@triton.jit
def _weigh(chances, nodes, count, now, live):
    """Update the chances of children that were there before the draft proposed, as `GrowingTree._weigh`."""
    for begin in range(0, count, CHUNK):
        m = begin + tl.arange(0, CHUNK)
        at = nodes + m * FIELDS
        parent = tl.load(at + PARENT, mask=m < count, other=-2.0).to(tl.int32)
        below = tl.max(((parent[:, None] == now[None, :]) & live[None, :]).to(tl.int32), 1) > 0
        rank = tl.load(at + RANK, mask=below, other=0.0)
        said = tl.load(at + SAID, mask=below, other=0.0)
        look = tl.load(at + LOOK, mask=below, other=0.0).to(tl.int32)
        up = tl.load(nodes + tl.maximum(parent, 0) * FIELDS + REACH, mask=below, other=0.0)
        above = tl.where(parent == ROOT, 1.0, up)
        standing = tl.where(said > 0.0, tl.where(rank > 0.0, OTHER_OF, FIRST_OF), ABSENT)
        kind = tl.where(look > 0, (look - 1) * STANDINGS + standing, 0)
        own = tl.load(chances + tl.where(rank > 0.0, OTHER_AT, FIRST_AT) + class_of(chances, said))
        odds = own / tl.maximum(1.0 - own, 1e-6) * tl.load(chances + ODDS_AT + kind)
        drafted = tl.where(look > 0, odds / (1.0 + odds), own)
        undrafted = tl.where(look > 0, tl.load(chances + LOOKED_AT + kind), tl.load(at + CHANCE, mask=below, other=0.0))
        chance = tl.where(said > 0.0, drafted, undrafted)
        tl.store(at + CHANCE, chance, mask=below)
        tl.store(at + REACH, chance * above, mask=below)


@triton.jit
def _add_candidates(growth, chances, nodes, result, count, now, live, SIZE: tl.constexpr):
    """Add the draft's proposals after some nodes, or after the text, as far as there is room; returns the new number
    of nodes."""
    rank = tl.arange(0, ENTRIES)
    is_root = now == ROOT
    top = tl.load(result + BEFORE + ENTRIES, mask=live, other=0.0).to(tl.float64)
    sure = tl.load(result + CONFIDENCE, mask=live, other=0.0).to(tl.float64)
    there = live[:, None] & (rank < tl.load(growth + CHILDREN).to(tl.int32))[None, :]
    token = tl.load(result[:, None] + BEFORE + rank[None, :], mask=there, other=0.0).to(tl.int32)
    score = tl.load(result[:, None] + BEFORE + ENTRIES + rank[None, :], mask=there, other=float("-inf")).to(tl.float64)
    there = there & (score > float("-inf"))
    said = sure[:, None] * tl.exp(tl.where(there, score - top[:, None], 0.0))
    chance = tl.load(chances + tl.where(rank == 0, FIRST_AT, OTHER_AT)[None, :] + class_of(chances, said))
    here = nodes + tl.where(is_root | (live == 0), 0, now) * FIELDS
    reach = tl.where(is_root, 1.0, tl.load(here + REACH))
    depth = tl.where(is_root, 0.0, tl.load(here + DEPTH))
    known = tl.full((LANES, ENTRIES), ROOT, tl.int32)  # nodes that exist already, from a lookup
    for begin in range(0, count, CHUNK):
        m = begin + tl.arange(0, CHUNK)
        parent = tl.load(nodes + m * FIELDS + PARENT, mask=m < count, other=-2.0).to(tl.int32)
        held = tl.load(nodes + m * FIELDS + TOKEN, mask=m < count, other=-1.0).to(tl.int32)
        alike = (parent[None, None, :] == now[:, None, None]) & (held[None, None, :] == token[:, :, None])
        known = tl.maximum(known, tl.max(tl.where(alike, m[None, None, :], ROOT), 2))
    again = there & (known >= 0)
    old = nodes + tl.maximum(known, 0) * FIELDS
    ranks = tl.zeros((LANES, ENTRIES), tl.float64) + rank[None, :].to(tl.float64)
    tl.store(old + RANK, ranks, mask=again)
    tl.store(old + SAID, said, mask=again)
    fresh = there & (known < 0) & ((reach[:, None] * chance >= tl.load(growth + LEAST)) | (rank == 0)[None, :])
    order = tl.reshape(tl.cumsum(tl.reshape(fresh.to(tl.int32), (LANES * ENTRIES,)), 0), (LANES, ENTRIES))
    fresh = fresh & (count + order <= SIZE)
    new = nodes + (count + order - 1) * FIELDS
    nothing = tl.zeros((LANES, ENTRIES), tl.float64)
    tl.store(new + TOKEN, token.to(tl.float64), mask=fresh)
    tl.store(new + PARENT, nothing + now[:, None].to(tl.float64), mask=fresh)
    tl.store(new + CHANCE, chance, mask=fresh)
    tl.store(new + REACH, reach[:, None] * chance, mask=fresh)
    tl.store(new + DEPTH, nothing + depth[:, None] + 1.0, mask=fresh)
    tl.store(new + RANK, ranks, mask=fresh)
    tl.store(new + SAID, said, mask=fresh)
    tl.store(new + LOOK, nothing, mask=fresh)
    tl.store(new + READ, nothing, mask=fresh)
    tl.store(new + SENT, nothing, mask=fresh)
    tl.store(new + SLOT, nothing - 1.0, mask=fresh)
    tl.store(new + KNOWN, nothing, mask=fresh)
    tl.store(new + ROW, nothing, mask=fresh)
    tl.debug_barrier()
    _weigh(chances, nodes, count, now, live)
    tl.debug_barrier()
    return count + tl.sum(tl.reshape(fresh.to(tl.int32), (LANES * ENTRIES,)), 0)


@triton.jit
def _choose(session, growth, nodes, now, count, tail, SIZE: tl.constexpr):
    """Choose the nodes of the next step, as `GrowingTree.open_nodes` and `Growth.pace`; returns how many.

    `now` gets them, best first.
    """
    n = tl.arange(0, SIZE)
    there = n < count
    at = nodes + n * FIELDS
    reach = tl.load(at + REACH, mask=there, other=-1.0)
    parent = tl.load(at + PARENT, mask=there, other=-1.0).to(tl.int32)
    read = tl.load(at + READ, mask=there, other=1.0)
    opened = tl.load(nodes + tl.maximum(parent, 0) * FIELDS + READ, mask=there, other=0.0)
    worth = tl.load(growth + WORTH)
    least = tl.load(growth + LEAST)
    row_price = tl.load(growth + ROW_PRICE)
    rows = tl.load(growth + SENT_NODES).to(tl.int32)
    room = tl.load(session + LIMIT) - tl.load(session + LENGTH)
    deepest = tl.minimum(tl.load(growth + DEEPEST).to(tl.int32), room - 1).to(tl.float64)
    bar = worth * 0.0
    left = tl.where(count >= rows, rows, 0)
    rest = reach
    while left > 0:  # the reach of the last node that a verify takes
        bar = tl.max(rest, 0)
        left -= tl.sum((rest == bar).to(tl.int32), 0)
        rest = tl.where(rest == bar, -1.0, rest)
    within = tl.load(at + DEPTH, mask=there, other=0.0) < deepest
    is_open = there & (read == 0.0) & within & (worth * reach > bar) & ((parent == ROOT) | (opened > 0.0))
    known = tl.load(at + KNOWN, mask=there, other=0.0)
    gains = tl.where(is_open, reach * tl.maximum(1.0 - known, 0.0), -1.0)
    fed = tl.sum((there & (read > 0.0)).to(tl.int32), 0)
    limit = tl.minimum(tl.load(growth + MOST).to(tl.int32) - fed, tl.load(growth + TAIL_LIMIT).to(tl.int32) - tail)
    limit = tl.minimum(limit, tl.load(growth + PACES).to(tl.int32))
    limit = tl.minimum(limit, (SIZE - count) // tl.load(growth + CHILDREN).to(tl.int32))
    best = limit * 0
    best_profit = worth * 0.0
    total = worth * 0.0
    width = limit * 0
    top = tl.max(gains, 0)
    while (width < limit) & (top >= least):
        found = tl.min(tl.where(gains == top, n, NOWHERE), 0)
        tl.store(now + width, found)
        gains = tl.where(n == found, -1.0, gains)
        total += tl.maximum(worth * top - row_price, 0.0)
        profit = total - tl.load(growth + PRICES + width)
        width += 1
        best = tl.where(profit > best_profit, width, best)
        best_profit = tl.where(profit > best_profit, profit, best_profit)
        top = tl.max(gains, 0)
    tl.debug_barrier()
    return best


@triton.jit
def _grow_one(session, placed, growth, chances, nodes, now, want, results, across, SIZE: tl.constexpr,
              LAST: tl.constexpr):  # fmt: skip
    lane = tl.arange(0, LANES)
    first = tl.load(placed + FIRST_ROW)
    rows = tl.load(placed + ROW_COUNT)
    count = tl.load(session + COUNT)
    length = tl.load(session + LENGTH)
    draft_length = tl.load(session + DRAFT_LENGTH)
    root_scored = tl.load(session + ROOT_SCORED)
    tail = tl.load(session + TAIL)
    if rows > 0:
        is_text = tl.load(now) == ROOT
        draft_length += tl.where(is_text, rows, 0)
        number = tl.load(now + lane, mask=lane < rows, other=-2)
        live = tl.where(is_text, (lane == 0) & (draft_length == length), lane < rows)
        row = tl.where(is_text, first + rows - 1, first + lane)
        root_scored = tl.where(is_text & (draft_length == length), 1, root_scored)
        tl.store(nodes + tl.maximum(number, 0) * FIELDS + READ, lane.to(tl.float64) * 0.0 + 1.0,
                 mask=live & (number >= 0))  # fmt: skip
        tl.debug_barrier()
        count = _add_candidates(growth, chances, nodes, results + row * across, count, number, live, SIZE)
    tl.debug_barrier()
    width = count * 0
    end = count * 0
    last = count * 0
    if LAST:
        tl.store(placed + ROW_COUNT, 0)
    elif draft_length < length:
        width = tl.minimum(length - draft_length, tl.load(growth + PACES).to(tl.int32))
        end = draft_length + width
        last = end - 1
        tl.store(now, ROOT)
    else:
        width = _choose(session, growth, nodes, now, count, tail, SIZE)
        live = lane < width
        found = tl.load(now + lane, mask=live, other=0)
        order = tl.sum(((found[None, :] < found[:, None]) & live[None, :]).to(tl.int32), 1)
        tl.debug_barrier()
        tl.store(now + order, found, mask=live)
        tl.store(nodes + found * FIELDS + SLOT, (tail + order).to(tl.float64), mask=live)
        depth = tl.load(nodes + found * FIELDS + DEPTH, mask=live, other=0.0).to(tl.int32)
        tail += width
        end = length + tail
        last = length - 1 + tl.max(depth, 0)
    tl.store(want, width)
    tl.store(want + 1, end)
    tl.store(want + 2, last)
    tl.store(session + COUNT, count)
    tl.store(session + DRAFT_LENGTH, draft_length)
    tl.store(session + ROOT_SCORED, root_scored)
    tl.store(session + TAIL, tail)


@triton.jit(do_not_specialize=["across"])
def grow(sessions, places, growth, chances, trees, now, wants, results, across, SIZE: tl.constexpr,
         LAST: tl.constexpr):  # fmt: skip
    """Add what one session's rows of the last draft step propose, and choose its next rows; LAST: none."""
    s = tl.program_id(0)
    session = sessions + s * SCALARS
    if (tl.load(session + STATE) == DECODING) & (tl.load(session + DRAFTS) > 0):
        _grow_one(session, places + s * PLACES, growth, chances, trees + s * SIZE * FIELDS,
                  now + s * LANES, wants + s * WANTS, results, across, SIZE, LAST)  # fmt: skip
    else:
        tl.store(wants + s * WANTS, 0)


@triton.jit(do_not_specialize=["wide"])
def place_drafts(sessions, places, wants, counts, total, wide, SESSIONS: tl.constexpr, PER_GROUP: tl.constexpr):
    """Place the rows of all sessions in the draft's next step; `lanes` of the growth sees to it that they fit."""
    s = tl.arange(0, SESSIONS)
    rows = tl.load(wants + s * WANTS)
    tl.store(total, place(
        sessions, places, counts, s, rows, tl.load(wants + s * WANTS + 1), tl.load(wants + s * WANTS + 2), rows * 0,
        wide, PER_GROUP, DRAFT_MOVES
    ))  # fmt: skip


@triton.jit(do_not_specialize=["context", "held", "per", "across", "wide", "all_groups", "spare"])
def write_drafts(sessions, places, trees, pages, history, moved, now, packed, groups, tables, own, counts, moves,
                 context, held, per, across, wide, all_groups, spare, SESSIONS: tl.constexpr, SIZE: tl.constexpr,
                 PER_GROUP: tl.constexpr):  # fmt: skip
    """Write the rows of one session into the draft's step; the program behind the last session writes the padding."""
    s = tl.program_id(0)
    if s == SESSIONS:
        last = places + (SESSIONS - 1) * PLACES
        used = tl.load(last + FIRST_GROUP) + (tl.load(last + ROW_COUNT) + PER_GROUP - 1) // PER_GROUP
        write_padding(packed, groups, own, counts, per, wide, used, all_groups, spare, 64)
    else:
        session = sessions + s * SCALARS
        placed = places + s * PLACES
        rows = tl.load(placed + ROW_COUNT)
        if rows > 0:
            is_text = tl.load(now + s * LANES) == ROOT
            write_rows(session, placed, trees + s * SIZE * FIELDS, now + s * LANES, pages + (2 * s + 1) * held,
                       history + s * context, moved + s * 4 * PATH_MOVES, packed, groups, tables, own, moves, per,
                       across, tl.load(session + DRAFT_LENGTH), tl.where(is_text, rows, 0), False, LANES, PER_GROUP,
                       DRAFT_MOVES)  # fmt: skip
