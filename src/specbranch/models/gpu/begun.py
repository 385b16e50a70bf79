"""Steps that a runner begins before they are asked for: of a tree that has just grown, and of a chain that most likely
follows on a verdict.

Owns what is known of such a step, and the answer to one question: is it what is asked for now? Invariant: a step that
is not is as if it had not been; what it wrote is written over.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from specbranch.core.pages import PAGE
from specbranch.core.runner import Feed
from specbranch.models.cache.kv_memory import Table
from specbranch.models.forward.step_rows import Rows
from specbranch.models.forward.transfer import Reading
from specbranch.models.gpu.layout import GROUP_ROWS
from specbranch.models.gpu.stream_clock import DeviceMoment


class Received:
    """A step that verifies a tree."""

    def __init__(
        self, seq: int, table: Table, start: int, read: Reading, results: Reading, begun: DeviceMoment
    ) -> None:
        """`read`: the token and the parent of each of its rows, behind how many these are; `begun`: when it was."""
        self.seq, self.results, self.begun = seq, results, begun
        self._start, self._read = start, read
        self._pages = table.pages[: -(-(start + GROUP_ROWS) // PAGE)]

    def reads(self, work: Sequence[Feed], rows: Sequence[Rows]) -> bool:
        """Whether it reads just this."""
        if len(work) != 1 or work[0].seq != self.seq or rows[0].start != self._start:
            return False
        (count, _), *read = self._read().tolist()
        asked = [list(one) for one in zip(work[0].tokens, work[0].parents, strict=True)]
        return asked == read[:count] and rows[0].table.pages[: len(self._pages)] == self._pages


@dataclass(frozen=True, slots=True)
class Followed:
    """A step that verifies a chain, which begins with the token that the verdict before it said."""

    seq: int
    rows: Rows
    pages: list[int]
    results: Reading
    begun: DeviceMoment

    def reads(self, work: Sequence[Feed], rows: Sequence[Rows]) -> bool:
        """Whether it reads just this, or this and more behind it: a row does not hang on those behind it."""
        if len(work) != 1 or work[0].seq != self.seq:
            return False
        feed, part = work[0], rows[0]
        return (
            part.start == part.prefix == self.rows.start
            and list(feed.tokens) == self.rows.tokens[: len(feed.tokens)]
            and list(part.seen) == self.rows.seen[: len(feed.tokens)]
            and part.table.pages[: len(self.pages)] == self.pages
        )
