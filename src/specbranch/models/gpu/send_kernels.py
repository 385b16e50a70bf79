"""The Triton kernel by which a grown tree becomes the step that verifies it: `core.sending`'s choice on arrays, in
float64, in the same order, and the rows written out for the target.

One program of one warp. Invariant: the same step comes of it as of `DeviceReceiver._plainly`. Needs Triton, so nobody
imports it but `receiving`, when it is asked to.
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-def"
# What Triton compiles has no Python types but constexpr.

import triton
import triton.language as tl

from specbranch.models.gpu import receiving, tree_layout
from specbranch.models.gpu.layout import ALIGNED as _ALIGNED
from specbranch.models.gpu.tree_kernels import (
    BACK,
    CHANCE,
    COUNT,
    DEPTH,
    FIELDS,
    GROUP,
    KEYS,
    LANES,
    MOVES,
    NODES,
    NOW,
    NOWHERE,
    ONE,
    OWN,
    PAGE,
    PARENT,
    PLANTED,
    REACH,
    ROOT,
    ROW,
    SHARED_COUNT,
    SMALL,
    SPREAD_COUNT,
    TOKEN,
)

SHEET = tl.constexpr(tree_layout.TREE_AT["sheet"])
ALIGNED = tl.constexpr(_ALIGNED)
PREFIX, LAST, SPARE, PAGES_HELD, MOVED, TEMPERATURE, NOISY, DEEPEST, MOST = (
    tl.constexpr(n) for n in range(len(receiving.SCALARS))
)
PRICES, MOVES_AT, PAGES_AT = (tl.constexpr(receiving.AT[name]) for name in ("prices", "moves", "pages"))


@triton.jit
def _flat(held, kv_slot, live):
    """Where KV slots of the sequence lie in the pool."""
    return tl.load(held + PAGES_AT + kv_slot // PAGE, mask=live, other=0.0).to(tl.int32) * PAGE + kv_slot % PAGE


@triton.jit
def _weigh_anew(nodes, at, there, parent, depth):
    """Say how far nodes are reached once more, level by level: chances above them may have changed."""
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
def _choose(tree, nodes, held, count, SIZE: tl.constexpr):
    """Choose what is sent, as `core.sending.sent`; leaves the nodes in NOW in their order, and tells each its row;
    returns how many."""
    n = tl.arange(0, SIZE)
    there = n < count
    at = nodes + n * FIELDS
    parent = tl.load(at + PARENT, mask=there, other=-2.0).to(tl.int32)
    depth = tl.load(at + DEPTH, mask=there, other=0.0).to(tl.int32)
    if tl.load(tree + PLANTED) > 0.0:
        _weigh_anew(nodes, at, there, parent, depth)
    reach = tl.load(at + REACH, mask=there, other=-1.0)
    deepest = tl.load(held + DEEPEST).to(tl.int32)
    limit = tl.load(held + MOST).to(tl.int32)
    order = tl.zeros_like(n) - 1
    rest = tl.where(there & (parent == ROOT) & (depth <= deepest), reach, -1.0)
    taken = count * 0
    best = count * 0
    promised = tl.load(held + PRICES) * 0.0
    most = promised
    top = tl.max(rest, 0)
    while (taken < limit) & (top >= 0.0):
        found = tl.min(tl.where(rest == top, n, NOWHERE), 0)
        order = tl.where(n == found, taken, order)
        rest = tl.where(n == found, -1.0, rest)
        rest = tl.where((parent == found) & (depth <= deepest), reach, rest)
        promised += top
        profit = promised - tl.load(held + PRICES + taken)
        taken += 1
        best = tl.where(profit > most, taken, best)
        most = tl.where(profit > most, profit, most)
        top = tl.max(rest, 0)
    chosen = (order >= 0) & (order < best)
    row = tl.cumsum(chosen.to(tl.int32), 0)
    tl.store(at + ROW, row.to(tl.float64), mask=chosen)
    tl.store(tree + NOW + row - 1, n.to(tl.float64), mask=chosen)
    tl.debug_barrier()
    return best


@triton.jit
def _write_rows(tree, nodes, held, packed, groups, tables, own, counts, moves, read, wide, best):
    """Write out the step that reads the last token of the text, and the nodes of NOW behind it."""
    lane = tl.arange(0, LANES)
    rows = best + 1
    live = lane < rows
    node = live & (lane > 0)
    now = tl.load(tree + NOW + lane - 1, mask=node, other=0.0).to(tl.int32)
    at = nodes + now * FIELDS
    prefix = tl.load(held + PREFIX).to(tl.int32)
    spare = tl.load(held + SPARE).to(tl.int32)
    depth = tl.load(at + DEPTH, mask=node, other=0.0).to(tl.int32)
    token = tl.load(at + TOKEN, mask=node, other=0.0).to(tl.int32)
    token = tl.where(lane == 0, tl.load(held + LAST).to(tl.int32), token)
    parent = tl.load(at + PARENT, mask=node, other=-1.0).to(tl.int32)
    above = tl.load(nodes + tl.maximum(parent, 0) * FIELDS + ROW, mask=node & (parent >= 0), other=0.0).to(tl.int32)
    position = prefix + depth
    shared = tl.minimum(tl.maximum((position // GROUP - 1) * GROUP, 0), prefix)
    length = position - shared + 1
    noisy = live & (tl.load(held + NOISY) + lane.to(tl.float64) * 0.0 > 0.0)
    tl.store(packed + lane, tl.where(live, token, 0))
    tl.store(packed + ALIGNED + lane, tl.where(live, position, 0))
    tl.store(packed + 2 * ALIGNED + lane, tl.where(live, _flat(held, prefix + lane, live), spare))
    tl.store(packed + 3 * ALIGNED + lane, tl.where(live, shared, 0))
    tl.store(packed + 4 * ALIGNED + lane, tl.where(live, length, 1))
    tl.store(packed + 5 * ALIGNED + lane, tl.where(live, tl.load(held + TEMPERATURE).to(tl.int32), ONE))
    for key in tl.static_range(2):
        bits = tl.load(tree + KEYS + 2 * depth + key, mask=noisy, other=0.0).to(tl.int64).to(tl.int32)
        tl.store(packed + (6 + key) * ALIGNED + lane, bits)
    tl.store(packed + 8 * ALIGNED + lane, noisy.to(tl.int32))
    tl.store(packed + 9 * ALIGNED + lane, tl.where(live, above, lane))
    tl.store(packed + 10 * ALIGNED + lane, tl.where(node, token, ROOT))
    tl.store(read, rows)
    tl.store(read + 2 + 2 * lane, token)
    tl.store(read + 3 + 2 * lane, tl.where(node, above, ROOT))
    tl.store(groups, 0)
    tl.store(groups + 1, rows)
    tl.store(groups + 2, 0)
    kept = tl.load(held + PAGES_HELD).to(tl.int32)
    for begin in range(0, kept, 32):
        p = begin + tl.arange(0, 32)
        tl.store(tables + p, tl.load(held + PAGES_AT + p, mask=p < kept, other=0.0).to(tl.int32), mask=p < kept)
    tl.store(own + lane * OWN, lane * 0 + spare, mask=(live == 0) & (lane < wide))
    back = tl.arange(0, BACK)
    before = live[:, None] & (back[None, :] < (prefix - shared)[:, None])
    tl.store(
        own + lane[:, None] * OWN + back[None, :], _flat(held, shared[:, None] + back[None, :], before), mask=before
    )
    tl.debug_barrier()  # parents are read now
    last = length - 1
    here = lane
    going = live
    while tl.max(going.to(tl.int32), 0) > 0:
        tl.store(own + lane * OWN + last, _flat(held, prefix + here, going), mask=going)
        going = going & (here > 0)
        here = tl.load(packed + 9 * ALIGNED + here, mask=going, other=0)
        last -= 1
    moved = tl.load(held + MOVED).to(tl.int32)
    tl.store(counts, moved)
    tl.store(counts + 1, tl.max(tl.where(live, depth, 0), 0))
    tl.store(counts + SHARED_COUNT, tl.max(tl.where(live, shared, 0), 0))
    tl.store(counts + SPREAD_COUNT, 0)
    for begin in range(0, moved, 32):
        m = begin + tl.arange(0, 32)
        for side in tl.static_range(2):
            kv_slot = tl.load(held + MOVES_AT + side * MOVES + m, mask=m < moved, other=0.0).to(tl.int32)
            tl.store(moves + side * MOVES + m, kv_slot, mask=m < moved)


@triton.jit(do_not_specialize=["begin", "wide"])
def send(tree, packed, groups, tables, own, counts, moves, read, begin, wide):
    """Choose what of a tree is sent, and write out the step of at most `wide` rows that verifies it."""
    nodes = tree + begin
    held = tree + SHEET
    count = tl.load(tree + COUNT).to(tl.int32)
    best = count * 0
    if count <= SMALL:  # noqa: SIM108 – Triton compiles both
        best = _choose(tree, nodes, held, count, SMALL)
    else:
        best = _choose(tree, nodes, held, count, NODES)
    _write_rows(tree, nodes, held, packed, groups, tables, own, counts, moves, read, wide, best)
