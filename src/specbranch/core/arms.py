"""Arms of a planned method: rounds by what they did, with the tokens a second that the model expected and those seen.

Owns the names of the arms, the counters of each arm, and their arithmetic. Does not own what a round costs (`costs.py`)
or which round is planned (`way_choice.py`). Invariant: every round of a planned method counts for one arm, so rounds
and tokens add up to those of the request, its first token left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Self

from specbranch.core.trees import Tree

Shape = Literal["plain", "lookup", "chain", "small tree", "large tree"]
SMALL_TREE_ROWS = 8  # rows of the largest small tree, the root's included
WITH_OVERLAP = " + overlap"  # behind the shape: the draft worked during the verify


@dataclass(slots=True)
class ArmRound:
    """One round: what it verifies, and what the model expects of it."""

    tree: Tree
    verified: list[int]
    rows: int  # of the target forward, those of all sessions
    context: int  # tokens before it
    sessions: int = 1  # in the batch
    overlap: bool = False  # the draft works during the verify
    before: tuple[int, ...] = ()  # rows of each draft step before the verify
    during: tuple[int, ...] = ()  # the same during the verify
    draft_seconds: float = 0.0  # expected: steps before the verify, with their setup
    target_seconds: float = 0.0  # expected: the verify alone
    host_seconds: float = 0.0  # expected: outside both models

    @property
    def name(self) -> str:
        """The arm of this round."""
        return shape_of(self.tree, self.verified) + (WITH_OVERLAP if self.overlap else "")

    @property
    def expected_tokens(self) -> float:
        """The bonus token, and the reaches of the verified nodes."""
        return 1.0 + sum([self.tree.nodes[n].reach for n in self.verified])

    def expected_seconds(self, beside: float) -> float:
        """Return the seconds that the model expects; `beside`: those of a verify with draft steps beside it."""
        return self.draft_seconds + self.host_seconds + max(self.target_seconds, beside)


def shape_of(tree: Tree, verified: list[int]) -> Shape:
    """Return what the target verifies, as a word."""
    nodes = [tree.nodes[n] for n in verified]
    if not nodes:
        return "plain"
    if all(node.look and not node.said for node in nodes):
        return "lookup"
    if len({node.parent for node in nodes}) == len(nodes):
        return "chain"  # no two nodes share a parent
    return "small tree" if len(nodes) < SMALL_TREE_ROWS else "large tree"


@dataclass(slots=True)
class Arm:
    """The rounds of one arm, added up."""

    rounds: int = 0
    tokens: int = 0
    seconds: float = 0.0
    expected_tokens: float = 0.0
    expected_seconds: float = 0.0

    @property
    def expected(self) -> float | None:
        """Tokens a second that the model expected; None: it knew no costs."""
        return self.expected_tokens / self.expected_seconds if self.expected_seconds > 0.0 else None

    @property
    def seen(self) -> float | None:
        """Tokens a second."""
        return self.tokens / self.seconds if self.seconds > 0.0 else None

    def add(self, other: Arm) -> None:
        """Add the rounds of another."""
        self.rounds += other.rounds
        self.tokens += other.tokens
        self.seconds += other.seconds
        self.expected_tokens += other.expected_tokens
        self.expected_seconds += other.expected_seconds

    def to_dict(self) -> dict[str, Any]:
        """Return plain values."""
        return {
            "rounds": self.rounds,
            "tokens": self.tokens,
            "seconds": self.seconds,
            "expected_tokens": self.expected_tokens,
            "expected_seconds": self.expected_seconds,
            "expected": self.expected,
            "seen": self.seen,
        }


@dataclass(slots=True)
class Arms:
    """Arms by name, in the order in which they were first taken."""

    by_name: dict[str, Arm] = field(default_factory=dict)

    def add(self, name: str, rounds: Arm) -> None:
        """Count rounds of an arm."""
        self.by_name.setdefault(name, Arm()).add(rounds)

    def join(self, other: Arms) -> None:
        """Add the arms of another request."""
        for name, arm in other.by_name.items():
            self.add(name, arm)

    @property
    def tokens(self) -> dict[str, int]:
        """Tokens of each arm."""
        return {name: arm.tokens for name, arm in self.by_name.items()}

    def to_dict(self) -> dict[str, dict[str, Any]]:
        """Return plain values by name."""
        return {name: arm.to_dict() for name, arm in self.by_name.items()}

    @classmethod
    def from_dict(cls, values: Mapping[str, Mapping[str, Any]]) -> Self:
        """Build from what `to_dict` returns."""
        names = ("rounds", "tokens", "seconds", "expected_tokens", "expected_seconds")
        return cls({name: Arm(**{key: one[key] for key in names}) for name, one in values.items()})


def arm_sentence(name: str, values: Mapping[str, Any]) -> str:
    """Say what an arm brought, from what `Arm.to_dict` returns."""
    if values["expected"] is None or values["seen"] is None:
        return f"{name}: {values['rounds']} rounds"
    return f"{name}: {values['expected']:,.0f} expected, {values['seen']:,.0f} seen"
