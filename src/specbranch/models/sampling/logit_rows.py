"""Rows of logits as the native runner hands them out: a place in a block that one forward made.

Owns only the reference; the logits stay on their device. Invariant: a block is never written again once its rows were
handed out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor, stack

from specbranch.models.files.head_columns import Columns


@dataclass(frozen=True, slots=True, eq=False)
class TensorRow:
    """One row of a block of logits [rows, vocabulary], or [rows, columns] where only some tokens are scored."""

    block: Tensor
    index: int
    columns: Columns | None = None
    # [rows, layers·hidden]: the last layers' hidden states, where the runner was asked for them
    states: Tensor | None = None

    @property
    def logits(self) -> Tensor:
        """The row itself [vocabulary]: a view, or a copy with −∞ for what is not scored."""
        row = self.block[self.index]
        return row if self.columns is None else self.columns.spread(row)


def rows_of(block: Tensor, columns: Columns | None = None, states: Tensor | None = None) -> list[TensorRow]:
    """Return every row of a block, in order."""
    return [TensorRow(block, index, columns, states) for index in range(block.shape[0])]


def collate(rows: Sequence[TensorRow]) -> Tensor:
    """Return the rows as one tensor [rows, vocabulary]: a view where they follow one another in one whole block,
    else a copy."""
    block, columns = scored(rows)
    return block if columns is None else columns.spread(block)


def scored(rows: Sequence[TensorRow]) -> tuple[Tensor, Columns | None]:
    """Return the rows as one tensor of what is scored, and which tokens that is; rows that differ in this are spread
    out first."""
    if not rows:
        raise ValueError("collate needs at least one row")
    block, first, columns = rows[0].block, rows[0].index, rows[0].columns
    if all(row.block is block and row.index == first + offset for offset, row in enumerate(rows)):
        return block[first : first + len(rows)], columns
    if all(row.columns is columns for row in rows):
        return stack([row.block[row.index] for row in rows]), columns
    return stack([row.logits for row in rows]), None
