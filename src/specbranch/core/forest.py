"""The values of a forest: rounds in which a device grows and verifies the draft trees of a whole batch by itself.

In such a round the device commits what the target accepted, looks up, lets the draft extend the trees, and chooses the
rows of the next verify. The host launches the next round before it has read this one. Owns only values. Does not own
what a round does (`core/forest_plan.py`), who takes part (`core/forest_loop.py`), or how a device works
(`models/gpu/forest_rounds.py`). Invariant: a session's tokens are those of its own orders.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol, runtime_checkable

from specbranch.core.trees import NO_TREE, Growth, Tree
from specbranch.errors import SpecBranchError

if TYPE_CHECKING:  # costs are learned from orders, which contain wishes
    from specbranch.core.costs import Costs

FOREST_VARIABLE = "SPECBRANCH_FOREST"  # 0: no device goes from verify to verify by itself; 1: also a CPU, for tests
FEW_UNCOMPUTED = 8  # committed tokens that draft steps of such a round compute on the way
NgramSizes = tuple[int, int]  # tokens of the longest and of the shortest n-gram
ForestEnd = Literal["stop", "length", "not finite"]


def wants_forests(is_gpu: bool) -> bool:
    """True if such rounds are wanted on a device: on every GPU, unless the user says otherwise."""
    return os.environ.get(FOREST_VARIABLE, "1" if is_gpu else "0") != "0"


@dataclass(frozen=True, slots=True)
class ForestWish:
    """What a session's method wants of such a round."""

    growth: Growth  # bounds and chances of its tree; the batch's plan sets the prices
    right: float  # how often the target chooses the draft's first candidate in this text
    covered: float  # and one of the draft's candidates
    looked: tuple[float, ...]  # how often lookup is right, by depth; empty: there is none
    drafts: bool  # the draft may work for it
    looks: NgramSizes | None  # lookup may work for it
    costs: Costs
    pay_probe: Callable[[float], bool]  # spends credit for a probe of so many seconds; False: there is too little


@dataclass(frozen=True, slots=True)
class ForestPlan:
    """One round for all sessions."""

    steps: int  # of the draft, in which the trees grow
    more: int  # further steps, at most; each is launched if the device has nodes for it that pay
    rows: int  # of the verify: one of each session, the others go to the likeliest nodes
    growth: Growth | None = None  # how trees grow, the same for all; None: they do not
    looks: NgramSizes | None = None
    gain: float = 1.0  # expected tokens a second, by those of plain decoding
    lead: int = 0  # further steps that are launched before the device has said if the one before them had nodes


@dataclass(frozen=True, slots=True)
class ForestOrders:
    """One round of the forest, for all sessions that take part."""

    texts: Mapping[int, Sequence[int]]  # the sessions' tokens; all but the last are computed
    limits: Mapping[int, int]  # tokens that each may have at most
    going_on: Collection[int]  # sessions that decode further behind this round, unless it ends them
    plan: ForestPlan
    drafting: Collection[int]  # sessions for which the draft may work
    looking: Collection[int]  # and lookup
    meanwhile: Callable[[], None]  # work of the host while the device computes


@dataclass(frozen=True, slots=True)
class ForestReport:
    """What a round brought to one session."""

    tokens: tuple[int, ...]
    tree: Tree = NO_TREE  # as it was verified: the nodes that had rows are marked as sent
    ended: ForestEnd | None = None  # why the device has ended it


@dataclass(frozen=True, slots=True)
class ForestRound:
    """A round of a session of which its method has not heard yet."""

    tree: Tree
    verified: list[int]  # nodes that had rows
    path: list[int]  # nodes that were accepted
    bonus: int | None  # the node of the last token; None: the tree has none, or it is on the path
    taken: int  # tokens of it that were emitted
    seconds: float  # between the ends of the round before and of this one


@dataclass(frozen=True, slots=True)
class ForestStep:
    """A round that a device computes, while the next one waits behind it."""

    reports: Callable[[], dict[int, ForestReport]]  # waits for the device; sessions without a row have none
    rows: int  # of its verify, at most
    ahead: bool  # it was launched before it was asked for
    launched: frozenset[int]  # sessions that take part in the next one
    failed: Mapping[int, SpecBranchError] = field(default_factory=dict)  # sessions that found no memory
    steps: Sequence[int] = ()  # rows of the draft steps that ended between the reports before and these


@runtime_checkable
class GrowsForests(Protocol):
    """A Runner that makes such rounds, with a draft's Runner on the same device or without one."""

    def joins_forest(self, seq: int, length: int) -> bool:
        """True if the device decodes the token behind `length` tokens by itself, in such a round, and all later
        ones."""
        ...

    def grows_with(self, draft: object | None) -> bool:
        """True if it can make such rounds with this draft."""
        ...

    def decode_forest(self, orders: ForestOrders, draft: object | None) -> ForestStep | None:
        """Make a round, and launch the next one; None: it has to be ordered otherwise.

        Sessions that have no row in the round that was launched ahead get one in the next, and no token now.
        """
        ...

    def finish_growing(self) -> None:
        """Launch what a round in flight still wants of the draft: the draft may do something else afterwards."""
        ...

    def leave_forest(self) -> None:
        """Forget what is launched; both models hold what they had committed before."""
        ...
