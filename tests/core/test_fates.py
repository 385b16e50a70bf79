"""Each drafted token meets one fate."""

from __future__ import annotations

from dataclasses import fields

import pytest

from specbranch.core.fates import (
    FATE_NAMES,
    FATES,
    THROWN_AWAY,
    Fates,
    Settled,
    branch_points,
    summed,
    tree_standings,
)
from specbranch.core.slots import ROOT
from specbranch.core.trees import Node, Tree


def test_each_fate_has_its_names_and_what_is_thrown_away_its_reason() -> None:
    assert list(FATES) == [one.name for one in fields(Fates)] == list(FATE_NAMES)
    assert {fate for fate in FATES if FATE_NAMES[fate].reason} == set(THROWN_AWAY)
    for names in zip(*FATE_NAMES.values(), strict=True):
        reported = [name for name in names if name]
        assert len(reported) == len(set(reported)), "two fates of one name"
    assert [Fates(**{fate: 1}).total for fate in FATES] == [1] * len(FATES)


@pytest.mark.parametrize("ended", [False, True])
def test_a_chain_and_its_branches_are_counted_whole(ended: bool) -> None:
    fates = Fates()
    fates.add_chain(5, 2, ended)
    fates.add_branches(3, 4, hit=False, ended=ended)
    assert fates == (Fates(accepted=2, unused=10) if ended else Fates(accepted=2, rejected=6, losing=4))
    assert summed([fates, fates]).total == 2 * 12


def test_of_a_branch_that_was_hit_the_head_alone_is_settled() -> None:
    fates = Fates()
    fates.add_branches(3, 4, hit=True, ended=False)
    assert fates == Fates(accepted=1, losing=4)


def node(parent: int, sent: bool = False, fed: bool = True) -> Node:
    return Node(0, parent, 0.5, 0.5, 1, scored=fed, sent=sent)


def test_tokens_of_a_tree_are_counted_by_what_was_sent_and_what_is_below_the_hit() -> None:
    tree = Tree(
        (
            node(ROOT, sent=True),
            node(0, sent=True),
            node(ROOT, sent=True),
            node(0),
            node(3),
            node(4, fed=False),
            node(2),
        )
    )
    reported = tree_standings(tree, sent=[0, 1, 2], main_path=[0, 1], path=[0], hit=3)
    assert reported == ([1], [2], [6], [4], [3])  # rejected, sibling, lost, left, head
    assert Settled(1, *map(len, reported)).fates(ended=False) == Fates(rejected=1, siblings=1, losing=1)
    assert Settled(1, *map(len, reported)).fates(ended=True) == Fates(unused=5)
    assert branch_points(tree) == {0, 2}
