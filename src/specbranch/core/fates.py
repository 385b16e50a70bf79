"""What becomes of drafted tokens: of a chain, of branches, of a tree. Statistics, traces and timelines all use this.

Owns the names, `FATE_NAMES`, and which token gets which. Invariant: every settled token is counted once, so the fates
of drafted tokens add up to their number.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

from specbranch.core.slots import ROOT
from specbranch.core.trees import Tree

Fate = Literal["accepted", "rejected", "siblings", "dropped", "unused", "losing"]  # the fields of `Fates`
FATES: tuple[Fate, ...] = get_args(Fate)  # in the order in which they are drawn
THROWN_AWAY: tuple[Fate, ...] = ("rejected", "siblings", "losing", "dropped")  # in the order in which they are reported


class FateName(NamedTuple):
    """What tokens of one fate are called where users see them."""

    traced: str  # in a round of a trace
    counted: str  # in a request's statistics; thrown-away tokens are under "rollback" there
    phrase: str  # behind their number, in a sentence
    reason: str = ""  # why they were thrown away


FATE_NAMES: Mapping[Fate, FateName] = {
    "accepted": FateName("used", "accepted", "in the answer"),
    "rejected": FateName("rolled_back", "rejected", "rolled back", "rejected by the target"),
    "siblings": FateName("beside", "tree_siblings", "beside the main path", "alternatives verified beside"),
    "dropped": FateName("dropped", "dropped_by_length", "dropped by the length rule", "dropped by the length rule"),
    "unused": FateName("unused", "unused", "never judged"),
    "losing": FateName("lost", "losing_branches", "on lost branches", "on losing branches"),
}


@dataclass(slots=True)
class Fates:
    """Drafted tokens by what became of them."""

    accepted: int = 0  # emitted, branch heads included
    rejected: int = 0  # on the main path: the chain a plain method would have sent
    siblings: int = 0  # verified beside the main path, and not accepted
    dropped: int = 0  # by the length rule
    unused: int = 0  # still in flight, or beyond the end of the request
    losing: int = 0  # on branches that lost

    @property
    def total(self) -> int:
        """How many tokens are settled."""
        return self.accepted + self.rejected + self.siblings + self.dropped + self.unused + self.losing

    def of(self, fate: Fate) -> int:
        """Return how many tokens met one fate."""
        count: int = getattr(self, fate)
        return count

    def add(self, more: Fates) -> None:
        """Add tokens that were counted elsewhere."""
        self.accepted += more.accepted
        self.rejected += more.rejected
        self.siblings += more.siblings
        self.dropped += more.dropped
        self.unused += more.unused
        self.losing += more.losing

    def add_chain(self, sent: int, good: int, ended: bool) -> None:
        """Count a verified chain of which `good` tokens were emitted.

        If the request `ended` there, the rest was not judged.
        """
        self.accepted += good
        if ended:
            self.unused += sent - good
        else:
            self.rejected += sent - good

    def add_branches(self, survivor: int, others: int, hit: bool, ended: bool) -> None:
        """Count the tokens of branches drafted during a verify.

        The survivor is the branch that was hit: its head is emitted, its rest is the next chain. Without a hit it is
        the first branch, which a plain method would have drafted; it is rejected. If the request `ended` inside the
        chain, no branch was decided.
        """
        if ended:
            self.unused += survivor + others
            return
        self.losing += others
        if hit:
            self.accepted += 1
        else:
            self.rejected += survivor


def summed(fates: Iterable[Fates]) -> Fates:
    """Return the sum of fates."""
    whole = Fates()
    for one in fates:
        whole.add(one)
    return whole


class Settled(NamedTuple):
    """What a verdict decided of the tokens that one round added to a tree, except the accepted ones."""

    round: int
    rejected: int = 0  # on the main path
    siblings: int = 0  # verified beside it
    lost: int = 0  # computed by the draft, never verified, and dropped
    left: int = 0  # computed, and below the bonus token: still to be judged
    head: int = 0  # the bonus token, if the draft had computed it

    def fates(self, ended: bool) -> Fates:
        """Return these as fates.

        Tokens that are left wait for the next verdict; if the request ended, none was judged.
        """
        if ended:
            return Fates(unused=sum(self[1:]))
        return Fates(rejected=self.rejected, siblings=self.siblings, losing=self.lost)


def tree_standings(
    tree: Tree, sent: Sequence[int], main_path: Sequence[int], path: Sequence[int], hit: int | None
) -> tuple[list[int], list[int], list[int], list[int], list[int]]:
    """Return the nodes of a tree by what a verdict decided of them, in the order of `Settled`'s fields.

    `main_path` is the main path of the `sent` nodes, `path` was accepted, and `hit` is the node of the bonus token.
    """
    nodes, inside, below = tree.nodes, {*main_path, *path}, {hit}
    lost, left = list[int](), list[int]()
    for n, node in enumerate(nodes):
        if node.scored and not node.sent:
            if node.parent in below:  # the parents of computed nodes are computed
                below.add(n)
                left.append(n)
            elif n != hit:
                lost.append(n)
    head = [hit] if hit is not None and nodes[hit].scored and not nodes[hit].sent else []
    return [n for n in main_path if n not in path], [n for n in sent if n not in inside], lost, left, head


def branch_points(tree: Tree) -> set[int]:
    """Return where branches begin: at the root or a verified node that has a child that is not verified."""
    nodes = tree.nodes
    parents = {node.parent for node in nodes if not node.sent}
    return {parent for parent in parents if parent == ROOT or nodes[parent].sent}
