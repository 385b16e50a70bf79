"""Rows of logits as the native runner hands them out: a place in a block that one forward made.

Owns only the reference; the logits stay on their device. Invariant: a block is never written again once its rows were handed out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor, stack


@dataclass(frozen=True, slots=True, eq=False)
class TensorRow:
    """One row of a block of logits [rows, vocabulary]."""

    block: Tensor
    index: int

    @property
    def logits(self) -> Tensor:
        """The row itself [vocabulary], a view."""
        return self.block[self.index]


def rows_of(block: Tensor) -> list[TensorRow]:
    """Return every row of a block, in order."""
    return [TensorRow(block, index) for index in range(block.shape[0])]


def collate(rows: Sequence[TensorRow]) -> Tensor:
    """Return the rows as one tensor [rows, vocabulary]: a view where they follow one another in one block, else a copy."""
    if not rows:
        raise ValueError("collate needs at least one row")
    block, first = rows[0].block, rows[0].index
    if all(row.block is block and row.index == first + offset for offset, row in enumerate(rows)):
        return block[first : first + len(rows)]
    return stack([row.logits for row in rows])
