"""The Triton kernels of a step that Llama's layer does not need: heads turned apart, and changes added row by row.

Owns the order of their sums. Invariant: a program computes one row, or one head of a row, and its compiled code does
not depend on the number of rows. So a row's bits do not depend on other rows.
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-def"
# What Triton compiles has no Python types but constexpr.

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def turn(raw, head_norm, cos, sin, positions, slots, queries, keys, values, page_stride, eps,
         HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, HALF: tl.constexpr, PAGE: tl.constexpr,
         EARLY: tl.constexpr):  # fmt: skip
    """Norm and rotate one head of a row, or take a value as it is; write keys and values to their KV slots.

    It does what `qkv` does at the end, for heads that no tile of a product holds.
    """
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()
    row = tl.program_id(0)
    head = tl.program_id(1)
    j = tl.arange(0, HALF)
    there = j < DIM // 2
    at = row.to(tl.int64) * ((HEADS + 2 * KV_HEADS) * DIM) + head * DIM + j
    a = tl.load(raw + at, mask=there, other=0.0).to(tl.float32)
    b = tl.load(raw + at + DIM // 2, mask=there, other=0.0).to(tl.float32)
    if head < HEADS + KV_HEADS:
        if head_norm is not None:
            own = tl.rsqrt((tl.sum(a * a, 0) + tl.sum(b * b, 0)) / DIM + eps)
            a = a * own * tl.load(head_norm + head * DIM + j, mask=there, other=0.0).to(tl.float32)
            b = b * own * tl.load(head_norm + head * DIM + DIM // 2 + j, mask=there, other=0.0).to(tl.float32)
        angle = tl.load(positions + row) * DIM + DIM // 2 + j
        c = tl.load(cos + angle, mask=there, other=0.0).to(tl.float32)
        s = tl.load(sin + angle, mask=there, other=0.0).to(tl.float32)  # the second half has the plain sine
        a, b = a * c - b * s, b * c + a * s
    slot = tl.load(slots + row)
    offset = (slot // PAGE).to(tl.int64) * page_stride + slot % PAGE * DIM + j
    if head < HEADS:
        to = queries + row * (HEADS * DIM) + head * DIM + j
    elif head < HEADS + KV_HEADS:
        to = keys + (head - HEADS) * (PAGE * DIM) + offset
    else:
        to = values + (head - HEADS - KV_HEADS) * (PAGE * DIM) + offset
    tl.store(to, a.to(queries.dtype.element_ty), mask=there)
    tl.store(to + DIM // 2, b.to(queries.dtype.element_ty), mask=there)


@triton.jit
def settle(changes, ids, stream, scaled, after, norm, squares, eps, H,
           ACTIVE: tl.constexpr, WIDTH: tl.constexpr, NORMS: tl.constexpr, EARLY: tl.constexpr):  # fmt: skip
    """Add a change to one row of the residual stream, through the norm `after` if there is one.

    The change of a layer with experts is the sum of ACTIVE outputs, in the order of expert numbers; a row of padding
    has none (`ids` below 0).
    """
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()
    row = tl.program_id(0)
    c = tl.arange(0, WIDTH)
    there = c < H
    change = tl.zeros((WIDTH,), tl.float32)
    if ids is None:
        change = tl.load(changes + row.to(tl.int64) * H + c, mask=there, other=0.0)
    else:
        for place in range(ACTIVE):
            pair = row * ACTIVE + place
            live = there & (c * 0 <= tl.load(ids + pair))
            change += tl.load(changes + pair.to(tl.int64) * H + c, mask=live, other=0.0)
    if after is not None:
        root = tl.rsqrt(tl.sum(change * change, 0) / H + eps)
        change = change * root * tl.load(after + c, mask=there, other=0.0).to(tl.float32)
    before = tl.load(stream + row * H + c, mask=there, other=0.0).to(tl.float32)
    new = (before + change).to(stream.dtype.element_ty)
    wide = new.to(tl.float32)
    by = tl.load(norm + c, mask=there, other=0.0).to(tl.float32)
    tl.store(stream + row * H + c, new, mask=there)
    tl.store(scaled + row * H + c, (wide * by).to(scaled.dtype.element_ty), mask=there)
    n = tl.arange(0, NORMS)
    tl.store(squares + row * NORMS + n, tl.where(n == 0, tl.sum(wide * wide, 0), 0.0))
