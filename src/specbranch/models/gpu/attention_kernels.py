"""The Triton kernels of paged attention, for rows that are sampled and for rows of prompts.

Owns the order of every sum. A row attends first to its own path, PATH_BLOCK KV slots at a time (online softmax). The
positions before it are read in blocks of BLOCK. Each block gives an average of values, rounded to the type of the
values, and blocks are merged one after the other, in the order of positions. So it does not matter whether one program
computes all of them, or each block has its own program and `join` merges their results. Invariant: a row's queries and
the keys it sees decide its bits. Other rows, the number of programs and the place in the pool do not matter. To keep
it, sums over positions are products with ones, whose order does not depend on the layout of a tile, and no product is
fused with a sum (`enable_fp_fusion`). The module needs Triton, so only `attention.py` imports it, when it uses the
kernels.

Which rows there are is loaded before a kernel waits for the one before it (`gdc_wait`). That is safe because whatever
writes it is launched without programmatic dependent launch, the embedding comes between, and every kernel waits before
it lets the next one in.

WINDOW positions are seen by a row, its own included; 0: all up to its own. With a window, the FIRST positions of the
sequence are seen, too. Blocks that hold none of these and lie wholly before the windows of a program's rows are not
read: loops number the blocks that are, and `_placed` says which block a number means. A block that a row does not see
leaves its result as it is, to the bit. SOFTCAP bounds scores; 0: none. `sinks` hold a further score for each head,
without a value: the own path begins with it.
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-def,assignment"
# What Triton compiles has no Python types but constexpr.

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from specbranch.models.forward.step_rows import GROUP_POSITIONS as _GROUP_POSITIONS
from specbranch.models.gpu.layout import LONGEST_COUNT as _LONGEST_COUNT
from specbranch.models.gpu.layout import SAMPLED_COUNT as _SAMPLED_COUNT
from specbranch.models.gpu.layout import SHARED_COUNT as _SHARED_COUNT
from specbranch.models.gpu.layout import TILES_COUNT as _TILES_COUNT
from specbranch.models.gpu.layout import USED_COUNT as _USED_COUNT

GROUP_POSITIONS = tl.constexpr(_GROUP_POSITIONS)
LONGEST_COUNT, SAMPLED_COUNT = tl.constexpr(_LONGEST_COUNT), tl.constexpr(_SAMPLED_COUNT)
SHARED_COUNT, USED_COUNT = tl.constexpr(_SHARED_COUNT), tl.constexpr(_USED_COUNT)
TILES_COUNT = tl.constexpr(_TILES_COUNT)
WEIGHED, UNROLLED = tl.constexpr(128), tl.constexpr(32)  # results that `join` weighs, and that it loads, at a time
SPARING = tl.constexpr(8)  # programs that share a tile, from which on the first computes no blocks
LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _scores(queries, k, seen, scale, SOFTCAP: tl.constexpr):
    """Return the scores of queries [M, keys]; what a query does not see has none.

    Of bounded scores, `scale` gives the power of 2 that their hyperbolic tangent is made of.
    """
    scores = tl.dot(queries, tl.trans(k), input_precision="ieee") * scale
    if SOFTCAP > 0.0:
        scores = (1.0 - 2.0 / (tl.exp2(scores) + 1.0)) * SOFTCAP
    return tl.where(seen, scores, float("-inf"))


@triton.jit
def _weights(scores, top, ones):
    """Return the weights of keys below `top`, in the type of values, and their sum."""
    base = tl.where(top == float("-inf"), 0.0, top)
    p = tl.exp2(scores - base[:, None]).to(ones.dtype)
    return p, tl.max(tl.dot(p, ones, input_precision="ieee"), 1)  # all columns are equal


@triton.jit
def _more(scores, v, ones, top, total, acc):
    """Add some keys to a running result (online softmax)."""
    new = tl.maximum(top, tl.max(scores, 1))
    p, part = _weights(scores, new, ones)
    fade = tl.exp2(top - tl.where(new == float("-inf"), 0.0, new))
    return new, total * fade + part, tl.dot(p, v, acc * fade[:, None], input_precision="ieee")


@triton.jit
def _average(acc, total, like):
    """Return a result divided by its sum, in the type of values, which represents it as well as values."""
    return (acc * (1.0 / tl.where(total == 0.0, 1.0, total))[:, None]).to(like.dtype)


@triton.jit
def _in_window(seen, position, left, WINDOW: tl.constexpr, FIRST: tl.constexpr):
    """Leave out of `seen` [M, keys] the positions before `left` [M], where each row's window begins, from FIRST on."""
    if WINDOW > 0:
        inside = position[None, :] >= left[:, None]
        if FIRST > 0:
            inside = inside | (position < FIRST)[None, :]
        seen = seen & inside
    return seen


