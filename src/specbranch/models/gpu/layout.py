"""A packed step: all inputs of a forward over several sequences in one int32 array, which one copy brings to a device.

Owns the order of the sections and their padding. A row reads the positions before `shared` through its group's page
table, the others, itself last, through its own path. Sampling parameters and pending moves of KV slots are sections,
too. Invariants: the bucket alone decides where a section lies, so a captured graph reads every step of a bucket through
the same views. A row's position alone decides `shared`, unless its tail is too deep: the part that does not lie at its
own positions may have one group at most.
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
from specbranch.models.forward.step_rows import GROUP_POSITIONS, Rows

LONGEST_OWN = 192  # KV slots of the longest own path
MOST_STEP_ROWS = 512  # rows of a step, at most
GROUP_ROWS = 16  # rows of a sequence that read its shared positions together
ALIGNED = 32  # numbers: sections begin at whole cache lines in every bucket
PER_ROW = 5  # sections with one number per row; they come first, so that they can be written as one table
OWN_SECTION, COUNTS_SECTION, MOVES_SECTION = 3, 4, 5  # sections, by number
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


class Bucket(NamedTuple):
    """The padded size of a step, all powers of two."""

    rows: int
    groups: int
    pages: int  # of the longest page table


SMALLEST_BUCKET = Bucket(1, 1, 8)  # 8 pages, so that short sequences share graphs


@dataclass(frozen=True, slots=True)
class Views:
    """The sections of a packed step, int32."""

    tokens: Tensor  # [rows]
    positions: Tensor  # [rows]
    slots: Tensor  # [rows] KV slots of the pool that keys and values are written to
    shared: Tensor  # [rows] how many positions are read through the page table
    own_count: Tensor  # [rows] length of the own path, at least 1
    groups: Tensor  # [groups, 2] first row and number of rows, consecutive; 0 rows if a group is padding
    tables: Tensor  # [groups, pages]
    own: Tensor  # [rows, LONGEST_OWN] KV slots of the pool by position; beyond `own_count` without meaning
    choosing: Tensor | None = None  # [fields of Choosing, at least rows]
    counts: Tensor | None = None  # the number of moves, and the depth of the deepest row
    # [2, some] KV slots of the pool: sources and targets, copied one after the other
    moves: Tensor | None = None


def bucket_of(work: Sequence[Rows], least: Bucket = SMALLEST_BUCKET) -> Bucket:
    """Return the smallest bucket for these rows, at least `least` in every dimension."""
    rows = sum([len(part.tokens) for part in work])
    if not 0 < rows <= MOST_STEP_ROWS:
        raise ValueError(f"a step takes 1 to {MOST_STEP_ROWS} rows, not {rows}; deal them out first")
    groups = sum([-(-len(part.tokens) // GROUP_ROWS) for part in work])
    kv_slots = max([part.start + len(part.tokens) for part in work])
    found = power_of_four(rows), power_of_four(groups), power_of_two(-(-kv_slots // PAGE))
    return Bucket(*map(max, found, least))


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
    """Return the length of a packed step."""
    return _offsets(bucket)[-1]


def views(packed: Tensor, bucket: Bucket) -> Views:
    """Return the sections of a packed step, or of a longer buffer that begins with one."""
    shapes, offsets = _shapes(bucket), _offsets(bucket)
    per_row = packed[: offsets[1]].view(shapes[0])[:, : bucket.rows]
    sections = [packed[at : at + prod(shape)].view(shape) for shape, at in zip(shapes[1:], offsets[1:], strict=False)]
    tokens, positions, slots, shared, own_count = per_row[:PER_ROW]
    groups, tables, own, counts, moves = sections
    return Views(tokens, positions, slots, shared, own_count, groups, tables, own, per_row[PER_ROW:], counts, moves)


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
) -> tuple[np.ndarray, Bucket]:
    """Pack rows for a device; padding reads and writes KV slot `spare` of the pool."""
    work = [part for part in work if part.tokens]
    bucket = bucket_of(work, least)
    packed = _blank(bucket, spare).copy()
    per_row, groups, tables, own = _sections(packed, bucket)
    rows = sum([len(part.tokens) for part in work])
    own[rows:] = spare
    per_row[0, :rows] = [token for part in work for token in part.tokens]
    _write_groups(work, groups, tables)
    _write_paths(work, per_row[1:PER_ROW, :rows], own[:rows])
    if choosing is not None:
        for field, numbers in enumerate(choosing, PER_ROW):
            per_row[field, :rows] = numbers
        packed[_offsets(bucket)[COUNTS_SECTION] + 1] = deepest(choosing.parent)
    if moves is not None:
        packed[_offsets(bucket)[COUNTS_SECTION]] = moves.shape[1]
        _section(packed, bucket, MOVES_SECTION)[:, : moves.shape[1]] = moves
    return packed, bucket


class Sheet:
    """A packed step whose tokens and moves can be overwritten."""

    def __init__(self, packed: np.ndarray, bucket: Bucket) -> None:
        self.packed, self.bucket = packed, bucket
        per_row = _section(packed, bucket, 0)
        self._tokens, self._said = per_row[0], per_row[-1]
        self._counts, self._moves = (_section(packed, bucket, number) for number in (COUNTS_SECTION, MOVES_SECTION))

    def say(self, tokens: Sequence[int]) -> None:
        """Make its first rows a chain of these tokens."""
        self._tokens[: len(tokens)] = tokens
        self._said[1 : len(tokens)] = tokens[1:]

    def move(self, moves: np.ndarray | None) -> None:
        """Set the moves that come before the step; None: no moves."""
        self._counts[0] = count = 0 if moves is None else moves.shape[1]
        if moves is not None:
            self._moves[:, :count] = moves


def padding(bucket: Bucket, spare: int) -> np.ndarray:
    """Return a packed step without rows; it reads and writes KV slot `spare` of the pool."""
    packed = _blank(bucket, spare).copy()
    _section(packed, bucket, OWN_SECTION)[:] = spare
    return packed


@lru_cache(maxsize=256)
def _blank(bucket: Bucket, spare: int) -> np.ndarray:
    """Return a packed step whose padding is complete but for own paths."""
    packed = np.zeros(packed_size(bucket), dtype=np.int32)
    per_row, _, tables, _ = _sections(packed, bucket)
    tables[:], per_row[2], per_row[4] = spare >> SHIFT, spare, 1
    per_row[PER_ROW], per_row[-2], per_row[-1] = ONE, _counting(per_row.shape[1]), ROOT_ROW
    return packed


def deepest(parents: np.ndarray | Tensor) -> int:
    """Return the depth of the deepest row below its root."""
    depth: list[int] = []
    for row, parent in enumerate(parents.tolist()):
        depth.append(depth[parent] + 1 if parent < row else 0)
    return max(depth)


def _write_paths(work: Sequence[Rows], per_row: np.ndarray, own: np.ndarray) -> None:
    """Write the rows' positions, KV slots, shared positions, own paths and the lengths of these."""
    positions, slots, shared, counts = per_row
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


