"""Rotary position embedding: tables of cosines and sines, and the rotation of queries and keys by them.

Owns the frequency variants (linear, llama3, yarn, divisors). Invariant: angles are computed in float32 in every
precision, as transformers does, so both agree to the last bit at any position.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from specbranch.models.families.rotary import Rope


def tables(
    rope: Rope, head_dim: int, positions: int, device: torch.device, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return cos and signed sin [positions, head_dim]; the first half of sin is negated, as `turn` needs it."""
    angles = torch.outer(torch.arange(positions, dtype=torch.float32), frequencies(rope, head_dim // rope.times))
    # Repeat only now: the last bits of torch's cosine of a number depend on the numbers beside it.
    cos, sin = ((part * rope.magnitude).repeat_interleave(rope.times, -1) for part in (angles.cos(), angles.sin()))
    return torch.cat((cos, cos), -1).to(device, dtype), torch.cat((-sin, sin), -1).to(device, dtype)


def turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate x [rows, heads, head_dim] by cos and signed sin [rows, 1, head_dim].

    Dimension i is paired with i + head_dim/2.
    """
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin)


def frequencies(rope: Rope, head_dim: int) -> Tensor:
    """Return the angle by which each pair of dimensions rotates from one position to the next [head_dim/2]."""
    plain = 1.0 / rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    if rope.kind == "linear":
        return plain / rope.factor
    if rope.kind == "llama3":
        return _llama3(rope, plain)
    if rope.kind == "yarn":
        return _yarn(rope, plain, head_dim)
    return plain / torch.tensor(rope.divisors) if rope.kind == "divisors" else plain


def _llama3(rope: Rope, plain: Tensor) -> Tensor:
    """Divide slow frequencies by the factor, keep fast ones, and interpolate between them (Llama 3.1)."""
    turns = rope.original_context / (2 * math.pi / plain)  # full turns over the original context
    fast = ((turns - rope.low_freq) / (rope.high_freq - rope.low_freq)).clamp(0, 1)
    return (1 - fast) * plain / rope.factor + fast * plain


def _yarn(rope: Rope, plain: Tensor, head_dim: int) -> Tensor:
    """Interpolate by dimension between plain and divided frequencies (arXiv 2309.00071, eq. 17-18)."""
    low, high = (_dimension_of(turns, rope, head_dim) for turns in (rope.beta_fast, rope.beta_slow))
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    slow = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low or 0.001)).clamp(0, 1)
    return plain / rope.factor * slow + plain * (1 - slow)


def _dimension_of(turns: float, rope: Rope, head_dim: int) -> float:
    """Return the pair of dimensions that makes `turns` full turns over the original context."""
    return head_dim * math.log(rope.original_context / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))
