"""Latency per token by formula: the paper's theorem, and a model of what the methods really do.

Owns the formulas. A draft step is the unit of time; a target forward takes c of them. `alpha` is the probability that a
drafted token is accepted, independently at each position. `hit` is the probability that the target's token after a
whole chain is among the heads of its branches. This file is pure arithmetic; `toy_runs` measures what the real methods
are charged.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

from specbranch.errors import BadParameter

TRIED = range(1, 65)  # lengths


def accepted_length(alpha: float, length: int) -> float:
    """Return the mean number of accepted tokens of a chain: α + α² + … + α^length."""
    _check_alpha(alpha)
    return float(length) if alpha == 1.0 else alpha * (1.0 - alpha**length) / (1.0 - alpha)


def theorem_latency(alpha: float, c: float, gamma: int) -> float:
    """Return the latency of Theorem 1 of the paper (arXiv 2506.01979), which counts no correction token."""
    _check(alpha, c, gamma)
    tokens = (1.0 + alpha**gamma) * accepted_length(alpha, gamma)
    return 2.0 * max(gamma, c) / tokens if tokens else math.inf


def serial_latency(alpha: float, c: float, gamma: int) -> float:
    """Return the latency of serial speculative decoding: γ draft steps and a forward yield the accepted tokens and
    one more."""
    _check(alpha, c, gamma)
    return (c + gamma) / (accepted_length(alpha, gamma) + 1.0)


def pearl_latency(alpha: float, c: float, gamma: int, hit: float | None = None) -> float:
    """Return the latency of PEARL, which drafts γ tokens during each forward; `hit` is α unless it has several
    branches.

    One of the γ tokens is the head, so γ − 1 become pending. After a rollback nothing is pending: the target emits one
    token per forward until a hit.
    """
    hit = alpha if hit is None else hit
    _check(alpha, c, gamma, hit)
    if hit == 0.0:
        return max(c, gamma)  # nothing drafted is ever used
    whole = alpha ** (gamma - 1) * hit
    empty = (1.0 - whole) / hit  # forwards with nothing pending, for each with a chain
    return max(c, gamma) * (1.0 + empty) / (accepted_length(alpha, gamma - 1) + 1.0 + empty)


def two_stage_latency(alpha: float, c: float, length: int, hit: float | None = None) -> float:
    """Return the latency of the paper's SpecBranch.

    During each forward it drafts a head and `length` tokens, which become the next chain. After a rollback a serial
    stage drafts the chain first.
    """
    hit = alpha if hit is None else hit
    _check(alpha, c, length, hit)
    serial = (1.0 - alpha**length * hit) * length
    return (max(c, length + 1) + serial) / (accepted_length(alpha, length) + 1.0)


def best_length(latency: Callable[[int], float], lengths: Iterable[int] = TRIED) -> int:
    """Return the length with the least latency; of several the shortest."""
    return min(lengths, key=latency)


def _check_alpha(alpha: float) -> None:
    if not 0.0 <= alpha <= 1.0:
        raise BadParameter(
            f"α is {alpha!r}; expected a chance from 0 to 1: the share of drafted tokens that are accepted."
        )


def _check(alpha: float, c: float, length: int, hit: float = 0.0) -> None:
    _check_alpha(alpha)
    if not 0.0 <= hit <= 1.0:
        raise BadParameter(f"The hit rate is {hit!r}; expected a chance from 0 to 1.")
    if not 0.0 < c < math.inf:
        raise BadParameter(f"c is {c!r}; expected a number above 0: the cost of a target forward in draft steps.")
    if length < 1:
        raise BadParameter(f"The draft length is {length!r}; expected at least 1 token.")
