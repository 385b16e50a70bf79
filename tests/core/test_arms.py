"""Arms: rounds are named by what they verify, and their figures add up."""

from __future__ import annotations

import pytest

from specbranch.core.arms import SMALL_TREE_ROWS, Arm, ArmRound, Arms, arm_sentence
from specbranch.core.slots import ROOT
from specbranch.core.trees import NO_TREE, Node, Tree


def node(parent: int, reach: float = 0.5, said: float = 0.5, look: int = 0) -> Node:
    return Node(7, parent, 0.5, reach, 1, said=said, look=look)


def star(count: int) -> Tree:
    return Tree(tuple(node(ROOT) for _ in range(count)))


CHAIN = Tree((node(ROOT), node(0)))
LOOKED_UP = Tree((node(ROOT, said=0.0, look=2), node(0, said=0.0, look=2)))
BOTH = Tree((node(ROOT, look=2), node(0, said=0.0, look=2)))


@pytest.mark.parametrize(
    ("tree", "name"),
    [
        (NO_TREE, "plain"),
        (LOOKED_UP, "lookup"),
        (BOTH, "chain"),
        (CHAIN, "chain"),
        (star(2), "small tree"),
        (star(SMALL_TREE_ROWS - 1), "small tree"),
        (star(SMALL_TREE_ROWS), "large tree"),
    ],
)
def test_a_round_is_named_by_what_it_verifies(tree: Tree, name: str) -> None:
    planned = ArmRound(tree, list(range(len(tree))), 1 + len(tree), 10)
    assert planned.name == name
    planned.overlap = True
    assert planned.name == f"{name} + overlap"


def test_a_round_is_expected_to_bring_its_reaches_and_the_bonus_token() -> None:
    tree = Tree((node(ROOT, 0.75), node(0, 0.5), node(ROOT, 0.125)))
    planned = ArmRound(tree, [0, 2], 3, 10, draft_seconds=1.0, target_seconds=2.0, host_seconds=0.5)
    assert planned.expected_tokens == 1.875
    assert planned.expected_seconds(0.0) == 3.5 and planned.expected_seconds(3.0) == 4.5


def test_rounds_of_an_arm_add_up_and_come_back_from_plain_values() -> None:
    arms = Arms()
    for name in ("chain", "plain", "chain"):
        arms.add(name, Arm(1, 3, 0.5, 2.0, 0.25))
    arms.join(Arms({"plain": Arm(1, 1, 0.5, 1.0, 0.25)}))
    assert arms.tokens == {"chain": 6, "plain": 4}
    chain = arms.to_dict()["chain"]
    assert (chain["rounds"], chain["expected"], chain["seen"]) == (2, 8.0, 6.0)
    assert Arms.from_dict(arms.to_dict()) == arms


def test_an_arm_is_told_in_a_sentence() -> None:
    told = Arm(2, 1390, 1.0, 1420.0, 1.0).to_dict()
    assert arm_sentence("small tree", told) == "small tree: 1,420 expected, 1,390 seen"
    assert arm_sentence("plain", Arm(2, 2).to_dict()) == "plain: 2 rounds"
