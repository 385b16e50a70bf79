"""Extends draft trees of several sessions in step, one forward a step for all their nodes.

Owns which nodes are computed next; their value comes with the order. What a grammar forces behind a node is computed
with it: no draft has to be asked for that. Invariant: a returned tree contains the ordered one, and every node of it
that is marked as computed is in the KV cache.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace

from specbranch.core.grammar import State
from specbranch.core.orders import Grow
from specbranch.core.runner import Ask, Feed, Growing, Proposal
from specbranch.core.slots import ROOT
from specbranch.core.trees import GrowingTree, Tree, paces
from specbranch.errors import CacheFull
from specbranch.exec.draft_steps import Drafting, Ends, Forward
from specbranch.exec.worker import UNCOMPUTED_AT_ONCE, Worker, chain_after


class _GrowingOrder:
    """One session's tree while it is extended; `held_nodes` maps computed tree nodes to tail nodes."""

    def __init__(self, worker: Worker, session: int, order: Grow) -> None:
        self.worker, self.session, self.order = worker, session, order
        within = worker.runner.context_length - len(order.on)
        self.growth = order.growth if order.growth.deepest <= within else replace(order.growth, deepest=within)
        self.rest, held = worker.settle(session, order.on, order.tree)
        self.growing = GrowingTree(order.tree)
        self.held_nodes: dict[int, int] = {ROOT: ROOT, **held}
        self._states: dict[int, State | None] = {ROOT: order.state}
        self.growing.nodes = [
            node if node.scored == (n in held) else node._replace(scored=n in held)
            for n, node in enumerate(order.tree.nodes)
        ]
        if worker.reads_features is not None and self.rest:  # what it said was made from states that are out of date
            self.growing.forget_said(self.growth.chances)

    def uncomputed_text(self) -> Feed:
        """Return the committed tokens that have to be computed before the tree."""
        if self.rest:
            self.growing.steps.append(len(self.rest))
        return Feed(self.session, tuple(self.rest), chain_after(ROOT, 0, len(self.rest)))

    def commit_text(self) -> None:
        """Commit these tokens, now that they are computed."""
        if self.rest:
            self.worker.commit_path(self.session, range(len(self.rest)))

    def open_nodes(self) -> list[tuple[int, float]]:
        """Return the nodes that may be computed next, with their gains, best first."""
        found = self.growing.open_nodes(self.growth)
        if self.order.state is not None:  # nothing follows an end token
            found = [(n, gain) for n, gain in found if (state := self._state(n)) is not None and not state.ended]
        return found[: self.worker.slots(self.session).room]

    def feed(self, numbers: list[int]) -> Feed:
        """Add nodes to the KV cache; returns their work in the next step."""
        nodes = self.growing.nodes
        self.held_nodes.update((n, node) for node, n in enumerate(numbers, len(self.worker.slots(self.session).tokens)))
        work = Feed(
            self.session,
            tuple(nodes[n].token for n in numbers),
            tuple(self.held_nodes[nodes[n].parent] for n in numbers),
        )
        self.growing.feed(numbers)
        return work

    def with_forced(self, numbers: list[int]) -> tuple[list[int], list[int]]:
        """Return nodes with what the grammar forces behind each, and those to ask about: the last of each chain."""
        if self.order.state is None or self.worker.reads_features is not None:  # such a row reads its parent's state
            return numbers, numbers
        found, asked = list(numbers), list[int]()
        room = min(self.worker.slots(self.session).room, UNCOMPUTED_AT_ONCE)  # a warm-up has prepared such steps
        for n in numbers:
            while len(found) < room and (child := self._forced_child(n)) is not None:
                n = child
                found.append(n)
            asked.append(n)
        return found, asked

    def _forced_child(self, number: int) -> int | None:
        """Return the node that a grammar forces behind another one; None: there is none, or it is computed already."""
        state, node = self._state(number), self.growing.nodes[number]
        token = None if state is None else state.forced
        if token is None or node.depth + 1 >= self.growth.deepest:
            return None
        self.growing.add_candidates(number, self.growth, (token,), (1.0,))
        child = self.growing.child(number, token)
        return None if child is None or self.growing.nodes[child].scored else child

    def ask(self, number: int, node: int) -> Ask:
        """Ask what the draft proposes after a node of the tree, ROOT for its root, which is a node of the cache."""
        state = self._state(number)
        return Ask(self.session, node, self.growth.children, "top", attempt=self.order.number, allowed=state)

    def _state(self, number: int) -> State | None:
        """Return the state of the request's grammar behind a node; None: there is none, or the node is forbidden."""
        if number not in self._states:
            node = self.growing.nodes[number]
            above = self._state(node.parent)
            self._states[number] = None if above is None else above.advance(node.token)
        return self._states[number]

    def add_candidates(self, number: int, proposal: Proposal) -> None:
        """Add the draft's candidates to the tree."""
        self.growing.add_candidates(number, self.growth, proposal.tokens, proposal.said)

    def grow_on_device(self, ends: Ends) -> Tree | None:
        """Let the model extend the tree by itself, if it can and nobody else waits for it."""
        runner = self.worker.grows_trees
        if not self.worker.lets_grow or runner is None or self.order.state is not None or ends.crowded():
            return None
        held = {n: node for n, node in self.held_nodes.items() if n != ROOT}
        tree = Tree(tuple(self.growing.nodes), self.growing.root_scored)
        growing = Growing(self.session, tuple(self.rest), tree, held, self.growth, self.order.receiver)
        grown = runner.grow(growing, ends.done if self.order.until_target else ends.enough)
        if grown is not None:
            self.worker.rows_fed += sum(grown.steps)
        return grown


