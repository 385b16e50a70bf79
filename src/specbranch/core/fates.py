"""What becomes of drafted tokens: of a chain, of branches beside it, of a tree. Statistics, traces and timelines all
go by this.

Owns the words, `FATE_NAMES`, and who gets which. Invariant: a token that is settled is counted once, so the fates of
what was drafted add up to its tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

from specbranch.core.slots import ROOT
from specbranch.core.trees import Tree

Fate = Literal["accepted", "rejected", "siblings", "dropped", "unused", "losing"]  # the fields of `Fates`
FATES: tuple[Fate, ...] = get_args(Fate)  # in the order in which they are drawn
THROWN_AWAY: tuple[Fate, ...] = ("rejected", "siblings", "losing", "dropped")  # in the order in which they are told


class FateName(NamedTuple):
    """What tokens of one fate are called where users read of them."""

    traced: str  # in a round of a trace
    counted: str  # in a request's statistics; what is thrown away stands under "rollback" there
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
    siblings: int = 0  # verified beside the main path, and not taken
    dropped: int = 0  # by the length rule
    unused: int = 0  # still in flight, or beyond the end of the request
    losing: int = 0  # on branches that lost

    @property
    def total(self) -> int:
        """How many tokens were settled."""
        return self.accepted + self.rejected + self.siblings + self.dropped + self.unused + self.losing

    def of(self, fate: Fate) -> int:
        """How many tokens met one fate."""
        count: int = getattr(self, fate)
        return count

    def add(self, more: Fates) -> None:
        """Count tokens that were counted elsewhere."""
        self.accepted += more.accepted
        self.rejected += more.rejected
        self.siblings += more.siblings
        self.dropped += more.dropped
        self.unused += more.unused
        self.losing += more.losing

    def add_chain(self, sent: int, good: int, ended: bool) -> None:
        """Count a verified chain of which `good` tokens were emitted; if the request `ended` there, the others were not
        judged."""
        self.accepted += good
        if ended:
            self.unused += sent - good
        else:
            self.rejected += sent - good

    def add_branches(self, survivor: int, others: int, hit: bool, ended: bool) -> None:
        """Count the tokens of branches drafted beside a verification.

        The survivor is the branch that was hit: its head is emitted, the rest of it will be the next chain. Without a
        hit it is the first branch, which a plain method would have drafted, and is rejected. Where the request `ended`
        inside the chain, no branch was ever decided.
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
    """Add fates up."""
    whole = Fates()
    for one in fates:
        whole.add(one)
    return whole


class Settled(NamedTuple):
    """What a verdict decided of the tokens that a tree was given in one round, but for those the target took."""

    round: int
    rejected: int = 0  # on the main path
    siblings: int = 0  # verified beside it
    lost: int = 0  # read, never sent, and left behind
    left: int = 0  # read, and below the token that was foreseen: still to be judged
    head: int = 0  # that token, if it was read, too

    def fates(self, ended: bool) -> Fates:
        """What that comes to: what is left waits for the next verdict; if the request ended, nothing was judged."""
        if ended:
            return Fates(unused=sum(self[1:]))
        return Fates(rejected=self.rejected, siblings=self.siblings, losing=self.lost)


def tree_standings(
    tree: Tree, sent: Sequence[int], main_path: Sequence[int], path: Sequence[int], hit: int | None
) -> tuple[list[int], list[int], list[int], list[int], list[int]]:
    """Return the nodes of a tree by what a verdict decided of them, in the order of `Settled`'s fields.

    `main_path` is the main path of what was `sent`, `path` was accepted, and then the target said the token of `hit`.
    """
    nodes, inside, below = tree.nodes, {*main_path, *path}, {hit}
    lost, left = list[int](), list[int]()
    for n, node in enumerate(nodes):
        if node.fed and not node.sent:
            if node.parent in below:  # what was read hangs on nothing but what was read
                below.add(n)
                left.append(n)
            elif n != hit:
                lost.append(n)
    head = [hit] if hit is not None and nodes[hit].fed and not nodes[hit].sent else []
    return [n for n in main_path if n not in path], [n for n in sent if n not in inside], lost, left, head


def branch_points(tree: Tree) -> set[int]:
    """Return where branches begin: the root or nodes that were sent, with something behind them that was not."""
    nodes = tree.nodes
    parents = {node.parent for node in nodes if not node.sent}
    return {parent for parent in parents if parent == ROOT or nodes[parent].sent}
