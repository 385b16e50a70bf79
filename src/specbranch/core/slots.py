"""Who holds which place in a cache: a committed prefix, and behind it a small tail in which every token names its parent.

Owns the bookkeeping of one sequence, not its memory. Invariant: token i of the prefix lies at place i, and node j of the tail at
place `len(prefix) + j`, so a chain that is committed does not move.
"""

from __future__ import annotations

from collections.abc import Sequence

from specbranch.errors import CacheFull

ROOT = -1  # the end of the prefix, as a parent
TAIL = 128  # places behind the prefix: a pending chain of 10 and 6 lanes of 10 fit

Move = tuple[int, int]  # from place, to place


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
        """Append tokens to the prefix; returns their places. The tail must be empty."""
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

    def keep(self, path: Sequence[int], commit: int) -> list[Move]:
        """Keep only `path` (a line of nodes from the root); its first `commit` nodes join the prefix. Returns the moves it takes.

        The remaining nodes of the path are renumbered from 0. Moves go to lower places in ascending order, so they can be done
        one after the other in place.
        """
        if not 0 <= commit <= len(path):
            raise ValueError(f"{commit} of a path of {len(path)} nodes cannot be committed")
        for node, parent in zip(path, (ROOT, *path), strict=False):
            if self.parents[node] != parent:
                raise ValueError(f"node {node} is no child of {parent}")
        here = len(self.prefix)
        moves = [(here + node, here + at) for at, node in enumerate(path) if node != at]
        line = [self.tokens[node] for node in path]
        self.prefix.extend(line[:commit])
        self.tokens = line[commit:]
        self.parents = list(range(ROOT, len(self.tokens) - 1))
        return moves

    def truncate(self, length: int) -> None:
        """Forget the tail, and the prefix beyond `length` tokens."""
        self.keep((), 0)
        del self.prefix[length:]

    def place(self, node: int) -> int:
        """Where the node lies in the cache."""
        return len(self.prefix) + node

    def path(self, node: int) -> list[int]:
        """The nodes from the root down to `node`, itself included."""
        line: list[int] = []
        while node != ROOT:
            line.append(node)
            node = self.parents[node]
        return line[::-1]

    def position(self, node: int) -> int:
        """The node's index in its sequence: how many tokens come before it."""
        return len(self.prefix) + len(self.path(node)) - 1

    def sequence(self, node: int) -> list[int]:
        """All tokens up to and including `node`; ROOT gives the prefix."""
        return [*self.prefix, *(self.tokens[n] for n in self.path(node))]

    def find(self, tokens: Sequence[int]) -> list[int]:
        """The longest line of nodes from the root that carries the beginning of `tokens`."""
        best: list[int] = []
        lines: list[list[int]] = [[]]
        for token in tokens:
            lines = [[*line, node] for line in lines for node in self._children(line[-1] if line else ROOT) if self.tokens[node] == token]
            if not lines:
                break
            best = lines[0]
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
