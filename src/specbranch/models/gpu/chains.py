"""Chains behind a committed text: as rows, as what is asked of them, and as steps that are written out before their
tokens are known.

Owns the sheets of such steps. Where a chain lies, what its rows see and how their tokens are chosen follows from where
it begins alone, and while the target works there is time to write that down for each place at which the next chain may
begin. Invariant: a sheet that is taken holds what `pack` would write for the same rows; rows behind them read and write
what nobody asks for.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate, product

import numpy as np

from specbranch.core.pages import PAGE
from specbranch.core.request import Request, Spot
from specbranch.core.runner import Done
from specbranch.models.cache.kv_memory import Table
from specbranch.models.forward.step_rows import Rows
from specbranch.models.gpu import asking
from specbranch.models.gpu.layout import Bucket, Choosing, Sheet, pack, power_of_four


class ChainSheets:
    """Steps of one sequence, by where they begin and how many rows they have."""

    def __init__(self, spare: int, least: Bucket, longest: int) -> None:
        """`spare`: the flat place for padding; `least`: how large a step's bucket is at the least; `longest`: how many
        positions there are, which no row may go beyond."""
        self._spare, self._least, self._longest = spare, least, longest
        self._seq, self._pages = -1, list[int]()
        self._sheets: dict[tuple[int, int], Sheet] = {}

    def write(
        self,
        seq: int,
        request: Request,
        table: Table,
        starts: Iterable[int],
        done: Done,
        sizes: Sequence[int],
    ) -> None:
        """Write out the steps of some sizes that begin at some places, as far as they are not, until something else
        is to be done."""
        if (seq, table.pages) != (self._seq, self._pages):
            self._seq, self._pages, self._sheets = seq, table.pages[:], {}
        for start, size in product(starts, sizes):
            on_page = start % PAGE <= PAGE - size and start // PAGE < len(table.pages)
            if on_page and start + size <= self._longest and (start, size) not in self._sheets:
                rows = chain_rows(table, (0,) * size, start)
                packed, bucket = pack([rows], self._spare, chain_choosing(request, rows), least=self._least)
                self._sheets[start, size] = Sheet(packed, bucket)
                if done():
                    return

    def forget(self) -> None:
        """Whose these are is no more; another may have the same number."""
        self._seq = -1

    def take(
        self, seq: int, table: Table, start: int, tokens: Sequence[int], moves: np.ndarray | None
    ) -> tuple[np.ndarray, Bucket] | None:
        """The step that begins at a place, with its tokens and what is to be moved before; nothing: it is not there."""
        sheet = self._sheets.get((start, power_of_four(len(tokens))))
        pages = start // PAGE + 1
        if sheet is None or seq != self._seq or table.pages[:pages] != self._pages[:pages]:
            return None
        sheet.say(tokens)
        sheet.move(moves)
        return sheet.packed, sheet.bucket


def chain_rows(table: Table, tokens: Sequence[int], start: int) -> Rows:
    """The rows of a chain behind a committed text."""
    return Rows(table, list(tokens), start, start, list(accumulate(1 << row for row in range(len(tokens)))))


def chain_choosing(request: Request, rows: Rows) -> Choosing:
    """What is asked of the rows of a chain: each leads to the next by its token."""
    count = len(rows.tokens)
    drawn = () if request.greedy else enumerate(Spot(request, rows.start + row, list) for row in range(1, count + 1))
    choosing = asking.choosing_of(count, drawn)
    choosing.parent[1:], choosing.said[1:] = range(count - 1), rows.tokens[1:]  # type: ignore[assignment]
    return choosing
