"""The Triton kernel that grows a draft tree on a device: the arithmetic of `core.trees.GrowingTree` on float64 arrays.

It is one program of one warp, which chooses the nodes of the next step between two draft steps, in some microseconds.
Invariant: it grows the same trees as `DeviceTree._plainly`, in the same order of operations. The module needs Triton,
so only `trees.py` imports it, when it uses the kernel.
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-def"
# What Triton compiles has no Python types but constexpr.

import triton
import triton.language as tl

from specbranch.core.pages import PAGE as _PAGE
from specbranch.core.trees import STANDINGS as _STANDINGS
from specbranch.models.forward.step_rows import GROUP_POSITIONS as _GROUP
from specbranch.models.gpu import tree_layout
from specbranch.models.gpu.layout import BEFORE as _BEFORE
from specbranch.models.gpu.layout import CONFIDENCE as _CONFIDENCE
from specbranch.models.gpu.layout import LONGEST_OWN as _OWN
from specbranch.models.gpu.layout import ONE as _ONE
from specbranch.models.gpu.layout import SHARED_COUNT as _SHARED_COUNT
from specbranch.models.gpu.layout import SPREAD_COUNT as _SPREAD_COUNT

NODES, LANES, ENTRIES, MOVES = (
    tl.constexpr(n) for n in (tree_layout.DEVICE_NODES, tree_layout.LANES, tree_layout.ENTRIES, tree_layout.TREE_MOVES)
)
FIELDS, EDGES = tl.constexpr(len(tree_layout.NODE_FIELDS)), tl.constexpr(tree_layout.TREE_PARTS["edges"])
BEFORE, CONFIDENCE, ONE, OWN, PAGE, GROUP = (tl.constexpr(n) for n in (_BEFORE, _CONFIDENCE, _ONE, _OWN, _PAGE, _GROUP))
CHUNK = tl.constexpr(8)  # nodes that are read at a time
SMALL = tl.constexpr(256)  # size that most trees fit
BACK = tl.constexpr(2 * tree_layout.DEEPEST)  # positions of the prefix in a row's own path, at most
ROOT, NOWHERE = tl.constexpr(-1), tl.constexpr(2147483647)
SHARED_COUNT, SPREAD_COUNT = tl.constexpr(_SHARED_COUNT), tl.constexpr(_SPREAD_COUNT)

COUNT, FED, SPENT, WIDTH, TAIL, PREFIX, ASKED, STEP, SPARE, PAGES_HELD, MOVED, TEMPERATURE, NOISY = (
    tl.constexpr(tree_layout.TREE_SCALARS.index(name))
    for name in [
        "count",
        "fed",
        "spent",
        "width",
        "tail",
        "prefix",
        "asked",
        "step",
        "spare",
        "pages",
        "moves",
        "temperature",
        "noisy",
    ]
)
WORTH, LEAST, FREE_TIME, TARGET_DELAY, DRAFT_DELAY, ROW_PRICE, CHILDREN, ROWS, DEEPEST, MOST, PACES, ROOM, PLANTED = (
    tl.constexpr(tree_layout.TREE_SCALARS.index(name))
    for name in [
        "worth",
        "least",
        "free_time",
        "target_delay",
        "draft_delay",
        "row_price",
        "children",
        "rows",
        "deepest",
        "most",
        "lanes",
        "room",
        "planted",
    ]
)
NOW, PRICES, EDGE, FIRST, OTHER, LOOKED, ODDS, KEYS, MOVES_AT, PAGES_AT = (
    tl.constexpr(tree_layout.TREE_AT[name])
    for name in ("now", "step", "edges", "first", "other", "looked", "odds", "keys", "moves", "pages")
)
TOKEN, PARENT, CHANCE, REACH, DEPTH, RANK, SAID, LOOK, READ, SENT, SLOT, KNOWN, ROW = (
    tl.constexpr(tree_layout.NODE_FIELDS.index(name))
    for name in [
        "token",
        "parent",
        "chance",
        "reach",
        "depth",
        "rank",
        "said",
        "look",
        "scored",
        "sent",
        "kv_slot",
        "known",
        "row",
    ]
)
STANDINGS = tl.constexpr(_STANDINGS)
FIRST_OF, OTHER_OF, ABSENT = tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)


@triton.jit
def _class_of(state, said):
    """Return the class of the draft's probability, as `core.trees.class_of`."""
    found = tl.zeros_like(said).to(tl.int32)
    for edge in tl.static_range(EDGES):
        found += (said >= tl.load(state + EDGE + edge)).to(tl.int32)
    return found