@triton.jit
def _skipped(before, FIRST: tl.constexpr, BLOCK: tl.constexpr):
    """Return how many blocks are not read, if `before` lie before a window; those of the FIRST positions are read."""
    if FIRST > 0:
        before = tl.maximum(before - (FIRST + BLOCK - 1) // BLOCK, 0)
    return before


@triton.jit
def _placed(number, skipped, FIRST: tl.constexpr, BLOCK: tl.constexpr):
    """Return which block a number of a loop means, which begins behind `skipped` blocks: first those of FIRST."""
    if FIRST > 0:
        number = tl.where(number < skipped + (FIRST + BLOCK - 1) // BLOCK, number - skipped, number)
    return number


@triton.jit
def _skipped_blocks(left, most, live, FIRST: tl.constexpr, BLOCK: tl.constexpr):
    """Return how many blocks none of the rows sees."""
    least = tl.min(tl.where(live, left, most), 0)
    return _skipped(tl.minimum(tl.maximum(least, 0), most) // BLOCK, FIRST, BLOCK)


@triton.jit
def _begun(sinks, top, total, at, live):
    """Return the running result that a sink begins: its score, and one for its sum; `at`: heads."""
    top = tl.load(sinks + at, mask=live, other=0.0).to(tl.float32) * LOG2_E
    return top, total + 1.0


@triton.jit
def _block(queries, k, v, ones, seen, scale, SOFTCAP: tl.constexpr):
    """Return the result of one block: its greatest score, its sum and its average."""
    scores = _scores(queries, k, seen, scale, SOFTCAP)
    top = tl.max(scores, 1)
    p, total = _weights(scores, top, ones)
    return top, total, _average(tl.dot(p, v, input_precision="ieee"), total, v)


@triton.jit
def _merged(top, total, acc, block_top, block_total, average):
    """Add the result of one block to a running result."""
    new = tl.maximum(top, block_top)
    fade = tl.exp2(top - new)
    weight = tl.exp2(block_top - new) * block_total
    return new, total * fade + weight, acc * fade[:, None] + average.to(tl.float32) * weight[:, None]


@triton.jit
def _keys_and_values(keys, values, offset, row, live, DIM: tl.constexpr, WIDTH: tl.constexpr):
    """Load keys and values [rows, WIDTH] of a page, zero where a row is not live."""
    d = tl.arange(0, WIDTH)
    at = offset + row[:, None] * DIM + d[None, :]
    mask = live[:, None] & (d < DIM)[None, :]
    return tl.load(keys + at, mask=mask, other=0.0), tl.load(values + at, mask=mask, other=0.0)


@triton.jit
def _shared_keys(keys, values, table, start, most, head, page_stride, DIM: tl.constexpr, WIDTH: tl.constexpr,
                 PAGE: tl.constexpr, COUNT: tl.constexpr):  # fmt: skip
    """Load keys and values of COUNT positions from `start` on, all on one page; those from `most` on are zero."""
    offset = tl.load(table + start // PAGE).to(tl.int64) * page_stride + head * PAGE * DIM
    row = start % PAGE + tl.arange(0, COUNT)
    return _keys_and_values(keys, values, offset, row, row < most - start + start % PAGE, DIM, WIDTH)


@triton.jit
def _own_path(queries, keys, values, own, count, shared, mine, head, scale, page_stride, ones, top, total, acc,
              DIM: tl.constexpr, WIDTH: tl.constexpr, PAGE: tl.constexpr, PATH_BLOCK: tl.constexpr,
              WINDOW: tl.constexpr, FIRST: tl.constexpr, SOFTCAP: tl.constexpr):  # fmt: skip
    """Add a row's own path to the running result of its queries (`mine`); `shared`: where its first position is."""
    for begin in range(0, count, PATH_BLOCK):
        j = begin + tl.arange(0, PATH_BLOCK)
        slot = tl.load(own + j, mask=j < count, other=0)
        offset = (slot // PAGE).to(tl.int64) * page_stride + head * PAGE * DIM
        d = tl.arange(0, WIDTH)
        at = (offset + (slot % PAGE) * DIM)[:, None] + d[None, :]
        mask = (j < count)[:, None] & (d < DIM)[None, :]
        k = tl.load(keys + at, mask=mask, other=0.0)
        v = tl.load(values + at, mask=mask, other=0.0)
        seen = mine[:, None] & (j < count)[None, :]
        if WINDOW > 0:
            inside = j >= count - WINDOW
            if FIRST > 0:
                inside = inside | (tl.load(shared) + j < FIRST)
            seen = seen & inside[None, :]
        scores = _scores(queries, k, seen, scale, SOFTCAP)
        top, total, acc = _more(scores, v, ones, top, total, acc)
    return top, total, acc


@triton.jit
def _leave(sums, tops, totals, average, top, total, into, live, DIM: tl.constexpr, WIDTH: tl.constexpr):
    """Store a result for `join`."""
    d = tl.arange(0, WIDTH)
    tl.store(tops + into, top, mask=live)
    tl.store(totals + into, total, mask=live)
    tl.store(sums + into[:, None] * DIM + d[None, :], average, mask=live[:, None] & (d < DIM)[None, :])


@triton.jit
def _leave_blocks(queries, keys, values, sums, tops, totals, table, left, end, most, skipped, split, step, at, live,
                  head, scale, page_stride, slots, ones, DIM: tl.constexpr, WIDTH: tl.constexpr, PAGE: tl.constexpr,
                  BLOCK: tl.constexpr, WINDOW: tl.constexpr, FIRST: tl.constexpr,
                  SOFTCAP: tl.constexpr):  # fmt: skip
    """Compute every `step`-th block that is read, from number `split` on, and store each result for `join`."""
    for number in range(skipped + split, tl.cdiv(most, BLOCK), step):
        block = _placed(number, skipped, FIRST, BLOCK)
        k, v = _shared_keys(keys, values, table, block * BLOCK, most, head, page_stride, DIM, WIDTH, PAGE, BLOCK)
        seen = (block * BLOCK + tl.arange(0, BLOCK))[None, :] < end[:, None]
        seen = _in_window(seen, block * BLOCK + tl.arange(0, BLOCK), left, WINDOW, FIRST)
        top, total, average = _block(queries, k, v, ones, seen, scale, SOFTCAP)
        _leave(sums, tops, totals, average, top, total, at.to(tl.int64) * slots + 1 + block, live, DIM, WIDTH)


@triton.jit
def _load_queries(q, at, live, DIM: tl.constexpr, WIDTH: tl.constexpr):
    d = tl.arange(0, WIDTH)
    return tl.load(q + at[:, None] * DIM + d[None, :], mask=live[:, None] & (d < DIM)[None, :], other=0.0)


# Numbers of rows must not compile another kernel, not even if they are 1.
@triton.jit(do_not_specialize=["rows"])
def partial_results(q, keys, values, sums, tops, totals, shared, own_count, groups, tables, own, counts, scale,
                    page_stride, rows, sinks,
                    HEADS: tl.constexpr, SHARE: tl.constexpr, PADDED: tl.constexpr, DIM: tl.constexpr,
                    WIDTH: tl.constexpr, PAGE: tl.constexpr, PATH_BLOCK: tl.constexpr, OWN: tl.constexpr,
                    BLOCK: tl.constexpr, TILE_ROWS: tl.constexpr, TILES: tl.constexpr, OWN_TILE: tl.constexpr,
                    SPLITS: tl.constexpr, WINDOW: tl.constexpr, FIRST: tl.constexpr, SOFTCAP: tl.constexpr,
                    EARLY: tl.constexpr):  # fmt: skip
    """Compute results for `join`, of a step of one sequence: programs for each row's own path, and for its blocks.

    Result 0 of a row and head is its own path; result 1 + b is block b. SPLITS programs share the blocks of a tile of
    rows.
    """
    head = tl.program_id(1)  # rows and blocks are on axis 0, as axis 1 allows fewer programs
    program = tl.program_id(0)
    slots = 1 + tl.cdiv(tl.load(counts + SHARED_COUNT), BLOCK)
    if program < rows:
        if EARLY:
            gdc_wait()
            gdc_launch_dependents()
        _leave_own_path(
            q, keys, values, sums, tops, totals, shared, own_count, own, program, head, scale, page_stride, slots,
            sinks, HEADS, SHARE, DIM, WIDTH, PAGE, PATH_BLOCK, OWN, OWN_TILE, WINDOW, FIRST, SOFTCAP,
        )  # fmt: skip
    else:
        tile = (program - rows) // SPLITS
        split = (program - rows) % SPLITS
        group = tile // TILES
        m = tl.arange(0, TILE_ROWS * PADDED)
        within = tile % TILES * TILE_ROWS + m // PADDED
        live = (within < tl.load(groups + 3 * group + 1)) & (m % PADDED < SHARE)
        row = tl.load(groups + 3 * group) + within
        end = tl.load(shared + row, mask=live, other=0)
        most = tl.max(end, 0)
        left = end
        skipped = 0
        if WINDOW > 0:
            left = end + tl.load(own_count + row, mask=live, other=0) - WINDOW
            skipped = _skipped_blocks(left, most, live, FIRST, BLOCK)
        if EARLY:
            gdc_wait()
            gdc_launch_dependents()
        if (skipped + split) * BLOCK < most:
            at = row * HEADS + head * SHARE + m % PADDED
            _leave_blocks(
                _load_queries(q, at, live, DIM, WIDTH), keys, values, sums, tops, totals,
                tables + tl.load(groups + 3 * group + 2), left, end, most, skipped, split, SPLITS, at, live, head,
                scale, page_stride, slots, tl.full((BLOCK, 16), 1.0, values.dtype.element_ty), DIM, WIDTH, PAGE, BLOCK,
                WINDOW, FIRST, SOFTCAP,
            )  # fmt: skip


@triton.jit
def _leave_own_path(q, keys, values, sums, tops, totals, shared, own_count, own, row, head, scale, page_stride, slots,
                    sinks, HEADS: tl.constexpr, SHARE: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr,
                    PAGE: tl.constexpr, PATH_BLOCK: tl.constexpr, OWN: tl.constexpr, TILE: tl.constexpr,
                    WINDOW: tl.constexpr, FIRST: tl.constexpr, SOFTCAP: tl.constexpr):  # fmt: skip
    """Compute the own path of one row, and store its result for `join`."""
    dtype = values.dtype.element_ty
    g = tl.arange(0, TILE)
    at = row * HEADS + head * SHARE + g
    live = g < SHARE
    top = tl.full((TILE,), float("-inf"), tl.float32)
    total = tl.zeros((TILE,), tl.float32)
    if sinks is not None:
        top, total = _begun(sinks, top, total, head * SHARE + g, live)
    acc = tl.zeros((TILE, WIDTH), tl.float32)
    top, total, acc = _own_path(
        _load_queries(q, at, live, DIM, WIDTH), keys, values, own + row * OWN, tl.load(own_count + row), shared + row,
        live, head, scale, page_stride, tl.full((PATH_BLOCK, 16), 1.0, dtype), top, total, acc, DIM, WIDTH, PAGE,
        PATH_BLOCK, WINDOW, FIRST, SOFTCAP,
    )  # fmt: skip
    average = (acc * (1.0 / tl.where(total == 0.0, 1.0, total))[:, None]).to(dtype)
    _leave(sums, tops, totals, average, top, total, at.to(tl.int64) * slots, live, DIM, WIDTH)


@triton.jit
def attend_batch(q, keys, values, sums, tops, totals, out, shared, own_count, groups, tables, own, counts, scale,
                 page_stride, sinks,
                 HEADS: tl.constexpr, SHARE: tl.constexpr, PADDED: tl.constexpr, DIM: tl.constexpr,
                 WIDTH: tl.constexpr, PAGE: tl.constexpr, PATH_BLOCK: tl.constexpr, OWN: tl.constexpr,
                 BLOCK: tl.constexpr, TILE: tl.constexpr, WHOLE: tl.constexpr, SPLITS: tl.constexpr,
                 WINDOW: tl.constexpr, FIRST: tl.constexpr, SOFTCAP: tl.constexpr,
                 BESIDE: tl.constexpr, EARLY: tl.constexpr):  # fmt: skip
    """Attend in a step of several sequences, with SPLITS programs for each group of rows and each key head.

    Of a group with at most WHOLE blocks, the first program computes all, and `join` skips its rows (their sum is 0).
    Otherwise the programs share the blocks. BESIDE: `attend_chunks` was launched before, and this runs beside it.
    """
    group = tl.program_id(0)
    head = tl.program_id(1)
    split = tl.program_id(2)
    count = tl.load(groups + 3 * group + 1)
    first = tl.load(groups + 3 * group)
    m = tl.arange(0, TILE)
    within = m // PADDED
    live = (within < count) & (m % PADDED < SHARE)
    end = tl.load(shared + first + within, mask=live, other=0)
    most = tl.max(end, 0)
    blocks = tl.cdiv(most, BLOCK)
    left = end
    skipped = 0  # blocks that no row of the group sees
    if WINDOW > 0:
        left = end + tl.load(own_count + first + within, mask=live, other=0) - WINDOW
        skipped = _skipped_blocks(left, most, live, FIRST, BLOCK)
    whole = blocks - skipped <= WHOLE
    works = (split == 0) | ((whole == 0) & (split < blocks - skipped))
    slots = 1 + tl.cdiv(tl.load(counts + SHARED_COUNT), BLOCK)
    table = tables + tl.load(groups + 3 * group + 2)
    if EARLY:
        if BESIDE:  # queries and keys are there, as `attend_chunks` lets this kernel in when it has waited for them
            count = _fenced(count)
        else:
            gdc_wait()
        gdc_launch_dependents()
    if (count > 0) & works:
        dtype = values.dtype.element_ty
        ones = tl.full((BLOCK, 16), 1.0, dtype)
        at = (first + within) * HEADS + head * SHARE + m % PADDED
        queries = _load_queries(q, at, live, DIM, WIDTH)
        if split == 0:
            top = tl.full((TILE,), float("-inf"), tl.float32)
            total = tl.zeros((TILE,), tl.float32)
            if sinks is not None:
                top, total = _begun(sinks, top, total, head * SHARE + m % PADDED, live)
            acc = tl.zeros((TILE, WIDTH), tl.float32)
            for row in range(count):
                top, total, acc = _own_path(
                    queries, keys, values, own + (first + row) * OWN, tl.load(own_count + first + row),
                    shared + first + row, within == row, head, scale, page_stride,
                    tl.full((PATH_BLOCK, 16), 1.0, dtype), top, total, acc, DIM, WIDTH, PAGE, PATH_BLOCK, WINDOW,
                    FIRST, SOFTCAP,
                )  # fmt: skip
            average = (acc * (1.0 / tl.where(total == 0.0, 1.0, total))[:, None]).to(dtype)
            if whole:
                acc = average.to(tl.float32) * total[:, None]
                for number in range(skipped, blocks):
                    block = _placed(number, skipped, FIRST, BLOCK)
                    k, v = _shared_keys(
                        keys, values, table, block * BLOCK, most, head, page_stride, DIM, WIDTH, PAGE, BLOCK
                    )
                    seen = (block * BLOCK + tl.arange(0, BLOCK))[None, :] < end[:, None]
                    seen = _in_window(seen, block * BLOCK + tl.arange(0, BLOCK), left, WINDOW, FIRST)
                    top, total, acc = _merged(top, total, acc, *_block(queries, k, v, ones, seen, scale, SOFTCAP))
                _store_out(out, at, live, acc, total, DIM, WIDTH)
                tl.store(totals + at.to(tl.int64) * slots, total * 0.0, mask=live)
            else:
                _leave(sums, tops, totals, average, top, total, at.to(tl.int64) * slots, live, DIM, WIDTH)
        if whole == 0:
            _leave_blocks(
                queries, keys, values, sums, tops, totals, table, left, end, most, skipped, split, SPLITS, at, live,
                head, scale, page_stride, slots, ones, DIM, WIDTH, PAGE, BLOCK, WINDOW, FIRST, SOFTCAP,
            )  # fmt: skip
    if EARLY and BESIDE:  # `join` waits for this kernel, and so for `attend_chunks`
        gdc_wait()


@triton.jit
def _fenced(number):
    """Return a number behind a fence: what other kernels wrote before is seen behind it."""
    return tl.inline_asm_elementwise(
        "fence.acq_rel.gpu; mov.b32 $0, $1;", "=r,r", [number], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def _store_out(out, at, live, acc, total, DIM: tl.constexpr, WIDTH: tl.constexpr):
    """Store the results of queries."""
    d = tl.arange(0, WIDTH)
    result = acc * (1.0 / tl.where(total == 0.0, 1.0, total))[:, None]
    tl.store(
        out + at[:, None] * DIM + d[None, :], result.to(out.dtype.element_ty), mask=live[:, None] & (d < DIM)[None, :]
    )


@triton.jit
def _chunk_results(counts, rows, room, HEADS: tl.constexpr, BLOCK: tl.constexpr, TOTAL: tl.constexpr):
    """Return where results of rows of prompts are stored: how many a row and head has, their shift, if they fit.

    They come behind the results of the `rows` sampled rows.
    """
    sampled = 1 + tl.cdiv(tl.load(counts + SHARED_COUNT), BLOCK)
    slots = 1 + tl.cdiv(tl.load(counts + LONGEST_COUNT), BLOCK)
    before = (rows * HEADS).to(tl.int64) * sampled
    fits = before + ((TOTAL - rows) * HEADS).to(tl.int64) * slots <= room
    return slots, before - (rows * HEADS).to(tl.int64) * slots, fits


@triton.jit(do_not_specialize=["rows", "room"])
def attend_chunks(q, keys, values, sums, tops, totals, out, tiles, tables, counts, scale, page_stride, rows,
                  room, sinks,
                  HEADS: tl.constexpr, SHARE: tl.constexpr, PADDED: tl.constexpr, DIM: tl.constexpr,
                  WIDTH: tl.constexpr, PAGE: tl.constexpr, PATH_BLOCK: tl.constexpr, BLOCK: tl.constexpr,
                  TILE_ROWS: tl.constexpr, TOTAL: tl.constexpr, WHOLE: tl.constexpr, SPLIT: tl.constexpr,
                  WINDOW: tl.constexpr, FIRST: tl.constexpr, SOFTCAP: tl.constexpr,
                  EARLY: tl.constexpr):  # fmt: skip
    """Attend from tiles of rows of prompts to all positions up to each row, through the page tables.

    The last tiles come first: they have most to read. If SPLIT, all programs share the blocks of the tiles that there
    are, where a tile has many and there is `room` for their results; otherwise one program computes a tile. With more
    tiles than programs each has several turns.
    """
    head = tl.program_id(1)
    slots, shift, fits = _chunk_results(counts, rows, room, HEADS, BLOCK, TOTAL)
    tops += shift
    totals += shift
    sums += shift * DIM
    used = tl.load(counts + TILES_COUNT)
    splits = 1
    if SPLIT:
        splits = tl.maximum(tl.num_programs(0) // tl.maximum(used, 1), 1)
    spared = tl.where(splits >= SPARING, 1, 0)  # the first of many programs computes own paths alone
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()
    for turn in range(tl.program_id(0), used * splits, tl.num_programs(0)):
        tile = tiles + 4 * (used - 1 - turn % used)
        split = turn // used
        count = tl.load(tile + 1)
        start = tl.load(tile + 3)
        most = tl.maximum((start + count - 1) // GROUP_POSITIONS - 1, 0) * GROUP_POSITIONS
        blocks = tl.cdiv(most, BLOCK)
        skipped = 0  # blocks that no row of the tile sees
        if WINDOW > 0:
            skipped = _skipped(tl.minimum(tl.maximum(start + 1 - WINDOW, 0), most) // BLOCK, FIRST, BLOCK)
        whole = (blocks - skipped <= WHOLE) | (fits == 0)
        if SPLIT == 0:
            whole = blocks >= 0
        if (split == 0) | ((whole == 0) & (split - spared < blocks - skipped)):
            dtype = values.dtype.element_ty
            table = tables + tl.load(tile + 2)
            m = tl.arange(0, TILE_ROWS * PADDED)
            within = m // PADDED
            live = (within < count) & (m % PADDED < SHARE)
            at = (tl.load(tile) + within) * HEADS + head * SHARE + m % PADDED
            queries = _load_queries(q, at, live, DIM, WIDTH)
            position = start + within
            end = tl.maximum(position // GROUP_POSITIONS - 1, 0) * GROUP_POSITIONS
            left = position + 1 - WINDOW
            many = tl.full((BLOCK, 16), 1.0, dtype)
            if split == 0:
                top = tl.full((TILE_ROWS * PADDED,), float("-inf"), tl.float32)
                total = tl.zeros((TILE_ROWS * PADDED,), tl.float32)
                if sinks is not None:
                    top, total = _begun(sinks, top, total, head * SHARE + m % PADDED, live)
                acc = tl.zeros((TILE_ROWS * PADDED, WIDTH), tl.float32)
                ones = tl.full((PATH_BLOCK, 16), 1.0, dtype)
                for begin in range(
                    tl.maximum(start // GROUP_POSITIONS - 1, 0) * GROUP_POSITIONS, start + count, PATH_BLOCK
                ):  # own paths
                    k, v = _shared_keys(
                        keys, values, table, begin, start + count, head, page_stride, DIM, WIDTH, PAGE, PATH_BLOCK
                    )
                    j = begin + tl.arange(0, PATH_BLOCK)
                    seen = (j[None, :] >= end[:, None]) & (j[None, :] <= position[:, None])
                    seen = _in_window(seen, j, left, WINDOW, FIRST)
                    top, total, acc = _more(_scores(queries, k, seen, scale, SOFTCAP), v, ones, top, total, acc)
                average = (acc * (1.0 / tl.where(total == 0.0, 1.0, total))[:, None]).to(dtype)
                if whole:
                    acc = average.to(tl.float32) * total[:, None]
                    for number in range(skipped, blocks):
                        block = _placed(number, skipped, FIRST, BLOCK)
                        k, v = _shared_keys(
                            keys, values, table, block * BLOCK, most, head, page_stride, DIM, WIDTH, PAGE, BLOCK
                        )
                        seen = (block * BLOCK + tl.arange(0, BLOCK))[None, :] < end[:, None]
                        seen = _in_window(seen, block * BLOCK + tl.arange(0, BLOCK), left, WINDOW, FIRST)
                        top, total, acc = _merged(top, total, acc, *_block(queries, k, v, many, seen, scale, SOFTCAP))
                    _store_out(out, at, live, acc, total, DIM, WIDTH)
                    if SPLIT:
                        tl.store(totals + at.to(tl.int64) * slots, total * 0.0, mask=live & (m * 0 < fits.to(tl.int32)))
                else:
                    _leave(sums, tops, totals, average, top, total, at.to(tl.int64) * slots, live, DIM, WIDTH)
            if (whole == 0) & (split >= spared):
                _leave_blocks(
                    queries, keys, values, sums, tops, totals, table, left, end, most, skipped, split - spared,
                    splits - spared, at, live, head, scale, page_stride, slots, many, DIM, WIDTH, PAGE, BLOCK, WINDOW,
                    FIRST, SOFTCAP,
                )  # fmt: skip


@triton.jit(do_not_specialize=["rows", "room"])
def join(sums, tops, totals, shared, positions, counts, out, rows, room,
         HEADS: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, BATCH: tl.constexpr,
         COUNT: tl.constexpr, TOTAL: tl.constexpr, WINDOW: tl.constexpr, FIRST: tl.constexpr,
         EARLY: tl.constexpr):  # fmt: skip
    """Merge the results of one row and COUNT heads: the own path, then the blocks that the row shares, in order.

    In a step of several sequences (BATCH), padding has no results, and some rows are done. Rows from `rows` on are
    those of prompts.
    """
    row = tl.program_id(0)
    at = row * HEADS + tl.program_id(1) * COUNT
    slots = 1 + tl.cdiv(tl.load(counts + SHARED_COUNT), BLOCK)
    shift = at.to(tl.int64) * 0
    left = COUNT
    end = tl.load(shared + row, mask=row < rows, other=0)
    position = tl.load(positions + row)
    if BATCH:
        of_prompt = row >= rows
        chunk_slots, chunk_shift, fits = _chunk_results(counts, rows, room, HEADS, BLOCK, TOTAL)
        slots = tl.where(of_prompt, chunk_slots, slots)
        shift = tl.where(of_prompt, chunk_shift, shift)
        last = tl.where(of_prompt, tl.load(counts + USED_COUNT), tl.load(counts + SAMPLED_COUNT))
        there = (row < last) & ((of_prompt == 0) | fits)
        end = tl.where(of_prompt, tl.maximum(position // GROUP_POSITIONS - 1, 0) * GROUP_POSITIONS, end)
    blocks = tl.cdiv(end, BLOCK)
    skipped = 0  # blocks that the row does not see
    if WINDOW > 0:
        skipped = tl.maximum(position + 1 - WINDOW, 0) // BLOCK
        if FIRST > 0:
            skipped = _skipped(tl.minimum(skipped, blocks), FIRST, BLOCK)
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()
    if BATCH:
        result = tl.load(totals + at.to(tl.int64) * slots + shift, mask=there, other=0.0)
        left = tl.where(result == 0.0, 0, COUNT)
    for head in range(left):
        first = (at + head).to(tl.int64) * slots + shift
        _join_head(sums, tops, totals, out, at + head, first, skipped, blocks, DIM, WIDTH, FIRST, BLOCK)


@triton.jit
def _join_head(sums, tops, totals, out, at, first, skipped, blocks, DIM: tl.constexpr, WIDTH: tl.constexpr,
               FIRST: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Merge the results of one row and head, which begin at `first`; of blocks, those that are not `skipped`.

    Only averages are merged one after the other. By how much each block lets the results before it fade, and its own
    weight, are known from the greatest scores alone: they take the places of the blocks' greatest scores and sums.
    """
    d = tl.arange(0, WIDTH)
    total = tl.load(totals + first)
    top = tl.load(tops + first)
    acc = tl.load(sums + first * DIM + d, mask=d < DIM, other=0.0).to(tl.float32) * total
    tops += first + 1
    totals += first + 1
    sums += (first + 1) * DIM
    i = tl.arange(0, WEIGHED)
    for begin in range(skipped, blocks, WEIGHED):
        number = begin + i
        there = number < blocks
        place = _placed(number, skipped, FIRST, BLOCK)
        block_top = tl.load(tops + place, mask=there, other=float("-inf"))
        block_total = tl.load(totals + place, mask=there, other=0.0)
        previous = _placed(number - 1, skipped, FIRST, BLOCK)
        before = tl.load(tops + previous, mask=there & (i > 0), other=float("-inf"))
        before = tl.maximum(tl.associative_scan(before, 0, _greater), top)
        new = tl.maximum(before, block_top)
        tl.debug_barrier()  # all have loaded what is overwritten now
        tl.store(tops + place, tl.exp2(before - new), mask=there)
        tl.store(totals + place, tl.exp2(block_top - new) * block_total, mask=there)
        tl.debug_barrier()
        top = tl.maximum(top, tl.max(block_top, 0))
        for some in range(begin, tl.minimum(begin + WEIGHED, blocks), UNROLLED):
            loaded = ()
            for j in tl.static_range(UNROLLED):
                one = _loaded(sums, tops, totals, some + j, blocks, skipped, DIM, WIDTH, FIRST, BLOCK)
                loaded = loaded + (one,)  # noqa: RUF005 – Triton knows no other way
            tl.debug_barrier()  # all loads come before the sums, which wait for one another
            for j in tl.static_range(UNROLLED):
                total = total * loaded[j][0] + loaded[j][1]
                acc = acc * loaded[j][0] + loaded[j][2] * loaded[j][1]
    tl.store(out + at * DIM + d, (acc * (1.0 / total)).to(out.dtype.element_ty), mask=d < DIM)


@triton.jit
def _greater(a, b):
    return tl.maximum(a, b)


@triton.jit
def _loaded(sums, tops, totals, number, blocks, skipped, DIM: tl.constexpr, WIDTH: tl.constexpr,
            FIRST: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Load fade, weight and average of one block; a number beyond the blocks adds nothing."""
    d = tl.arange(0, WIDTH)
    place = _placed(number, skipped, FIRST, BLOCK)
    there = number < blocks
    return (
        tl.load(tops + place, mask=there, other=1.0),
        tl.load(totals + place, mask=there, other=0.0),
        tl.load(sums + place * DIM + d, mask=(number + d * 0 < blocks) & (d < DIM), other=0.0).to(tl.float32),
    )
