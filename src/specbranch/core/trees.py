"""A draft tree and its expected gain: which nodes to verify, which to extend, what remains after a verdict.

Owns the values and the arithmetic; nothing here calls a model. A node's *chance* is the probability that the target
accepts it after its parent; its *reach* is the probability that the target accepts the whole path to it. Invariant: a
parent comes before its children, and has at least their reach.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, log
from operator import itemgetter
from typing import NamedTuple

from specbranch.core.slots import ROOT

# borders between the classes of a draft's probability
EDGES = (0.01, 0.03, 0.06, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98, 0.995)
CLASSES = len(EDGES) + 1


@dataclass(frozen=True, slots=True)
class Chances:
    """Acceptance rates of a draft's first candidate, and of its others, by class of the draft's probability."""

    first: tuple[float, ...]
    other: tuple[float, ...]
    looked: tuple[float, ...]  # of looked-up tokens that are none of the draft's candidates, by `look_class`
    # added to the log-odds of a candidate that lookup proposes, too, by `look_class`
    shifts: tuple[float, ...]

    def of(self, rank: int, said: float) -> float:
        """Return the chance of a candidate."""
        return (self.other if rank else self.first)[class_of(said)]


# where a looked-up token stands with the draft: position not scored; first candidate; another one; none of them
NOT_SCORED, FIRST, OTHER, ABSENT = range(4)
STANDINGS = 4
MATCHES = (2, 3, 4, 5, 9, 17)  # borders between the classes of match length, in tokens
LOOKS = len(MATCHES) + 1


def match_class(words: int) -> int:
    """Return the class of a match of so many tokens, 1 to LOOKS."""
    return bisect_right(MATCHES, words) + 1


def look_class(look: int, standing: int) -> int:
    """Return the class of a looked-up token: by the class of its match, and its standing with the draft."""
    return (look - 1) * STANDINGS + standing


def standing(node: Node, parent_scored: bool) -> int:
    """Return a looked-up token's standing with the draft."""
    if node.said > 0.0:
        return OTHER if node.rank else FIRST
    return ABSENT if parent_scored else NOT_SCORED


def class_of(said: float) -> int:
    """Return the class of a draft's probability."""
    return bisect_right(EDGES, said)


class Node(NamedTuple):
    """A drafted token."""

    token: int
    parent: int
    chance: float
    reach: float
    depth: int  # 1 for a child of the root
    rank: int = 0  # among the draft's candidates for its position
    said: float = 0.0  # the draft's own probability; 0: it is not from the draft
    look: int = 0  # the class of its match, if lookup proposed it; 0: lookup did not
    scored: bool = False  # the draft has computed it, so that its children are known
    sent: bool = False  # the target verifies it in this round


@dataclass(frozen=True, slots=True)
class Tree:
    """Nodes by number.

    `root_scored`: the draft has scored the root, so its candidates after the committed tokens are known.
    """

    nodes: tuple[Node, ...] = ()
    root_scored: bool = False
    steps: tuple[int, ...] = ()  # rows of each draft step of the last Grow order

    def __len__(self) -> int:
        return len(self.nodes)

    def child(self, parent: int, token: int) -> int | None:
        """Return the child of a node that carries a token."""
        return next((n for n, node in enumerate(self.nodes) if node.parent == parent and node.token == token), None)

    def children(self, parent: int) -> list[int]:
        """Return the children of a node."""
        return [n for n, node in enumerate(self.nodes) if node.parent == parent]

    def main_path(self, among: Sequence[int] | None = None) -> list[int]:
        """Return the likeliest path from the root: at every node its likeliest child."""
        nodes, best = self.nodes, dict[int, int]()
        for n in range(len(nodes)) if among is None else sorted(among):
            before = best.get(nodes[n].parent)
            if before is None or nodes[n].reach > nodes[before].reach:
                best[nodes[n].parent] = n
        path: list[int] = []
        while (below := best.get(path[-1] if path else ROOT)) is not None:
            path.append(below)
        return path


