"""Rotary position embedding as a value: its base, and how frequencies are scaled, read from a configuration or written.

Owns the variants and the refusal of unknown ones. Does not own the angles (`forward/rope.py`). Invariant: a `Rope` that
exists can be computed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

from specbranch.errors import UnsupportedArchitecture
from specbranch.file_values import MOST_CONTEXT_TOKENS, FileValues

RopeKind = Literal["default", "linear", "llama3", "yarn", "divisors"]
USE_TRANSFORMERS = "Load it with runner='transformers'."
THETAS = (2.0, 1e15)  # bases of rotary positions
FACTORS = (1e-6, 1e6)  # range of scaling factors


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary position embedding: the base θ, and how its frequencies are scaled to longer contexts."""

    theta: float = 10000.0
    kind: RopeKind = "default"
    factor: float = 1.0
    original_context: int = 0  # llama3, yarn: context length before scaling
    low_freq: float = 1.0  # llama3: below this many turns per original context `factor` divides a frequency
    high_freq: float = 4.0  # llama3: above this many turns a frequency stays as it is
    beta_fast: float = 32.0  # yarn: the same two bounds
    beta_slow: float = 1.0
    truncate: bool = True  # yarn: bounds rounded outwards to whole dimensions
    magnitude: float = 1.0  # yarn, divisors: factor of cos and sin
    # one for each frequency: llama3 scaling in GGUF, longrope
    divisors: tuple[float, ...] = ()
    times: int = 1  # how often each frequency is repeated, for heads that are this many times larger


def rope_from_config(values: FileValues, context: int, name: str, theta: float = 10000.0) -> Rope:
    """Read `rope_parameters`, or the older `rope_theta` and `rope_scaling`; `theta`: the family's own base."""
    scaling = values.group("rope_scaling")
    scaling = scaling if scaling.values else values.group("rope_parameters")
    kind = scaling.text("rope_type", scaling.text("type", "default"))
    theta = scaling.number("rope_theta", values.number("rope_theta", theta, *THETAS), *THETAS)
    return scaled_rope(kind, theta, scaling, context, name)


def scaled_rope(kind: str, theta: float, scaling: FileValues, context: int, name: str) -> Rope:
    """Read the scaling of a known kind; refuse any other."""
    original = scaling.count("original_max_position_embeddings", context, most=MOST_CONTEXT_TOKENS)
    if kind == "default":
        return Rope(theta)
    if kind == "linear":
        return Rope(theta, "linear", scaling.number("factor", None, *FACTORS))
    if kind == "llama3":
        low, high = (scaling.number(f"{end}_freq_factor", None, *FACTORS) for end in ("low", "high"))
        if low >= high:
            scaling.refuse("high_freq_factor", f"more than low_freq_factor, {low}")
        return Rope(theta, "llama3", scaling.number("factor", None, *FACTORS), original, low, high)
    if kind == "yarn":
        return _yarn(theta, scaling, context, original)
    raise UnsupportedArchitecture(
        f"{name} uses {kind!r} rotary scaling; the native decoder has default, linear, llama3 and yarn. "
        f"{USE_TRANSFORMERS}"
    )


def rope_settings(rope: Rope) -> dict[str, Any]:
    """Return what a configuration says of it."""
    values: dict[str, Any] = {"rope_type": rope.kind, "rope_theta": rope.theta}
    if rope.kind == "divisors":
        return {**values, "divisors": list(rope.divisors)}
    if rope.kind in ("linear", "llama3", "yarn"):
        values["factor"] = rope.factor
    if rope.kind in ("llama3", "yarn"):
        values["original_max_position_embeddings"] = rope.original_context
    if rope.kind == "llama3":
        values |= {"low_freq_factor": rope.low_freq, "high_freq_factor": rope.high_freq}
    if rope.kind == "yarn":
        values |= {
            "beta_fast": rope.beta_fast,
            "beta_slow": rope.beta_slow,
            "truncate": rope.truncate,
            "attention_factor": rope.magnitude,
        }
    return values


def _yarn(theta: float, scaling: FileValues, context: int, original: int) -> Rope:
    factor = scaling.number("factor", context / original, *FACTORS)
    scale, over = (scaling.number(key, 0.0, 0.0, FACTORS[1]) for key in ("mscale", "mscale_all_dim"))
    usual = _mscale(factor, scale) / _mscale(factor, over) if scale and over else usual_magnitude(factor)
    return Rope(
        theta,
        "yarn",
        factor,
        original,
        beta_fast=scaling.number("beta_fast", 32.0, *FACTORS),
        beta_slow=scaling.number("beta_slow", 1.0, *FACTORS),
        truncate=scaling.flag("truncate", True),
        magnitude=scaling.number("attention_factor", usual, *FACTORS),
    )


def usual_magnitude(factor: float) -> float:
    """Return YaRN's factor of cos and sin if no other one is set."""
    return _mscale(factor, 1.0)


def _mscale(factor: float, weight: float) -> float:
    # YaRN, arXiv 2309.00071, eq. 22: longer contexts flatten the softmax, this sharpens it again.
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0
