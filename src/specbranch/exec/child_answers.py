"""Checks the answers of a draft worker in another process against its orders.

Owns the refusal of invalid answers. Invariant: an accepted answer has the kind, the size and the range of its order. So
a broken worker costs a request nothing but its draft.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from specbranch.core.orders import Branch, Draft, Drafted, DraftOrder, Effort, Grow, Prefill, Reached, Sparse
from specbranch.core.runner import MOST_ENTRIES
from specbranch.core.slots import ROOT
from specbranch.core.trees import LOOKS, Node, Tree

PROBABILITY_SLACK = 1e-3  # by which a probability may miss its range: softmax rounds


class BadAnswer(Exception):
    """An answer that does not fit its order."""


@dataclass(frozen=True, slots=True)
class Asked:
    """What a worker was ordered, by session; which sessions use the ratio rule, and the number of token ids."""

    orders: Mapping[int, DraftOrder]
    by_ratio: Collection[int]
    vocabulary: int

    def check_heads(self, heads: Mapping[int, Branch]) -> None:
        """Refuse heads that were not ordered."""
        for session, head in heads.items():
            order = self._order(session)
            _expect(isinstance(order, Draft) and order.announces, f"a head for session {session}, which wants none")
            assert isinstance(order, Draft)
            self._check_branch(head, session, order)
            _expect(head.after == order.pending, "a head that does not continue the whole of the pending chain")

    def check_stale(self, sessions: Collection[int]) -> None:
        """Refuse a request to send whole what was sent whole already."""
        for session in sessions:
            _expect(self._order(session).on.base > 0, f"session {session} as missing, which was sent whole")

    def check_round(self, made: Mapping[int, Drafted], effort: Effort) -> None:
        """Refuse answers that do not fit their orders."""
        for session, what in made.items():
            match self._order(session), what:
                case Draft() as order, tuple() as branches:
                    self._check_branches(branches, session, order)
                case Grow() as order, Tree() as tree:
                    self._check_tree(tree, order)
                case Prefill() as order, Reached(tokens):
                    _expect(0 <= tokens <= len(order.on), f"{tokens} tokens read of {len(order.on)}")
                case order, _:
                    raise BadAnswer(f"a {type(what).__name__} for a {type(order).__name__}")
        _check_effort(effort)

    def _order(self, session: int) -> DraftOrder:
        _expect(session in self.orders, f"something for session {session}, for which nothing was ordered")
        return self.orders[session]

    def _check_branches(self, branches: tuple[Branch, ...], session: int, order: Draft) -> None:
        widths = Counter[int]()
        for after, width in order.plan.forks or ((order.pending, 1),):
            widths[after] += width
        for after, count in Counter(branch.after for branch in branches).items():
            _expect(count <= widths[after], f"{count} branches after {after} pending tokens")
        for branch in branches:
            self._check_branch(branch, session, order)

    def _check_branch(self, branch: Branch, session: int, order: Draft) -> None:
        count, most = len(branch.tokens), order.plan.length
        _expect(1 <= count <= most, f"a chain of {count} tokens where at most {most} were ordered")
        self._check_tokens(branch.tokens)
        _expect(len(branch.confidence) - count in (0, 1), f"{len(branch.confidence)} confidences of {count} tokens")
        _check_probabilities(branch.confidence)
        if branch.q is not None:
            _expect(session in self.by_ratio, "a law for a token that was not drawn")
            _expect(len(branch.q) == count, f"{len(branch.q)} laws of {count} tokens")
            for token, law in zip(branch.tokens, branch.q, strict=True):
                self._check_law(token, law)

    def _check_law(self, token: int, law: Sparse | None) -> None:
        if law is None:
            return
        _expect(len(law.ids) == len(law.probs) <= MOST_ENTRIES, f"a law of {len(law.ids)} tokens")
        _expect(len(set(law.ids)) == len(law.ids), "a law that names a token twice")
        self._check_tokens(law.ids)
        _check_probabilities(law.probs)
        _expect(abs(sum(law.probs) - 1.0) <= PROBABILITY_SLACK, f"a law that sums to {sum(law.probs)}")
        _expect(law.prob(token) > 0.0, f"token {token}, which its own law rules out")

    def _check_tokens(self, tokens: Collection[int]) -> None:
        if tokens and not 0 <= min(tokens) <= max(tokens) < self.vocabulary:
            raise BadAnswer(f"it answered token ids {min(tokens)} to {max(tokens)}; there are {self.vocabulary}")

    def _check_tree(self, tree: Tree, order: Grow) -> None:
        before, growth = order.tree.nodes, order.growth
        most = len(before) + (growth.most + 1) * growth.children
        _expect(len(before) <= len(tree) <= most, f"a tree of {len(tree)} nodes where at most {most} were ordered")
        for old, node in zip(before, tree.nodes, strict=False):
            _expect(_fixed_fields(old) == _fixed_fields(node), "a tree that has lost nodes")
        for n, node in enumerate(tree.nodes):
            self._check_node(tree, n, node)
        for node in tree.nodes[len(before) :]:
            _expect(node.depth <= growth.deepest and not node.sent, f"a new node at depth {node.depth}")
        self._check_steps(tree.steps, order)

    def _check_node(self, tree: Tree, n: int, node: Node) -> None:
        _expect(ROOT <= node.parent < n, f"a node {n} whose parent is {node.parent}")
        above = tree.nodes[node.parent].depth if node.parent != ROOT else 0
        _expect(node.depth == above + 1, f"a node at depth {node.depth} below one at {above}")
        self._check_tokens((node.token,))
        _check_probabilities((node.chance, node.reach, node.said))
        _expect(0 <= node.look <= LOOKS and node.rank >= 0, f"a node of rank {node.rank}, looked up as {node.look}")

    def _check_steps(self, steps: tuple[int, ...], order: Grow) -> None:
        """Check the steps of a tree: sessions step together, and each tree notes the steps of all."""
        most = 1 + sum(other.growth.most for other in self.orders.values() if isinstance(other, Grow))
        _expect(len(steps) <= most, f"a tree of {len(steps)} steps where at most {most} were ordered")
        rows = len(order.on) + order.growth.most
        _expect(all(0 <= step <= rows for step in steps), f"a step of {max(steps, default=0)} nodes")


def _fixed_fields(node: Node) -> tuple[int, int, bool]:
    """Return the fields of a node that extending a tree never changes."""
    return node.token, node.parent, node.sent


def _check_effort(effort: Effort) -> None:
    _expect(0.0 <= effort.seconds < math.inf, f"a round of {effort.seconds} seconds")
    counts = [effort.tokens, *(count for prompt in effort.prompts.values() for count in (prompt.read, prompt.cached))]
    _expect(min(counts) >= 0, "a negative count of tokens")


def _check_probabilities(values: Iterable[float]) -> None:
    for value in values:
        if not -PROBABILITY_SLACK <= value <= 1.0 + PROBABILITY_SLACK:  # as NaN is not
            raise BadAnswer(f"it answered {value} for a probability")


def _expect(sound: bool, said: str) -> None:
    if not sound:
        raise BadAnswer(f"it answered {said}")
