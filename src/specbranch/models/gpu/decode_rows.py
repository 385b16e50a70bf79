"""The rows of a plain decode step: one for each sequence, packed as arrays, not sequence by sequence.

Owns the packing of such a step; rows of verify orders of other sequences may come behind its own. Does not own the
sections (`layout.py`), or which sequences decode (`plain_decode.py`). Invariant: a packed step is the one that
`layout.pack` makes of the same rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain

import numpy as np

from specbranch.core.noise import key_bytes
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


class OwnPaths:
    """The KV slots that rows read by themselves, at positions that grow by one from step to step.

    A row shares all positions but its last group and the one before with its sequence. Each group lies on one page. So
    a path begins elsewhere only where the row begins a group.
    """

    def __init__(self, tables: Sequence[Table]) -> None:
        self._tables, self._rows = tables, np.arange(len(tables))
        self._positions = np.full(len(tables), -2, dtype=np.int32)  # of the step before; -2: not known
        self._begins = np.empty(len(tables), dtype=np.int32)  # the first KV slot of the page of each position
        self.own = np.empty((len(tables), WINDOW), dtype=np.int32)  # what lies behind a path is one of its KV slots
        self.shared = self.behind = self.slots = self._positions  # positions; those of each path before its last; slots

    def forget(self, rows: Sequence[int]) -> None:
        """Forget the paths of rows whose page tables have changed."""
        self._positions = self._positions.copy()
        self._positions[rows] = -2

    def move_to(self, positions: np.ndarray) -> None:
        """Bring all paths to these positions; only those that begin elsewhere are written anew."""
        shared = np.maximum((positions & -GROUP_POSITIONS) - GROUP_POSITIONS, 0)
        follows = (shared == self.shared) & (positions - self._positions <= 1)
        self._positions, self.shared, self.behind = positions, shared, positions - shared
        if (anew := np.flatnonzero(~follows)).size:
            self._write(anew)
        self.slots = self._begins + (positions & (PAGE - 1))
        self.own[self._rows, self.behind] = self.slots

    def _write(self, rows: np.ndarray) -> None:
        """Write the whole paths of some rows."""
        positions, shared = self._positions[rows], self.shared[rows]
        tables = [self._tables[row].pages for row in rows.tolist()]
        of_groups = zip(tables, (shared >> SHIFT).tolist(), (positions >> SHIFT).tolist(), strict=True)
        begins = np.array([(pages[first], pages[last]) for pages, first, last in of_groups], dtype=np.int32) << SHIFT
        path = np.minimum(shared[:, None] + _WITHIN, positions[:, None])
        self.own[rows] = begins.repeat(GROUP_POSITIONS, axis=1) + (path & (PAGE - 1))
        self._begins[rows] = begins[:, 1]


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
        self.shaped = [at for at, row in enumerate(rows) if row.is_shaped]
        self.is_masked = any(row.is_masked for row in rows)
        self.before, self.sources = before, sources
        self.shaping: object | None = None  # what `shaped_decode.py` keeps for the steps of these sequences
        self._noisy = [at for at, row in enumerate(rows) if not row.request.greedy]
        self._drawn = [rows[at].request for at in self._noisy]
        coldest = [max(request.params.temperature, COLDEST) for request in self._drawn]
        self._temperatures = np.array(coldest, dtype=np.float32).view(np.int32)
        self._paths = OwnPaths([row.table for row in rows])
        self._tables: np.ndarray | None = None  # page tables, one after the other; None: not known
        self._groups = np.ones((len(rows), 3), dtype=np.int32)  # see `Views.groups`
        self._groups[:, 0] = np.arange(len(rows))

    def __len__(self) -> int:
        return len(self.rows)

    def advance(self, changed: Sequence[int]) -> None:
        """Become the next step of the same sequences: each row computes the token that it has sampled.

        `changed`: rows whose page tables are not those of the step so far.
        """
        self.positions = self.positions + 1
        self.tokens = -1 - self._groups[:, 0]
        if changed:
            self._paths.forget(changed)
            self._tables = None

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
        self._paths.move_to(positions)
        all_rows[0, :rows], all_rows[1, :rows], all_rows[2, :rows] = self.tokens, positions, self._paths.slots
        per_row[0, :rows], per_row[1, :rows] = self._paths.shared, self._paths.behind + 1
        own[:rows, :WINDOW], own[sampled:] = self._paths.own, spare
        groups[:rows] = self._groups
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
        if self._tables is None or not (self.positions & (PAGE - 1)).all():
            ends = ((self.positions >> SHIFT) + 1).tolist()
            tables = [row.table.pages[:end] for row, end in zip(self.rows, ends, strict=True)]
            self._groups[:, 2] = [0, *accumulate(ends[:-1])]
            self._tables = np.array(list(chain.from_iterable(tables)), dtype=np.int32)
        return self._tables

    def _write_sampling(self, per_row: np.ndarray) -> None:
        """Write the temperature and the noise of rows that are not greedy."""
        if not self._noisy:
            return
        noise = b"".join(
            [
                key_bytes(request.seed, request.sample, position + 1)
                for request, position in zip(self._drawn, self.positions[self._noisy].tolist(), strict=True)
            ]
        )
        first = PER_ROW - ALL_ROWS
        per_row[first, self._noisy] = self._temperatures
        per_row[first + 1 : first + 3, self._noisy] = np.frombuffer(noise, dtype="<i4").reshape(-1, 2).T
        per_row[first + 3, self._noisy] = 1
