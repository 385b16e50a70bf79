"""The policies by name.

Owns the table; how a policy plans is in `policy`, `hrad_policy` and `planner`. Invariant: it has every name that
`config.PolicyName` allows.
"""

from __future__ import annotations

from specbranch.config import HeadKind, PolicyName, SpeculativeConfig
from specbranch.core.hrad_policy import LAST, PAPER
from specbranch.core.policy import Confidence, Entropy, Fixed, Policy, PolicyKind, until_of, width_of


def make_policy(config: SpeculativeConfig, kind: PolicyName, heads: HeadKind) -> Policy:
    """Build the policy a configuration asks for, the method's own `kind` if it asks for none."""
    make = POLICIES[config.policy or kind].make
    if make is None:
        raise ValueError(f"policy {config.policy or kind!r} grows trees and plans no chains")
    return make(config, config.heads or heads)


def _fixed(config: SpeculativeConfig, heads: HeadKind) -> Policy:
    return Fixed(config.num_speculative_tokens, heads, until_of(config))


def _confidence(config: SpeculativeConfig, heads: HeadKind) -> Policy:
    return Confidence(config.num_speculative_tokens, config.stop_below, width_of(config), heads, until_of(config))


def _oracle(config: SpeculativeConfig, heads: HeadKind) -> Policy:
    """Make the oracle: its draft's confidence is the truth, 1 for a right token and 0 for a wrong one."""
    return Confidence(config.num_speculative_tokens, 0.5, width_of(config), heads, until_of(config))


def _entropy(config: SpeculativeConfig, heads: HeadKind) -> Policy:
    return Entropy(config.num_speculative_tokens, heads=heads, until=until_of(config))


POLICIES: dict[PolicyName, PolicyKind] = {
    "fixed": PolicyKind(_fixed),
    "confidence": PolicyKind(_confidence),
    "entropy": PolicyKind(_entropy),
    "last": LAST,
    "paper": PAPER,
    "oracle": PolicyKind(_oracle, needs_branches=True),
    "planner": PolicyKind(None, ("overlap", "trees", "branches", "lookup", "learning")),
}