NO_TREE = Tree()


@dataclass(frozen=True, slots=True)
class Growth:
    """How to extend a tree: at each step the draft computes the nodes with the highest gain, as many as pay.

    All times are priced in tokens. `step[w - 1]` is the price of a step over w nodes. While the target works
    (`free_time`) the draft's time costs nothing. But a step then takes `draft_delay` more, and delays the target by
    `target_delay`. Computing a node is worth `worth` times its gain, see `GrowingTree.open_nodes`.
    """

    step: tuple[float, ...]
    chances: Chances
    free_time: float = 0.0
    target_delay: float = 0.0
    draft_delay: float = 0.0
    worth: float = 0.8
    children: int = 4
    least: float = 0.01  # reach below which a candidate is not added
    rows: int = 64  # most nodes of a verify; while the target waits, only these are worth computing
    row_price: float = 0.0  # price of verifying a node, in tokens
    lanes: int = 16  # most nodes of one tree in a step
    deepest: int = 32  # up to this depth every device gives a token the bits of a single step
    most: int = 120  # most computed nodes of one tree: about what a tail holds

    def pace(self, spent: float, gains: Sequence[float]) -> int:
        """Return how many of the best nodes to compute next, after `spent` time; 0: none pays."""
        return self.best_step(spent, gains)[0]

    def best_step(self, spent: float, gains: Sequence[float]) -> tuple[int, float]:
        """Return the best number of nodes, and its profit in tokens."""
        best, best_profit, total = 0, 0.0, 0.0
        for width, gain in enumerate(gains[: min(self.lanes, len(self.step))], start=1):
            if gain < self.least:
                break
            total += max(self.worth * gain - self.row_price, 0.0)
            profit = total - self.price(spent, width)
            if profit > best_profit:
                best, best_profit = width, profit
        return best, best_profit

    def price(self, spent: float, width: int) -> float:
        """Return the price of a step beyond the free time."""
        end = spent + self.seconds(spent, width)
        if spent >= self.free_time:
            return end - spent
        return max(end - max(self.free_time + self.target_delay, spent), 0.0) + self.target_delay

    def seconds(self, spent: float, width: int) -> float:
        """Return the time of a step, priced in tokens."""
        return self.step[min(width, len(self.step)) - 1] + (self.draft_delay if spent < self.free_time else 0.0)


def paces(growths: Sequence[Growth], spent: float, reaches: Sequence[Sequence[float]]) -> list[int]:
    """Return how many nodes of each of several trees to compute next; the trees share the price of a step."""
    if len(growths) == 1:
        return [growths[0].pace(spent, reaches[0])]
    shared = max(growths, key=lambda growth: len(growth.step))
    gains = [
        (max(growth.worth * reach - growth.row_price, 0.0), at)
        for at, growth in enumerate(growths)
        for reach in reaches[at][: growth.lanes]
        if reach >= growth.least
    ]
    gains.sort(key=itemgetter(0), reverse=True)
    best, best_gain, total = 0, 0.0, 0.0
    for width, (gain, _) in enumerate(gains[: len(shared.step)], start=1):
        total += gain
        profit = total - shared.price(spent, width)
        if profit > best_gain:
            best, best_gain = width, profit
    counts = [0] * len(growths)
    for _, at in gains[:best]:
        counts[at] += 1
    return counts


def shifted(chance: float, shift: float) -> float:
    """Return a chance with something added to its log-odds."""
    odds = chance / max(1.0 - chance, 1e-6) * exp(shift)
    return odds / (1.0 + odds)


def log_odds(chance: float) -> float:
    """Return the logarithm of the odds; certainty counts as 99 to 1."""
    chance = min(max(chance, 0.01), 0.99)
    return log(chance / (1.0 - chance))