def grow(worker: Worker, orders: Mapping[int, Grow], ends: Ends) -> Drafting[dict[int, Tree]]:
    """Carry out the orders step by step; returns the trees."""
    trees = list(_prepared(worker, orders))
    if len(trees) == 1 and (grown := trees[0].grow_on_device(ends)) is not None:
        return {trees[0].session: grown}
    spent = yield from _compute_texts(trees)
    while steps := _steps(worker, trees, spent, ends):
        spent += trees[0].growth.seconds(spent, sum(len(numbers) for _, numbers, _ in steps))
        _note_absent(trees, {tree.session for tree, _, _ in steps})
        work = [tree.feed(numbers) for tree, numbers, _ in steps]
        read = [(tree, n) for tree, _, asked in steps for n in asked]
        proposals = yield Forward(work, [tree.ask(n, tree.held_nodes[n]) for tree, n in read])
        for (tree, n), proposal in zip(read, proposals, strict=True):
            tree.add_candidates(n, proposal)
    return {tree.session: tree.growing.tree() for tree in trees}


def _prepared(worker: Worker, orders: Mapping[int, Grow]) -> Iterator[_GrowingOrder]:
    """Prepare the orders that fit into memory; the other sessions decode without a draft."""
    for session, order in orders.items():
        with suppress(CacheFull), worker.releasing(session):
            tree = _GrowingOrder(worker, session, order)
            worker.runner.demand(session, len(tree.rest))
            yield tree


def _compute_texts(trees: list[_GrowingOrder]) -> Drafting[float]:
    """Compute the rest of the committed tokens, and score the roots that are not scored; returns the time, in
    tokens."""
    if not trees:
        return 0.0
    unasked = [tree for tree in trees if not tree.growing.root_scored]
    proposals = yield Forward(
        [tree.uncomputed_text() for tree in trees], [tree.ask(ROOT, len(tree.rest) - 1) for tree in unasked]
    )
    for tree in trees:
        tree.commit_text()
    for tree, proposal in zip(unasked, proposals, strict=True):
        tree.add_candidates(ROOT, proposal)
    if not (rows := sum(len(tree.rest) for tree in trees)):
        return 0.0
    _note_absent(trees, {tree.session for tree in trees if tree.rest})
    return trees[0].growth.seconds(0.0, rows)


def _note_absent(trees: list[_GrowingOrder], present: set[int]) -> None:
    """Note an empty step for trees that took no part in it: step times are learned from all sessions together."""
    for tree in trees:
        if tree.session not in present:
            tree.growing.steps.append(0)


def _steps(
    worker: Worker, trees: list[_GrowingOrder], spent: float, ends: Ends
) -> list[tuple[_GrowingOrder, list[int], list[int]]]:
    """Return the nodes that each tree computes next, and those to ask about, without trees that compute none."""
    if ends.enough():
        return []
    over = ends.done()
    growing = [tree for tree in trees if not (over and tree.order.until_target)]
    open_nodes = [tree.open_nodes() for tree in growing]
    gains = [[gain for _, gain in nodes] for nodes in open_nodes]
    widths = paces([tree.growth for tree in growing], spent, gains) if growing else []
    steps = [
        (tree, *tree.with_forced(sorted(n for n, _ in nodes[:width])))
        for tree, nodes, width in zip(growing, open_nodes, widths, strict=True)
        if width
    ]
    return [step for step in steps if worker.make_room(step[0].session, len(step[1]))]
