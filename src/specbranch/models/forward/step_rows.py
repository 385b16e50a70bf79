"""The rows of a step: their tokens, the KV slots they are written to, and what each of them attends to.

Owns the attention mask of trees, on every device. Invariant: a row attends to its ancestors in the order of their
*positions*. All rows of a sequence share the positions before `shared_end`, which are read page by page. The others,
the row's own path, are listed one by one. The boundary depends on the row's position alone, as long as its tail is at
most GROUP_POSITIONS deep.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from specbranch.core.slots import ROOT, Slots
from specbranch.models.cache.kv_memory import Table

GROUP_POSITIONS = 32  # a row's own path begins at a multiple of this: the last full group and the current one


@dataclass(frozen=True, slots=True)
class Rows:
    """New rows of one sequence, in consecutive KV slots from `start`."""

    table: Table
    tokens: Sequence[int]
    start: int
    prefix: int  # KV slots that every row sees
    seen: Sequence[int]  # attention mask: bit j of `seen[i]` is set if row i sees KV slot `prefix + j`

    @property
    def _behind(self) -> int:
        """The number of KV slots behind the prefix, those of the rows included."""
        return self.start + len(self.tokens) - self.prefix

    @property
    def positions(self) -> list[int]:
        """The rows' indices in their sequence."""
        return [self.prefix + seen.bit_count() - 1 for seen in self.seen]

    def cut(self, count: int) -> tuple[Rows, Rows]:
        """Return the first `count` rows and the others."""
        first = Rows(self.table, self.tokens[:count], self.start, self.prefix, self.seen[:count])
        return first, Rows(self.table, self.tokens[count:], self.start + count, self.prefix, self.seen[count:])

    def kv_slots(self) -> np.ndarray:
        """Return the KV slots of the pool that the rows are written to."""
        return self.table.flat(np.arange(self.start, self.start + len(self.tokens)))

    def behind(self) -> np.ndarray:
        """Return the mask over the KV slots behind the prefix [rows, KV slots].

        Ascending slots of a row are in the order of positions; the last one is the row itself.
        """
        return _bits(self.seen, self._behind)

    def path(self, row: int, start: int) -> np.ndarray:
        """Return the KV slots of the sequence that a row sees from position `start` on, itself last."""
        tail = np.flatnonzero(_bits(self.seen[row : row + 1], self._behind)[0]) + self.prefix
        return np.concatenate((np.arange(start, self.prefix), tail[max(start - self.prefix, 0) :]))


@dataclass(frozen=True, slots=True)
class ChunkRows:
    """New rows of one prompt, in consecutive KV slots from `start`: each sees all positions before it and itself."""

    table: Table
    tokens: Sequence[int]
    start: int

    def cut(self, count: int) -> tuple[ChunkRows, ChunkRows]:
        """Return the first `count` rows and the others."""
        return (
            ChunkRows(self.table, self.tokens[:count], self.start),
            ChunkRows(self.table, self.tokens[count:], self.start + count),
        )


def rows_of_nodes(table: Table, slots: Slots, nodes: range) -> Rows:
    """Make rows of nodes of the tail: each sees the prefix, its ancestors and itself."""
    seen: list[int] = []
    for node, parent in enumerate(slots.parents[: nodes.stop]):
        seen.append((0 if parent == ROOT else seen[parent]) | 1 << node)
    return Rows(
        table,
        slots.tokens[nodes.start : nodes.stop],
        slots.slot_of(nodes.start),
        len(slots.prefix),
        seen[nodes.start : nodes.stop],
    )


def rows_of_chunk(table: Table, tokens: Sequence[int], start: int) -> Rows:
    """Make rows of consecutive tokens of the prefix: each sees all tokens before it and itself."""
    return Rows(table, tokens, start, start, [(2 << row) - 1 for row in range(len(tokens))])


def shared_end(position: int, prefix: int) -> int:
    """Return how many positions a row shares with all rows of its sequence.

    It follows from the row's position, but it never exceeds the prefix; that matters only if the tail is deeper than a
    group.
    """
    return min(max(position // GROUP_POSITIONS - 1, 0) * GROUP_POSITIONS, prefix)


def split_into_steps(work: Sequence[Rows], most: int) -> Iterator[list[Rows]]:
    """Split rows into steps of at most `most` rows, in their order.

    So the keys that a row attends to are written by its own step or by an earlier one.
    """
    step: list[Rows] = []
    room = most
    for rows in work:
        rest = rows
        while len(rest.tokens) >= room:
            first, rest = rest.cut(room)
            yield [*step, first]
            step, room = [], most
        step += [rest] if rest.tokens else []
        room -= len(rest.tokens)
    if step:
        yield step


def tokens_of(work: Sequence[Rows]) -> np.ndarray:
    """Return the tokens of all rows [rows]."""
    return np.array([token for rows in work for token in rows.tokens], dtype=np.int64)


def positions_of(work: Sequence[Rows]) -> np.ndarray:
    """Return the positions of all rows [rows]."""
    return np.array([position for rows in work for position in rows.positions], dtype=np.int64)


def _bits(numbers: Sequence[int], width: int) -> np.ndarray:
    """Unpack integers into bits, lowest first [numbers, width]."""
    size = -(-width // 8)
    packed = np.frombuffer(b"".join(number.to_bytes(size, "little") for number in numbers), dtype=np.uint8)
    return np.unpackbits(packed.reshape(-1, size), axis=1, bitorder="little")[:, :width].astype(np.bool_)