class GrowingTree:
    """A tree that is being extended."""

    def __init__(self, tree: Tree) -> None:
        self.nodes = list(tree.nodes)
        self.root_scored = tree.root_scored
        self.steps: list[int] = []

    def open_nodes(self, growth: Growth) -> list[tuple[int, float]]:
        """Return the nodes that the draft may compute next, with their gains, best first.

        The gain is the probability that the target reaches the node and then chooses a token that no child of it has
        yet.
        """
        nodes = self.nodes
        scored = sum([node.scored for node in nodes])
        if scored >= growth.most:
            return []
        bar = self._last_row(growth) if growth.free_time == 0.0 else 0.0
        open_ends = [
            n
            for n, node in enumerate(nodes)
            if not node.scored
            and node.depth < growth.deepest
            and growth.worth * node.reach > bar
            and (node.parent == ROOT or nodes[node.parent].scored)
        ]
        known = self._known()
        found = [(n, nodes[n].reach * max(1.0 - known[n], 0.0)) for n in open_ends]
        found.sort(key=itemgetter(1), reverse=True)  # of equal ones the first stays the first
        return found[: growth.most - scored]

    def _known(self) -> list[float]:
        """Return the summed chances of each node's children."""
        known = [0.0] * (len(self.nodes) + 1)  # the root's are the last
        for node in self.nodes:
            known[node.parent] += node.chance
        return known

    def _last_row(self, growth: Growth) -> float:
        """Return the reach of the last node that fits into a verify of the best ones."""
        if len(self.nodes) < growth.rows:
            return 0.0
        return sorted([node.reach for node in self.nodes], reverse=True)[growth.rows - 1]

    def graft(self, tokens: Sequence[int], words: int, chances: Chances) -> list[float]:
        """Add looked-up tokens as a path from the root, behind a match of `words` tokens; the match gets longer with
        each. Returns the chance of each token, if those before it are right."""
        nodes, here, reach, scored, new, path = self.nodes, ROOT, 1.0, self.root_scored, False, list[float]()
        for depth, token in enumerate(tokens, start=1):
            look, known = match_class(words + depth - 1), None
            if not new:  # what is new has no children
                known = next((n for n, node in enumerate(nodes) if node.parent == here and node.token == token), None)
            if known is None:
                chance = chances.looked[look_class(look, ABSENT if scored else NOT_SCORED)]
                reach *= chance
                nodes.append(Node(token, here, chance, reach, depth, 1, 0.0, look))
                here, scored, new = len(nodes) - 1, False, True
            else:
                nodes[known] = nodes[known]._replace(look=look)
                self._weigh(known, chances)
                here, reach, scored = known, nodes[known].reach, nodes[known].scored
            path.append(nodes[here].chance)
        return path

    def _weigh(self, n: int, chances: Chances) -> None:
        """Set a node's chance and reach by all that is known of it."""
        node = self.nodes[n]
        above = self.nodes[node.parent] if node.parent != ROOT else None
        at = look_class(node.look, standing(node, above.scored if above else self.root_scored)) if node.look else None
        if node.said > 0.0:
            chance = chances.of(node.rank, node.said)
            chance = chance if at is None else shifted(chance, chances.shifts[at])
        else:
            chance = node.chance if at is None else chances.looked[at]
        self.nodes[n] = node._replace(chance=chance, reach=chance * (above.reach if above else 1.0))

    def forget_said(self, chances: Chances) -> None:
        """Forget what the draft said: its candidates stay without a chance, looked-up ones with that of lookup."""
        self.root_scored = False
        for n, node in enumerate(self.nodes):
            self.nodes[n] = node._replace(chance=0.0, rank=1, said=0.0, scored=False)
            self._weigh(n, chances)

    def child(self, parent: int, token: int) -> int | None:
        """Return the child of a node that carries a token."""
        return next((n for n, node in enumerate(self.nodes) if node.parent == parent and node.token == token), None)

    def feed(self, numbers: Sequence[int]) -> None:
        """Note that the draft has computed some nodes in one forward."""
        self.steps.append(len(numbers))
        for n in numbers:
            self.nodes[n] = self.nodes[n]._replace(scored=True)

    def add_candidates(self, parent: int, growth: Growth, tokens: Sequence[int], said: Sequence[float]) -> None:
        """Add the draft's candidates after a node; looked-up children get a new chance."""
        here = self.nodes[parent] if parent != ROOT else None
        reach, depth = (here.reach, here.depth) if here else (1.0, 0)
        self.root_scored = self.root_scored or here is None
        known = {node.token: n for n, node in enumerate(self.nodes) if node.parent == parent}
        for rank, (token, probability) in enumerate(zip(tokens, said, strict=True)):
            chance = growth.chances.of(rank, probability)
            if token in known:
                self.nodes[known[token]] = self.nodes[known[token]]._replace(rank=rank, said=probability)
            elif reach * chance >= growth.least or rank == 0:
                self.nodes.append(Node(token, parent, chance, reach * chance, depth + 1, rank, probability))
        for n in known.values():
            self._weigh(n, growth.chances)

    def tree(self) -> Tree:
        """Return the tree as it is now."""
        for n, node in enumerate(self.nodes):  # a chance may have changed since its children came
            above = self.nodes[node.parent].reach if node.parent != ROOT else 1.0
            if node.reach != above * node.chance:
                self.nodes[n] = node._replace(reach=above * node.chance)
        return Tree(tuple(self.nodes), self.root_scored, tuple(self.steps))


