"""The largest forwards that a method orders of each model, by its settings and the batch size.

Owns the bounds that a warm-up prepares for. Invariant: a bound is never below what workers order in ordinary rounds.
Only rare rounds exceed it: several sessions of a large batch that are resumed at once.
"""

from __future__ import annotations

from specbranch.config import SpeculativeConfig
from specbranch.core.market import MOST_LANES, MOST_ROWS
from specbranch.core.methods import PLAIN, Method
from specbranch.core.planner import PLANNED_ROWS
from specbranch.core.policy import width_of
from specbranch.core.rounds import GIVEN_AT_ONCE
from specbranch.core.slots import TAIL
from specbranch.core.warm_up import ForwardSizes
from specbranch.exec.worker import STRIDE, UNCOMPUTED_AT_ONCE


def target_sizes(method: Method, config: SpeculativeConfig, sessions: int, hidden: bool = False) -> ForwardSizes:
    """Return the sizes of the target's forwards; `hidden`: they return hidden states."""
    each = _verified_rows(method, config)
    # a resumed session computes its last tokens again, in the forward that verifies or before
    alone = max(each - 1 + UNCOMPUTED_AT_ONCE, STRIDE, GIVEN_AT_ONCE)
    return _sizes(method, config, sessions, alone, each, hidden=hidden)


def draft_sizes(method: Method, config: SpeculativeConfig, sessions: int) -> ForwardSizes:
    """Return the sizes of the draft's forwards."""
    if method.plans(config):
        each = UNCOMPUTED_AT_ONCE  # texts before a tree; steps of trees are smaller
        return _sizes(method, config, sessions, max(each, STRIDE), each, MOST_LANES, candidates=True, trees=True)
    pending = config.num_speculative_tokens
    # all branches of a session, or the chain that is in flight and the two tokens around it
    each = max(pending + 2, width_of(config))
    return _sizes(method, config, sessions, max(pending + UNCOMPUTED_AT_ONCE, each, STRIDE), each, candidates=True)


def _verified_rows(method: Method, config: SpeculativeConfig) -> int:
    """Return how many rows of one session a verify has, its last committed token included."""
    if method.plans(config):
        return PLANNED_ROWS
    if method.guesses:
        width = config.lookahead_window + config.lookahead_candidates
        return 1 + width * (config.lookahead_ngram - 1) + config.lookahead_ngram
    return 1 if config.method in (None, PLAIN) else 1 + config.num_speculative_tokens


def _sizes(
    method: Method,
    config: SpeculativeConfig,
    sessions: int,
    alone: int,
    each: int,
    shared: int = 0,
    *,
    candidates: bool = False,
    trees: bool = False,
    hidden: bool = False,
) -> ForwardSizes:
    """Put the bounds together; `shared`: rows that two sessions alone may fill."""
    alone, each = min(alone, TAIL), min(each, TAIL)  # all rows are nodes of a tail first
    many = max(sessions * each + UNCOMPUTED_AT_ONCE - 1, shared) if sessions > 1 else 0
    together = min(max(alone, many), MOST_ROWS)
    return ForwardSizes(config.method or PLAIN, sessions, alone, together, candidates, trees, hidden)
