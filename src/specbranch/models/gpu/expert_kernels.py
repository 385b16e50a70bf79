"""The Triton kernels of a mixture of experts: the router's choice, rows sorted by expert, and products in tiles.

A *pair* is a row and one of its chosen experts; pair row·ACTIVE + j is the row's expert with the j-th lowest number. A
tile has up to ROWS pairs of one expert, whose weights alone it reads. Invariants: of equal scores the lowest expert is
chosen. A pair's product has the same order of sums in every place of every tile, and `family_kernels.settle` adds a
row's outputs in the order of expert numbers. So a row's bits do not depend on who shares its experts. The bucket alone
decides the grids; programs without work return at once.
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-def"
# What Triton compiles has no Python types but constexpr.

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from specbranch.models.gpu.layout import SPREAD_COUNT as _SPREAD_COUNT
from specbranch.models.gpu.product_kernels import _halves, _product, _root, activated

SPREAD_COUNT = tl.constexpr(_SPREAD_COUNT)
LOG2E = tl.constexpr(1.4426950408889634)
LEAST = tl.constexpr(-3.0e38)  # stands for a score that is no number: the row's result is none either


@triton.jit
def route(logits, slots, counts, ids, weights, spare,
          COUNT: tl.constexpr, ACTIVE: tl.constexpr, WIDTH: tl.constexpr, PLACES: tl.constexpr,
          ALL_FIRST: tl.constexpr, TO_ONE: tl.constexpr, EARLY: tl.constexpr):  # fmt: skip
    """Choose the experts of one row, and their weights.

    A row of padding, which writes to a KV slot from `spare` on, chooses none (-1). In a step that is timed it has some,
    dealt out over all experts, so that as many weights are read as with real rows.
    """
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()
    row = tl.program_id(0)
    if tl.load(slots + row) < spare:
        e = tl.arange(0, WIDTH)
        there = e < COUNT
        scores = tl.load(logits + row * COUNT + e, mask=there, other=float("-inf")).to(tl.float32)
        odds = tl.exp2((scores - tl.max(scores, 0)) * LOG2E)
        if ALL_FIRST:
            odds = odds / tl.sum(odds, 0)
            scores = odds
        left = tl.where(scores == scores, scores, LEAST)
        left = tl.where(there, left, float("-inf"))
        taken = tl.zeros((WIDTH,), tl.int32)
        for _ in range(ACTIVE):
            best = tl.min(tl.where(left == tl.max(left, 0), e, WIDTH), 0)
            taken = tl.where(e == best, 1, taken)
            left = tl.where(e == best, float("-inf"), left)
        if (not ALL_FIRST) or TO_ONE:
            odds = odds / tl.sum(tl.where(taken == 1, odds, 0.0), 0)
        to = row * ACTIVE + tl.cumsum(taken, 0) - 1
        tl.store(ids + to, e, mask=taken == 1)
        tl.store(weights + to, odds, mask=taken == 1)
    else:
        j = tl.arange(0, PLACES)
        spread = tl.load(counts + SPREAD_COUNT)
        some = (row * 40503 % 65536 + j) % COUNT
        tl.store(ids + row * ACTIVE + j, tl.where(spread == 0, -1, some), mask=j < ACTIVE)
        tl.store(weights + row * ACTIVE + j, j * 0.0, mask=j < ACTIVE)


@triton.jit(do_not_specialize=["pairs"])
def plan(ids, order, tiles, used, pairs,
         COUNT: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
         EARLY: tl.constexpr):  # fmt: skip
    """Write the pairs of one expert behind those of all lower experts, and its tiles behind theirs.

    A tile is: the expert, where its pairs begin, how many there are. WIDTH is greater than COUNT.
    """
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()
    expert = tl.program_id(0)
    e = tl.arange(0, WIDTH)
    p = tl.arange(0, BLOCK)
    counted = tl.zeros((WIDTH,), tl.int32)
    for begin in range(0, pairs, BLOCK):
        found = tl.load(ids + begin + p, mask=begin + p < pairs, other=-1)
        counted += tl.histogram(tl.where(found < 0, COUNT, found), WIDTH)
    lower = e < expert
    mine = tl.sum(tl.where(e == expert, counted, 0), 0)
    tile = tl.sum(tl.where(lower, (counted + ROWS - 1) // ROWS, 0), 0)
    start = tl.sum(tl.where(lower, counted, 0), 0)
    if expert == COUNT - 1:
        tl.store(used, tile + (mine + ROWS - 1) // ROWS)
    if mine > 0:
        at = start
        for begin in range(0, pairs, BLOCK):
            found = tl.load(ids + begin + p, mask=begin + p < pairs, other=-1)
            match = (found == expert).to(tl.int32)
            tl.store(order + at + tl.cumsum(match, 0) - 1, begin + p, mask=match == 1)
            at += tl.sum(match, 0)
        for number in range((mine + ROWS - 1) // ROWS):
            to = tiles + 3 * (tile + number)
            tl.store(to, expert)
            tl.store(to + 1, start + number * ROWS)
            tl.store(to + 2, tl.minimum(mine - number * ROWS, ROWS))


@triton.jit
def _tile(order, tiles, tile, ROWS: tl.constexpr):
    """Return the expert of a tile, its pairs, and which of them exist; the others stand for pair 0."""
    i = tl.arange(0, ROWS)
    live = i < tl.load(tiles + 3 * tile + 2)
    pair = tl.load(order + tl.load(tiles + 3 * tile + 1) + i, mask=live, other=0)
    return tl.load(tiles + 3 * tile).to(tl.int64), pair, live


@triton.jit
def gated_by_expert(x, w, bias, scale, squares, order, tiles, used, out, eps, N, K, per_weight, per_scale,
                    ACTIVE: tl.constexpr, ACTIVATION: tl.constexpr, NORMS: tl.constexpr, ROWS: tl.constexpr,
                    TILE: tl.constexpr, STEP: tl.constexpr, SWAP: tl.constexpr, EVEN: tl.constexpr,
                    FULL: tl.constexpr, STORED: tl.constexpr, EARLY: tl.constexpr):  # fmt: skip
    """Compute activation(gate)·up of the pairs of a tile, as `product_kernels.gated` does of rows.

    `per_weight`, `per_scale`: numbers of an expert's weights and scales.
    """
    if EARLY:
        gdc_wait()
    tile = tl.program_id(0)
    if tile >= tl.load(used):
        return
    expert, pair, live = _tile(order, tiles, tile, ROWS)
    i = tl.arange(0, TILE)
    within = tl.program_id(1) * (TILE // 2) + i % (TILE // 2)
    columns = within + i // (TILE // 2) * N
    first = pair // ACTIVE - tl.arange(0, ROWS)  # the products add a row's place in the tile
    root = _root(squares, first, K, eps, ROWS, NORMS)
    acc = (
        _product(
            x, w + expert * per_weight, scale + expert * per_scale, columns, within < N, first, 2 * N, K, 0, ROWS, TILE,
            STEP, 1, SWAP, EVEN, FULL, STORED, EARLY,
        )
        * root
    )  # fmt: skip
    if bias is not None:
        acc += tl.load(bias + expert * (2 * N) + columns, mask=within < N, other=0.0).to(tl.float32)[None, :]
    gate, up = _halves(acc, ROWS, TILE)
    c = tl.program_id(1) * (TILE // 2) + tl.arange(0, TILE // 2)
    tl.store(
        out + pair[:, None].to(tl.int64) * N + c[None, :],
        activated(gate, up, ACTIVATION).to(out.dtype.element_ty),
        mask=live[:, None] & (c < N)[None, :],
    )


@triton.jit
def down_by_expert(x, w, bias, scale, weights, order, tiles, used, out, N, K, per_weight, per_scale,
                   ROWS: tl.constexpr, TILE: tl.constexpr, STEP: tl.constexpr, SWAP: tl.constexpr, EVEN: tl.constexpr,
                   FULL: tl.constexpr, STORED: tl.constexpr, EARLY: tl.constexpr):  # fmt: skip
    """Compute the outputs of the pairs of a tile, times their weights, in float32."""
    if EARLY:
        gdc_wait()
    tile = tl.program_id(0)
    if tile >= tl.load(used):
        return
    expert, pair, live = _tile(order, tiles, tile, ROWS)
    columns = tl.program_id(1) * TILE + tl.arange(0, TILE)
    there = columns < N
    by = tl.load(weights + pair)[:, None]
    acc = _product(
        x, w + expert * per_weight, scale + expert * per_scale, columns, there, pair - tl.arange(0, ROWS), N, K, 0,
        ROWS, TILE, STEP, 1, SWAP, EVEN, FULL, STORED, EARLY,
    )  # fmt: skip
    if bias is not None:
        acc += tl.load(bias + expert * N + columns, mask=there, other=0.0).to(tl.float32)[None, :]
    tl.store(out + pair[:, None].to(tl.int64) * N + columns[None, :], acc * by, mask=live[:, None] & there[None, :])