def path_of(tree: Tree, tokens: Sequence[int]) -> tuple[list[int], int | None]:
    """Return the verified nodes of a tree that a verdict's tokens follow, and the node of the token behind them.

    That token is the target's own, so its node was not verified; None: there is no such node, or no such token.
    """
    path, here = list[int](), ROOT
    for token in tokens if tree.nodes else ():
        found = tree.child(here, token)
        if found is None or not tree.nodes[found].sent:
            return path, found
        path.append(found)
        here = found
    return path, None


def chosen(tree: Tree, numbers: Sequence[int]) -> Tree:
    """Return a part of a tree, renumbered in the order given; it has to hold the parents of its nodes."""
    renumbered = {n: at for at, n in enumerate(numbers)}
    renumbered[ROOT] = ROOT
    nodes = [tree.nodes[n] for n in numbers]
    return Tree(tuple([Node(node[0], renumbered[node[1]], *node[2:]) for node in nodes]), tree.root_scored)


def marked(tree: Tree, numbers: Sequence[int]) -> Tree:
    """Return the tree with some nodes marked as being verified."""
    there = set(numbers)
    return Tree(
        tuple([Node(*node[:-1], True) if n in there else node for n, node in enumerate(tree.nodes)]), tree.root_scored
    )


def below(tree: Tree, root: int) -> Tree:
    """Return the subtree below a node as a tree of its own: the node is committed now."""
    inside: dict[int, int] = {root: ROOT}
    nodes: list[Node] = []
    base = tree.nodes[root]
    for n, node in enumerate(tree.nodes):
        if node.parent in inside:
            inside[n] = len(nodes)
            above = inside[node.parent]
            reach = node.chance * (nodes[above].reach if above != ROOT else 1.0)
            nodes.append(Node(node.token, above, node.chance, reach, node.depth - base.depth, *node[5:-1], False))
    return Tree(tuple(nodes), base.scored)


def farthest(tree: Tree, deepest: int) -> list[int]:
    """Return the nodes down to a depth, by falling reach; parents come before their children."""
    found = [(n, node.reach) for n, node in enumerate(tree.nodes) if node.depth <= deepest]
    found.sort(key=itemgetter(1), reverse=True)  # of equal ones the first stays the first
    return [n for n, _ in found]
