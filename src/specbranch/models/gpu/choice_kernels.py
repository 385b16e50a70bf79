"""The Triton kernels of sampling: the best entries of every row, with noise, and the rows that the tokens lead to.

Owns the order of every sum. Invariant: a row's result depends on its logits, its temperature and its noise only. The
module needs Triton, so only `choice.py` imports it, when it uses the kernels. For EARLY see `product_kernels.py`.
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-def"
# What Triton compiles has no Python types but constexpr.

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from specbranch.core.runner import ENTROPY_WEIGHT as _ENTROPY_WEIGHT
from specbranch.models.gpu.layout import BEFORE as _BEFORE
from specbranch.models.gpu.layout import BOUND as _BOUND
from specbranch.models.gpu.layout import CONFIDENCE as _CONFIDENCE

BEFORE, BOUND, CONFIDENCE = tl.constexpr(_BEFORE), tl.constexpr(_BOUND), tl.constexpr(_CONFIDENCE)
ENTROPY_WEIGHT = tl.constexpr(_ENTROPY_WEIGHT)
LOG2_E = tl.constexpr(1.4426950408889634)
NOWHERE = tl.constexpr(2147483647)


@triton.jit
def _permuted(x):
    """Apply the 32-bit permutation of `core.noise`."""
    x ^= x >> 16
    x *= 0x7FEB352D
    x ^= x >> 15
    x *= 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def _gumbel(ids, first, second):
    """Return −log E of token ids under two keys; E = −log1p(−v), v = (bits + ½)·2⁻³²; see `noise_rows.gumbel`."""
    bits = _permuted(_permuted(ids.to(tl.uint32) ^ first.to(tl.uint32)) ^ second.to(tl.uint32))
    upper = bits >= 0x80000000
    small = (tl.where(upper, bits ^ 0xFFFFFFFF, bits).to(tl.float32) + 0.5) * (2.0**-32)  # min(v, 1 − v), never 0
    rest = 1.0 - small
    lost = rest - 1.0  # −small as rounded in `rest`; the rounding error is divided out below
    log1p = tl.where(lost == 0.0, -small, tl.log(rest) * (small / tl.where(lost == 0.0, 1.0, -lost)))
    return -tl.log(-tl.where(upper, tl.log(small), log1p))


@triton.jit
def _best(values, columns, out_values, out_columns, COUNT: tl.constexpr):
    """Write the COUNT greatest values in order, among equals the lowest column first; returns the greatest."""
    greatest = tl.max(values, 0)
    for rank in tl.static_range(COUNT):
        top = tl.max(values, 0)
        at = tl.min(tl.where(values == top, columns, NOWHERE), 0)
        tl.store(out_values + rank, top)
        tl.store(out_columns + rank, at)
        values = tl.where(columns == at, float("-inf"), values)
    return greatest


@triton.jit
def _bound(sums, part, held):
    """Return AdaEDL's bound on a row's acceptance, from the sums of its tiles; see `sample.entropy_bound`."""
    peaks = tl.load(sums + part, mask=held, other=float("-inf"))
    top = tl.max(peaks, 0)
    lower = tl.maximum(peaks - top, -60.0)
    share = tl.where(peaks == float("-inf"), 0.0, tl.exp2(lower * LOG2_E))
    weights = tl.load(sums + 2 * part, mask=held, other=0.0)
    total = tl.sum(share * weights, 0)
    moment = tl.sum(share * (tl.load(sums + 3 * part, mask=held, other=0.0) + weights * lower), 0)
    entropy = tl.log(total) - moment / total
    return tl.maximum(1.0 - tl.sqrt(ENTROPY_WEIGHT * tl.maximum(entropy, 0.0)), 0.0)


@triton.jit(do_not_specialize=["width", "stride", "per"])
def scan(logits, ids, choosing, tops, columns, sums, width, stride, per,
         TILE: tl.constexpr, COUNT: tl.constexpr, LISTED: tl.constexpr, EARLY: tl.constexpr):  # fmt: skip
    """Find the best entries of one tile of one row, and the sum of its exponentials.

    With several entries it also writes the parts of the entropy without noise: the maximum, and sums of exponentials.
    """
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()
    row = tl.program_id(0)
    tile = tl.program_id(1)
    at = (row * tl.num_programs(1) + tile).to(tl.int64)
    j = tile * TILE + tl.arange(0, TILE)
    score = tl.load(logits + row.to(tl.int64) * stride + j, mask=j < width, other=float("-inf")).to(tl.float32)
    score = score / tl.load(choosing + row).to(tl.float32, bitcast=True)
    if COUNT > 1:
        part = tl.num_programs(0) * tl.num_programs(1)
        peak = tl.max(score, 0)
        below = tl.maximum(score - tl.where(peak == float("-inf"), 0.0, peak), -60.0)
        weight = tl.where(score == float("-inf"), 0.0, tl.exp2(below * LOG2_E))
        tl.store(sums + part + at, peak)
        tl.store(sums + 2 * part + at, tl.sum(weight, 0))
        tl.store(sums + 3 * part + at, tl.sum(weight * below, 0))
    if tl.load(choosing + 3 * per + row) != 0:
        token = tl.load(ids + j, mask=j < width, other=0) if LISTED else j
        score += _gumbel(token, tl.load(choosing + per + row), tl.load(choosing + 2 * per + row))
    top = _best(score, j, tops + at * COUNT, columns + at * COUNT, COUNT)
    tl.store(sums + at, tl.sum(tl.exp2((score - tl.where(top == float("-inf"), 0.0, top)) * LOG2_E), 0))


@triton.jit(do_not_specialize=["width", "per", "tiles", "across"])
def settle(ids, choosing, counts, tops, columns, sums, picks, results, arrived, width, per, tiles, across,
           ENTRIES: tl.constexpr, COUNT: tl.constexpr, TILES: tl.constexpr, ROWS: tl.constexpr, LISTED: tl.constexpr,
           EARLY: tl.constexpr):  # fmt: skip
    """Write one row's token, confidence and best entries; the last program to arrive finds the reached rows."""
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()
    row = tl.program_id(0)
    result = results + row * across
    e = tl.arange(0, ENTRIES)
    held = e < tiles * COUNT
    score = tl.load(tops + row * tiles * COUNT + e, mask=held, other=float("-inf"))
    candidates = tl.load(columns + row * tiles * COUNT + e, mask=held, other=NOWHERE)
    best = tl.max(score, 0)
    t = tl.arange(0, TILES)
    own = tl.load(tops + (row * tiles + t) * COUNT, mask=t < tiles, other=float("-inf"))
    part = tl.load(sums + row * tiles + t, mask=t < tiles, other=0.0)
    tl.store(result + CONFIDENCE, 1.0 / tl.sum(part * tl.exp2((own - best) * LOG2_E), 0))
    if COUNT > 1:
        tl.store(result + BOUND, _bound(sums + row * tiles + t, tl.num_programs(0) * tiles, t < tiles))
    for rank in tl.static_range(COUNT):
        top = tl.max(score, 0)
        at = tl.min(tl.where(score == top, candidates, NOWHERE), 0)
        column = tl.minimum(at, width - 1)  # any token, if all scores are NaN
        token = tl.load(ids + column).to(tl.int32) if LISTED else column
        if rank == 0:
            tl.store(picks + row, token)
            tl.store(result, token.to(tl.float32))
        tl.store(result + BEFORE + rank, token.to(tl.float32))
        tl.store(result + BEFORE + COUNT + rank, top)
        score = tl.where(candidates == at, float("-inf"), score)
    tl.debug_barrier()
    if tl.atomic_add(arrived, 1, sem="acq_rel") == tl.num_programs(0) - 1:
        tl.store(arrived, 0)
        r = tl.arange(0, ROWS)
        live = r < tl.num_programs(0)
        way = r
        reached = live
        for _ in range(tl.load(counts + 1) + 1):
            above = tl.load(choosing + 4 * per + way, mask=live, other=0)
            said = tl.load(choosing + 5 * per + way, mask=live, other=0)
            reached = reached & ((said == -1) | (said == tl.load(picks + above, cache_modifier=".cg")))
            way = above
        tl.store(results + r * across + 1, reached.to(tl.float32), mask=live)