def _write_groups(work: Sequence[Rows], groups: np.ndarray, tables: np.ndarray) -> None:
    """Write groups and page tables."""
    first = at = 0
    for part in work:
        count, pages = len(part.tokens), part.table.pages[: tables.shape[1]]
        for done in range(0, count, GROUP_ROWS):
            groups[at] = first + done, min(GROUP_ROWS, count - done)
            tables[at, : len(pages)] = pages
            at += 1
        first += count


def _sections(packed: np.ndarray, bucket: Bucket) -> list[np.ndarray]:
    """Return the table of numbers per row, and the sections behind it that every step fills."""
    return [_section(packed, bucket, number) for number in range(COUNTS_SECTION)]


def _section(packed: np.ndarray, bucket: Bucket, number: int) -> np.ndarray:
    return np.ndarray(_shapes(bucket)[number], np.int32, packed, _offsets(bucket)[number] * packed.itemsize)


@cache
def _counting(count: int) -> np.ndarray:
    return np.arange(count, dtype=np.int32)


@cache
def _shapes(bucket: Bucket) -> tuple[tuple[int, ...], ...]:
    rows, groups, pages = bucket
    table = (PER_ROW + len(Choosing._fields), _aligned(rows))
    return (table, (groups, 2), (groups, pages), (rows, LONGEST_OWN), (ALIGNED,), (2, most_moves(rows)))


@cache
def _offsets(bucket: Bucket) -> tuple[int, ...]:
    """Return where each section begins, and where the last one ends."""
    offsets = [0]
    for shape in _shapes(bucket):
        offsets.append(offsets[-1] + _aligned(prod(shape)))
    return tuple(offsets)


def _aligned(number: int) -> int:
    return -(-number // ALIGNED) * ALIGNED