@triton.jit
def _flat(state, kv_slot, live):
    """Translate KV slots of the sequence into KV slots of the pool."""
    return tl.load(state + PAGES_AT + kv_slot // PAGE, mask=live, other=0.0).to(tl.int32) * PAGE + kv_slot % PAGE


@triton.jit
def _add_candidates(state, nodes, results, across, count, now, live):
    """Add the draft's proposals after the nodes of the last step; returns the new number of nodes."""
    lane = tl.arange(0, LANES)
    rank = tl.arange(0, ENTRIES)
    is_root = now == ROOT
    result = results + tl.where(is_root, tl.load(state + ASKED).to(tl.int32), lane) * across
    top = tl.load(result + BEFORE + ENTRIES, mask=live, other=0.0).to(tl.float64)
    sure = tl.load(result + CONFIDENCE, mask=live, other=0.0).to(tl.float64)
    there = live[:, None] & (rank < tl.load(state + CHILDREN).to(tl.int32))[None, :]
    token = tl.load(result[:, None] + BEFORE + rank[None, :], mask=there, other=0.0).to(tl.int32)
    score = tl.load(result[:, None] + BEFORE + ENTRIES + rank[None, :], mask=there, other=float("-inf")).to(tl.float64)
    there = there & (score > float("-inf"))
    said = sure[:, None] * tl.exp(tl.where(there, score - top[:, None], 0.0))
    chance = tl.load(state + tl.where(rank == 0, FIRST, OTHER)[None, :] + _class_of(state, said))
    here = nodes + tl.where(is_root | (live == 0), 0, now) * FIELDS
    reach = tl.where(is_root, 1.0, tl.load(here + REACH))
    depth = tl.where(is_root, 0.0, tl.load(here + DEPTH))
    known = tl.full((LANES, ENTRIES), ROOT, tl.int32)  # nodes that exist already, from a lookup
    planted = tl.load(state + PLANTED).to(tl.int32)
    for begin in range(0, planted, CHUNK):
        m = begin + tl.arange(0, CHUNK)
        parent = tl.load(nodes + m * FIELDS + PARENT, mask=m < planted, other=-2.0).to(tl.int32)
        held = tl.load(nodes + m * FIELDS + TOKEN, mask=m < planted, other=-1.0).to(tl.int32)
        alike = (parent[None, None, :] == now[:, None, None]) & (held[None, None, :] == token[:, :, None])
        known = tl.maximum(known, tl.max(tl.where(alike, m[None, None, :], ROOT), 2))
    again = there & (known >= 0)
    old = nodes + tl.maximum(known, 0) * FIELDS
    ranks = tl.zeros((LANES, ENTRIES), tl.float64) + rank[None, :].to(tl.float64)
    tl.store(old + RANK, ranks, mask=again)
    tl.store(old + SAID, said, mask=again)
    fresh = there & (known < 0) & ((reach[:, None] * chance >= tl.load(state + LEAST)) | (rank == 0)[None, :])
    order = tl.reshape(tl.cumsum(tl.reshape(fresh.to(tl.int32), (LANES * ENTRIES,)), 0), (LANES, ENTRIES))
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
    tl.debug_barrier()
    _weigh(state, nodes, planted, now, live)
    tl.debug_barrier()
    return count + tl.sum(tl.reshape(fresh.to(tl.int32), (LANES * ENTRIES,)), 0)


@triton.jit
def _weigh(state, nodes, planted, now, live):
    """Update the probabilities of looked-up children of the last step's nodes."""
    for begin in range(0, planted, CHUNK):
        m = begin + tl.arange(0, CHUNK)
        at = nodes + m * FIELDS
        parent = tl.load(at + PARENT, mask=m < planted, other=-2.0).to(tl.int32)
        below = tl.max(((parent[:, None] == now[None, :]) & live[None, :]).to(tl.int32), 1) > 0
        rank = tl.load(at + RANK, mask=below, other=0.0)
        said = tl.load(at + SAID, mask=below, other=0.0)
        look = tl.load(at + LOOK, mask=below, other=0.0).to(tl.int32)
        above = tl.where(
            parent == ROOT, 1.0, tl.load(nodes + tl.maximum(parent, 0) * FIELDS + REACH, mask=below, other=0.0)
        )
        standing = tl.where(said > 0.0, tl.where(rank > 0.0, OTHER_OF, FIRST_OF), ABSENT)
        kind = tl.where(look > 0, (look - 1) * STANDINGS + standing, 0)
        own = tl.load(state + tl.where(rank > 0.0, OTHER, FIRST) + _class_of(state, said))
        odds = own / tl.maximum(1.0 - own, 1e-6) * tl.load(state + ODDS + kind)
        drafted = tl.where(look > 0, odds / (1.0 + odds), own)
        undrafted = tl.where(look > 0, tl.load(state + LOOKED + kind), tl.load(at + CHANCE, mask=below, other=0.0))
        chance = tl.where(said > 0.0, drafted, undrafted)
        tl.store(at + CHANCE, chance, mask=below)
        tl.store(at + REACH, chance * above, mask=below)


@triton.jit
def _choose(state, nodes, count, fed, spent, SIZE: tl.constexpr):
    """Choose the nodes of the next step, best first, into NOW; returns how many."""
    n = tl.arange(0, SIZE)
    there = n < count
    at = nodes + n * FIELDS
    reach = tl.load(at + REACH, mask=there, other=-1.0)
    parent = tl.load(at + PARENT, mask=there, other=-1.0).to(tl.int32)
    opened = tl.load(nodes + tl.maximum(parent, 0) * FIELDS + READ, mask=there, other=0.0)
    worth = tl.load(state + WORTH)
    free = tl.load(state + FREE_TIME)
    rows = tl.load(state + ROWS).to(tl.int32)
    bar = free * 0.0
    left = tl.where((free == 0.0) & (count >= rows), rows, 0)
    rest = reach
    while left > 0:  # the last of those that can be verified
        bar = tl.max(rest, 0)
        left -= tl.sum((rest == bar).to(tl.int32), 0)
        rest = tl.where(rest == bar, -1.0, rest)
    uncomputed = tl.load(at + READ, mask=there, other=1.0) == 0.0
    within = tl.load(at + DEPTH, mask=there, other=0.0) < tl.load(state + DEEPEST)
    is_open = there & uncomputed & within & (worth * reach > bar) & ((parent == ROOT) | (opened > 0.0))
    gains = tl.where(is_open, reach * tl.maximum(1.0 - tl.load(at + KNOWN, mask=there, other=0.0), 0.0), -1.0)
    room = tl.minimum(tl.load(state + MOST).to(tl.int32) - fed, tl.load(state + ROOM).to(tl.int32))
    limit = tl.minimum(room, tl.load(state + PACES).to(tl.int32))
    target_delay = tl.load(state + TARGET_DELAY)
    draft_delay = tl.where(spent < free, tl.load(state + DRAFT_DELAY), 0.0)
    row_price = tl.load(state + ROW_PRICE)
    least = tl.load(state + LEAST)
    best = limit * 0
    best_profit = bar * 0.0
    total = bar * 0.0
    width = limit * 0
    top = tl.max(gains, 0)
    while (width < limit) & (top >= least):
        found = tl.min(tl.where(gains == top, n, NOWHERE), 0)
        tl.store(state + NOW + width, found.to(tl.float64))
        gains = tl.where(n == found, -1.0, gains)
        total += tl.maximum(worth * top - row_price, 0.0)
        end = spent + (tl.load(state + PRICES + width) + draft_delay)
        beyond = tl.maximum(end - tl.maximum(free + target_delay, spent), 0.0) + target_delay
        profit = total - tl.where(spent < free, beyond, end - spent)
        width += 1
        best = tl.where(profit > best_profit, width, best)
        best_profit = tl.where(profit > best_profit, profit, best_profit)
        top = tl.max(gains, 0)
    return best


@triton.jit
def _write_rows(state, nodes, packed, groups, tables, own, counts, moves, across, per, width, step):
    """Pack the step that computes the nodes of NOW."""
    lane = tl.arange(0, LANES)
    live = lane < width
    found = tl.load(state + NOW + lane, mask=live, other=0.0).to(tl.int32)
    order = tl.sum(((found[None, :] < found[:, None]) & live[None, :]).to(tl.int32), 1)
    tl.debug_barrier()
    tl.store(state + NOW + order, found.to(tl.float64), mask=live)
    tl.debug_barrier()
    now = tl.load(state + NOW + lane, mask=live, other=0.0).to(tl.int32)
    at = nodes + now * FIELDS
    prefix = tl.load(state + PREFIX).to(tl.int32)
    kv_slot = tl.load(state + TAIL).to(tl.int32) + lane
    tl.store(at + SLOT, kv_slot.to(tl.float64), mask=live)
    spare = tl.load(state + SPARE).to(tl.int32)
    depth = tl.load(at + DEPTH, mask=live, other=1.0).to(tl.int32)
    position = prefix + depth - 1
    shared = tl.minimum(tl.maximum((position // GROUP - 1) * GROUP, 0), prefix)
    length = position - shared + 1
    noisy = live & (tl.load(state + NOISY) + lane.to(tl.float64) * 0.0 > 0.0)
    token = tl.load(at + TOKEN, mask=live, other=0.0).to(tl.int32)
    tl.store(packed + lane, token)
    tl.store(packed + per + lane, tl.where(live, position, 0))
    tl.store(packed + 2 * per + lane, tl.where(live, _flat(state, prefix + kv_slot, live), spare))
    tl.store(packed + 3 * per + lane, tl.where(live, shared, 0))
    tl.store(packed + 4 * per + lane, tl.where(live, length, 1))
    tl.store(packed + 5 * per + lane, tl.where(live, tl.load(state + TEMPERATURE).to(tl.int32), ONE))
    for key in tl.static_range(2):
        bits = tl.load(state + KEYS + 2 * depth + key, mask=noisy, other=0.0).to(tl.int64).to(tl.int32)
        tl.store(packed + (6 + key) * per + lane, bits)
    tl.store(packed + 8 * per + lane, noisy.to(tl.int32))
    tl.store(packed + 9 * per + lane, lane)
    tl.store(packed + 10 * per + lane, lane * 0 + ROOT)
    tl.store(groups, 0)
    tl.store(groups + 1, width)
    tl.store(groups + 2, 0)
    held = tl.load(state + PAGES_HELD).to(tl.int32)
    for begin in range(0, held, 32):
        p = begin + tl.arange(0, 32)
        tl.store(tables + p, tl.load(state + PAGES_AT + p, mask=p < held, other=0.0).to(tl.int32), mask=p < held)
    tl.store(own + lane * OWN, lane * 0 + spare, mask=live == 0)
    back = tl.arange(0, BACK)
    before = live[:, None] & (back[None, :] < (prefix - shared)[:, None])
    tl.store(
        own + lane[:, None] * OWN + back[None, :], _flat(state, shared[:, None] + back[None, :], before), mask=before
    )
    tl.debug_barrier()  # KV slots are read now
    last = length - 1
    going = live
    while tl.max(going.to(tl.int32), 0) > 0:
        here = nodes + tl.maximum(now, 0) * FIELDS
        behind = tl.load(here + SLOT, mask=going, other=0.0).to(tl.int32)
        tl.store(own + lane * OWN + last, _flat(state, prefix + behind, going), mask=going)
        now = tl.load(here + PARENT, mask=going, other=-1.0).to(tl.int32)
        last -= 1
        going = going & (now >= 0)
    first = tl.where((step == 0) & (across == 0), tl.load(state + MOVED).to(tl.int32), 0)
    tl.store(counts, first)
    tl.store(counts + 1, 0)
    tl.store(counts + SHARED_COUNT, tl.max(tl.where(live, shared, 0), 0))
    tl.store(counts + SPREAD_COUNT, 0)
    for begin in range(0, first, 32):
        m = begin + tl.arange(0, 32)
        for side in tl.static_range(2):
            moved = tl.load(state + MOVES_AT + side * MOVES + m, mask=m < first, other=0.0).to(tl.int32)
            tl.store(moves + side * MOVES + m, moved, mask=m < first)


@triton.jit(do_not_specialize=["across", "per", "begin"])
def grow(state, results, packed, groups, tables, own, counts, moves, reported, across, per, begin):
    """Add the proposals of the last step, choose the nodes of the next one, and pack that step."""
    nodes = state + begin
    count = tl.load(state + COUNT).to(tl.int32)
    fed = tl.load(state + FED).to(tl.int32)
    read = tl.load(state + WIDTH).to(tl.int32)
    step = tl.load(state + STEP).to(tl.int32)
    spent = tl.load(state + SPENT)
    lane = tl.arange(0, LANES)
    if read > 0:
        live = lane < read
        now = tl.load(state + NOW + lane, mask=live, other=-2.0).to(tl.int32)
        noted = live & (now >= 0)
        tl.store(nodes + tl.maximum(now, 0) * FIELDS + READ, lane.to(tl.float64) * 0.0 + 1.0, mask=noted)
        fed += tl.sum(noted.to(tl.int32), 0)
        count = _add_candidates(state, nodes, results, across, count, now, live)
    width = count * 0
    if count <= SMALL:
        width = _choose(state, nodes, count, fed, spent, SMALL)
    else:
        width = _choose(state, nodes, count, fed, spent, NODES)
    tl.debug_barrier()
    if width > 0:
        _write_rows(state, nodes, packed, groups, tables, own, counts, moves, across, per, width, step)
        spent += tl.load(state + PRICES + width - 1) + tl.where(
            spent < tl.load(state + FREE_TIME), tl.load(state + DRAFT_DELAY), 0.0
        )
    tail = tl.load(state + TAIL)
    room = tl.load(state + ROOM)
    tl.debug_barrier()
    tl.store(state + COUNT, count.to(tl.float64))
    tl.store(state + FED, fed.to(tl.float64))
    tl.store(state + WIDTH, width.to(tl.float64))
    tl.store(state + STEP, (step + 1).to(tl.float64))
    tl.store(state + SPENT, spent)
    tl.store(state + TAIL, tail + width)
    tl.store(state + ROOM, room - width)
    tl.debug_barrier()
    tl.store(reported + step, 32 * count + width)
