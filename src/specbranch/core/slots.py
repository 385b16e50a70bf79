"""The KV slots of one sequence: a committed prefix, and behind it a small tail in which every token names its parent.

Owns the bookkeeping, not the memory. Invariant: token i of the prefix is at KV slot i, and node j of the tail at KV
slot `len(prefix) + j`. So a chain does not move when it is committed.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from specbranch.errors import CacheFull

ROOT = -1  # the end of the prefix, as a parent
TAIL = 128  # KV slots behind the prefix

Move = tuple[int, int]  # from KV slot, to KV slot


class Slots:
    """Prefix and tail of one sequence."""

    def __init__(self, capacity: int, tail: int = TAIL) -> None:
        self.capacity = capacity
        self.tail_limit = tail
        self.prefix: list[int] = []
        self.tokens: list[int] = []
        self.parents: list[int] = []

    def __len__(self) -> int:
        return len(self.prefix) + len(self.tokens)

    @property
    def room(self) -> int:
        """How many nodes the tail can still take."""
        return min(self.tail_limit - len(self.tokens), self.capacity - len(self))

    def extend(self, tokens: Sequence[int]) -> range:
        """Append tokens to the prefix; returns their KV slots. The tail must be empty."""
        if self.tokens:
            raise ValueError("extend needs an empty tail; keep or drop it first")
        self.demand(len(tokens), self.capacity - len(self))
        start = len(self.prefix)
        self.prefix.extend(tokens)
        return range(start, start + len(tokens))

    def grow(self, tokens: Sequence[int], parents: Sequence[int]) -> range:
        """Add nodes to the tail, each with its parent (a node, possibly one of these, or ROOT); returns them."""
        if len(tokens) != len(parents):
            raise ValueError(f"{len(tokens)} tokens were given {len(parents)} parents")
        self.demand(len(tokens), self.room)
        start = len(self.tokens)
        for offset, parent in enumerate(parents):
            if not ROOT <= parent < start + offset:
                raise ValueError(f"node {start + offset} names parent {parent}, which does not exist yet")
        self.tokens.extend(tokens)
        self.parents.extend(parents)
        return range(start, start + len(tokens))

    def keep(self, nodes: Sequence[int], commit: int) -> list[Move]:
        """Keep only `nodes`, in ascending order; returns the moves. The first `commit` of them, a path, join the
        prefix.

        The others, each below the end of that path, are renumbered from 0. Moves go to lower KV slots in ascending
        order, so they can be done one after the other in place.
        """
        if not 0 <= commit <= len(nodes):
            raise ValueError(f"{commit} of {len(nodes)} nodes cannot be committed")
        renumbered = {node: at - commit for at, node in enumerate(nodes)}
        renumbered[nodes[commit - 1] if commit else ROOT] = ROOT
        self._check_kept(nodes, commit, renumbered)
        here = len(self.prefix)
        moves = [(here + node, here + at) for at, node in enumerate(nodes) if node != at]
        self.prefix.extend(self.tokens[node] for node in nodes[:commit])
        self.parents = [renumbered[self.parents[node]] for node in nodes[commit:]]
        self.tokens = [self.tokens[node] for node in nodes[commit:]]
        return moves

    def _check_kept(self, nodes: Sequence[int], commit: int, renumbered: dict[int, int]) -> None:
        for node, parent in zip(nodes[:commit], (ROOT, *nodes), strict=False):
            if self.parents[node] != parent:
                raise ValueError(f"node {node} is no child of {parent}")
        if any(a >= b for a, b in pairwise(nodes)):
            raise ValueError(f"nodes to keep must be told in ascending order, not {list(nodes)}")
        for node in nodes[commit:]:
            if renumbered.get(self.parents[node], -2) < ROOT:
                raise ValueError(
                    f"node {node} is no child of a node that stays in the tail, nor of the end of the path"
                )

    def truncate(self, length: int) -> None:
        """Drop the tail, and the prefix beyond `length` tokens."""
        self.keep((), 0)
        del self.prefix[length:]

    def slot_of(self, node: int) -> int:
        """Return the KV slot of a node."""
        return len(self.prefix) + node

    @property
    def depth(self) -> int:
        """How many nodes the longest path of the tail has."""
        depths = [0]  # of ROOT, then of each node
        for parent in self.parents:
            depths.append(depths[parent + 1] + 1)
        return max(depths)

    def path(self, node: int) -> list[int]:
        """Return the nodes from the root down to `node`, itself included."""
        path: list[int] = []
        while node != ROOT:
            path.append(node)
            node = self.parents[node]
        return path[::-1]

    def position(self, node: int) -> int:
        """Return the node's index in its sequence: how many tokens come before it."""
        return len(self.prefix) + len(self.path(node)) - 1

    def sequence(self, node: int) -> list[int]:
        """Return all tokens up to and including `node`; ROOT gives the prefix."""
        return [*self.prefix, *(self.tokens[n] for n in self.path(node))]

    def find(self, tokens: Sequence[int]) -> list[int]:
        """Return the longest path of nodes from the root that carries the beginning of `tokens`."""
        best: list[int] = []
        paths: list[list[int]] = [[]]
        for token in tokens:
            paths = [
                [*path, node]
                for path in paths
                for node in self._children(path[-1] if path else ROOT)
                if self.tokens[node] == token
            ]
            if not paths:
                break
            best = paths[0]
        return best

    def check(self) -> None:
        """Raise if an invariant is broken."""
        if len(self.tokens) != len(self.parents) or len(self.tokens) > self.tail_limit or len(self) > self.capacity:
            raise AssertionError(f"slots out of shape: {len(self.prefix)} + {len(self.tokens)} of {self.capacity}")
        if any(not ROOT <= parent < node for node, parent in enumerate(self.parents)):
            raise AssertionError(f"a node comes before its parent: {self.parents}")

    def _children(self, parent: int) -> list[int]:
        return [node for node, above in enumerate(self.parents) if above == parent]

    def demand(self, need: int, free: int | None = None) -> None:
        """Raise CacheFull unless `need` more nodes fit the tail."""
        free = self.room if free is None else free
        if need > free:
            raise CacheFull(
                f"Need {need} cache slots, {free} free (capacity {self.capacity}, tail {self.tail_limit}). "
                "Lower max_tokens or num_speculative_tokens, or raise context_length."
            )
