"""A packed step: all inputs of a forward over several sequences in one int32 array, which one copy brings to a device.

Owns the order of the sections and their padding. A step has rows that are sampled, and behind them rows of prompts. A
sampled row reads the positions before `shared` through its group's page table, the others, itself last, through its own
path. A prompt's row reads all its positions through the page table of its tile. Sampling parameters and pending moves
of KV slots are sections, too. Page tables come last, as their length varies. Invariants: the bucket alone decides where
a section lies, so a captured graph reads every step of a bucket through the same views. A row's position alone decides
`shared`, unless its tail is too deep: the part that does not lie at its own positions may have one group at most.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import accumulate
from math import prod
from typing import NamedTuple

import numpy as np
from torch import Tensor

from specbranch.core.pages import PAGE
from specbranch.models.forward.step_rows import GROUP_POSITIONS, ChunkRows, Rows

LONGEST_OWN = 192  # KV slots of the longest own path
MOST_STEP_ROWS = 512  # sampled rows of a step, at most
MOST_TOTAL_ROWS = 2048  # rows of a step, at most, those of prompts included
LEAST_TOTAL_ROWS = 32  # the same, at least, if it has rows of prompts
CHUNK_STEP_ROWS = (16, 64, 256, 512)  # padded numbers of sampled rows of steps with rows of prompts: few kinds
GROUP_ROWS = 16  # rows of a sequence that read its shared positions together
BATCH_GROUP_ROWS = 4  # the same in a step of several sequences, most of which have few rows
LEAST_TILE_ROWS = 16  # rows of a prompt that read their keys together, at least
ALIGNED = 32  # numbers: sections begin at whole cache lines in every bucket
ALL_ROWS = 3  # sections with one number per row, those of prompts included: token, position, KV slot
PER_ROW = 5  # the same and those of sampled rows: shared, own_count
# sections, by number
ROWS_SECTION, CHOICE_SECTION, GROUPS_SECTION, OWN_SECTION, COUNTS_SECTION, MOVES_SECTION, TILES_SECTION = range(7)
# entries of the section of counts: moves; depth of the deepest row; most shared positions of a sampled row; rows in
# use, with padding of sampled rows and with rows of prompts; sampled rows without padding; length of the longest
# prompt; 1 in a step that is timed: its padding reads as many experts as real rows would
MOVED_COUNT, DEPTH_COUNT, SHARED_COUNT, USED_COUNT, SAMPLED_COUNT, LONGEST_COUNT, SPREAD_COUNT, TILES_COUNT = range(8)
SHIFT = PAGE.bit_length() - 1
ROOT_ROW, NO_ROW = -1, -2  # values of `said`: the row is a root, the row can never be accepted
ONE = int(np.float32(1.0).view(np.int32))
# A row of results begins with: token, 1 if the row is reached, confidence, and, with several entries, AdaEDL's bound.
BEFORE, CONFIDENCE, BOUND = 4, 2, 3


class Choosing(NamedTuple):
    """Sampling parameters and tree edges of rows, each [rows] int32."""

    temperature: np.ndarray | Tensor  # the bits of a float32
    first_key: np.ndarray | Tensor  # key of the noise
    second_key: np.ndarray | Tensor
    noisy: np.ndarray | Tensor  # 1 if noise is added
    parent: np.ndarray | Tensor  # a row of the same step; a root is its own parent
    # the token that the parent must sample for this row to be reached; ROOT_ROW: always, NO_ROW: never
    said: np.ndarray | Tensor


PARENT_FIELD = Choosing._fields.index("parent")
PARENT_ROW = PER_ROW - ALL_ROWS + PARENT_FIELD  # in the section of sampled rows


class Bucket(NamedTuple):
    """The padded size of a step."""

    rows: int  # sampled ones
    groups: int  # of one sequence GROUP_ROWS rows each; of several sequences as many groups as rows
    chunk: int = 0  # rows of prompts

    @property
    def total(self) -> int:
        """All rows."""
        return self.rows + self.chunk


SMALLEST_BUCKET = Bucket(1, 1)
DEFAULT_PAGES = 64  # of the longest page table, if nobody says otherwise


@dataclass(frozen=True, slots=True)
class Views:
    """The sections of a packed step, int32."""

    tokens: Tensor  # [all rows]
    positions: Tensor  # [all rows]
    slots: Tensor  # [all rows] KV slots of the pool that keys and values are written to
    shared: Tensor  # [rows] how many positions are read through the page table
    own_count: Tensor  # [rows] length of the own path, at least 1
    # [groups, 3] first row and number of rows, consecutive, and where the page table begins; 0 rows: padding
    groups: Tensor
    tables: Tensor  # page tables, one after the other
    own: Tensor  # [rows, LONGEST_OWN] KV slots of the pool by position; beyond `own_count` without meaning
    choosing: Tensor | None = None  # [fields of Choosing, at least rows]
    counts: Tensor | None = None  # see MOVED_COUNT and the others
    # [2, some] KV slots of the pool: sources and targets, copied one after the other
    moves: Tensor | None = None
    # [tiles, 4] of prompts: first row, number of rows, where the page table begins, position of the first row
    tiles: Tensor | None = None
    most_pages: int = DEFAULT_PAGES  # of the longest page table


def bucket_of(work: Sequence[Rows], least: Bucket = SMALLEST_BUCKET, chunk: int = 0) -> Bucket:
    """Return the smallest bucket for these rows and `chunk` rows of prompts, with at least as many rows as `least`."""
    return padded_bucket(sum([len(part.tokens) for part in work]), len(work) == 1, least, chunk)


def padded_bucket(rows: int, alone: bool, least: Bucket, chunk: int) -> Bucket:
    """Return the smallest bucket for `rows` sampled rows; `alone`: they are of one sequence. Others as for
    `bucket_of`."""
    if rows > MOST_STEP_ROWS or not 0 < rows + chunk <= MOST_TOTAL_ROWS:
        raise ValueError(
            f"a step takes up to {MOST_STEP_ROWS} sampled rows, and 1 to {MOST_TOTAL_ROWS} in all; got {rows} and "
            f"{chunk} of prompts; deal them out first"
        )
    if chunk:
        padded = chunk_step_rows(rows)
        return Bucket(padded, padded, max(power_of_two(padded + chunk), LEAST_TOTAL_ROWS) - padded)
    padded = max(power_of_four(rows), least.rows)
    return alone_bucket(padded) if alone else Bucket(padded, padded)


def alone_bucket(rows: int) -> Bucket:
    """Return the bucket of a step of one sequence with this padded number of rows."""
    return Bucket(rows, max(rows // GROUP_ROWS, 1))


def chunk_step_rows(rows: int) -> int:
    """Return the padded number of sampled rows of a step that has rows of prompts, too."""
    return next(padded for padded in CHUNK_STEP_ROWS if padded >= rows)


def fitting_chunks(chunks: Sequence[ChunkRows], rows: int, tile_rows: int) -> tuple[list[ChunkRows], list[ChunkRows]]:
    """Return the rows of prompts that fit into a step with `rows` sampled rows, in their order, and the others."""
    room, taken, used, tiles = MOST_TOTAL_ROWS - chunk_step_rows(rows), list[ChunkRows](), 0, 0
    for at, chunk in enumerate(chunks):
        count = min(len(chunk.tokens), room - used)
        used, tiles = used + count, tiles + -(-count // tile_rows)
        if not count or tiles > most_tiles(used):  # the bucket is not smaller, so it has as many tiles
            return taken, list(chunks[at:])
        if count < len(chunk.tokens):
            first, rest = chunk.cut(count)
            return [*taken, first], [rest, *chunks[at + 1 :]]
        taken.append(chunk)
    return taken, []


def most_tiles(chunk: int) -> int:
    """Return how many tiles a step of `chunk` rows of prompts can have."""
    return chunk // 4 + LEAST_TILE_ROWS if chunk else 0


def most_moves(rows: int) -> int:
    """Return how many KV slots a step of `rows` rows can move."""
    return max(4 * rows, 2 * ALIGNED)


def power_of_four(number: int) -> int:
    """Round up to a power of four, above 16 to a power of two: there padding costs more than another graph."""
    least = power_of_two(number)
    return least * 2 if least in (2, 8) else least


def power_of_two(number: int) -> int:
    """Round up to a power of two."""
    return 1 << (number - 1).bit_length()


def packed_size(bucket: Bucket) -> int:
    """Return the length of a packed step without its page tables."""
    return _offsets(bucket)[-1]


def largest_size(most_pages: int) -> int:
    """Return the length of the longest packed step, if no page table is longer than this."""
    sequences = MOST_STEP_ROWS + most_tiles(MOST_TOTAL_ROWS)
    widest = (Bucket(rows, rows, MOST_TOTAL_ROWS - rows) for rows in CHUNK_STEP_ROWS)
    return max(map(packed_size, widest)) + sequences * most_pages


def views(packed: Tensor, bucket: Bucket, most_pages: int = DEFAULT_PAGES) -> Views:
    """Return the sections of a packed step, or of a longer buffer that begins with one."""
    shapes, offsets = _shapes(bucket), _offsets(bucket)
    sections = [packed[at : at + prod(shape)].view(shape) for shape, at in zip(shapes, offsets, strict=False)]
    all_rows, per_row, groups, own, counts, moves, tiles = sections
    tokens, positions, slots = all_rows[:, : bucket.total]
    shared, own_count = per_row[: PER_ROW - ALL_ROWS, : bucket.rows]
    choosing = per_row[PER_ROW - ALL_ROWS :, : bucket.rows]
    tables = packed[offsets[-1] :]
    return Views(
        tokens, positions, slots, shared, own_count, groups, tables, own, choosing, counts, moves,
        tiles if bucket.chunk else None, most_pages,
    )  # fmt: skip


def brought_moves(packed: Tensor, bucket: Bucket, count: int) -> Tensor:
    """Return the moves of a packed step in order [2, count]."""
    moves = views(packed, bucket).moves
    assert moves is not None
    return moves[:, :count].long()


def pack(
    work: Sequence[Rows],
    spare: int,
    choosing: Choosing | None = None,
    moves: np.ndarray | None = None,
    least: Bucket = SMALLEST_BUCKET,
    chunks: Sequence[ChunkRows] = (),
    tile_rows: int = LEAST_TILE_ROWS,
) -> tuple[np.ndarray, Bucket]:
    """Pack rows for a device; padding reads and writes KV slot `spare` of the pool.

    `chunks`: rows of prompts. `tile_rows`: how many rows of one prompt read their keys together.
    """
    work = [part for part in work if part.tokens]
    bucket = bucket_of(work, least, sum([len(chunk.tokens) for chunk in chunks]))
    fixed = packed_size(bucket)
    parts: list[Rows | ChunkRows] = [*work, *chunks]
    tables = [part.table.pages[: -(-(part.start + len(part.tokens)) // PAGE)] for part in parts]
    ends = list(accumulate([len(pages) for pages in tables], initial=fixed))
    packed = np.empty(ends[-1], dtype=np.int32)
    packed[:fixed] = blank_step(bucket, spare)
    for begin, end, pages in zip(ends, ends[1:], tables, strict=False):
        packed[begin:end] = pages
    all_rows, per_row, _, own = sections_of(packed, bucket)
    rows = sum([len(part.tokens) for part in work])
    own[rows:] = spare
    counts = section_of(packed, bucket, COUNTS_SECTION)
    if work:
        write_rows(work, packed, bucket, [end - fixed for end in ends])
        counts[SHARED_COUNT], counts[SAMPLED_COUNT] = per_row[0, :rows].max(), rows
    if choosing is not None:
        write_choosing(choosing, packed, bucket)
    if moves is not None:
        counts[MOVED_COUNT] = moves.shape[1]
        section_of(packed, bucket, MOVES_SECTION)[:, : moves.shape[1]] = moves
    if chunks:
        counts[LONGEST_COUNT] = max([chunk.start + len(chunk.tokens) for chunk in chunks])
        begins = [end - fixed for end in ends[len(work) :]]
        counts[USED_COUNT] = write_chunks(chunks, bucket, begins, all_rows, packed, tile_rows)
    return packed, bucket


def write_rows(work: Sequence[Rows], packed: np.ndarray, bucket: Bucket, begins: Sequence[int], first: int = 0) -> None:
    """Write rows of sequences behind the `first` rows, of which each has a group of its own.

    `begins`: where their page tables begin.
    """
    all_rows, per_row, groups, own = sections_of(packed, bucket)
    end = first + sum([len(part.tokens) for part in work])
    all_rows[0, first:end] = [token for part in work for token in part.tokens]
    _write_groups(work, groups, begins, GROUP_ROWS if len(groups) < bucket.rows else 0, first)
    written = (*all_rows[1:, first:end], *per_row[: PER_ROW - ALL_ROWS, first:end])
    _write_paths(work, written, own[first:end])


def write_choosing(choosing: Choosing, packed: np.ndarray, bucket: Bucket, first: int = 0) -> None:
    """Write the sampling numbers of rows behind the `first` rows; parents count from there."""
    _, per_row, *_ = sections_of(packed, bucket)
    end = first + len(choosing.said)
    for field, numbers in enumerate(choosing, PER_ROW - ALL_ROWS):
        per_row[field, first:end] = numbers
    per_row[PARENT_ROW, first:end] += first
    depth = deepest(choosing.parent) if end > first else 0
    section_of(packed, bucket, COUNTS_SECTION)[DEPTH_COUNT] = depth


def write_chunks(
    chunks: Sequence[ChunkRows],
    bucket: Bucket,
    begins: Sequence[int],
    all_rows: np.ndarray,
    packed: np.ndarray,
    tile_rows: int,
) -> int:
    """Write the rows of prompts, and their tiles; returns how many rows of the step are in use."""
    tiles, at, row = section_of(packed, bucket, TILES_SECTION), 0, bucket.rows
    for chunk, begin in zip(chunks, begins, strict=False):
        count = len(chunk.tokens)
        positions = np.arange(chunk.start, chunk.start + count)
        all_rows[0, row : row + count] = chunk.tokens
        all_rows[1, row : row + count] = positions
        all_rows[2, row : row + count] = chunk.table.flat(positions)
        for first in range(0, count, tile_rows):
            if at == len(tiles):
                raise ValueError(f"a step takes {len(tiles)} tiles of prompts; deal the prompts out first")
            tiles[at] = row + first, min(tile_rows, count - first), begin, chunk.start + first
            at += 1
        row += count
    section_of(packed, bucket, COUNTS_SECTION)[TILES_COUNT] = at
    return row


class Sheet:
    """A packed step whose tokens and moves can be overwritten."""

    def __init__(self, packed: np.ndarray, bucket: Bucket) -> None:
        self.packed, self.bucket = packed, bucket
        self._tokens = section_of(packed, bucket, ROWS_SECTION)[0]
        self._said = section_of(packed, bucket, CHOICE_SECTION)[-1]
        self._counts, self._moves = (section_of(packed, bucket, number) for number in (COUNTS_SECTION, MOVES_SECTION))

    def say(self, tokens: Sequence[int]) -> None:
        """Make its first rows a chain of these tokens."""
        self._tokens[: len(tokens)] = tokens
        self._said[1 : len(tokens)] = tokens[1:]

    def move(self, moves: np.ndarray | None) -> None:
        """Set the moves that come before the step; None: no moves."""
        self._counts[MOVED_COUNT] = count = 0 if moves is None else moves.shape[1]
        if moves is not None:
            self._moves[:, :count] = moves


def padding(bucket: Bucket, spare: int) -> np.ndarray:
    """Return a packed step without rows; it reads and writes KV slot `spare` of the pool."""
    packed = blank_step(bucket, spare).copy()
    section_of(packed, bucket, OWN_SECTION)[:] = spare
    return packed


@lru_cache(maxsize=256)
def blank_step(bucket: Bucket, spare: int) -> np.ndarray:
    """Return a packed step whose padding is complete but for own paths."""
    packed = np.zeros(packed_size(bucket), dtype=np.int32)
    all_rows, per_row, *_ = sections_of(packed, bucket)
    all_rows[2], per_row[1] = spare, 1
    per_row[PER_ROW - ALL_ROWS], per_row[-2], per_row[-1] = ONE, _counting(per_row.shape[1]), ROOT_ROW
    section_of(packed, bucket, COUNTS_SECTION)[USED_COUNT] = bucket.rows
    return packed


def deepest(parents: np.ndarray | Tensor) -> int:
    """Return the depth of the deepest row below its root."""
    depth: list[int] = []
    for row, parent in enumerate(parents.tolist()):
        depth.append(depth[parent] + 1 if parent < row else 0)
    return max(depth)


def _write_paths(work: Sequence[Rows], sections: Sequence[np.ndarray], own: np.ndarray) -> None:
    """Write the rows' positions, KV slots, shared positions, own paths and the lengths of these."""
    positions, slots, shared, counts = sections
    # per sequence, the first KV slot that an own path may have
    firsts = [max(part.prefix // GROUP_POSITIONS - 1, 0) * GROUP_POSITIONS for part in work]
    window = _window(work, firsts)
    if len(work) == 1:
        placed = _placed_alone(tuple(work[0].seen), work[0].prefix - firsts[0])
        np.add(placed.positions, firsts[0], out=positions)
        np.add(placed.shared, firsts[0], out=shared)
    else:
        tail = _tails(tuple([seen for part in work for seen in part.seen]))
        placed = _placed(tail, *_prefixes(work, firsts))
        positions[:], shared[:] = placed.positions, placed.shared
    counts[:] = placed.counts
    window.take(placed.paths, out=own[:, : placed.paths.shape[1]], mode="clip")
    slots[:] = own[_counting(len(own)), counts - 1]  # a row is the last of its own path


class _Placed(NamedTuple):
    """Positions of rows, how many positions each shares, and its own path, as indices into the window."""

    positions: np.ndarray  # [rows]
    shared: np.ndarray  # [rows]
    counts: np.ndarray  # [rows]
    paths: np.ndarray  # [rows, longest]


def _placed(tail: _Tails, prefix: int | np.ndarray, end: int | np.ndarray) -> _Placed:
    """Place rows behind prefixes of these lengths; `end`: where each prefix ends in the window."""
    positions = tail.depth + prefix
    shared = np.maximum((positions & -GROUP_POSITIONS) - GROUP_POSITIONS, 0)
    if tail.deepest > GROUP_POSITIONS:
        np.minimum(shared, tail.run + prefix, out=shared)
    counts = positions - shared + 1
    longest = int(counts.max())
    if longest > LONGEST_OWN:
        raise ValueError(
            f"a row's own path has {longest} KV slots, {LONGEST_OWN} fit; commit before the tail grows so deep"
        )
    before = prefix - shared  # how much of a path is prefix
    paths = (end - before)[:, None] + _counting(longest)
    if tail.row.size:
        paths[tail.row, before[tail.row] + tail.rank] += tail.off
    return _Placed(positions, shared, counts, paths)


@lru_cache(maxsize=1024)  # chains recur: there are 32 cases of each length
def _placed_alone(seen: tuple[int, ...], prefix: int) -> _Placed:
    """Do as `_placed` for one sequence, counted from the first KV slot that an own path may have."""
    return _placed(_tails(seen), prefix, prefix)


def _window(work: Sequence[Rows], firsts: Sequence[int]) -> np.ndarray:
    """Return the KV slots of the pool of each sequence, from `firsts` to its last row, one sequence after the other."""
    parts: list[np.ndarray] = []
    for part, first in zip(work, firsts, strict=True):
        end = part.start + len(part.tokens)
        for page in range(first >> SHIFT, (end - 1 >> SHIFT) + 1):
            begin = page << SHIFT
            within = _counting(PAGE)[max(first - begin, 0) : end - begin]
            parts.append(within + (part.table.pages[page] << SHIFT))
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _prefixes(work: Sequence[Rows], firsts: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """Return the length of each row's prefix, and where it ends in the window."""
    sizes = [part.start + len(part.tokens) - first for part, first in zip(work, firsts, strict=True)]
    ends = [
        at - first + part.prefix for part, first, at in zip(work, firsts, accumulate(sizes, initial=0), strict=False)
    ]
    each = np.array([[part.prefix for part in work], ends], dtype=np.int32)
    prefix, end = each.repeat([len(part.tokens) for part in work], axis=1)
    return prefix, end


class _Tails(NamedTuple):
    """What rows see of their tails: a run from the prefix on that lies at its own positions, then single nodes."""

    deepest: int
    depth: np.ndarray  # [rows] nodes before the row itself
    run: np.ndarray  # [rows] length of the run
    row: np.ndarray  # [nodes beyond runs] which row sees it
    rank: np.ndarray  # its depth in the row's path
    off: np.ndarray  # distance of its KV slot from its position


@lru_cache(maxsize=4096)  # trees of the same shape recur
def _tails(seen: tuple[int, ...]) -> _Tails:
    width = -(-max(seen).bit_length() // 8)
    packed = np.frombuffer(b"".join([one.to_bytes(width, "little") for one in seen]), dtype=np.uint8)
    bits = np.unpackbits(packed.reshape(len(seen), width), axis=1, bitorder="little")
    depth = [one.bit_count() - 1 for one in seen]
    run = np.array([(one ^ (one + 1)).bit_length() - 1 for one in seen], dtype=np.int32)
    row, bit = bits.nonzero()
    rank = bits.cumsum(axis=1, dtype=np.int64)[row, bit] - 1
    beyond = (rank >= run[row]).nonzero()[0]
    return _Tails(
        max(depth),
        np.array(depth, dtype=np.int32),
        run,
        row[beyond],
        rank[beyond],
        (bit - rank)[beyond].astype(np.int32),
    )


def _write_groups(work: Sequence[Rows], groups: np.ndarray, begins: Sequence[int], most: int, first: int = 0) -> None:
    """Write groups of up to `most` rows; 0: as in a step of several sequences. `begins`: where page tables begin.

    `first`: rows before these, and groups.
    """
    at = first
    most = most or BATCH_GROUP_ROWS
    for part, begin in zip(work, begins, strict=False):
        count = len(part.tokens)
        for done in range(0, count, most):
            groups[at] = first + done, min(most, count - done), begin
            at += 1
        first += count


def sections_of(packed: np.ndarray, bucket: Bucket) -> list[np.ndarray]:
    """Return the tables of numbers per row, and the sections behind them that every step fills."""
    return [section_of(packed, bucket, number) for number in range(COUNTS_SECTION)]


def section_of(packed: np.ndarray, bucket: Bucket, number: int) -> np.ndarray:
    """Return a section of a packed step."""
    return np.ndarray(_shapes(bucket)[number], np.int32, packed, _offsets(bucket)[number] * packed.itemsize)


@cache
def _counting(count: int) -> np.ndarray:
    return np.arange(count, dtype=np.int32)


@cache
def _shapes(bucket: Bucket) -> tuple[tuple[int, ...], ...]:
    rows, groups, chunk = bucket
    sampled = (PER_ROW - ALL_ROWS + len(Choosing._fields), _aligned(rows))
    sections = ((groups, 3), (rows, LONGEST_OWN), (ALIGNED,), (2, most_moves(rows)), (most_tiles(chunk), 4))
    return ((ALL_ROWS, _aligned(rows + chunk)), sampled, *sections)


@cache
def _offsets(bucket: Bucket) -> tuple[int, ...]:
    """Return where each section begins, and where the last one ends."""
    offsets = [0]
    for shape in _shapes(bucket):
        offsets.append(offsets[-1] + _aligned(prod(shape)))
    return tuple(offsets)


def _aligned(number: int) -> int:
    return -(-number // ALIGNED) * ALIGNED
