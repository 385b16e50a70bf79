"""Acceptance: which drafted tokens the target accepts, and its next token, by the two lossless rules.

Owns the decisions, on chains and trees alike, given the target's tokens (match) or distributions (ratio); no arrays, no
model. Invariant: emitted tokens follow the target's distribution alone, whatever was drafted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from specbranch.core.noise import Uniform
from specbranch.core.orders import Sparse, Verify
from specbranch.core.runner import Head, Law
from specbranch.core.slots import ROOT

Outcome = tuple[tuple[int, ...], int]  # accepted nodes, then the bonus token


@dataclass(frozen=True, slots=True)
class _Candidate:
    token: int
    q: Sparse | None
    node: int | None  # None: a sampled head, which was not computed


def accept_match(order: Verify, chosen: Sequence[int]) -> Outcome:
    """Accept children that carry the target's token, from the root down.

    `chosen[i + 1]` is the target's token after node i, `chosen[0]` that after the context.
    """
    path: list[int] = []
    here = ROOT
    while True:
        token = chosen[here + 1]
        child = _carrier(order, here, token)
        if child is None:
            return tuple(path), token
        path.append(child)
        here = child


def accept_ratio(order: Verify, law: Callable[[int], Law], uniform: Uniform, head: Head | None = None) -> Outcome:
    """Accept by rejection sampling (Leviathan et al. 2023), recursive over siblings, from the root down.

    `law(i)` is p after node i, ROOT after the context.
    """
    path: list[int] = []
    here = ROOT
    while True:
        taken, token = _decide(_candidates(order, here, head), law(here), uniform, len(path))
        if taken is None:
            return tuple(path), token
        path.append(taken)
        here = taken


def _carrier(order: Verify, parent: int, token: int) -> int | None:
    nodes = range(parent + 1, len(order.tokens))  # children come after their parent
    return next((n for n in nodes if order.parent(n) == parent and order.tokens[n] == token), None)


def _candidates(order: Verify, parent: int, head: Head | None) -> list[_Candidate]:
    nodes = [n for n in range(parent + 1, len(order.tokens)) if order.parent(n) == parent]
    found = [_Candidate(order.tokens[n], order.q[n] if order.q else None, n) for n in nodes]
    if head is not None and head.node == parent:
        found.append(_Candidate(head.token, head.q, None))
    return found


def _decide(candidates: list[_Candidate], law: Law, uniform: Uniform, depth: int) -> tuple[int | None, int]:
    """Return the accepted child, or None, and the token that was decided on."""
    sampled = [c for c in candidates if c.q is not None]
    for attempt, candidate in enumerate(sampled):
        assert candidate.q is not None
        # u*q < p rather than u < p/q: q may be tiny
        if uniform(depth, "accept", attempt) * candidate.q.prob(candidate.token) < law.prob(candidate.token):
            return candidate.node, candidate.token
        law = law.residual(candidate.q)
    token = law.draw(uniform(depth, "residual" if sampled else "own", 0))
    carrier = next((c for c in candidates if c.q is None and c.token == token), None)
    return (carrier.node if carrier else None), token
