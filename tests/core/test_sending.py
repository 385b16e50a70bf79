"""Which nodes of a tree are verified: the choice that a device can make is that of planner and market."""

from __future__ import annotations

import random

import pytest

from specbranch.core.costs import MeasuredCosts
from specbranch.core.experience import Experience
from specbranch.core.market import granted
from specbranch.core.planner import Planner
from specbranch.core.sending import sent
from specbranch.core.slots import ROOT
from specbranch.core.trees import Node, Tree


def some_tree(rng: random.Random, size: int) -> Tree:
    nodes: list[Node] = []
    for n in range(size):
        parent = rng.randrange(-1, n) if n else ROOT
        above, depth = (nodes[parent].reach, nodes[parent].depth) if parent != ROOT else (1.0, 0)
        chance = rng.choice([0.05, 0.3, 0.5, 0.9, 1.0])  # so that some are reached alike
        nodes.append(Node(n, parent, chance, above * chance, depth + 1, said=0.5))
    return Tree(tuple(nodes), True)


@pytest.mark.parametrize("seed", range(40))
def test_what_a_device_would_choose_is_what_is_granted(seed: int) -> None:
    rng, costs = random.Random(seed), MeasuredCosts()
    slope = rng.choice([0.0, 0.02, 0.2, 1.0])
    for rows in (1, 2, 4, 9, 16):
        costs.target.set(rows, 0.01 * (1 + slope * rows))
    costs.step.set(1, 0.001)
    planner = Planner(Experience(costs=costs))
    planner.begin(100)
    tree, room = some_tree(rng, rng.choice([0, 1, 5, 20, 60])), rng.choice([2, 4, 40])
    candidates = planner.candidates(tree, room)
    grant = granted({0: planner.row_offer(tree, candidates)})[0]
    foretold = planner.sending(room)
    assert foretold is not None
    assert sent(tree, foretold()) == sorted(candidates[: grant.count])


def test_in_a_batch_and_without_trees_nothing_is_forecast() -> None:
    costs = MeasuredCosts()
    costs.target.set(1, 0.01)
    planner = Planner(Experience(costs=costs))
    planner.begin(100, 2)
    assert planner.sending(10) is None
    planner = Planner(Experience(costs=costs), trees=False)
    planner.begin(100)
    assert planner.sending(10) is None
