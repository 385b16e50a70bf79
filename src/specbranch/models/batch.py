"""From the bookkeeping of sequences to the numbers of one step: which rows there are, where each is written, and whom
it sees.

Owns what a row sees, on every device. Invariant: a row sees its ancestors in the order of their *positions*. Those
before `shared_end` are read where they lie, as every row of the sequence has them in common; the others, the row's own
path, are listed one by one. Where the one ends and the other begins depends on the row's position alone, as long as
its tail is at most GROUP deep.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from specbranch.core.slots import ROOT, Slots
from specbranch.models.kv import Table

GROUP = 32  # positions: a row's own path is its last two groups


@dataclass(frozen=True, slots=True)
class Rows:
    """New rows of one sequence: consecutive KV slots from `start`; `seen[i]` has bit j set where row i sees KV slot
    `prefix + j`."""

    table: Table
    tokens: Sequence[int]
    start: int
    prefix: int  # KV slots that every row sees
    seen: Sequence[int]

    @property
    def positions(self) -> list[int]:
        """The rows' indices in their sequence."""
        return [self.prefix + seen.bit_count() - 1 for seen in self.seen]

    def cut(self, count: int) -> tuple[Rows, Rows]:
        """Return the first `count` rows and the others."""
        first = Rows(self.table, self.tokens[:count], self.start, self.prefix, self.seen[:count])
        return first, Rows(self.table, self.tokens[count:], self.start + count, self.prefix, self.seen[count:])

    def kv_slots(self) -> np.ndarray:
        """Where the rows are written, in the pool."""
        return self.table.flat(np.arange(self.start, self.start + len(self.tokens)))

    def behind(self) -> np.ndarray:
        """Which KV slots behind the prefix each row sees, itself last [rows, KV slots]: ascending ones are in the order
        of positions."""
        return _bits(self.seen, self.start + len(self.tokens) - self.prefix)

    def path(self, row: int, start: int) -> np.ndarray:
        """The KV slots, in the sequence, of what a row sees from a position on, itself last."""
        tail = np.flatnonzero(self.behind()[row]) + self.prefix
        return np.concatenate((np.arange(start, self.prefix), tail[max(start - self.prefix, 0) :]))


def rows_of_nodes(table: Table, slots: Slots, nodes: range) -> Rows:
    """Describe nodes of the tail: each sees the prefix, its ancestors and itself."""
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
    """Describe consecutive tokens of the prefix: each sees all before it and itself."""
    return Rows(table, tokens, start, start, [(2 << row) - 1 for row in range(len(tokens))])


def shared_end(position: int, prefix: int) -> int:
    """How many positions a row reads in common with the others of its sequence; fewer only where its tail is deeper
    than a group."""
    return min(max(position // GROUP - 1, 0) * GROUP, prefix)


def dealt(work: Sequence[Rows], most: int) -> Iterator[list[Rows]]:
    """Deal rows out to steps of at most `most`, in their order: what a row sees is written by its own step or by one
    before it."""
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
    """The tokens of all rows [rows]."""
    return np.array([token for rows in work for token in rows.tokens], dtype=np.int64)


def positions_of(work: Sequence[Rows]) -> np.ndarray:
    """The positions of all rows [rows]."""
    return np.array([position for rows in work for position in rows.positions], dtype=np.int64)


def _bits(numbers: Sequence[int], width: int) -> np.ndarray:
    """Write numbers out in bits, lowest first [numbers, width]."""
    size = -(-width // 8)
    packed = np.frombuffer(b"".join(number.to_bytes(size, "little") for number in numbers), dtype=np.uint8)
    return np.unpackbits(packed.reshape(-1, size), axis=1, bitorder="little")[:, :width].astype(np.bool_)
