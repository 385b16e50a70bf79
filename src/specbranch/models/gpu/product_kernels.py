"""The Triton kernels of a decoding step's products, with what comes before and after each: norm, rotation, residual, gate.

Owns the order of every sum. Invariant: rows are taken in tiles of 16, the numbers of a product in one order and in a fixed number of parts,
so a row's bits depend neither on the rows beside it nor on how many there are. The stream of a layer is left as it is and, multiplied by
the next norm's weights, as the next product reads it; each tile leaves the sum of its squares, and who reads on divides by their root.
Where kernels may begin early (EARLY), each waits for the one before it to end before it reads anything, and tells the next to come when it
has read all it needs.
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-def"
# What Triton compiles has no Python types but constexpr.

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def _product(x, w, columns, there, first, rows, K, part, TILE: tl.constexpr, STEP: tl.constexpr, PARTS: tl.constexpr,
             SWAP: tl.constexpr, EVEN: tl.constexpr, FULL: tl.constexpr, EARLY: tl.constexpr):  # fmt: skip
    """Multiply 16 rows of x by some rows of w, over one part of their length; returns [16, TILE]. `there`: which of w's rows exist."""
    steps = tl.cdiv(K, STEP)
    begin = steps * part // PARTS
    r = first + tl.arange(0, 16)
    k = begin * STEP + tl.arange(0, STEP)
    w_at = w + columns.to(tl.int64)[:, None] * K + k[None, :]
    x_at = x + r[:, None] * K + k[None, :]
    acc = tl.zeros((TILE, 16) if SWAP else (16, TILE), tl.float32)
    for _ in range(steps * (part + 1) // PARTS - begin):
        if EVEN:
            of_w = tl.load(w_at) if FULL else tl.load(w_at, mask=there[:, None], other=0.0)
            of_x = tl.load(x_at, mask=(r < rows)[:, None], other=0.0)
        else:
            of_w = tl.load(w_at, mask=there[:, None] & (k < K)[None, :], other=0.0)
            of_x = tl.load(x_at, mask=(r < rows)[:, None] & (k < K)[None, :], other=0.0)
            k += STEP
        acc = tl.dot(of_w, tl.trans(of_x), acc) if SWAP else tl.dot(of_x, tl.trans(of_w), acc)
        w_at += STEP
        x_at += STEP
    if EARLY:
        gdc_launch_dependents()
    return tl.trans(acc) if SWAP else acc


@triton.jit
def _root(squares, first, rows, K, eps, NORMS: tl.constexpr):
    """What each of 16 rows is divided by: from the sums of squares that the tiles before left."""
    r = first + tl.arange(0, 16)
    sums = tl.load(squares + r[:, None] * NORMS + tl.arange(0, NORMS)[None, :], mask=(r < rows)[:, None], other=0.0)
    return tl.rsqrt(tl.sum(sums, 1) / K + eps)[:, None]


@triton.jit
def _halves(acc, TILE: tl.constexpr):
    """The first and the second half of a tile's columns."""
    return tl.split(tl.permute(tl.reshape(acc, (16, 2, TILE // 2)), (0, 2, 1)))


@triton.jit
def embed(tokens, table, norm, stream, scaled, squares, H, WIDTH: tl.constexpr, NORMS: tl.constexpr, EARLY: tl.constexpr):
    """Begin the stream of one row with its token."""
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()
    row = tl.program_id(0)
    c = tl.arange(0, WIDTH)
    x = tl.load(table + tl.load(tokens + row).to(tl.int64) * H + c, mask=c < H, other=0.0)
    wide = x.to(tl.float32)
    tl.store(stream + row * H + c, x, mask=c < H)
    by = tl.load(norm + c, mask=c < H, other=0.0).to(tl.float32)
    tl.store(scaled + row * H + c, (wide * by).to(scaled.dtype.element_ty), mask=c < H)
    n = tl.arange(0, NORMS)
    tl.store(squares + row * NORMS + n, tl.where(n == 0, tl.sum(wide * wide, 0), 0.0))


@triton.jit(do_not_specialize=["rows"])
def qkv(x, w, bias, squares, head_norm, cos, sin, positions, slots, queries, keys, values, page_stride, eps, rows, K,
        HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, PAGE: tl.constexpr, BIASED: tl.constexpr, NORMED: tl.constexpr,
        NORMS: tl.constexpr, TILE: tl.constexpr, STEP: tl.constexpr, SWAP: tl.constexpr, EVEN: tl.constexpr, FULL: tl.constexpr,
        EARLY: tl.constexpr):  # fmt: skip
    """Queries, keys and values of 16 rows, turned; keys and values go to their places. A tile has as much of each half of a head."""
    if EARLY:
        gdc_wait()
    first = tl.program_id(0) * 16
    tile = tl.program_id(1)
    head = tile * TILE // DIM
    begin = tile * TILE % DIM // 2
    i = tl.arange(0, TILE)
    j = begin + tl.arange(0, TILE // 2)
    columns = head * DIM + begin + i % (TILE // 2) + i // (TILE // 2) * (DIM // 2)
    r = first + tl.arange(0, 16)
    live = (r < rows)[:, None]
    root = _root(squares, first, rows, K, eps, NORMS)  # all of this is asked for before the long loop
    angle = tl.load(positions + r, mask=r < rows, other=0)[:, None] * DIM + DIM // 2 + j[None, :]
    c = tl.load(cos + angle).to(tl.float32)
    s = tl.load(sin + angle).to(tl.float32)  # the second half of a table has the sine as it is
    slot = tl.load(slots + r, mask=r < rows, other=0)
    place = ((slot // PAGE).to(tl.int64) * page_stride + slot % PAGE * DIM)[:, None] + j[None, :]
    acc = _product(x, w, columns, i < TILE, first, rows, K, 0, TILE, STEP, 1, SWAP, EVEN, FULL, EARLY) * root
    if BIASED:
        acc += tl.load(bias + columns).to(tl.float32)[None, :]
    a, b = _halves(acc, TILE)
    if head < HEADS + KV_HEADS:
        if NORMED:  # a tile is a whole head then
            own = tl.rsqrt((tl.sum(a * a, 1) + tl.sum(b * b, 1)) / DIM + eps)[:, None]
            a = a * own * tl.load(head_norm + head * DIM + j).to(tl.float32)[None, :]
            b = b * own * tl.load(head_norm + head * DIM + DIM // 2 + j).to(tl.float32)[None, :]
        a, b = a * c - b * s, b * c + a * s
    if head < HEADS:
        to = queries + r[:, None] * (HEADS * DIM) + head * DIM + j[None, :]
    elif head < HEADS + KV_HEADS:
        to = keys + (head - HEADS) * (PAGE * DIM) + place
    else:
        to = values + (head - HEADS - KV_HEADS) * (PAGE * DIM) + place
    tl.store(to, a.to(queries.dtype.element_ty), mask=live)
    tl.store(to + DIM // 2, b.to(queries.dtype.element_ty), mask=live)


@triton.jit(do_not_specialize=["rows"])
def added(x, w, bias, stream, scaled, norm, squares, sums, arrived, rows, N, K,
          BIASED: tl.constexpr, NORMS: tl.constexpr, TILE: tl.constexpr, STEP: tl.constexpr, PARTS: tl.constexpr, SWAP: tl.constexpr,
          EVEN: tl.constexpr, FULL: tl.constexpr, EARLY: tl.constexpr):  # fmt: skip
    """Add a product to the stream. Where it is made in parts, the last to arrive adds them up in their order."""
    if EARLY:
        gdc_wait()
    first = tl.program_id(0) * 16
    tile = tl.program_id(1)
    columns = tile * TILE + tl.arange(0, TILE)
    there = columns < N
    r = first + tl.arange(0, 16)
    kept = (r < rows)[:, None] & there[None, :]
    at = r[:, None] * N + columns[None, :]
    before = tl.load(stream + at, mask=kept, other=0.0).to(tl.float32)
    by = tl.load(norm + columns, mask=there, other=0.0).to(tl.float32)
    part = tl.program_id(2)
    acc = _product(x, w, columns, there, first, rows, K, part, TILE, STEP, PARTS, SWAP, EVEN, FULL, EARLY)
    done = True
    if PARTS > 1:
        number = tl.program_id(0) * tl.num_programs(1) + tile
        o = tl.arange(0, 16)[:, None] * TILE + tl.arange(0, TILE)[None, :]
        tl.store(sums + (number * PARTS + part) * 16 * TILE + o, acc)
        tl.debug_barrier()
        done = tl.atomic_add(arrived + number, 1, sem="acq_rel") == PARTS - 1
        if done:
            acc = tl.load(sums + number * PARTS * 16 * TILE + o, cache_modifier=".cg")
            for other in tl.static_range(1, PARTS):
                acc += tl.load(sums + (number * PARTS + other) * 16 * TILE + o, cache_modifier=".cg")
            tl.store(arrived + number, 0)
    if done:
        if BIASED:
            acc += tl.load(bias + columns, mask=there, other=0.0).to(tl.float32)[None, :]
        new = (before + acc).to(stream.dtype.element_ty)
        wide = tl.where(kept, new.to(tl.float32), 0.0)
        tl.store(stream + at, new, mask=kept)
        tl.store(scaled + at, (wide * by[None, :]).to(scaled.dtype.element_ty), mask=kept)
        tl.store(squares + r * NORMS + tile, tl.sum(wide * wide, 1), mask=r < rows)


@triton.jit(do_not_specialize=["rows"])
def gated(x, w, bias, squares, out, eps, rows, N, K,
          BIASED: tl.constexpr, NORMS: tl.constexpr, TILE: tl.constexpr, STEP: tl.constexpr, SWAP: tl.constexpr,
          EVEN: tl.constexpr, FULL: tl.constexpr, EARLY: tl.constexpr):  # fmt: skip
    """silu(gate)·up of 16 rows; a tile has as many columns of each."""
    if EARLY:
        gdc_wait()
    first = tl.program_id(0) * 16
    i = tl.arange(0, TILE)
    within = tl.program_id(1) * (TILE // 2) + i % (TILE // 2)
    columns = within + i // (TILE // 2) * N
    root = _root(squares, first, rows, K, eps, NORMS)  # asked for before the long loop
    acc = _product(x, w, columns, within < N, first, rows, K, 0, TILE, STEP, 1, SWAP, EVEN, FULL, EARLY) * root
    if BIASED:
        acc += tl.load(bias + columns, mask=within < N, other=0.0).to(tl.float32)[None, :]
    gate, up = _halves(acc, TILE)
    r = first + tl.arange(0, 16)
    c = tl.program_id(1) * (TILE // 2) + tl.arange(0, TILE // 2)
    tl.store(
        out + r[:, None] * N + c[None, :],
        (gate * tl.sigmoid(gate) * up).to(out.dtype.element_ty),
        mask=(r < rows)[:, None] & (c < N)[None, :],
    )


@triton.jit(do_not_specialize=["rows"])
def scored(x, w, squares, out, eps, rows, N, K,
           NORMS: tl.constexpr, TILE: tl.constexpr, STEP: tl.constexpr, SWAP: tl.constexpr, EVEN: tl.constexpr, FULL: tl.constexpr,
           EARLY: tl.constexpr):  # fmt: skip
    """Logits of 16 rows, in float32."""
    if EARLY:
        gdc_wait()
    first = tl.program_id(0) * 16
    columns = tl.program_id(1) * TILE + tl.arange(0, TILE)
    root = _root(squares, first, rows, K, eps, NORMS)  # asked for before the long loop
    acc = _product(x, w, columns, columns < N, first, rows, K, 0, TILE, STEP, 1, SWAP, EVEN, FULL, EARLY) * root
    r = first + tl.arange(0, 16)
    tl.store(out + r[:, None].to(tl.int64) * N + columns[None, :], acc, mask=(r < rows)[:, None] & (columns < N)[None, :])
