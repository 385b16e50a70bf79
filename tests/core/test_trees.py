"""Trees of drafted tokens: how they are extended, what is computed next, what is left after a verdict."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specbranch.core.experience import Experience
from specbranch.core.slots import ROOT
from specbranch.core.stats import Stats
from specbranch.core.trees import (
    ABSENT,
    EDGES,
    FIRST,
    NO_TREE,
    NOT_SCORED,
    OTHER,
    GrowingTree,
    Growth,
    Node,
    Tree,
    below,
    chosen,
    class_of,
    farthest,
    look_class,
    marked,
    match_class,
    standing,
)

CHANCES = Experience().insight.chances()
GROWTH = Growth((0.1, 0.1, 0.1), CHANCES, worth=1.0)


def grown() -> GrowingTree:
    """Two tokens after the text, 10 and 11; after 10 come 20 and 21."""
    growing = GrowingTree(NO_TREE)
    growing.add_candidates(ROOT, GROWTH, (10, 11), (0.8, 0.15))
    growing.feed([0])
    growing.add_candidates(0, GROWTH, (20, 21), (0.6, 0.3))
    return growing


def numbers(growing: GrowingTree, growth: Growth) -> list[int]:
    return [n for n, _ in growing.open_nodes(growth)]


def numbers_of(tree: Tree) -> list[tuple[int, int]]:
    return [(node.token, node.parent) for node in tree.nodes]


TREES = st.lists(st.tuples(st.integers(-1, 8), st.floats(0.05, 1.0), st.booleans()), max_size=14)


def made(shape: list[tuple[int, float, bool]]) -> Tree:
    nodes: list[Node] = []
    for at, (above, chance, fed) in enumerate(shape):
        parent = min(above, at - 1)
        over = nodes[parent] if parent != ROOT else None
        nodes.append(
            Node(
                100 + at,
                parent,
                chance,
                chance * (over.reach if over else 1.0),
                over.depth + 1 if over else 1,
                scored=fed,
            )
        )
    return Tree(tuple(nodes), True)


def test_reach_is_the_product_of_chances_on_the_way() -> None:
    tree = grown().tree()
    assert numbers_of(tree) == [(10, ROOT), (11, ROOT), (20, 0), (21, 0)]
    assert tree.nodes[0].reach == tree.nodes[0].chance == CHANCES.of(0, 0.8)
    assert tree.nodes[3].reach == pytest.approx(CHANCES.of(0, 0.8) * CHANCES.of(1, 0.3))
    assert tree.root_scored and [node.depth for node in tree.nodes] == [1, 1, 2, 2]


def test_what_is_hardly_likely_is_not_taken_in_but_the_first_always_is() -> None:
    growing = GrowingTree(NO_TREE)
    growing.add_candidates(ROOT, GROWTH, (1, 2, 3), (0.002, 0.001, 0.0005))
    assert numbers_of(growing.tree()) == [(1, ROOT)]


def test_the_end_that_reaches_farthest_is_read_next_and_only_behind_what_was_read() -> None:
    growing = grown()
    assert numbers(growing, GROWTH) == [2, 3, 1]
    growing.nodes.append(Node(30, 2, 0.9, 0.5, 3))  # behind 20, which was not read
    assert 4 not in numbers(growing, GROWTH)


def test_while_the_target_waits_nothing_is_read_that_could_not_be_sent() -> None:
    growing = grown()
    few = Growth((0.1,), CHANCES, worth=1.0, rows=2)
    assert numbers(growing, few) == []
    beside = Growth((0.1,), CHANCES, worth=1.0, rows=2, free_time=9.0)
    assert numbers(growing, beside) == [2, 3, 1]


def test_a_node_whose_continuation_is_known_is_less_in_need_of_reading() -> None:
    growing = GrowingTree(NO_TREE)
    growing.graft((10, 20), 4, CHANCES)
    ((number, gain),) = growing.open_nodes(GROWTH)
    assert (number, gain) == (0, pytest.approx(growing.nodes[0].reach * (1 - growing.nodes[1].chance)))
    growing.feed([0])
    assert growing.open_nodes(GROWTH) == [(1, growing.nodes[1].reach)]


@given(TREES, st.booleans())
def test_what_may_be_read_next_is_in_the_order_of_its_gain(shape: list[tuple[int, float, bool]], beside: bool) -> None:
    growing = GrowingTree(made(shape))
    growth = replace(GROWTH, rows=4, free_time=9.0 if beside else 0.0)
    found = growing.open_nodes(growth)
    assert found == sorted(found, key=lambda pair: (-pair[1], pair[0]))
    for n, gain in found:
        known = sum(node.chance for node in growing.nodes if node.parent == n)
        assert gain == pytest.approx(growing.nodes[n].reach * max(1.0 - known, 0.0))
    bar = sorted((node.reach for node in growing.nodes), reverse=True)[3] if len(shape) > 3 and not beside else 0.0
    fed = {ROOT, *(n for n, node in enumerate(growing.nodes) if node.scored)}
    open_ends = [n for n, node in enumerate(growing.nodes) if n not in fed and node.parent in fed and node.reach > bar]
    assert sorted(n for n, _ in found) == open_ends


def test_draft_and_text_correct_each_other() -> None:
    alone = GrowingTree(NO_TREE)
    alone.graft((10, 20), 2, CHANCES)
    before = alone.nodes[0].chance
    agreed, denied = (GrowingTree(alone.tree()) for _ in range(2))
    agreed.add_candidates(ROOT, GROWTH, (10, 11), (0.5, 0.2))
    denied.add_candidates(ROOT, GROWTH, (12, 11), (0.5, 0.2))
    assert denied.nodes[0].chance < before < agreed.nodes[0].chance
    assert agreed.nodes[0].chance > CHANCES.of(0, 0.5), "the text adds to what the draft says"
    assert agreed.tree().nodes[1].reach == pytest.approx(agreed.nodes[0].chance * agreed.nodes[1].chance), (
        "what follows rises with it"
    )
    again = GrowingTree(agreed.tree())
    again.graft((11, 21), 2, CHANCES)
    assert again.nodes[2].look == 2 and again.nodes[2].said == 0.2, "a candidate of the draft may be looked up later"


def test_every_standing_has_a_class_of_its_own() -> None:
    kv_slots = (NOT_SCORED, FIRST, OTHER, ABSENT)
    classes = {look_class(match_class(words), where) for words in range(1, 40) for where in kv_slots}
    assert classes == set(range(len(CHANCES.looked))) and len(CHANCES.looked) == len(CHANCES.shifts)
    node = Node(1, ROOT, 0.5, 0.5, 1)
    assert standing(node, False) == NOT_SCORED and standing(node, True) == ABSENT
    assert standing(node._replace(said=0.3), True) == FIRST and standing(node._replace(said=0.3, rank=2), True) == OTHER


def test_the_classes_cover_all_probabilities_in_order() -> None:
    assert [class_of(edge) for edge in EDGES] == list(range(1, len(EDGES) + 1))
    assert class_of(0.0) == 0 and class_of(1.0) == len(CHANCES.first) - 1 == len(CHANCES.other) - 1


@given(TREES, st.integers(1, 6))
def test_nodes_by_reach_hold_their_parents(shape: list[tuple[int, float, bool]], deepest: int) -> None:
    tree = made(shape)
    numbers = farthest(tree, deepest)
    assert all(tree.nodes[a].reach >= tree.nodes[b].reach for a, b in pairwise(numbers))
    assert all(tree.nodes[n].parent == ROOT or tree.nodes[n].parent in numbers[:at] for at, n in enumerate(numbers))
    part = chosen(tree, sorted(numbers))
    assert all(node.parent < at for at, node in enumerate(part.nodes))


@given(TREES)
def test_what_is_below_a_node_is_a_tree_again(shape: list[tuple[int, float, bool]]) -> None:
    tree = made(shape)
    for root, base in enumerate(tree.nodes):
        part = below(tree, root)
        assert part.root_scored == base.scored
        assert all(node.reach == pytest.approx(tree.nodes[node.token - 100].reach / base.reach) for node in part.nodes)
        assert all(node.depth == tree.nodes[node.token - 100].depth - base.depth for node in part.nodes)
        assert all(node.parent < at for at, node in enumerate(part.nodes))


def test_a_tree_is_counted_where_its_tokens_end_up() -> None:
    tree = marked(grown().tree(), [0, 1, 2])  # 10 → 20 is the main line, 11 a sibling; 21 was not sent
    stats = Stats()
    stats.judge_tree(tree, [0, 1, 2], [0], 3, 2)
    assert (stats.drafted, stats.accepted, stats.rejected, stats.siblings, stats.losing) == (4, 2, 1, 1, 0)
    assert stats.hits_at == [0, 1] and stats.branch_hits_other == 1
    stats.check()
    stats.judge_tree(tree, [0, 1, 2], [0, 2], None, 1)  # the request ended at 10
    assert stats.unused == 2
    stats.check()
