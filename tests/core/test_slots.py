"""Slots against a list of lists: after any sequence of operations both hold the same."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from specbranch.core.slots import ROOT, Slots
from specbranch.errors import CacheFull

CAPACITY, TAIL = 40, 10
TOKENS = st.integers(0, 2)


@dataclass(frozen=True)
class Node:
    """A node of the model: its whole sequence, and the label of the memory it lies in."""

    sequence: tuple[int, ...]
    depth: int
    label: int


class SlotsAgainstLists(RuleBasedStateMachine):
    """Memory is a list of labels by KV slot; moves are carried out on it as a runner would."""

    def __init__(self) -> None:
        super().__init__()
        self.slots = Slots(CAPACITY, TAIL)
        self.prefix: list[int] = []
        self.nodes: list[Node] = []
        self.memory: list[int] = []
        self.labels: list[int] = []  # of the prefix
        self.fresh = 0

    def label(self) -> int:
        self.fresh += 1
        return self.fresh

    def add(self, parent: int, token: int) -> None:
        above = self.nodes[parent] if parent != ROOT else Node(tuple(self.prefix), 0, 0)
        self.nodes.append(Node((*above.sequence, token), above.depth + 1, self.label()))
        self.memory.append(self.fresh)

    @precondition(lambda self: not self.nodes and len(self.prefix) < CAPACITY)
    @rule(tokens=st.lists(TOKENS, max_size=6))
    def extend(self, tokens: list[int]) -> None:
        tokens = tokens[: CAPACITY - len(self.prefix)]
        kv_slots = self.slots.extend(tokens)
        assert kv_slots == range(len(self.prefix), len(self.prefix) + len(tokens))
        self.prefix += tokens
        self.labels += [self.label() for _ in tokens]
        self.memory = list(self.labels)

    @rule(data=st.data(), tokens=st.lists(TOKENS, min_size=1, max_size=4))
    def grow_a_tree(self, data: st.DataObject, tokens: list[int]) -> None:
        tokens = tokens[: self.slots.room]
        start = len(self.nodes)
        parents = [data.draw(st.integers(ROOT, start + i - 1)) for i in range(len(tokens))]
        assert self.slots.grow(tokens, parents) == range(start, start + len(tokens))
        for token, parent in zip(tokens, parents, strict=True):
            self.add(parent, token)

    @rule(data=st.data(), width=st.integers(2, 4))
    def fork(self, data: st.DataObject, width: int) -> None:
        parent = data.draw(st.integers(ROOT, len(self.nodes) - 1))
        heads = list(range(min(width, self.slots.room)))
        self.slots.grow(heads, [parent] * len(heads))
        for head in heads:
            self.add(parent, head)

    @rule(data=st.data())
    def keep(self, data: st.DataObject) -> None:
        node = data.draw(st.integers(ROOT, len(self.nodes) - 1))
        path = self.slots.path(node)
        commit = data.draw(st.integers(0, len(path)))
        end = path[commit - 1] if commit else ROOT
        chosen: list[int] = path[:commit] if data.draw(st.booleans()) else path
        for other in range(len(self.nodes)):  # whatever hangs below the end of the line may stay, too
            above = self.slots.parents[other]
            if other not in chosen and (above == end or above in chosen[commit:]) and data.draw(st.booleans()):
                chosen = sorted([*chosen, other])
        start, path = len(self.prefix), chosen
        for source, to in self.slots.keep(path, commit):
            assert to < source
            self.memory[to] = self.memory[source]
        kept = [self.nodes[n] for n in path]
        self.prefix += [n.sequence[-1] for n in kept[:commit]]
        self.labels += [n.label for n in kept[:commit]]
        self.nodes = [Node(n.sequence, n.depth - commit, n.label) for n in kept[commit:]]
        del self.memory[start + len(path) :]

    @rule(data=st.data())
    def truncate(self, data: st.DataObject) -> None:
        length = data.draw(st.integers(0, len(self.prefix)))
        self.slots.truncate(length)
        self.nodes = []
        del self.prefix[length:], self.labels[length:], self.memory[length:]

    @rule(data=st.data(), asked=st.lists(TOKENS, max_size=8))
    def find(self, data: st.DataObject, asked: list[int]) -> None:
        found = self.slots.find(asked)
        lines = [node.sequence[len(self.prefix) :] for node in self.nodes]
        longest = max((n for n in range(len(asked) + 1) if tuple(asked[:n]) in [(), *lines]), default=0)
        assert [self.slots.tokens[n] for n in found] == asked[:longest]
        assert not found or self.slots.path(found[-1]) == found

    @invariant()
    def both_tell_the_same(self) -> None:
        slots = self.slots
        slots.check()
        assert slots.sequence(ROOT) == self.prefix
        assert len(slots) == len(self.memory) == len(self.prefix) + len(self.nodes)
        assert slots.room == min(TAIL - len(self.nodes), CAPACITY - len(slots))
        assert self.memory[: len(self.prefix)] == self.labels, "token i of the prefix lies in slot i"
        for index, node in enumerate(self.nodes):
            assert tuple(slots.sequence(index)) == node.sequence
            assert slots.position(index) == len(node.sequence) - 1
            assert self.memory[slots.slot_of(index)] == node.label


SlotsAgainstLists.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestSlotsAgainstLists = SlotsAgainstLists.TestCase


def grown() -> Slots:
    """A prefix of two, then a chain 0 → 1 and a sibling 2 of node 0."""
    slots = Slots(20, 8)
    slots.extend([5, 6])
    slots.grow([7, 8, 9], [ROOT, 0, ROOT])
    return slots


def test_a_committed_chain_does_not_move() -> None:
    assert grown().keep([0, 1], 2) == []


def test_a_branch_moves_behind_the_prefix_when_it_wins() -> None:
    slots = grown()
    assert slots.keep([2], 1) == [(4, 2)]
    assert slots.prefix == [5, 6, 9]


def test_the_kept_part_of_a_path_becomes_a_chain() -> None:
    slots = grown()
    slots.grow([4, 3], [2, 3])
    assert slots.keep([2, 3, 4], 1) == [(4, 2), (5, 3), (6, 4)]
    assert (slots.tokens, slots.parents) == ([4, 3], [ROOT, 0])


def test_rejected_nodes_free_their_kv_slots() -> None:
    slots = grown()
    slots.keep([], 0)
    assert slots.room == 8
    assert slots.sequence(ROOT) == [5, 6]


def test_extending_beside_a_tail_is_refused() -> None:
    with pytest.raises(ValueError, match="extend needs an empty tail"):
        grown().extend([1])


@pytest.mark.parametrize("parent", [-2, 3, 9])
def test_a_parent_that_does_not_exist_is_refused_and_nothing_is_added(parent: int) -> None:
    slots = grown()
    with pytest.raises(ValueError, match=f"node 3 names parent {parent}, which does not exist yet"):
        slots.grow([1], [parent])
    assert slots.tokens == [7, 8, 9]


@pytest.mark.parametrize("path", [[1], [2, 1], [0, 2], [0, 0]])
def test_nodes_that_are_no_path_are_refused_and_nothing_is_dropped(path: list[int]) -> None:
    slots = grown()
    with pytest.raises(ValueError, match=r"is no child of|in ascending order"):
        slots.keep(path, 1)
    assert slots.tokens == [7, 8, 9]
    assert slots.prefix == [5, 6]


def test_a_full_tail_is_a_sentence_that_says_what_to_do() -> None:
    with pytest.raises(CacheFull) as caught:
        grown().grow([1] * 6, [ROOT] * 6)
    assert str(caught.value) == (
        "Need 6 cache slots, 5 free (capacity 20, tail 8). Lower max_tokens or num_speculative_tokens, or raise "
        "context_length."
    )


def test_a_full_cache_refuses_a_prompt_and_keeps_what_it_has() -> None:
    slots = Slots(4, 2)
    slots.extend([1, 2])
    with pytest.raises(CacheFull, match="Need 3 cache slots, 2 free"):
        slots.extend([1, 2, 3])
    assert slots.prefix == [1, 2]
    assert slots.extend([3, 4]) == range(2, 4)
    with pytest.raises(CacheFull, match="Need 1 cache slots, 0 free"):
        slots.grow([1], [ROOT])


def test_a_broken_invariant_is_noticed() -> None:
    slots = grown()
    slots.parents[1] = 2
    with pytest.raises(AssertionError, match="before its parent"):
        slots.check()
    slots = grown()
    slots.tokens.append(1)
    with pytest.raises(AssertionError, match="out of shape"):
        slots.check()


def test_the_depth_is_that_of_the_longest_path() -> None:
    slots = Slots(40)
    slots.extend([1, 2])
    assert slots.depth == 0
    slots.grow([3, 4, 5, 6], [ROOT, 0, ROOT, 1])
    assert slots.depth == 3 == max(len(slots.path(node)) for node in range(4))
