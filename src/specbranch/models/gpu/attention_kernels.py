"""The Triton kernels of paged attention: partial results of own paths and of shared blocks, and their join.

Owns the order of every sum. Invariant: a row's own path and its number of shared positions decide what it adds, and in
which order. Other rows, the number of programs and the place in the pool do not matter. The module needs Triton, so
only `attention.py` imports it, when it uses the kernels.
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-def"
# What Triton compiles has no Python types but constexpr.

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def _own_path(q, keys, values, sums, tops, totals, count, own, row, head, scale, page_stride, slots,
              HEADS: tl.constexpr, SHARE: tl.constexpr, TILE: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr,
              PAGE: tl.constexpr, PATH_BLOCK: tl.constexpr):  # fmt: skip
    """Attend to a row's own path, PATH_BLOCK KV slots at a time, for all heads that share a key head."""
    g = tl.arange(0, TILE)
    d = tl.arange(0, WIDTH)
    at = row * HEADS + head * SHARE + g
    queries = tl.load(q + at[:, None] * DIM + d[None, :], mask=(g < SHARE)[:, None] & (d < DIM)[None, :], other=0.0)
    top = tl.full((TILE,), float("-inf"), tl.float32)
    total = tl.zeros((TILE,), tl.float32)
    acc = tl.zeros((TILE, WIDTH), tl.float32)
    for begin in range(0, count, PATH_BLOCK):
        j = begin + tl.arange(0, PATH_BLOCK)
        offset = tl.load(own + j, mask=j < count, other=0)
        offset = (offset // PAGE).to(tl.int64) * page_stride + head * PAGE * DIM + (offset % PAGE) * DIM
        live = (j < count)[:, None] & (d < DIM)[None, :]
        k = tl.load(keys + offset[:, None] + d[None, :], mask=live, other=0.0)
        v = tl.load(values + offset[:, None] + d[None, :], mask=live, other=0.0)
        scores = tl.dot(queries, tl.trans(k), input_precision="ieee") * scale
        scores = tl.where((j < count)[None, :], scores, float("-inf"))
        new = tl.maximum(top, tl.max(scores, 1))
        p = tl.exp2(scores - new[:, None])
        fade = tl.exp2(top - new)
        total = total * fade + tl.sum(p, 1)
        acc = acc * fade[:, None] + tl.dot(p.to(v.dtype), v, input_precision="ieee")
        top = new
    _leave(sums, tops, totals, acc, top, total, at.to(tl.int64) * slots, g < SHARE, DIM, WIDTH)


@triton.jit
def _shared_block(q, keys, values, sums, tops, totals, end, page, at, live, block, start, count, most, head, scale,
                  page_stride, slots,
                  TILE: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, PAGE: tl.constexpr, BLOCK: tl.constexpr,
                  LONG: tl.constexpr):  # fmt: skip
    """Attend to one block of shared positions, for all rows of a tile; `end`: where each row's shared positions end."""
    d = tl.arange(0, WIDTH)
    queries = tl.load(q + at[:, None] * DIM + d[None, :], mask=live[:, None] & (d < DIM)[None, :], other=0.0)
    top = tl.full((TILE,), float("-inf"), tl.float32)
    total = tl.zeros((TILE,), tl.float32)
    acc = tl.zeros((TILE, WIDTH), tl.float32)
    offset = page.to(tl.int64) * page_stride + head * PAGE * DIM
    if LONG == 1:
        top, total, acc = _read(
            queries, keys + offset, values + offset, end, start, most, scale, top, total, acc, DIM, WIDTH, PAGE, BLOCK
        )
    else:
        for part in range(count):
            top, total, acc = _read(queries, keys + offset, values + offset, end, start + part * BLOCK, most, scale,
                                    top, total, acc, DIM, WIDTH, PAGE, BLOCK)  # fmt: skip
    _leave(sums, tops, totals, acc, top, total, at.to(tl.int64) * slots + 1 + block, live, DIM, WIDTH)


@triton.jit
def _read(queries, keys, values, end, start, most, scale, top, total, acc,
          DIM: tl.constexpr, WIDTH: tl.constexpr, PAGE: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Add BLOCK positions of a page to the running result (online softmax)."""
    d = tl.arange(0, WIDTH)
    j = start + tl.arange(0, BLOCK)
    offset = (j % PAGE)[:, None] * DIM + d[None, :]
    written = (j < most)[:, None] & (d < DIM)[None, :]  # slots that no row of the tile shares may hold NaN
    k = tl.load(keys + offset, mask=written, other=0.0)
    v = tl.load(values + offset, mask=written, other=0.0)
    scores = tl.dot(queries, tl.trans(k), input_precision="ieee") * scale
    scores = tl.where(j[None, :] < end[:, None], scores, float("-inf"))
    new = tl.maximum(top, tl.max(scores, 1))
    base = tl.where(new == float("-inf"), 0.0, new)
    p = tl.exp2(scores - base[:, None])
    fade = tl.exp2(top - base)
    return new, total * fade + tl.sum(p, 1), acc * fade[:, None] + tl.dot(p.to(v.dtype), v, input_precision="ieee")


@triton.jit
def _leave(sums, tops, totals, acc, top, total, into, live, DIM: tl.constexpr, WIDTH: tl.constexpr):
    """Store a partial result for the join: an average of values, which half precision represents as well as values."""
    d = tl.arange(0, WIDTH)
    average = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    tl.store(tops + into, top, mask=live)
    tl.store(totals + into, total, mask=live)
    tl.store(
        sums + into[:, None] * DIM + d[None, :],
        average.to(sums.dtype.element_ty),
        mask=live[:, None] & (d < DIM)[None, :],
    )


# Numbers of rows and pages must not compile another kernel, not even if they are 1.
@triton.jit(do_not_specialize=["rows", "pages", "slots"])
def partial_results(q, keys, values, sums, tops, totals, shared, own_count, groups, tables, own, scale, page_stride,
                    rows, pages, slots,
                    HEADS: tl.constexpr, SHARE: tl.constexpr, PADDED: tl.constexpr, DIM: tl.constexpr,
                    WIDTH: tl.constexpr, PAGE: tl.constexpr, PATH_BLOCK: tl.constexpr, OWN: tl.constexpr,
                    BLOCK: tl.constexpr, LONG: tl.constexpr, NEAR: tl.constexpr, TILE_ROWS: tl.constexpr,
                    TILES: tl.constexpr, OWN_TILE: tl.constexpr, EARLY: tl.constexpr):  # fmt: skip
    """Compute partial results: one program for each key head and each row, or block of a tile of rows.

    Result 0 of a row and head is its own path; result 1 + b is block b.
    """
    if EARLY:  # see product_kernels
        gdc_wait()
        gdc_launch_dependents()
    head = tl.program_id(1)  # rows and blocks are on axis 0, as axis 1 allows fewer programs
    program = tl.program_id(0)
    if program < rows:
        _own_path(q, keys, values, sums, tops, totals, tl.load(own_count + program), own + program * OWN, program, head,
                  scale, page_stride, slots, HEADS, SHARE, OWN_TILE, DIM, WIDTH, PAGE, PATH_BLOCK)  # fmt: skip
    else:
        tile = (program - rows) // (slots - 1)
        block = (program - rows) % (slots - 1)
        is_near = block * BLOCK < NEAR
        start = tl.where(is_near, block * BLOCK, NEAR + (block - NEAR // BLOCK) * LONG * BLOCK)
        group = tile // TILES
        m = tl.arange(0, TILE_ROWS * PADDED)
        within = tile % TILES * TILE_ROWS + m // PADDED
        live = (within < tl.load(groups + 2 * group + 1)) & (m % PADDED < SHARE)
        row = tl.load(groups + 2 * group) + within
        end = tl.load(shared + row, mask=live, other=0)
        most = tl.max(end, 0)
        if start < most:
            page = tl.load(tables + group * pages + start // PAGE)
            at = row * HEADS + head * SHARE + m % PADDED
            count = tl.where(is_near, 1, LONG)
            _shared_block(q, keys, values, sums, tops, totals, end, page, at, live, block, start, count, most, head,
                          scale, page_stride, slots, TILE_ROWS * PADDED, DIM, WIDTH, PAGE, BLOCK, LONG)  # fmt: skip


@triton.jit(do_not_specialize=["slots"])
def join(sums, tops, totals, shared, out, slots,
         HEADS: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, LONG: tl.constexpr,
         NEAR: tl.constexpr, CHUNK: tl.constexpr, EARLY: tl.constexpr):  # fmt: skip
    """Join the partial results of one row and head: the own path, then the blocks that the row shares."""
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()
    row = tl.program_id(0)
    at = row * HEADS + tl.program_id(1)
    first = at.to(tl.int64) * slots
    d = tl.arange(0, WIDTH)
    top = tl.load(tops + first)
    total = tl.load(totals + first)
    acc = tl.load(sums + first * DIM + d, mask=d < DIM, other=0.0).to(tl.float32) * total
    end = tl.load(shared + row)
    blocks = tl.where(end <= NEAR, tl.cdiv(end, BLOCK), NEAR // BLOCK + tl.cdiv(end - NEAR, LONG * BLOCK))
    if blocks <= CHUNK:  # the row's own position decides which branch runs
        top, total, acc = _joined(sums, tops, totals, first + 1, 0, blocks, top, total, acc, DIM, WIDTH, CHUNK)
    else:
        for begin in range(0, blocks, 2 * CHUNK):
            top, total, acc = _joined(
                sums, tops, totals, first + 1, begin, blocks, top, total, acc, DIM, WIDTH, 2 * CHUNK
            )
    tl.store(out + at * DIM + d, (acc / total).to(out.dtype.element_ty), mask=d < DIM)


@triton.jit
def _joined(
    sums,
    tops,
    totals,
    first,
    begin,
    blocks,
    top,
    total,
    acc,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Add the partial results of some blocks to the running result."""
    d = tl.arange(0, WIDTH)
    b = begin + tl.arange(0, CHUNK)
    there = b < blocks
    tops_here = tl.load(tops + first + b, mask=there, other=float("-inf"))
    totals_here = tl.load(totals + first + b, mask=there, other=0.0)
    sums_here = tl.load(
        sums + (first + b)[:, None] * DIM + d[None, :], mask=there[:, None] & (d < DIM)[None, :], other=0.0
    ).to(tl.float32)
    new = tl.maximum(top, tl.max(tops_here, 0))
    fade = tl.exp2(top - new)
    weight = tl.exp2(tops_here - new) * totals_here
    return new, total * fade + tl.sum(weight, 0), acc * fade + tl.sum(weight[:, None] * sums_here, 0)
