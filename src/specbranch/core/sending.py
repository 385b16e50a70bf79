"""Which nodes of a tree the target verifies if a request is alone: those with the highest reach, as many as pay.

Owns the choice as arithmetic on a tree, so that a device can make it right behind its draft steps. Invariant: the
choice equals what the planner and the market agree on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from specbranch.core.slots import ROOT
from specbranch.core.trees import Tree, farthest


class Sending(NamedTuple):
    """How to choose: `prices[k - 1]` is the price of k nodes, in tokens."""

    prices: tuple[float, ...]
    deepest: int


SendingLater = Callable[[], Sending]  # computed when the host has time for it


def likeliest_nodes(tree: Tree, deepest: int, most: int, alternatives: bool = True) -> list[int]:
    """Return the nodes that may be verified, by falling reach; parents come before their children."""
    if not alternatives:
        return [n for n in tree.main_path() if tree.nodes[n].depth <= deepest][:most]
    taken, numbers = {ROOT}, list[int]()
    for n in farthest(tree, deepest):
        if tree.nodes[n].parent not in taken:
            continue
        numbers.append(n)
        taken.add(n)
        if len(numbers) == most:
            break
    return numbers


def sent(tree: Tree, sending: Sending) -> list[int]:
    """Return the nodes to verify, in the tree's order."""
    numbers = likeliest_nodes(tree, sending.deepest, len(sending.prices))
    return sorted(numbers[: _worthwhile([tree.nodes[n].reach for n in numbers], sending.prices)])


def _worthwhile(reaches: Sequence[float], prices: Sequence[float]) -> int:
    """Return the number of nodes with the highest profit."""
    best, most, promised = 0, 0.0, 0.0
    for count, (reach, price) in enumerate(zip(reaches, prices, strict=False), start=1):
        promised += reach
        if promised - price > most:
            best, most = count, promised - price
    return best
