"""The Triton functions by which a forest writes a packed step: where each session's rows lie, and the rows themselves.

Both steps of a round are written here: the verify of the target, in which a session has its last token and some nodes,
and the steps of the draft, in which it has committed tokens or some nodes. Owns the numbers of the tables for all
kernels of the forest. Invariant: a step is the one that `layout.write_rows` and `layout.write_choosing` write for the
same rows. Needs Triton, so only modules of kernels import it.
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-def"
# What Triton compiles has no Python types but constexpr.

import triton
import triton.language as tl

from specbranch.models.gpu import forest_layout
from specbranch.models.gpu.layout import DEPTH_COUNT as _DEPTH_COUNT
from specbranch.models.gpu.layout import MOVED_COUNT as _MOVED_COUNT
from specbranch.models.gpu.layout import SAMPLED_COUNT as _SAMPLED_COUNT
from specbranch.models.gpu.layout import SPREAD_COUNT as _SPREAD_COUNT
from specbranch.models.gpu.layout import USED_COUNT as _USED_COUNT
from specbranch.models.gpu.layout import most_moves
from specbranch.models.gpu.noise_kernels import noise_keys
from specbranch.models.gpu.tree_kernels import (
    BACK,
    CHANCE,
    DEPTH,
    FIELDS,
    GROUP,
    ONE,
    OWN,
    PAGE,
    PARENT,
    REACH,
    ROOT,
    ROW,
    SHARED_COUNT,
    SLOT,
    TOKEN,
)

SCALARS, PLACES, REPORT, REPORT_HEAD = (
    tl.constexpr(n)
    for n in (
        len(forest_layout.SESSION_FIELDS),
        len(forest_layout.PLACE_FIELDS),
        forest_layout.REPORT_SIZE,
        len(forest_layout.REPORT_FIELDS),
    )
)
STATE, LENGTH, LIMIT, SEED_LOW, SEED_HIGH, SAMPLE, TEMPERATURE, NOISY, STOPS, COUNT, ROOT_SCORED = (
    tl.constexpr(forest_layout.SESSION_FIELDS.index(name))
    for name in [
        "state",
        "length",
        "limit",
        "seed_low",
        "seed_high",
        "sample",
        "temperature",
        "noisy",
        "stops",
        "nodes",
        "root_scored",
    ]
)
DRAFT_LENGTH, TAIL, TARGET_MOVES, DRAFT_MOVES, DRAFTS, LOOKS = (
    tl.constexpr(forest_layout.SESSION_FIELDS.index(name))
    for name in ["draft_length", "tail", "target_moves", "draft_moves", "drafts", "looks"]
)
FIRST_ROW, ROW_COUNT, FIRST_GROUP, TABLE_AT, FIRST_MOVE = (
    tl.constexpr(forest_layout.PLACE_FIELDS.index(name)) for name in ["first_row", "rows", "group", "table", "moved"]
)
DECODING, STOPPED, LIMITED, FAILED = (
    tl.constexpr(n)
    for n in (forest_layout.DECODING, forest_layout.STOPPED, forest_layout.LIMITED, forest_layout.FAILED)
)
LEAST_MOVES = tl.constexpr(most_moves(1))
STOP_IDS, PATH_MOVES = tl.constexpr(forest_layout.STOP_IDS), tl.constexpr(forest_layout.PATH_MOVES)
MOVED_COUNT, DEPTH_COUNT, USED_COUNT, SAMPLED_COUNT, SPREAD_COUNT = (
    tl.constexpr(n) for n in (_MOVED_COUNT, _DEPTH_COUNT, _USED_COUNT, _SAMPLED_COUNT, _SPREAD_COUNT)
)


@triton.jit
def shared_by(position):
    """Return how many positions a row shares with its group."""
    return tl.maximum((position // GROUP - 1) * GROUP, 0)


@triton.jit
def weigh_anew(nodes, count, SIZE: tl.constexpr):
    """Set reaches level by level: chances above a node may have changed since it was added."""
    n = tl.arange(0, SIZE)
    there = n < count
    at = nodes + n * FIELDS
    parent = tl.load(at + PARENT, mask=there, other=-1.0).to(tl.int32)
    depth = tl.load(at + DEPTH, mask=there, other=0.0).to(tl.int32)
    chance = tl.load(at + CHANCE, mask=there, other=0.0)
    deep = tl.max(depth, 0)
    level = deep * 0 + 1
    while level <= deep:
        here = there & (depth == level)
        above = tl.load(nodes + tl.maximum(parent, 0) * FIELDS + REACH, mask=here & (parent >= 0), other=1.0)
        tl.store(at + REACH, above * chance, mask=here)
        tl.debug_barrier()
        level += 1


@triton.jit
def place(sessions, places, counts, s, rows, ends, last, depths, wide, PER_GROUP: tl.constexpr, MOVED: tl.constexpr):
    """Place the rows of all sessions one behind the other, and write the step's counts; vectors over sessions.

    `rows`: how many each has. `ends`: KV slots that its page table has to reach. `last`: its last position. `depths`:
    of its deepest row below the root. `wide`: rows of the bucket. MOVED: the scalar that counts its moves. Returns the
    rows of all.
    """
    if MOVED == DRAFT_MOVES:  # a step makes four moves a row; a session beyond that waits for the next one
        waiting = tl.where(rows > 0, tl.load(sessions + s * SCALARS + MOVED), 0)
        rows = tl.where(tl.cumsum(waiting, 0) <= tl.maximum(4 * wide, LEAST_MOVES), rows, 0)
    taken = rows > 0
    groups = (rows + PER_GROUP - 1) // PER_GROUP
    pages = tl.where(taken, (ends + PAGE - 1) // PAGE, 0)
    moved = tl.where(taken, tl.load(sessions + s * SCALARS + MOVED), 0)
    at = places + s * PLACES
    tl.store(at + FIRST_ROW, tl.cumsum(rows, 0) - rows)
    tl.store(at + ROW_COUNT, rows)
    tl.store(at + FIRST_GROUP, tl.cumsum(groups, 0) - groups)
    tl.store(at + TABLE_AT, tl.cumsum(pages, 0) - pages)
    tl.store(at + FIRST_MOVE, tl.cumsum(moved, 0) - moved)
    total = tl.sum(rows, 0)
    tl.store(counts + MOVED_COUNT, tl.sum(moved, 0))
    tl.store(counts + DEPTH_COUNT, tl.max(tl.where(taken, depths, 0), 0))
    tl.store(counts + SHARED_COUNT, tl.max(tl.where(taken, shared_by(last), 0), 0))
    tl.store(counts + USED_COUNT, wide)
    tl.store(counts + SAMPLED_COUNT, total)
    tl.store(counts + SPREAD_COUNT, 0)
    return total


@triton.jit
def write_rows(session, placed, nodes, now, pages, history, moved, packed, groups, tables, own, moves, per, across,
               start, texts, VERIFIES: tl.constexpr, ROWS: tl.constexpr, PER_GROUP: tl.constexpr,
               MOVED: tl.constexpr):  # fmt: skip
    """Write the rows of one session: `texts` committed tokens from `start` on, then nodes; in a verify the last token.

    `now`: its nodes, in the order of their rows. VERIFIES: rows are tried, each behind its parent; otherwise each of
    them proposes. A node lies at the KV slot of its row, or at its own one. `across`: moves that the step can take.
    MOVED: the scalar that counts the session's moves.
    """
    lane = tl.arange(0, ROWS)
    first = tl.load(placed + FIRST_ROW)
    rows = tl.load(placed + ROW_COUNT)
    begin = tl.load(placed + TABLE_AT)
    length = tl.load(session + LENGTH)
    temperature = tl.load(session + TEMPERATURE)
    noisy = tl.load(session + NOISY)
    live = lane < rows
    node = live & (lane >= texts)
    number = tl.load(now + lane - texts, mask=node, other=0)
    at = nodes + number * FIELDS
    depth = tl.load(at + DEPTH, mask=node, other=0.0).to(tl.int32)
    position = tl.where(node, length - 1 + depth, start + lane)
    said = tl.load(at + TOKEN, mask=node, other=0.0).to(tl.int32)
    token = tl.where(node, said, tl.load(history + position, mask=live & (lane < texts), other=0))
    behind = lane - texts if VERIFIES else tl.load(at + SLOT, mask=node, other=0.0).to(tl.int32)
    slot = tl.where(node, length + behind, position)
    flat = tl.load(pages + slot // PAGE, mask=live, other=0) * PAGE + slot % PAGE
    shared = shared_by(position)
    count = position - shared + 1
    parent = first + lane
    if VERIFIES:
        up = tl.load(at + PARENT, mask=node, other=-1.0).to(tl.int32)
        above = tl.load(nodes + tl.maximum(up, 0) * FIELDS + ROW, mask=node & (up >= 0), other=0.0)
        parent = first + above.to(tl.int32)
    row = packed + first + lane
    tl.store(row, token, mask=live)
    tl.store(row + per, position, mask=live)
    tl.store(row + 2 * per, flat, mask=live)
    tl.store(row + 3 * per, shared, mask=live)
    tl.store(row + 4 * per, count, mask=live)
    tl.store(row + 5 * per, lane * 0 + temperature, mask=live)
    one, two = noise_keys(
        tl.load(session + SEED_LOW), tl.load(session + SEED_HIGH), tl.load(session + SAMPLE), position + 1
    )
    tl.store(row + 6 * per, tl.where(noisy != 0, one, 0), mask=live)
    tl.store(row + 7 * per, tl.where(noisy != 0, two, 0), mask=live)
    tl.store(row + 8 * per, lane * 0 + noisy, mask=live)
    tl.store(row + 9 * per, parent, mask=live)
    tl.store(row + 10 * per, tl.where(node & VERIFIES, said, ROOT), mask=live)
    group = tl.load(placed + FIRST_GROUP) + lane
    begins = lane * PER_GROUP < rows
    tl.store(groups + group * 3, first + lane * PER_GROUP, mask=begins)
    tl.store(groups + group * 3 + 1, tl.minimum(rows - lane * PER_GROUP, PER_GROUP), mask=begins)
    tl.store(groups + group * 3 + 2, lane * 0 + begin, mask=begins)
    held = (tl.max(tl.where(live, slot, 0), 0) + PAGE) // PAGE
    for begun in range(0, held, 32):
        p = begun + tl.arange(0, 32)
        tl.store(tables + begin + p, tl.load(pages + p, mask=p < held, other=0), mask=p < held)
    back = tl.arange(0, BACK)
    # the part of an own path that lies at its own positions is on two pages at most
    low = tl.load(pages + shared // PAGE, mask=live, other=0)
    high = tl.load(pages + shared // PAGE + 1, mask=live & (shared // PAGE + 1 < held), other=0)
    path = shared[:, None] + back[None, :]
    page = tl.where(path // PAGE == (shared // PAGE)[:, None], low[:, None], high[:, None])
    before = live[:, None] & (path < tl.where(node, length, position + 1)[:, None])
    tl.store(own + (first + lane)[:, None] * OWN + back[None, :], page * PAGE + path % PAGE, mask=before)
    last = count - 1
    here = number
    going = node
    while tl.max(going.to(tl.int32), 0) > 0:
        there = nodes + here * FIELDS
        put = tl.load(there + (ROW if VERIFIES else SLOT), mask=going, other=0.0).to(tl.int32)
        slot = length + put - (1 if VERIFIES else 0)
        flat = tl.load(pages + slot // PAGE, mask=going, other=0) * PAGE + slot % PAGE
        tl.store(own + (first + lane) * OWN + last, flat, mask=going)
        here = tl.load(there + PARENT, mask=going, other=-1.0).to(tl.int32)
        last -= 1
        going = going & (here >= 0)
        here = tl.maximum(here, 0)
    count_moved = tl.load(session + MOVED)
    m = tl.arange(0, PATH_MOVES)
    put_at = tl.load(placed + FIRST_MOVE) + m
    for side in tl.static_range(2):
        kv_slot = tl.load(moved + side * PATH_MOVES + m, mask=m < count_moved, other=0)
        # pages may have been copied since the moves were noted
        flat = tl.load(pages + kv_slot // PAGE, mask=m < count_moved, other=0) * PAGE + kv_slot % PAGE
        tl.store(moves + side * across + put_at, flat, mask=m < count_moved)
    tl.debug_barrier()
    tl.store(session + MOVED, 0)


@triton.jit
def write_padding(packed, groups, own, counts, per, wide, used_groups, all_groups, spare, TILE: tl.constexpr):
    """Write the rows and groups of a step that belong to no session."""
    rows = tl.load(counts + SAMPLED_COUNT)
    for begin in range(rows, wide, TILE):
        lane = begin + tl.arange(0, TILE)
        rest = lane < wide
        row = packed + lane
        for field in tl.static_range(9):
            tl.store(row + field * per, lane * 0, mask=rest)
        tl.store(row + 2 * per, lane * 0 + spare, mask=rest)
        tl.store(row + 4 * per, lane * 0 + 1, mask=rest)
        tl.store(row + 5 * per, lane * 0 + ONE, mask=rest)
        tl.store(row + 9 * per, lane, mask=rest)
        tl.store(row + 10 * per, lane * 0 + ROOT, mask=rest)
        tl.store(own + lane * OWN, lane * 0 + spare, mask=rest)
    for begin in range(used_groups, all_groups, TILE):
        lane = begin + tl.arange(0, TILE)
        for field in tl.static_range(3):
            tl.store(groups + lane * 3 + field, lane * 0, mask=lane < all_groups)
