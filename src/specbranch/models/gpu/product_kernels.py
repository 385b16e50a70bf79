"""The Triton kernels of a decoding step's products, with what comes before and after each: norm, rotation, residual, gate.

Owns the order of every sum. Invariant: rows are taken in tiles of 16, the numbers of a product in one order and in a fixed number of
parts, so a row's bits depend neither on the rows beside it nor on how many there are. A program may take several such tiles (MANY: 1, 2
or 4) with the weights it has read: each is multiplied by instructions of its own. The stream of a layer is left as it is and,
multiplied by the next norm's weights, as the next product reads it; each tile leaves the sum of its squares, and who reads on divides by
their root. Weights are plain numbers (STORED 0), whole ones with a scale for each output (8), or nibbles with a scale for each group of 128
inputs (4). Buffers have whole tiles of rows: those that nobody asked for are computed too, and written where nobody reads. Where kernels
may begin early (EARLY), each waits for the one before it to end before it reads anything, and tells the next to come when it has read all
it needs.
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-def"
# What Triton compiles has no Python types but constexpr.

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.language.target_info import cuda_capability_geq


def _nibbles_in(kind: str, ones: int, offset: int) -> str:
    """PTX that makes eight floats of the nibbles of four bytes: `ones` before each, `offset` subtracted from each pair."""
    halves = [("and.b32 t, $4, 0x0f0f0f0f;", 0), ("shr.u32 t, $4, 4; and.b32 t, t, 0x0f0f0f0f;", 2)]
    picked = ((0, 0x4140), (1, 0x4342))  # a byte, then the ones, twice
    lines = []
    for half, first in halves:
        lines.append(half)
        for out, pick in picked:
            lines.append(f"prmt.b32 ${first + out}, t, 0x{ones * 0x01010101:08x}, {pick};")
            lines.append(f"sub.{kind} ${first + out}, ${first + out}, o;")
    return f"{{.reg .b32 t, o; mov.b32 o, 0x{offset * 0x00010001:08x}; {' '.join(lines)}}}"


BFLOAT16_NIBBLES = tl.constexpr(_nibbles_in("bf16x2", 0x43, 0x4308))
FLOAT16_NIBBLES = tl.constexpr(_nibbles_in("f16x2", 0x64, 0x6408))


@triton.jit
def _products(x, w, scale, columns, there, first, N, K, part, MANY: tl.constexpr, TILE: tl.constexpr, STEP: tl.constexpr,
              PARTS: tl.constexpr, SWAP: tl.constexpr, EVEN: tl.constexpr, FULL: tl.constexpr, STORED: tl.constexpr,
              EARLY: tl.constexpr):  # fmt: skip
    """Multiply tiles of x by some rows of w, over one part of their length; returns four times [16, TILE], the first MANY of which count.

    `there`: which of w's rows exist.
    """
    if STORED == 4:
        a, b, c, d = _nibble_products(x, w, scale, columns, there, first, N, K, part, MANY, TILE, STEP, PARTS, FULL)
    else:
        a, b, c, d = _whole_products(x, w, columns, there, first, K, part, MANY, TILE, STEP, PARTS, SWAP, EVEN, FULL, STORED)
    if EARLY:
        gdc_launch_dependents()
    if STORED == 8:
        by = tl.load(scale + columns, mask=there, other=0.0)[None, :]
        a, b, c, d = a * by, b * by, c * by, d * by
    return a, b, c, d


@triton.jit
def _whole_products(x, w, columns, there, first, K, part, MANY: tl.constexpr, TILE: tl.constexpr, STEP: tl.constexpr, PARTS: tl.constexpr,
                    SWAP: tl.constexpr, EVEN: tl.constexpr, FULL: tl.constexpr, STORED: tl.constexpr):  # fmt: skip
    steps = tl.cdiv(K, STEP)
    begin = steps * part // PARTS
    k = begin * STEP + tl.arange(0, STEP)
    w_at = w + columns.to(tl.int64)[:, None] * K + k[None, :]
    x_at = x + (first + tl.arange(0, 16))[:, None] * K + k[None, :]
    a = tl.zeros((TILE, 16) if SWAP else (16, TILE), tl.float32)
    b, c, d = a, a, a
    for _ in range(steps * (part + 1) // PARTS - begin):
        if EVEN:
            of_w = tl.load(w_at) if FULL else tl.load(w_at, mask=there[:, None], other=0)
        else:
            of_w = tl.load(w_at, mask=there[:, None] & (k < K)[None, :], other=0)
        if STORED == 8:
            of_w = of_w.to(x.dtype.element_ty)
        a = _more(a, of_w, x_at, k, K, SWAP, EVEN)
        if MANY > 1:
            b = _more(b, of_w, x_at + 16 * K, k, K, SWAP, EVEN)
        if MANY > 2:
            c = _more(c, of_w, x_at + 32 * K, k, K, SWAP, EVEN)
            d = _more(d, of_w, x_at + 48 * K, k, K, SWAP, EVEN)
        k += STEP
        w_at += STEP
        x_at += STEP
    if SWAP:
        a, b, c, d = tl.trans(a), tl.trans(b), tl.trans(c), tl.trans(d)
    return a, b, c, d


@triton.jit
def _more(acc, of_w, x_at, k, K, SWAP: tl.constexpr, EVEN: tl.constexpr):
    of_x = tl.load(x_at) if EVEN else tl.load(x_at, mask=(k < K)[None, :], other=0.0)
    return tl.dot(of_w, tl.trans(of_x), acc) if SWAP else tl.dot(of_x, tl.trans(of_w), acc)


@triton.jit
def _nibbles(both, DTYPE: tl.constexpr):
    """The low and the high halves of bytes, less 8, as floats.

    In machine code four bytes at a time: beside the bits of 128 (of 1024 in float16) a nibble is the number's own end, so 136 (1032) is
    subtracted and nothing is converted.
    """
    if cuda_capability_geq(9, 0):
        if tl.bfloat16 == DTYPE:
            low, high = tl.inline_asm_elementwise(BFLOAT16_NIBBLES, "=r,=r,=r,=r,r", [both], (tl.bfloat16, tl.bfloat16), True, 4)
        else:
            low, high = tl.inline_asm_elementwise(FLOAT16_NIBBLES, "=r,=r,=r,=r,r", [both], (tl.float16, tl.float16), True, 4)
    else:
        low = ((both & 15).to(tl.int8) - 8).to(DTYPE)
        high = ((both >> 4).to(tl.int8) - 8).to(DTYPE)
    return low, high


@triton.jit
def _nibble_products(x, w, scale, columns, there, first, N, K, part, MANY: tl.constexpr, TILE: tl.constexpr, STEP: tl.constexpr,
                     PARTS: tl.constexpr, FULL: tl.constexpr):  # fmt: skip
    """A step is a group of 128 inputs: the low nibbles of its 64 bytes are the first half of them, the high ones the second."""
    tl.static_assert(STEP == 128)
    groups = K // 128
    begin = groups * part // PARTS
    half = tl.arange(0, 64)
    w_at = w + columns.to(tl.int64)[:, None] * (K // 2) + (begin * 64 + half)[None, :]
    x_at = x + (first + tl.arange(0, 16))[:, None] * K + (begin * 128 + half)[None, :]
    scale_at = scale + begin * N + columns  # [groups, outputs]
    a = tl.zeros((16, TILE), tl.float32)
    b, c, d = a, a, a
    for _ in range(groups * (part + 1) // PARTS - begin):
        both = tl.load(w_at) if FULL else tl.load(w_at, mask=there[:, None], other=0)
        by = (tl.load(scale_at) if FULL else tl.load(scale_at, mask=there, other=0.0))[None, :]
        low, high = _nibbles(both, x.dtype.element_ty)
        a += _of_group(x_at, low, high) * by
        if MANY > 1:
            b += _of_group(x_at + 16 * K, low, high) * by
        if MANY > 2:
            c += _of_group(x_at + 32 * K, low, high) * by
            d += _of_group(x_at + 48 * K, low, high) * by
        w_at += 64
        x_at += 128
        scale_at += N
    return a, b, c, d


@triton.jit
def _of_group(x_at, low, high):
    sums = tl.dot(tl.load(x_at), tl.trans(low))
    return tl.dot(tl.load(x_at + 64), tl.trans(high), sums)


@triton.jit
def _root(squares, first, K, eps, NORMS: tl.constexpr):
    """What each row is divided by: from the sums of squares that the tiles before left."""
    r = first + tl.arange(0, 16)
    sums = tl.load(squares + r[:, None] * NORMS + tl.arange(0, NORMS)[None, :])
    return tl.rsqrt(tl.sum(sums, 1) / K + eps)[:, None]


@triton.jit
def _halves(acc, TILE: tl.constexpr):
    """The first and the second half of a tile's columns."""
    return tl.split(tl.permute(tl.reshape(acc, (16, 2, TILE // 2)), (0, 2, 1)))


@triton.jit(do_not_specialize=["rows"])
def embed(tokens, picks, counts, moves, table, norm, stream, scaled, squares, memory, rows, H, per, page_stride,
          WIDTH: tl.constexpr, NORMS: tl.constexpr, PIECE: tl.constexpr, SIDE: tl.constexpr, PAGE: tl.constexpr, DIM: tl.constexpr,
          EARLY: tl.constexpr):  # fmt: skip
    """Begin the stream of one row with its token, a negative one being what a row of the step before chose. Programs beyond the rows
    move what a verdict left behind to its new place, each in one layer's keys or values."""
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()
    row = tl.program_id(0)
    if row < rows:
        c = tl.arange(0, WIDTH)
        token = tl.load(tokens + row)
        if token < 0:
            token = tl.load(picks - 1 - token)
        x = tl.load(table + token.to(tl.int64) * H + c, mask=c < H, other=0.0)
        wide = x.to(tl.float32)
        tl.store(stream + row * H + c, x, mask=c < H)
        by = tl.load(norm + c, mask=c < H, other=0.0).to(tl.float32)
        tl.store(scaled + row * H + c, (wide * by).to(scaled.dtype.element_ty), mask=c < H)
        n = tl.arange(0, NORMS)
        tl.store(squares + row * NORMS + n, tl.where(n == 0, tl.sum(wide * wide, 0), 0.0))
    else:
        e = tl.arange(0, PIECE)  # of one place: [kv_heads, DIM]
        within = (row - rows).to(tl.int64) * (SIDE * PAGE) + e // DIM * (PAGE * DIM) + e % DIM
        for move in range(tl.load(counts)):  # one after the other: a place may be left and then filled
            source = tl.load(moves + move)
            target = tl.load(moves + per + move)
            from_page = (source // PAGE).to(tl.int64) * page_stride + source % PAGE * DIM
            to_page = (target // PAGE).to(tl.int64) * page_stride + target % PAGE * DIM
            held = tl.load(memory + from_page + within, mask=e < SIDE, other=0.0)
            tl.store(memory + to_page + within, held, mask=e < SIDE)


@triton.jit(do_not_specialize=["rows"])
def qkv(x, w, bias, scale, squares, head_norm, cos, sin, positions, slots, queries, keys, values, page_stride, eps, rows, K,
        HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, PAGE: tl.constexpr, BIASED: tl.constexpr, NORMED: tl.constexpr,
        NORMS: tl.constexpr, MANY: tl.constexpr, TILE: tl.constexpr, STEP: tl.constexpr, PARTS: tl.constexpr, SWAP: tl.constexpr,
        EVEN: tl.constexpr, FULL: tl.constexpr, STORED: tl.constexpr, EARLY: tl.constexpr):  # fmt: skip
    """Queries, keys and values, turned; keys and values go to their places. A tile has as much of each half of a head."""
    if EARLY:
        gdc_wait()
    first = tl.program_id(0) * (16 * MANY)
    tile = tl.program_id(1)
    head = tile * TILE // DIM
    begin = tile * TILE % DIM // 2
    i = tl.arange(0, TILE)
    columns = head * DIM + begin + i % (TILE // 2) + i // (TILE // 2) * (DIM // 2)
    # What the first rows need is asked for before the long loop.
    root, c, s, place = _turning(squares, cos, sin, positions, slots, first, begin, page_stride, eps, rows, K, DIM, PAGE, NORMS, TILE)
    N = (HEADS + 2 * KV_HEADS) * DIM
    p, q, r, t = _products(x, w, scale, columns, i < TILE, first, N, K, 0, MANY, TILE, STEP, 1, SWAP, EVEN, FULL, STORED, EARLY)
    _turned(p, root, c, s, place, bias, head_norm, queries, keys, values, columns, first, head, begin, eps, rows,
            HEADS, KV_HEADS, DIM, PAGE, BIASED, NORMED, TILE)  # fmt: skip
    for more in tl.static_range(1, MANY):
        at = first + 16 * more
        root, c, s, place = _turning(squares, cos, sin, positions, slots, at, begin, page_stride, eps, rows, K, DIM, PAGE, NORMS, TILE)
        _turned(q if more == 1 else r if more == 2 else t, root, c, s, place, bias, head_norm, queries, keys, values, columns, at, head,
                begin, eps, rows, HEADS, KV_HEADS, DIM, PAGE, BIASED, NORMED, TILE)  # fmt: skip


@triton.jit
def _turning(squares, cos, sin, positions, slots, first, begin, page_stride, eps, rows, K, DIM: tl.constexpr, PAGE: tl.constexpr,
             NORMS: tl.constexpr, TILE: tl.constexpr):  # fmt: skip
    """What 16 rows are divided and turned by, and where their keys and values go."""
    r = first + tl.arange(0, 16)
    j = begin + tl.arange(0, TILE // 2)
    root = _root(squares, first, K, eps, NORMS)
    angle = tl.load(positions + r, mask=r < rows, other=0)[:, None] * DIM + DIM // 2 + j[None, :]
    c = tl.load(cos + angle).to(tl.float32)
    s = tl.load(sin + angle).to(tl.float32)  # the second half of a table has the sine as it is
    slot = tl.load(slots + r, mask=r < rows, other=0)
    return root, c, s, ((slot // PAGE).to(tl.int64) * page_stride + slot % PAGE * DIM)[:, None] + j[None, :]


@triton.jit
def _turned(acc, root, c, s, place, bias, head_norm, queries, keys, values, columns, first, head, begin, eps, rows, HEADS: tl.constexpr,
            KV_HEADS: tl.constexpr, DIM: tl.constexpr, PAGE: tl.constexpr, BIASED: tl.constexpr, NORMED: tl.constexpr,
            TILE: tl.constexpr):  # fmt: skip
    acc *= root
    if BIASED:
        acc += tl.load(bias + columns).to(tl.float32)[None, :]
    r = first + tl.arange(0, 16)
    j = begin + tl.arange(0, TILE // 2)
    live = (r < rows)[:, None]
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
def added(x, w, bias, scale, stream, scaled, norm, squares, sums, arrived, rows, N, K,
          BIASED: tl.constexpr, NORMS: tl.constexpr, MANY: tl.constexpr, TILE: tl.constexpr, STEP: tl.constexpr, PARTS: tl.constexpr,
          SWAP: tl.constexpr, EVEN: tl.constexpr, FULL: tl.constexpr, STORED: tl.constexpr, EARLY: tl.constexpr):  # fmt: skip
    """Add a product to the stream. Where it is made in parts, the last to arrive adds them up in their order."""
    if EARLY:
        gdc_wait()
    first = tl.program_id(0) * (16 * MANY)
    tile = tl.program_id(1)
    part = tl.program_id(2)
    columns = tile * TILE + tl.arange(0, TILE)
    there = columns < N
    by = tl.load(norm + columns, mask=there, other=0.0).to(tl.float32)
    before = _before(stream, columns, there, first, rows, N)  # asked for before the long loop
    a, b, c, d = _products(x, w, scale, columns, there, first, N, K, part, MANY, TILE, STEP, PARTS, SWAP, EVEN, FULL, STORED, EARLY)
    done = True
    number = tl.program_id(0) * tl.num_programs(1) + tile
    o = tl.arange(0, 16)[:, None] * TILE + tl.arange(0, TILE)[None, :]
    mine = sums + number * (PARTS * MANY * 16 * TILE) + o  # [parts, tiles of rows]
    if PARTS > 1:
        for more in tl.static_range(MANY):
            tl.store(mine + (part * MANY + more) * (16 * TILE), a if more == 0 else b if more == 1 else c if more == 2 else d)
        tl.debug_barrier()
        done = tl.atomic_add(arrived + number, 1, sem="acq_rel") == PARTS - 1
    if done:
        if PARTS > 1:
            tl.store(arrived + number, 0)
        for more in tl.static_range(MANY):
            acc = a if more == 0 else b if more == 1 else c if more == 2 else d
            if PARTS > 1:
                acc = tl.load(mine + more * (16 * TILE), cache_modifier=".cg")
                for other in tl.static_range(1, PARTS):
                    acc += tl.load(mine + (other * MANY + more) * (16 * TILE), cache_modifier=".cg")
            at = first + 16 * more
            held = before if more == 0 else _before(stream, columns, there, at, rows, N)
            _left(acc, held, by, bias, stream, scaled, squares, columns, there, at, tile, rows, N, BIASED, NORMS)


@triton.jit
def _before(stream, columns, there, first, rows, N):
    """What the stream of 16 rows is before a product is added."""
    r = first + tl.arange(0, 16)
    return tl.load(stream + r[:, None] * N + columns[None, :], mask=(r < rows)[:, None] & there[None, :], other=0.0).to(tl.float32)


@triton.jit
def _left(acc, before, by, bias, stream, scaled, squares, columns, there, first, tile, rows, N, BIASED: tl.constexpr, NORMS: tl.constexpr):
    """Leave the stream of 16 rows, what the next product reads of it, and the sum of its squares."""
    if BIASED:
        acc += tl.load(bias + columns, mask=there, other=0.0).to(tl.float32)[None, :]
    r = first + tl.arange(0, 16)
    kept = (r < rows)[:, None] & there[None, :]
    at = r[:, None] * N + columns[None, :]
    new = (before + acc).to(stream.dtype.element_ty)
    wide = tl.where(kept, new.to(tl.float32), 0.0)
    tl.store(stream + at, new, mask=kept)
    tl.store(scaled + at, (wide * by[None, :]).to(scaled.dtype.element_ty), mask=kept)
    tl.store(squares + r * NORMS + tile, tl.sum(wide * wide, 1), mask=r < rows)


@triton.jit(do_not_specialize=["rows"])
def gated(x, w, bias, scale, squares, out, eps, rows, N, K,
          BIASED: tl.constexpr, NORMS: tl.constexpr, MANY: tl.constexpr, TILE: tl.constexpr, STEP: tl.constexpr, PARTS: tl.constexpr,
          SWAP: tl.constexpr, EVEN: tl.constexpr, FULL: tl.constexpr, STORED: tl.constexpr, EARLY: tl.constexpr):  # fmt: skip
    """silu(gate)·up; a tile has as many columns of each."""
    if EARLY:
        gdc_wait()
    first = tl.program_id(0) * (16 * MANY)
    i = tl.arange(0, TILE)
    within = tl.program_id(1) * (TILE // 2) + i % (TILE // 2)
    columns = within + i // (TILE // 2) * N
    root = _root(squares, first, K, eps, NORMS)  # asked for before the long loop
    a, b, c, d = _products(x, w, scale, columns, within < N, first, 2 * N, K, 0, MANY, TILE, STEP, 1, SWAP, EVEN, FULL, STORED, EARLY)
    for more in tl.static_range(MANY):
        at = first + 16 * more
        acc = (a if more == 0 else b if more == 1 else c if more == 2 else d) * (root if more == 0 else _root(squares, at, K, eps, NORMS))
        if BIASED:
            acc += tl.load(bias + columns, mask=within < N, other=0.0).to(tl.float32)[None, :]
        gate, up = _halves(acc, TILE)
        r = at + tl.arange(0, 16)
        j = tl.program_id(1) * (TILE // 2) + tl.arange(0, TILE // 2)
        both = (gate * tl.sigmoid(gate) * up).to(out.dtype.element_ty)
        tl.store(out + r[:, None] * N + j[None, :], both, mask=(r < rows)[:, None] & (j < N)[None, :])


@triton.jit(do_not_specialize=["rows"])
def scored(x, w, scale, squares, out, eps, rows, N, K,
           NORMS: tl.constexpr, MANY: tl.constexpr, TILE: tl.constexpr, STEP: tl.constexpr, PARTS: tl.constexpr, SWAP: tl.constexpr,
           EVEN: tl.constexpr, FULL: tl.constexpr, STORED: tl.constexpr, EARLY: tl.constexpr):  # fmt: skip
    """Logits, in float32."""
    if EARLY:
        gdc_wait()
    first = tl.program_id(0) * (16 * MANY)
    columns = tl.program_id(1) * TILE + tl.arange(0, TILE)
    root = _root(squares, first, K, eps, NORMS)  # asked for before the long loop
    a, b, c, d = _products(x, w, scale, columns, columns < N, first, N, K, 0, MANY, TILE, STEP, 1, SWAP, EVEN, FULL, STORED, EARLY)
    for more in tl.static_range(MANY):
        at = first + 16 * more
        acc = (a if more == 0 else b if more == 1 else c if more == 2 else d) * (root if more == 0 else _root(squares, at, K, eps, NORMS))
        r = at + tl.arange(0, 16)
        tl.store(out + r[:, None].to(tl.int64) * N + columns[None, :], acc, mask=(r < rows)[:, None] & (columns < N)[None, :])
