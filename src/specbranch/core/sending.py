"""What of a grown tree the target is to verify, where a request is alone: the nodes it most likely comes to, as many as
pay.

Owns the choice as arithmetic on a tree, so that a device can make it where the tree has grown. Invariant: what is
chosen here is what the planner and the market agree on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from specbranch.core.slots import ROOT
from specbranch.core.trees import Tree, farthest


class Sending(NamedTuple):
    """How to choose: `prices[k - 1]` is what k nodes cost beyond none, in tokens."""

    prices: tuple[float, ...]
    deepest: int


SendingLater = Callable[[], Sending]  # worked out once there is time for it


def likeliest_nodes(tree: Tree, deepest: int, most: int, alternatives: bool = True) -> list[int]:
    """Which nodes could be verified, by their reach; parents come before children."""
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
    """The nodes that are verified, in their order in the tree."""
    numbers = likeliest_nodes(tree, sending.deepest, len(sending.prices))
    return sorted(numbers[: _worthwhile([tree.nodes[n].reach for n in numbers], sending.prices)])


def _worthwhile(reaches: Sequence[float], prices: Sequence[float]) -> int:
    """How many bring most beyond what they cost."""
    best, most, promised = 0, 0.0, 0.0
    for count, (reach, price) in enumerate(zip(reaches, prices, strict=False), start=1):
        promised += reach
        if promised - price > most:
            best, most = count, promised - price
    return best
