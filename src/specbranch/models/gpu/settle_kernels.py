"""The Triton kernel that settles a verify: what each session of the forest has accepted, and what is left of its tree.

One program of one warp a session. Its loop runs once for each committed token and reads no memory: a session's rows and
nodes are in registers. Invariant: the tables are those of `settling.settle_plainly`. Needs Triton, so only
`settling.py` imports it, when it uses the kernel.
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-def"
# What Triton compiles has no Python types but constexpr.

import triton
import triton.language as tl

from specbranch.models.gpu.forest_rows_kernels import (
    COUNT,
    DECODING,
    DRAFT_LENGTH,
    DRAFT_MOVES,
    FAILED,
    FIRST_ROW,
    LENGTH,
    LIMIT,
    LIMITED,
    PATH_MOVES,
    PLACES,
    REPORT,
    REPORT_HEAD,
    ROOT_SCORED,
    ROW_COUNT,
    SCALARS,
    STATE,
    STOP_IDS,
    STOPPED,
    STOPS,
    TAIL,
    TARGET_MOVES,
)
from specbranch.models.gpu.tree_kernels import (
    CHANCE,
    CONFIDENCE,
    DEPTH,
    FIELDS,
    NOWHERE,
    PARENT,
    REACH,
    READ,
    ROOT,
    ROW,
    SENT,
    SLOT,
    TOKEN,
)


@triton.jit
def _below(nodes, count, hit, advance, SIZE: tl.constexpr):
    """Keep the nodes below `hit`, renumbered, as `core.trees.below`; returns how many, and the end of the KV slots."""
    n = tl.arange(0, SIZE)
    there = n < count
    at = nodes + n * FIELDS
    depth = tl.load(at + DEPTH, mask=there, other=0.0).to(tl.int32)
    parent = tl.load(at + PARENT, mask=there, other=-1.0).to(tl.int32)
    chance = tl.load(at + CHANCE, mask=there, other=0.0)
    above = nodes + tl.maximum(parent, 0) * FIELDS
    base = tl.max(tl.where(n == hit, depth, 0), 0)
    deep = tl.max(depth, 0)
    is_first = there & (parent == hit)
    tl.store(at + ROW, is_first.to(tl.float64), mask=there)
    tl.store(at + REACH, chance, mask=is_first)
    tl.debug_barrier()
    level = base + 2
    while level <= deep:
        here = there & (depth == level)
        marked = tl.load(above + ROW, mask=here, other=0.0)
        tl.store(at + ROW, marked, mask=here)
        reach = tl.load(above + REACH, mask=here, other=0.0)
        tl.store(at + REACH, chance * reach, mask=here & (marked > 0.0))
        tl.debug_barrier()
        level += 1
    inside = tl.load(at + ROW, mask=there, other=0.0) > 0.0
    number = tl.cumsum(inside.to(tl.int32), 0) - 1
    tl.debug_barrier()
    tl.store(at + ROW, number.to(tl.float64), mask=inside)
    tl.debug_barrier()
    up = tl.where(parent == hit, -1.0, tl.load(above + ROW, mask=inside & (parent != hit), other=0.0))
    kv_slot = tl.load(at + SLOT, mask=inside, other=-1.0)
    kv_slot = tl.where(kv_slot >= 0.0, kv_slot - advance.to(tl.float64), -1.0)
    tl.debug_barrier()
    tl.store(at + PARENT, up, mask=inside)
    tl.store(at + DEPTH, (depth - base).to(tl.float64), mask=inside)
    tl.store(at + SENT, n.to(tl.float64) * 0.0, mask=inside)
    tl.store(at + SLOT, kv_slot, mask=inside)
    tl.store(at + ROW, n.to(tl.float64) * 0.0, mask=inside)
    tl.debug_barrier()
    for field in tl.static_range(FIELDS):  # a node moves to a lower number: all are read before one is written
        value = tl.load(at + field, mask=inside, other=0.0)
        tl.debug_barrier()
        tl.store(nodes + number * FIELDS + field, value, mask=inside)
        tl.debug_barrier()
    return tl.sum(inside.to(tl.int32), 0), tl.max(tl.where(inside, kv_slot, -1.0), 0).to(tl.int32) + 1


@triton.jit
def _settle_one(session, stops, history, nodes, moves, report, placed, packed, picks, results, per, across,
                SIZE: tl.constexpr, ROWS: tl.constexpr):  # fmt: skip
    first = tl.load(placed + FIRST_ROW)
    rows = tl.load(placed + ROW_COUNT)
    length = tl.load(session + LENGTH)
    limit = tl.load(session + LIMIT)
    count = tl.load(session + COUNT)
    draft_length = tl.load(session + DRAFT_LENGTH)
    root_scored = tl.load(session + ROOT_SCORED)
    r = tl.arange(0, ROWS)
    live = r < rows
    token = tl.load(picks + first + r, mask=live, other=-1)
    sure = tl.load(results + (first + r) * across + CONFIDENCE, mask=live, other=0.0)
    parent = tl.load(packed + 9 * per + first + r, mask=live, other=-1) - first
    said = tl.load(packed + 10 * per + first + r, mask=live, other=-3)
    j = tl.arange(0, STOP_IDS)
    stop = tl.load(stops + j, mask=j < tl.load(session + STOPS), other=-1)
    n = tl.arange(0, SIZE)
    there = n < count
    at = nodes + n * FIELDS
    kv_slot = tl.load(at + SLOT, mask=there, other=-1.0).to(tl.int32)
    scored = tl.load(at + READ, mask=there, other=0.0) > 0.0
    up = tl.load(at + PARENT, mask=there, other=-2.0).to(tl.int32)
    held = tl.load(at + TOKEN, mask=there, other=-1.0).to(tl.int32)
    drafted = moves + 2 * PATH_MOVES
    here = rows * 0
    node = rows * 0 + ROOT
    taken = rows * 0
    moved = rows * 0
    placed_rows = rows * 0 + 1
    shifted = tl.load(session + DRAFT_MOVES)  # those that no draft step has made yet come first
    advance = rows * 0
    is_read = rows * 0
    ended = rows * 0 + DECODING
    going = rows > 0
    while going:
        chosen = tl.max(tl.where(r == here, token, -1), 0)
        finite = tl.max(((r == here) & (sure != sure)).to(tl.int32), 0) == 0
        tl.store(history + length + taken, chosen, mask=finite)
        tl.store(report + REPORT_HEAD + taken, chosen, mask=finite)
        taken += finite.to(tl.int32)
        is_stop = tl.max((stop == chosen).to(tl.int32), 0) > 0
        ended = tl.where(length + taken >= limit, LIMITED, DECODING)
        ended = tl.where(is_stop, STOPPED, ended)
        ended = tl.where(finite, ended, FAILED)
        child = tl.min(tl.where(live & (r > here) & (parent == here) & (said == chosen), r, NOWHERE), 0)
        going = (ended == DECODING) & (child < NOWHERE)
        moves_row = going & (child != taken)
        placed_rows += (going & (child == taken) & (moved == 0)).to(tl.int32)
        tl.store(moves + moved, length - 1 + child, mask=moves_row)
        tl.store(moves + PATH_MOVES + moved, length - 1 + taken, mask=moves_row)
        moved += moves_row.to(tl.int32)
        # the node that this token leads to, sent or not
        node = tl.min(tl.where(there & (up == node) & (held == chosen), n, NOWHERE), 0)
        is_read = tl.max(((n == node) & scored).to(tl.int32), 0)
        behind = tl.max(tl.where(n == node, kv_slot, -1), 0)
        moves_node = (ended == DECODING) & (is_read > 0) & (behind != taken - 1)
        tl.store(drafted + shifted, length + behind, mask=moves_node)
        tl.store(drafted + PATH_MOVES + shifted, length + taken - 1, mask=moves_node)
        shifted += moves_node.to(tl.int32)
        advance += is_read
        here = tl.where(going, child, here)
    goes_on = ended == DECODING
    size = rows * 0
    tail = rows * 0
    if goes_on & (node < NOWHERE):
        size, tail = _below(nodes, count, node, advance, SIZE)
    tl.store(session + STATE, ended)
    tl.store(session + LENGTH, length + taken)
    tl.store(session + COUNT, size)
    tl.store(session + ROOT_SCORED, tl.where(goes_on, is_read, 0))
    tl.store(session + DRAFT_LENGTH, draft_length + tl.where(goes_on, advance, 0))
    tl.store(session + TAIL, tail)
    tl.store(session + TARGET_MOVES, tl.where(goes_on, moved, 0))
    tl.store(session + DRAFT_MOVES, tl.where(goes_on, shifted, 0))
    tl.store(report, taken)
    tl.store(report + 1, ended)
    tl.store(report + 2, tl.minimum(placed_rows, taken))
    tl.store(report + 3, tl.where(goes_on & (shifted > 0), -1, draft_length + tl.where(goes_on, advance, 0)))
    tl.store(report + 4, count)
    tl.store(report + 5, root_scored)
    tl.debug_barrier()
    tl.store(placed + ROW_COUNT, 0)


@triton.jit(do_not_specialize=["per", "across", "context"])
def settle(sessions, stops, history, trees, moves, reports, places, packed, picks, results, context, per, across,
           SIZE: tl.constexpr, ROWS: tl.constexpr):  # fmt: skip
    """Commit what the verify in flight has accepted, for one session; without rows in it, only report its state."""
    s = tl.program_id(0)
    session = sessions + s * SCALARS
    placed = places + s * PLACES
    report = reports + s * REPORT
    state = tl.load(session + STATE)
    if (state == DECODING) & (tl.load(placed + ROW_COUNT) > 0):
        _settle_one(session, stops + s * STOP_IDS, history + s * context,
                    trees + s * SIZE * FIELDS, moves + s * 4 * PATH_MOVES, report, placed, packed, picks, results, per,
                    across, SIZE, ROWS)  # fmt: skip
    else:
        tl.store(report, 0)
        tl.store(report + 1, state)
        for field in tl.static_range(2, REPORT_HEAD):
            tl.store(report + field, 0)
