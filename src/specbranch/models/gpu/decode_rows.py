"""The rows of a plain decode step: one for each sequence, packed as arrays, not sequence by sequence.

Owns the packing of such a step; rows of verify orders of other sequences may come behind its own. Does not own the
sections (`layout.py`), or which sequences decode (`plain_decode.py`). Invariant: a packed step is the one that
`layout.pack` makes of the same rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from itertools import accumulate, chain

import numpy as np

from specbranch.core.noise import keys
from specbranch.core.pages import PAGE
from specbranch.core.request import Request
from specbranch.models.cache.kv_memory import Table
from specbranch.models.forward.step_rows import GROUP_POSITIONS, ChunkRows, Rows
from specbranch.models.gpu.layout import (
    ALL_ROWS,
    COUNTS_SECTION,
    LEAST_TILE_ROWS,
    LONGEST_COUNT,
    PER_ROW,
    SAMPLED_COUNT,
    SHARED_COUNT,
    SHIFT,
    SMALLEST_BUCKET,
    USED_COUNT,
    Bucket,
    Choosing,
    blank_step,
    packed_size,
    padded_bucket,
    section_of,
    sections_of,
    write_choosing,
    write_chunks,
    write_rows,
)
from specbranch.models.sampling.sheet import COLDEST, is_penalised

WINDOW = 2 * GROUP_POSITIONS  # KV slots of the longest own path: the last full group and the current one
_WITHIN = np.arange(WINDOW, dtype=np.int32)


@dataclass(frozen=True, slots=True)
class DecodeRow:
    """A sequence in a decode step."""

    table: Table
    request: Request

    @property
    def is_shaped(self) -> bool:
        """True if its token is not sampled by the graph alone, or its log-probabilities are wanted."""
        params = self.request.params
        cut = not self.request.greedy and (params.top_k is not None or params.top_p < 1.0 or params.min_p > 0.0)
        edited = is_penalised(params) or bool(params.logit_bias) or params.min_tokens > 0
        return cut or edited or params.logprobs is not None or self.is_masked

    @property
    def is_masked(self) -> bool:
        """True if a grammar decides which tokens may follow."""
        return self.request.is_constrained


@dataclass(frozen=True, slots=True)
class VerifyRows:
    """Rows of verify orders in a decode step; `choosing`: how the step samples them, if it judges them itself."""

    parts: Sequence[Rows]
    choosing: Choosing | None

    def __len__(self) -> int:
        return sum([len(part.tokens) for part in self.parts])


NO_VERIFY_ROWS = VerifyRows((), None)


class DecodeRows:
    """The rows of a step: row i computes a token of `rows[i]` at position `positions[i]`."""

    def __init__(
        self,
        rows: Sequence[DecodeRow],
        positions: Sequence[int],
        tokens: Sequence[int],
        before: DecodeRows | None = None,
        sources: Sequence[int | Sequence[int]] = (),
    ) -> None:
        """`tokens`: of each row; -1 - r is the token that row r of the step before has sampled.

        `before`: the step before. `sources`: of each row, its row there, or else its text.
        """
        self.rows = tuple(rows)
        self.positions = np.array(positions, dtype=np.int32)
        self.tokens = np.array(tokens, dtype=np.int32)
        self.is_shaped = any(row.is_shaped for row in rows)
        self.is_masked = any(row.is_masked for row in rows)
        self.before, self.sources = before, sources
        self.shaping: object | None = None  # what `shaped_decode.py` keeps for the steps of these sequences
        self._noisy = [at for at, row in enumerate(rows) if not row.request.greedy]
        coldest = [max(row.request.params.temperature, COLDEST) for row in rows if not row.request.greedy]
        self._temperatures = np.array(coldest, dtype=np.float32).view(np.int32)
        self._begins: list[int] = []  # where page tables begin, and where the last one ends
        self._tables = np.empty(0, dtype=np.int32)

    def __len__(self) -> int:
        return len(self.rows)

    def after(self, same_tables: bool) -> DecodeRows:
        """Return the next step of the same sequences: each row computes the token that it has sampled.

        `same_tables`: their page tables are those of this step.
        """
        made = copy(self)
        made.positions = self.positions + 1
        if not same_tables:
            made._begins = []
        made.tokens = -1 - np.arange(len(self.rows), dtype=np.int32)
        return made

    def pack(
        self,
        spare: int,
        least: Bucket = SMALLEST_BUCKET,
        chunks: Sequence[ChunkRows] = (),
        tile_rows: int = LEAST_TILE_ROWS,
        verify: VerifyRows = NO_VERIFY_ROWS,
    ) -> tuple[np.ndarray, Bucket]:
        """Pack the step; arguments as for `layout.pack`. `verify`: rows behind these."""
        rows, positions = len(self.rows), self.positions
        sampled = rows + len(verify)
        bucket = padded_bucket(sampled, sampled == 1, least, sum([len(chunk.tokens) for chunk in chunks]))
        fixed, tables = packed_size(bucket), self._page_tables()
        others: list[Rows | ChunkRows] = [*verify.parts, *chunks]
        of_others = [part.table.pages[: -(-(part.start + len(part.tokens)) // PAGE)] for part in others]
        ends = list(accumulate(map(len, of_others), initial=len(tables)))
        packed = np.empty(fixed + ends[-1], dtype=np.int32)
        packed[:fixed] = blank_step(bucket, spare)
        packed[fixed : fixed + len(tables)] = tables
        packed[fixed + len(tables) :] = list(chain.from_iterable(of_others))
        all_rows, per_row, groups, own = sections_of(packed, bucket)
        shared = np.maximum((positions & -GROUP_POSITIONS) - GROUP_POSITIONS, 0)
        all_rows[0, :rows], all_rows[1, :rows] = self.tokens, positions
        per_row[0, :rows], per_row[1, :rows] = shared, positions - shared + 1
        all_rows[2, :rows] = self._write_paths(own, shared)
        own[sampled:] = spare
        groups[:rows, 0], groups[:rows, 1], groups[:rows, 2] = np.arange(rows), 1, self._begins[:rows]
        self._write_sampling(per_row)
        if verify.parts:
            write_rows(verify.parts, packed, bucket, ends, rows)
        if verify.choosing is not None:
            write_choosing(verify.choosing, packed, bucket, rows)
        counts = section_of(packed, bucket, COUNTS_SECTION)
        counts[SHARED_COUNT], counts[SAMPLED_COUNT] = per_row[0, :sampled].max(), sampled
        if chunks:
            counts[LONGEST_COUNT] = max([chunk.start + len(chunk.tokens) for chunk in chunks])
            begins = ends[len(verify.parts) :]
            counts[USED_COUNT] = write_chunks(chunks, bucket, begins, all_rows, packed, tile_rows)
        return packed, bucket

    def _page_tables(self) -> np.ndarray:
        """Return the page tables of all rows, one after the other; they are longer where a row begins a page."""
        if not self._begins or not (self.positions & (PAGE - 1)).all():
            ends = ((self.positions >> SHIFT) + 1).tolist()
            tables = [row.table.pages[:end] for row, end in zip(self.rows, ends, strict=True)]
            self._begins = list(accumulate(ends, initial=0))
            self._tables = np.array(list(chain.from_iterable(tables)), dtype=np.int32)
        return self._tables

    def _write_paths(self, own: np.ndarray, shared: np.ndarray) -> np.ndarray:
        """Write the own path of each row; returns the KV slots that the rows are written to."""
        rows, positions = len(self.rows), self.positions
        # an own path lies on two pages at most
        first_pages = [row.table.pages[at] for row, at in zip(self.rows, (shared >> SHIFT).tolist(), strict=True)]
        last_pages = [row.table.pages[at] for row, at in zip(self.rows, (positions >> SHIFT).tolist(), strict=True)]
        first, last = (np.array(pages, dtype=np.int32) << SHIFT for pages in (first_pages, last_pages))
        path = shared[:, None] + _WITHIN
        np.minimum(path, positions[:, None], out=path)
        begins = positions & -PAGE
        pages = np.where(path < begins[:, None], first[:, None], last[:, None])
        own[:rows, :WINDOW] = pages + (path & (PAGE - 1))
        return last + (positions & (PAGE - 1))

    def _write_sampling(self, per_row: np.ndarray) -> None:
        """Write the temperature and the noise of rows that are not greedy."""
        if not self._noisy:
            return
        noise: list[int] = []
        for at, position in zip(self._noisy, self.positions[self._noisy].tolist(), strict=True):
            request = self.rows[at].request
            noise += keys(request.seed, request.sample, position + 1)
        first = PER_ROW - ALL_ROWS
        per_row[first, self._noisy] = self._temperatures
        per_row[first + 1 : first + 3, self._noisy] = np.array(noise, dtype=np.uint32).view(np.int32).reshape(-1, 2).T
        per_row[first + 3, self._noisy] = 1
