"""The Triton kernels of a decode step's products, fused with norm, rotation, residual and gate.

Owns the order of every sum. Invariant: a row's bits depend neither on other rows nor on their number. To keep it:
- Rows come in tiles (ROWS: 16 or more). A product sums its inputs in one order, in a fixed number of parts, by one kind
  of instruction.
- The compiler's layout of a tile over threads depends on the tile. So sums over columns are sums of integers, and no
  product is fused with a sum (`enable_fp_fusion`).

A layer writes the residual stream twice: as it is, and times the next norm's weights, as the next product reads it.
Each tile writes the sum of its squares; the next product divides by their root. STORED is 0 for plain weights, 8
for int8 and 9 for fp8 with a scale for each output, and 4 for int4 with a scale for each 128 inputs. It is 5 for int4
and 10 for fp8 with a scale for each group of inputs, which is the loop step then; 6 for such int4 with zeros, which lie
behind the scales, less 8. With BOXED, x and w are tensor
descriptors, whose boxes the memory unit of a Hopper GPU copies by itself (TMA); bits are the same. UNIT is the loop
step of a product's tiling for few rows: split-K parts begin at multiples of it with every tiling. Buffers have whole
tiles of rows: padding rows are computed, too, and nobody reads them. If kernels may start early (EARLY), each waits for
the end of the one before it before it reads anything. It lets the next one start when it has read all it needs.

What families add to Llama's layer is decided by further constants: ACTIVATION of a gate (0 silu, 1 gelu by tanh, 2
gpt-oss' bounded gate), ONTO (a product is added to the residual stream, or stored apart), SCALE of embeddings, SOFTCAP
of logits, and a bias of `scored`.
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-def"
# What Triton compiles has no Python types but constexpr.

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.language.target_info import cuda_capability_geq

from specbranch.models.gpu.layout import USED_COUNT as _USED_COUNT

USED_COUNT = tl.constexpr(_USED_COUNT)


def _nibbles_in(kind: str, ones: int, offset: int) -> str:
    """Return PTX that makes eight floats of the nibbles of four bytes.

    `ones` are the bits before each nibble; `offset` is subtracted from each pair.
    """
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
def _boxed_product(x, w, first, column, K, part, ROWS: tl.constexpr, TILE: tl.constexpr, STEP: tl.constexpr,
                   PARTS: tl.constexpr, UNIT: tl.constexpr, SWAP: tl.constexpr):  # fmt: skip
    """Multiply ROWS rows of x from `first` on by TILE rows of w from `column` on, over one split-K part."""
    units = tl.cdiv(K, UNIT)
    begin = units * part // PARTS * (UNIT // STEP)
    end = tl.minimum(units * (part + 1) // PARTS * (UNIT // STEP), tl.cdiv(K, STEP))
    acc = tl.zeros((TILE, ROWS) if SWAP else (ROWS, TILE), tl.float32)
    for step in range(begin, end):
        of_w = w.load([column, step * STEP])
        of_x = x.load([first, step * STEP])
        acc = tl.dot(of_w, tl.trans(of_x), acc) if SWAP else tl.dot(of_x, tl.trans(of_w), acc)
    return tl.trans(acc) if SWAP else acc


@triton.jit
def _boxed_pair(x, w, first, column, other, K, ROWS: tl.constexpr, HALF: tl.constexpr, STEP: tl.constexpr,
                SWAP: tl.constexpr):  # fmt: skip
    """Multiply some rows of x by HALF rows of w from `column` on, and by HALF from `other` on."""
    a = tl.zeros((HALF, ROWS) if SWAP else (ROWS, HALF), tl.float32)
    b = tl.zeros((HALF, ROWS) if SWAP else (ROWS, HALF), tl.float32)
    for step in range(tl.cdiv(K, STEP)):
        of_a = w.load([column, step * STEP])
        of_b = w.load([other, step * STEP])
        of_x = x.load([first, step * STEP])
        a = tl.dot(of_a, tl.trans(of_x), a) if SWAP else tl.dot(of_x, tl.trans(of_a), a)
        b = tl.dot(of_b, tl.trans(of_x), b) if SWAP else tl.dot(of_x, tl.trans(of_b), b)
    if SWAP:
        a = tl.trans(a)
        b = tl.trans(b)
    return a, b


@triton.jit
def _product(x, w, scale, columns, there, first, N, K, part, ROWS: tl.constexpr, TILE: tl.constexpr, STEP: tl.constexpr,
             PARTS: tl.constexpr, SWAP: tl.constexpr, EVEN: tl.constexpr, FULL: tl.constexpr, STORED: tl.constexpr,
             EARLY: tl.constexpr):  # fmt: skip
    """Multiply some rows of x by some rows of w, over one split-K part; returns [ROWS, TILE].

    `there`: which of w's rows exist.
    """
    if STORED == 4:
        acc = _nibble_product(x, w, scale, columns, there, first, N, K, part, ROWS, TILE, STEP, PARTS, FULL)
    elif (STORED == 5) or (STORED == 6) or (STORED == 10):
        acc = _group_product(x, w, scale, columns, there, first, N, K, part, ROWS, TILE, STEP, PARTS, FULL, STORED)
    else:
        acc = _whole_product(x, w, columns, there, first, K, part, ROWS, TILE, STEP, PARTS, SWAP, EVEN, FULL, STORED)
    if EARLY:
        gdc_launch_dependents()
    if (STORED == 8) or (STORED == 9):
        acc *= tl.load(scale + columns, mask=there, other=0.0)[None, :]
    return acc


@triton.jit
def _whole_product(x, w, columns, there, first, K, part,
                   ROWS: tl.constexpr, TILE: tl.constexpr, STEP: tl.constexpr, PARTS: tl.constexpr, SWAP: tl.constexpr,
                   EVEN: tl.constexpr, FULL: tl.constexpr, STORED: tl.constexpr):  # fmt: skip
    steps = tl.cdiv(K, STEP)
    begin = steps * part // PARTS
    r = first + tl.arange(0, ROWS)
    k = begin * STEP + tl.arange(0, STEP)
    w_at = w + columns.to(tl.int64)[:, None] * K + k[None, :]
    x_at = x + r[:, None] * K + k[None, :]
    acc = tl.zeros((TILE, ROWS) if SWAP else (ROWS, TILE), tl.float32)
    for _ in range(steps * (part + 1) // PARTS - begin):
        if EVEN:
            of_w = tl.load(w_at) if FULL else tl.load(w_at, mask=there[:, None], other=0.0)
            of_x = tl.load(x_at)
        else:
            of_w = tl.load(w_at, mask=there[:, None] & (k < K)[None, :], other=0.0)
            of_x = tl.load(x_at, mask=(k < K)[None, :], other=0.0)
            k += STEP
        if (STORED == 8) or (STORED == 9):
            of_w = of_w.to(of_x.dtype)
        acc = tl.dot(of_w, tl.trans(of_x), acc) if SWAP else tl.dot(of_x, tl.trans(of_w), acc)
        w_at += STEP
        x_at += STEP
    return tl.trans(acc) if SWAP else acc


@triton.jit
def _nibbles(both, DTYPE: tl.constexpr):
    """Return the low and the high nibbles of bytes, minus 8, as floats.

    PTX does this for four bytes at a time. Behind the bits of 128 (1024 in float16) a nibble is the end of the number's
    mantissa. So 136 (1032) is subtracted, and nothing is converted.
    """
    if cuda_capability_geq(9, 0):
        if tl.bfloat16 == DTYPE:
            low, high = tl.inline_asm_elementwise(
                BFLOAT16_NIBBLES, "=r,=r,=r,=r,r", [both], (tl.bfloat16, tl.bfloat16), True, 4
            )
        else:
            low, high = tl.inline_asm_elementwise(
                FLOAT16_NIBBLES, "=r,=r,=r,=r,r", [both], (tl.float16, tl.float16), True, 4
            )
    else:
        low = ((both & 15).to(tl.int8) - 8).to(DTYPE)
        high = ((both >> 4).to(tl.int8) - 8).to(DTYPE)
    return low, high


@triton.jit
def _nibble_product(x, w, scale, columns, there, first, N, K, part,
                    ROWS: tl.constexpr, TILE: tl.constexpr, STEP: tl.constexpr, PARTS: tl.constexpr,
                    FULL: tl.constexpr):  # fmt: skip
    """Multiply by int4 weights. A loop step is a group of 128 inputs: the low nibbles are its first half."""
    tl.static_assert(STEP == 128)
    groups = K // 128
    begin = groups * part // PARTS
    r = first + tl.arange(0, ROWS)
    half = tl.arange(0, 64)
    w_at = w + columns.to(tl.int64)[:, None] * (K // 2) + (begin * 64 + half)[None, :]
    x_at = x + r[:, None] * K + (begin * 128 + half)[None, :]
    scale_at = scale + begin * N + columns  # [groups, outputs]
    acc = tl.zeros((ROWS, TILE), tl.float32)
    for _ in range(groups * (part + 1) // PARTS - begin):
        both = tl.load(w_at) if FULL else tl.load(w_at, mask=there[:, None], other=0)
        low, high = tl.load(x_at), tl.load(x_at + 64)
        by = tl.load(scale_at) if FULL else tl.load(scale_at, mask=there, other=0.0)
        of_low, of_high = _nibbles(both, low.dtype)
        sums = tl.dot(low, tl.trans(of_low))
        sums = tl.dot(high, tl.trans(of_high), sums)
        acc += sums * by[None, :]
        w_at += 64
        x_at += 128
        scale_at += N
    return acc


@triton.jit
def _group_product(x, w, scale, columns, there, first, N, K, part,
                   ROWS: tl.constexpr, TILE: tl.constexpr, STEP: tl.constexpr, PARTS: tl.constexpr,
                   FULL: tl.constexpr, STORED: tl.constexpr):  # fmt: skip
    """Multiply by weights with a scale for each group of inputs; a loop step is a group."""
    groups = K // STEP
    begin = groups * part // PARTS
    WIDTH: tl.constexpr = STEP if STORED == 10 else STEP // 2  # bytes of a group
    r = first + tl.arange(0, ROWS)
    i = tl.arange(0, WIDTH)
    w_at = w + columns.to(tl.int64)[:, None] * (groups * WIDTH) + (begin * WIDTH + i)[None, :]
    x_at = x + r[:, None] * K + (begin * STEP + i)[None, :]
    scale_at = scale + begin * N + columns  # [groups, outputs]
    acc = tl.zeros((ROWS, TILE), tl.float32)
    for _ in range(groups * (part + 1) // PARTS - begin):
        of_w = tl.load(w_at) if FULL else tl.load(w_at, mask=there[:, None], other=0.0)
        of_x = tl.load(x_at)
        by = tl.load(scale_at) if FULL else tl.load(scale_at, mask=there, other=0.0)
        if STORED < 10:
            of_low, of_high = _nibbles(of_w, of_x.dtype)
            if STORED == 6:  # all of these are whole numbers from -15 to 15
                shift = tl.load(scale_at + groups * N, mask=there, other=0.0).to(of_x.dtype)[:, None]
                of_low, of_high = of_low - shift, of_high - shift
            sums = tl.dot(of_x, tl.trans(of_low))
            sums = tl.dot(tl.load(x_at + WIDTH), tl.trans(of_high), sums)
        else:
            sums = tl.dot(of_x, tl.trans(of_w.to(of_x.dtype)))
        acc += sums * by[None, :]
        w_at += WIDTH
        x_at += STEP
        scale_at += N
    return acc


@triton.jit
def _summed(x, COUNT: tl.constexpr):
    """Sum the COUNT non-negative numbers of each row, as integer multiples of a power of two: exact in any order.

    If one of them is not finite, the sum is NaN.
    """
    UNITS: tl.constexpr = (1 << 30) // COUNT  # in the power of two below the greatest number
    # compare bits: non-negative floats have the same order, infinity and NaN last; a float maximum would skip NaN
    power = tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1) & 0x7F800000
    inverse = (0x7F000000 - power).to(tl.float32, bitcast=True)
    whole = (x * inverse[:, None] * UNITS).to(tl.int32)
    summed = tl.sum(whole, 1).to(tl.float32) * (power.to(tl.float32, bitcast=True) / UNITS)
    return tl.where(power == 0x7F800000, float("nan"), summed)


@triton.jit
def _root(squares, first, K, eps, ROWS: tl.constexpr, NORMS: tl.constexpr):
    """Return the inverse root mean square of each row, from the sums of squares that the last kernel wrote."""
    r = first + tl.arange(0, ROWS)
    sums = tl.load(squares + r[:, None] * NORMS + tl.arange(0, NORMS)[None, :])
    return tl.rsqrt(_summed(sums, NORMS) / K + eps)[:, None]


@triton.jit
def activated(gate, up, ACTIVATION: tl.constexpr):
    """Return the activation of gates, times ups."""
    if ACTIVATION == 1:
        inner = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
        return gate * tl.sigmoid(2.0 * inner) * up
    if ACTIVATION == 2:
        gate = tl.minimum(gate, 7.0, propagate_nan=tl.PropagateNan.ALL)
        up = tl.clamp(up, -7.0, 7.0, propagate_nan=tl.PropagateNan.ALL)
        return gate * tl.sigmoid(1.702 * gate) * (up + 1.0)
    return gate * tl.sigmoid(gate) * up


@triton.jit
def _halves(acc, ROWS: tl.constexpr, TILE: tl.constexpr):
    """Return the first and the second half of a tile's columns."""
    return tl.split(tl.permute(tl.reshape(acc, (ROWS, 2, TILE // 2)), (0, 2, 1)))


@triton.jit(do_not_specialize=["rows"])
def embed(tokens, picks, counts, moves, table, norm, stream, scaled, squares, memory, rows, H, per, page_stride,
          WIDTH: tl.constexpr, NORMS: tl.constexpr, PIECE: tl.constexpr, SIDE: tl.constexpr, PAGE: tl.constexpr,
          DIM: tl.constexpr, EARLY: tl.constexpr, SCALE: tl.constexpr = None):  # fmt: skip
    """Write a row's embedding to the residual stream; a negative token stands for one that the last step sampled.

    Programs beyond the rows move KV slots after a verdict, each in one layer's keys or values.
    """
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
        if SCALE is not None:
            x = (x.to(tl.float32) * SCALE).to(x.dtype)
        wide = x.to(tl.float32)
        tl.store(stream + row * H + c, x, mask=c < H)
        by = tl.load(norm + c, mask=c < H, other=0.0).to(tl.float32)
        tl.store(scaled + row * H + c, (wide * by).to(scaled.dtype.element_ty), mask=c < H)
        n = tl.arange(0, NORMS)
        tl.store(squares + row * NORMS + n, tl.where(n == 0, tl.sum(wide * wide, 0), 0.0))
    else:
        e = tl.arange(0, PIECE)  # of one KV slot: [kv_heads, DIM]
        within = (row - rows).to(tl.int64) * (SIDE * PAGE) + e // DIM * (PAGE * DIM) + e % DIM
        for move in range(tl.load(counts)):  # in order: one move may free a KV slot that the next one fills
            source = tl.load(moves + move)
            target = tl.load(moves + per + move)
            from_page = (source // PAGE).to(tl.int64) * page_stride + source % PAGE * DIM
            to_page = (target // PAGE).to(tl.int64) * page_stride + target % PAGE * DIM
            held = tl.load(memory + from_page + within, mask=e < SIDE, other=0.0)
            tl.store(memory + to_page + within, held, mask=e < SIDE)


@triton.jit(do_not_specialize=["rows"])
def qkv(x, w, bias, scale, squares, head_norm, cos, sin, positions, slots, counts, queries, keys, values, page_stride,
        eps, rows, K,
        HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, PAGE: tl.constexpr, BIASED: tl.constexpr,
        NORMED: tl.constexpr, NORMS: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr, STEP: tl.constexpr,
        PARTS: tl.constexpr, SWAP: tl.constexpr, EVEN: tl.constexpr, FULL: tl.constexpr, STORED: tl.constexpr,
        BOXED: tl.constexpr, UNIT: tl.constexpr, JOINED: tl.constexpr, CHUNKS: tl.constexpr,
        EARLY: tl.constexpr):  # fmt: skip
    """Compute queries, keys and values of some rows, rotate them, and write keys and values to their KV slots.

    A tile has as many columns of the first half of a head as of the second.
    """
    if EARLY:
        gdc_wait()
    first = tl.program_id(0) * ROWS
    if CHUNKS:  # noqa: SIM102 – the outer one is decided by the compiler
        if first >= tl.load(counts + USED_COUNT):
            return
    tile = tl.program_id(1)
    head = tile * TILE // DIM
    begin = tile * TILE % DIM // 2
    i = tl.arange(0, TILE)
    j = begin + tl.arange(0, TILE // 2)
    columns = head * DIM + begin + i % (TILE // 2) + i // (TILE // 2) * (DIM // 2)
    r = first + tl.arange(0, ROWS)
    live = (r < rows)[:, None]
    root = _root(squares, first, K, eps, ROWS, NORMS)  # these loads start before the long loop
    angle = tl.load(positions + r, mask=r < rows, other=0)[:, None] * DIM + DIM // 2 + j[None, :]
    c = tl.load(cos + angle).to(tl.float32)
    s = tl.load(sin + angle).to(tl.float32)  # the second half of a table has the plain sine
    slot = tl.load(slots + r, mask=r < rows, other=0)
    offset = ((slot // PAGE).to(tl.int64) * page_stride + slot % PAGE * DIM)[:, None] + j[None, :]
    N = (HEADS + 2 * KV_HEADS) * DIM
    if BOXED:  # then a tile is a whole head
        acc = _boxed_product(x, w, first, head * DIM, K, 0, ROWS, TILE, STEP, 1, UNIT, SWAP) * root
        if EARLY:
            gdc_launch_dependents()
    else:
        acc = (
            _product(
                x, w, scale, columns, i < TILE, first, N, K, 0, ROWS, TILE, STEP, 1, SWAP, EVEN, FULL, STORED, EARLY
            )
            * root
        )
    if BIASED:
        acc += tl.load(bias + columns).to(tl.float32)[None, :]
    a, b = _halves(acc, ROWS, TILE)
    if head < HEADS + KV_HEADS:
        if NORMED:  # then a tile is a whole head
            own = tl.rsqrt((_summed(a * a, TILE // 2) + _summed(b * b, TILE // 2)) / DIM + eps)[:, None]
            a = a * own * tl.load(head_norm + head * DIM + j).to(tl.float32)[None, :]
            b = b * own * tl.load(head_norm + head * DIM + DIM // 2 + j).to(tl.float32)[None, :]
        a, b = a * c - b * s, b * c + a * s
    if head < HEADS:
        to = queries + r[:, None] * (HEADS * DIM) + head * DIM + j[None, :]
    elif head < HEADS + KV_HEADS:
        to = keys + (head - HEADS) * (PAGE * DIM) + offset
    else:
        to = values + (head - HEADS - KV_HEADS) * (PAGE * DIM) + offset
    tl.store(to, a.to(queries.dtype.element_ty), mask=live)
    tl.store(to + DIM // 2, b.to(queries.dtype.element_ty), mask=live)


@triton.jit(do_not_specialize=["rows"])
def added(x, w, bias, scale, stream, scaled, norm, squares, sums, arrived, counts, rows, N, K,
          BIASED: tl.constexpr, NORMS: tl.constexpr, NORM_TILE: tl.constexpr, ROWS: tl.constexpr,
          TILE: tl.constexpr, STEP: tl.constexpr, PARTS: tl.constexpr, SWAP: tl.constexpr, EVEN: tl.constexpr,
          FULL: tl.constexpr, STORED: tl.constexpr, BOXED: tl.constexpr, UNIT: tl.constexpr, JOINED: tl.constexpr,
          CHUNKS: tl.constexpr, EARLY: tl.constexpr, ONTO: tl.constexpr = True):  # fmt: skip
    """Add a product to the residual stream; without ONTO, store it in the stream's place.

    Of several split-K parts, the last program to arrive adds them in order; with JOINED, one program computes them one
    after the other. Squares are summed over NORM_TILE columns at a time, for any width of a tile.
    """
    if EARLY:
        gdc_wait()
    first = tl.program_id(0) * ROWS
    if CHUNKS:  # noqa: SIM102 – the outer one is decided by the compiler
        if first >= tl.load(counts + USED_COUNT):
            return
    tile = tl.program_id(1)
    columns = tile * TILE + tl.arange(0, TILE)
    there = columns < N
    r = first + tl.arange(0, ROWS)
    kept = (r < rows)[:, None] & there[None, :]
    at = r[:, None] * N + columns[None, :]
    if ONTO:
        before = tl.load(stream + at, mask=kept, other=0.0).to(tl.float32)
        by = tl.load(norm + columns, mask=there, other=0.0).to(tl.float32)
    part = tl.program_id(2)
    if BOXED:
        acc = _boxed_product(x, w, first, tile * TILE, K, part, ROWS, TILE, STEP, PARTS, UNIT, SWAP)
        if JOINED:
            for other in tl.static_range(1, PARTS):
                acc += _boxed_product(x, w, first, tile * TILE, K, other, ROWS, TILE, STEP, PARTS, UNIT, SWAP)
        if EARLY:
            gdc_launch_dependents()
    else:
        acc = _product(
            x, w, scale, columns, there, first, N, K, part, ROWS, TILE, STEP, PARTS, SWAP, EVEN, FULL, STORED, EARLY
        )
    done = True
    if (PARTS > 1) and (not JOINED):
        number = tl.program_id(0) * tl.num_programs(1) + tile
        o = tl.arange(0, ROWS)[:, None] * TILE + tl.arange(0, TILE)[None, :]
        tl.store(sums + (number * PARTS + part) * ROWS * TILE + o, acc)
        tl.debug_barrier()
        done = tl.atomic_add(arrived + number, 1, sem="acq_rel") == PARTS - 1
        if done:
            acc = tl.load(sums + number * PARTS * ROWS * TILE + o, cache_modifier=".cg")
            for other in tl.static_range(1, PARTS):
                acc += tl.load(sums + (number * PARTS + other) * ROWS * TILE + o, cache_modifier=".cg")
            tl.store(arrived + number, 0)
    if done:
        if BIASED:
            acc += tl.load(bias + columns, mask=there, other=0.0).to(tl.float32)[None, :]
        if ONTO:
            new = (before + acc).to(stream.dtype.element_ty)
            wide = tl.where(kept, new.to(tl.float32), 0.0)
            tl.store(stream + at, new, mask=kept)
            tl.store(scaled + at, (wide * by[None, :]).to(scaled.dtype.element_ty), mask=kept)
            SUMS: tl.constexpr = TILE // NORM_TILE
            if SUMS == 1:
                tl.store(squares + r * NORMS + tile, _summed(wide * wide, TILE), mask=r < rows)
            else:
                of_tiles = _summed(tl.reshape(wide * wide, (ROWS * SUMS, NORM_TILE)), NORM_TILE)
                n = tile * SUMS + tl.arange(0, SUMS)
                tl.store(
                    squares + r[:, None] * NORMS + n[None, :],
                    tl.reshape(of_tiles, (ROWS, SUMS)),
                    mask=(r < rows)[:, None] & (n < NORMS)[None, :],
                )
        else:
            tl.store(stream + at, acc.to(stream.dtype.element_ty), mask=kept)


@triton.jit(do_not_specialize=["rows"])
def gated(x, w, bias, scale, squares, out, counts, eps, rows, N, K,
          BIASED: tl.constexpr, NORMS: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr,
          STEP: tl.constexpr, PARTS: tl.constexpr, SWAP: tl.constexpr, EVEN: tl.constexpr, FULL: tl.constexpr,
          STORED: tl.constexpr, BOXED: tl.constexpr, UNIT: tl.constexpr, JOINED: tl.constexpr, CHUNKS: tl.constexpr,
          EARLY: tl.constexpr, ACTIVATION: tl.constexpr = 0):  # fmt: skip
    """Compute activation(gate)·up of some rows; a tile has as many columns of gate as of up."""
    if EARLY:
        gdc_wait()
    first = tl.program_id(0) * ROWS
    if CHUNKS:  # noqa: SIM102 – the outer one is decided by the compiler
        if first >= tl.load(counts + USED_COUNT):
            return
    i = tl.arange(0, TILE)
    within = tl.program_id(1) * (TILE // 2) + i % (TILE // 2)
    columns = within + i // (TILE // 2) * N
    root = _root(squares, first, K, eps, ROWS, NORMS)  # these loads start before the long loop
    c = tl.program_id(1) * (TILE // 2) + tl.arange(0, TILE // 2)
    if BOXED:
        column = tl.program_id(1) * (TILE // 2)
        gate, up = _boxed_pair(x, w, first, column, N + column, K, ROWS, TILE // 2, STEP, SWAP)
        if EARLY:
            gdc_launch_dependents()
        gate *= root
        up *= root
        if BIASED:
            gate += tl.load(bias + c, mask=c < N, other=0.0).to(tl.float32)[None, :]
            up += tl.load(bias + N + c, mask=c < N, other=0.0).to(tl.float32)[None, :]
    else:
        acc = (
            _product(
                x, w, scale, columns, within < N, first, 2 * N, K, 0, ROWS, TILE, STEP, 1, SWAP, EVEN, FULL, STORED,
                EARLY,
            )
            * root
        )  # fmt: skip
        if BIASED:
            acc += tl.load(bias + columns, mask=within < N, other=0.0).to(tl.float32)[None, :]
        gate, up = _halves(acc, ROWS, TILE)
    r = first + tl.arange(0, ROWS)
    tl.store(
        out + r[:, None] * N + c[None, :],
        activated(gate, up, ACTIVATION).to(out.dtype.element_ty),
        mask=(r < rows)[:, None] & (c < N)[None, :],
    )


@triton.jit(do_not_specialize=["rows"])
def scored(x, w, scale, squares, out, eps, rows, N, K,
           NORMS: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr, STEP: tl.constexpr, PARTS: tl.constexpr,
           SWAP: tl.constexpr, EVEN: tl.constexpr, FULL: tl.constexpr, STORED: tl.constexpr, BOXED: tl.constexpr,
           UNIT: tl.constexpr, JOINED: tl.constexpr, CHUNKS: tl.constexpr, EARLY: tl.constexpr, bias=None, counts=None,
           SOFTCAP: tl.constexpr = 0.0):  # fmt: skip
    """Compute the logits of some rows, or another product of normed rows, in the type of `out`."""
    if EARLY:
        gdc_wait()
    first = tl.program_id(0) * ROWS
    if CHUNKS:  # noqa: SIM102 – the outer one is decided by the compiler
        if first >= tl.load(counts + USED_COUNT):
            return
    columns = tl.program_id(1) * TILE + tl.arange(0, TILE)
    root = _root(squares, first, K, eps, ROWS, NORMS)  # these loads start before the long loop
    if BOXED:
        acc = _boxed_product(x, w, first, tl.program_id(1) * TILE, K, 0, ROWS, TILE, STEP, 1, UNIT, SWAP) * root
        if EARLY:
            gdc_launch_dependents()
    else:
        acc = (
            _product(
                x, w, scale, columns, columns < N, first, N, K, 0, ROWS, TILE, STEP, 1, SWAP, EVEN, FULL, STORED, EARLY
            )
            * root
        )
    if bias is not None:
        acc += tl.load(bias + columns, mask=columns < N, other=0.0).to(tl.float32)[None, :]
    if SOFTCAP > 0.0:
        acc = (1.0 - 2.0 / (tl.exp(acc * (2.0 / SOFTCAP)) + 1.0)) * SOFTCAP
    r = first + tl.arange(0, ROWS)
    tl.store(
        out + r[:, None].to(tl.int64) * N + columns[None, :], acc, mask=(r < rows)[:, None] & (columns < N)[None, :]
    )
