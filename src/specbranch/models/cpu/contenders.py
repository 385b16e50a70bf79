"""The tokens that can still win once noise is added: a scan of the whole vocabulary as machine code.

Owns the LLVM text and its launch. `sampling/noise_rows.py` computes the noise, only for the few tokens found here.
Invariant: no token that wins or ties is left out. The hash is exact, and every rounding favours the token.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np

from specbranch.core.noise import exponential, mix
from specbranch.models.cpu.machine_code import CannotCompile, compile_text
from specbranch.models.cpu.text_writer import number

CONTENDER_BLOCK = 256  # tokens tested together; each is tested by itself only if one of them can win
FEW_CONTENDERS = 16  # up to this many, plain Python compares faster than numpy
NOISE_SLACK = 1e-3  # far above the error of float32: noise is at most 23, its error at most 1e-5
RELATIVE_SLACK = 2.0**-20  # the same for scores so large that adding noise rounds the noise

_Scan = ctypes.CFUNCTYPE(
    ctypes.c_int64,
    ctypes.c_void_p,
    ctypes.c_int64,
    ctypes.c_uint32,
    ctypes.c_uint32,
    ctypes.c_float,
    ctypes.c_void_p,
)
Scores = np.ndarray[Any, np.dtype[np.float32]]
Ids = np.ndarray[Any, np.dtype[np.int64]]


def contenders(scores: Scores, top: int, key: tuple[int, int]) -> Ids | None:
    """Return the tokens, ascending, that may have the greatest score once the noise under `key` is added.

    `scores`: contiguous. `top`: the token of the greatest score, which must be finite. None if there is no compiler.
    """
    loaded = _loaded()
    if loaded is None:
        return None
    scan, _ = loaded
    found = np.empty(len(scores), dtype=np.int64)
    least = _least(_noisy(scores, top, key))
    found = found[: scan(scores.ctypes.data, len(scores), *key, least, found.ctypes.data)]
    return found if len(found) > FEW_CONTENDERS else _closest(scores, found, key)


def _closest(scores: Scores, ids: Ids, key: tuple[int, int]) -> Ids:
    """Return those of a few tokens that are the best, or so close to it that float32 must decide."""
    noisy = [_noisy(scores, token, key) for token in ids.tolist()]
    return ids[np.array(noisy) >= _least(max(noisy))]


def _noisy(scores: Scores, token: int, key: tuple[int, int]) -> float:
    return float(scores[token]) - math.log(exponential(mix(token, key)))


def _least(best: float) -> float:
    """Return the score that a token needs to win against `best`, with slack for float32 rounding."""
    return best - NOISE_SLACK - RELATIVE_SLACK * abs(best)


@cache
def _loaded() -> tuple[Callable[..., int], Any] | None:
    """Return the compiled scan and the engine that owns its code; None if there is no compiler."""
    try:
        engine = compile_text(_source(), optimise=True)
    except CannotCompile:
        return None
    return _Scan(engine.get_function_address("scan")), engine


def _source() -> str:
    return "\n".join((_PERMUTE, _can_win(), _SCAN))


# `core.noise.mix` is two of these permutations, each after a key.
_PERMUTE = f"""define internal i32 @permute(i32 %x) alwaysinline {{
  %a.high = lshr i32 %x, 16
  %a = xor i32 %x, %a.high
  %b = mul i32 %a, {0x7FEB352D}
  %b.high = lshr i32 %b, 15
  %c = xor i32 %b, %b.high
  %d = mul i32 %c, {0x846CA68B - 2**32}
  %d.high = lshr i32 %d, 16
  %e = xor i32 %d, %d.high
  ret i32 %e
}}"""


def _can_win() -> str:
    """Write the test of one token.

    With v = (bits + ½)·2⁻³² the noise is −log(−log1p(−v)) ≤ −log v. A float's bits as an integer approximate
    2²³·(127 + log2) from below, so they bound log v from below without a logarithm.
    """
    return f"""define internal i1 @can_win(ptr %scores, i64 %at, i32 %first, i32 %second, float %least) alwaysinline {{
  %id = trunc i64 %at to i32
  %under.first = xor i32 %id, %first
  %once = call i32 @permute(i32 %under.first)
  %under.second = xor i32 %once, %second
  %bits = call i32 @permute(i32 %under.second)
  %half = lshr i32 %bits, 1
  %v = sitofp i32 %half to float
  %v.bits = bitcast float %v to i32
  %log = sitofp i32 %v.bits to float
  %scaled = fmul float %log, {number(-math.log(2) * 2.0**-23)}
  %noise = fadd float %scaled, {number(math.log(2) * (127 + 31))}
  %score.p = getelementptr float, ptr %scores, i64 %at
  %score = load float, ptr %score.p
  %sum = fadd float %score, %noise
  %can = fcmp oge float %sum, %least
  ret i1 %can
}}"""


_SCAN = f"""
declare i64 @llvm.smin.i64(i64, i64)
define i64 @scan(ptr %scores, i64 %many, i32 %first, i32 %second, float %least, ptr %found) {{
begin:
  br label %block
block:
  %start = phi i64 [0, %begin], [%stop, %none], [%stop, %listed]
  %count = phi i64 [0, %begin], [%count, %none], [%count.after, %listed]
  %more = icmp slt i64 %start, %many
  br i1 %more, label %look, label %end
look:
  %full = add i64 %start, {CONTENDER_BLOCK}
  %stop = call i64 @llvm.smin.i64(i64 %full, i64 %many)
  br label %each
each:
  %at = phi i64 [%start, %look], [%at.next, %each]
  %any = phi i32 [0, %look], [%any.next, %each]
  %can = call i1 @can_win(ptr %scores, i64 %at, i32 %first, i32 %second, float %least)
  %can.wide = zext i1 %can to i32
  %any.next = or i32 %any, %can.wide
  %at.next = add nuw nsw i64 %at, 1
  %at.more = icmp slt i64 %at.next, %stop
  br i1 %at.more, label %each, label %looked
looked:
  %some = icmp ne i32 %any.next, 0
  br i1 %some, label %list, label %none
none:
  br label %block
list:
  %one = phi i64 [%start, %looked], [%one.next, %list]
  %count.now = phi i64 [%count, %looked], [%count.after, %list]
  %to = getelementptr i64, ptr %found, i64 %count.now
  store i64 %one, ptr %to
  %wins = call i1 @can_win(ptr %scores, i64 %one, i32 %first, i32 %second, float %least)
  %wins.wide = zext i1 %wins to i64
  %count.after = add i64 %count.now, %wins.wide
  %one.next = add nuw nsw i64 %one, 1
  %one.more = icmp slt i64 %one.next, %stop
  br i1 %one.more, label %list, label %listed
listed:
  br label %block
end:
  ret i64 %count
}}"""
