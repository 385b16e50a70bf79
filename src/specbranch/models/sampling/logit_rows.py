"""Rows of logits: references into the block of logits that one forward returned.

Owns only the reference; the logits stay on their device. Invariant: a block is never written again once rows refer to
it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor, stack

from specbranch.models.files.head_columns import Columns


@dataclass(frozen=True, slots=True, eq=False)
class TensorRow:
    """One row of a block of logits [rows, vocabulary], or [rows, columns] of a reduced head."""

    block: Tensor
    index: int
    columns: Columns | None = None
    # [rows, layers·hidden]: hidden states of the last layers; None: the forward was not asked for them
    states: Tensor | None = None

    @property
    def logits(self) -> Tensor:
        """The logits [vocabulary]: a view, or for a reduced head a copy with −∞ at all other tokens."""
        row = self.block[self.index]
        return row if self.columns is None else self.columns.spread(row)


def rows_of(block: Tensor, columns: Columns | None = None, states: Tensor | None = None) -> list[TensorRow]:
    """Return every row of a block, in order."""
    return [TensorRow(block, index, columns, states) for index in range(block.shape[0])]


def collate(rows: Sequence[TensorRow]) -> Tensor:
    """Return the rows as one tensor [rows, vocabulary].

    It is a view if the rows are consecutive rows of one block over the whole vocabulary, else a copy.
    """
    block, columns = scored(rows)
    return block if columns is None else columns.spread(block)


def scored(rows: Sequence[TensorRow]) -> tuple[Tensor, Columns | None]:
    """Return the rows as one tensor, and the tokens of its columns; None: the whole vocabulary.

    Rows with different columns are spread over the whole vocabulary first.
    """
    if not rows:
        raise ValueError("collate needs at least one row")
    block, first, columns = rows[0].block, rows[0].index, rows[0].columns
    if all(row.block is block and row.index == first + offset for offset, row in enumerate(rows)):
        return block[first : first + len(rows)], columns
    if all(row.columns is columns for row in rows):
        return stack([row.block[row.index] for row in rows]), columns
    return stack([row.logits for row in rows]), None
