"""A step as one array of whole numbers: what rows of several sequences need on a device, carried there by one copy.

Owns the order of the sections and their padding. Invariant: where a section lies depends on the bucket alone, so a
captured graph reads every step of a bucket through the same views. A row reads the positions before `shared` through
its group's page table, the others, itself last, through its own line. Where the one ends follows from the row's
position alone, as long as the part of its tail that does not lie at its own positions is at most a group deep. What is
asked of the rows, and what is to be moved before, goes with them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from math import prod
from typing import NamedTuple

import numpy as np
from torch import Tensor

from specbranch.models.batch import GROUP, Rows
from specbranch.models.kv import PAGE

OWN = 192  # the longest own line
MOST_ROWS = 512  # in a step
GROUP_ROWS = 16  # rows of a sequence that read its shared positions together
ALIGNED = 32  # numbers: sections begin at whole cache lines, whatever the bucket
PER_ROW = 5  # sections of one number a row; they come first, so that they can be written as one table
SHIFT = PAGE.bit_length() - 1
ROOT_ROW, NO_ROW = -1, -2  # said: by nobody, or what cannot be taken
ONE = int(np.float32(1.0).view(np.int32))


class Choosing(NamedTuple):
    """What is asked of rows, each [rows] int32: how to choose their tokens, and whom the chosen ones are to lead to."""

    temperature: np.ndarray | Tensor  # the bits of a float32
    first_key: np.ndarray | Tensor  # of the noise
    second_key: np.ndarray | Tensor
    noisy: np.ndarray | Tensor  # 1 where noise is added
    parent: np.ndarray | Tensor  # a row of the same step, itself at the top
    # the token that has to be chosen at the parent for this row to be reached; ROOT_ROW: it is, NO_ROW: never
    said: np.ndarray | Tensor


class Bucket(NamedTuple):
    """The padded size of a step, all powers of two."""

    rows: int
    groups: int
    pages: int  # in the longest table


LEAST = Bucket(1, 1, 8)  # short texts share their graphs


@dataclass(frozen=True, slots=True)
class Views:
    """The sections of a packed step, int32."""

    tokens: Tensor  # [rows]
    positions: Tensor  # [rows]
    slots: Tensor  # [rows] flat places that keys and values are written to
    shared: Tensor  # [rows] how many positions are read through the table
    own_count: Tensor  # [rows] length of the own line, at least 1
    groups: Tensor  # [groups, 2] first row and how many, one after the other; 0 where a group is padding
    tables: Tensor  # [groups, pages]
    own: Tensor  # [rows, OWN] flat places in the order of positions; beyond `own_count` they mean nothing
    choosing: Tensor | None = None  # [fields of Choosing, at least rows]
    counts: Tensor | None = None  # how many moves there are, and how deep the longest way from a root is
    # [2, some] flat places: what lies at the first is copied to the second, one after the other
    moves: Tensor | None = None


def bucket_of(work: Sequence[Rows], least: Bucket = LEAST) -> Bucket:
    """Return the smallest bucket that holds these rows, and is nowhere smaller than `least`."""
    rows = sum([len(part.tokens) for part in work])
    if not 0 < rows <= MOST_ROWS:
        raise ValueError(f"a step takes 1 to {MOST_ROWS} rows, not {rows}; deal them out first")
    groups = sum([-(-len(part.tokens) // GROUP_ROWS) for part in work])
    places = max([part.start + len(part.tokens) for part in work])
    found = power_of_four(rows), power_of_four(groups), power_of_two(-(-places // PAGE))
    return Bucket(*map(max, found, least))


def most_moves(rows: int) -> int:
    """How many places a step of so many rows can move."""
    return max(4 * rows, 2 * ALIGNED)


def power_of_four(number: int) -> int:
    """The least power of four that is not below a number, but above 16 of two: padding costs more there than a
    graph."""
    least = power_of_two(number)
    return least * 2 if least in (2, 8) else least


def power_of_two(number: int) -> int:
    """The least power of two that is not below a number."""
    return 1 << (number - 1).bit_length()


def packed_size(bucket: Bucket) -> int:
    """How many numbers a packed step has."""
    return _offsets(bucket)[-1]


def views(packed: Tensor, bucket: Bucket) -> Views:
    """The sections of a packed step, or of a longer buffer that begins with one."""
    shapes, offsets = _shapes(bucket), _offsets(bucket)
    per_row = packed[: offsets[1]].view(shapes[0])[:, : bucket.rows]
    sections = [packed[at : at + prod(shape)].view(shape) for shape, at in zip(shapes[1:], offsets[1:], strict=False)]
    tokens, positions, slots, shared, own_count = per_row[:PER_ROW]
    groups, tables, own, counts, moves = sections
    return Views(tokens, positions, slots, shared, own_count, groups, tables, own, per_row[PER_ROW:], counts, moves)


def brought_moves(packed: Tensor, bucket: Bucket, count: int) -> Tensor:
    """The moves that came with a step, in the order they are to be made [2, count]."""
    moves = views(packed, bucket).moves
    assert moves is not None
    return moves[:, :count].long()


def pack(
    work: Sequence[Rows],
    spare: int,
    choosing: Choosing | None = None,
    moves: np.ndarray | None = None,
    least: Bucket = LEAST,
) -> tuple[np.ndarray, Bucket]:
    """Write rows out for a device; padding is written to, and read from, the flat place `spare`."""
    work = [part for part in work if part.tokens]
    bucket = bucket_of(work, least)
    packed = np.zeros(packed_size(bucket), dtype=np.int32)
    per_row, groups, tables, own, counts, moved = _sections(packed, bucket)
    lines = _lines(work)
    rows = len(lines.shared)
    _pad(per_row, tables, own, spare, rows)
    first_pages = _write_groups(work, groups, tables)
    table = (tables - _counting(bucket.pages)) << SHIFT  # what makes of a place a flat one, by page
    flat = lines.places + table.take((lines.places >> SHIFT) + first_pages, mode="clip")
    own[:rows, : flat.shape[1]] = flat
    slots = flat[_counting(rows), lines.counts - 1]  # a row is the last of its own line
    tokens = [token for part in work for token in part.tokens]
    per_row[:PER_ROW, :rows] = tokens, lines.positions, slots, lines.shared, lines.counts
    if choosing is not None:
        per_row[PER_ROW:, :rows] = choosing
        counts[1] = deepest(choosing.parent)
    if moves is not None:
        counts[0] = moves.shape[1]
        moved[:, : moves.shape[1]] = moves
    return packed, bucket


def padding(bucket: Bucket, spare: int) -> np.ndarray:
    """A packed step without a row: it reads and writes the flat place `spare`."""
    packed = np.zeros(packed_size(bucket), dtype=np.int32)
    per_row, _, tables, own, _, _ = _sections(packed, bucket)
    _pad(per_row, tables, own, spare, 0)
    return packed


def _pad(per_row: np.ndarray, tables: np.ndarray, own: np.ndarray, spare: int, rows: int) -> None:
    tables[:], own[rows:], per_row[2, rows:], per_row[4, rows:] = spare >> SHIFT, spare, spare, 1
    per_row[PER_ROW], per_row[-2], per_row[-1] = ONE, _counting(per_row.shape[1]), ROOT_ROW


def deepest(parents: np.ndarray | Tensor) -> int:
    """How many rows the longest way from a root has below it."""
    depth: list[int] = []
    for row, parent in enumerate(parents.tolist()):
        depth.append(depth[parent] + 1 if parent < row else 0)
    return max(depth)


class _Lines(NamedTuple):
    positions: np.ndarray  # [rows]
    shared: np.ndarray  # [rows]
    counts: np.ndarray  # [rows]
    places: np.ndarray  # [rows, longest line], in the sequence


def _lines(work: Sequence[Rows]) -> _Lines:
    """Find every row's own line, all sequences at once."""
    tail = _tails(tuple([seen for part in work for seen in part.seen]))
    prefix = (
        work[0].prefix
        if len(work) == 1
        else np.repeat([part.prefix for part in work], [len(part.tokens) for part in work])
    )
    positions = tail.depth + prefix
    shared = np.minimum(np.maximum((positions // GROUP - 1) * GROUP, 0), tail.run + prefix)
    counts = positions - shared + 1
    longest = int(counts.max())
    if longest > OWN:
        raise ValueError(f"a row's own line has {longest} places, {OWN} fit; commit before the tail grows so deep")
    places = shared[:, None] + _counting(longest)
    if tail.row.size:
        places[tail.row, tail.rank + (prefix - shared)[tail.row]] += tail.off
    return _Lines(positions, shared, counts, places)


class _Tails(NamedTuple):
    """What rows see of their tails. A run from the prefix on lies at its own positions; what comes after it is told
    one by one."""

    depth: np.ndarray  # [rows] how much comes before the row itself
    run: np.ndarray  # [rows]
    row: np.ndarray  # [seen beyond runs]
    rank: np.ndarray  # which of the row's tail it is
    off: np.ndarray  # how far from its own position it lies


@lru_cache(maxsize=4096)  # trees of the same shape come again and again
def _tails(seen: tuple[int, ...]) -> _Tails:
    width = -(-max(seen).bit_length() // 8)
    packed = np.frombuffer(b"".join([one.to_bytes(width, "little") for one in seen]), dtype=np.uint8).reshape(
        len(seen), width
    )
    bits = np.unpackbits(packed, axis=1, bitorder="little")
    depth = np.array([one.bit_count() - 1 for one in seen])
    run = np.array([(one ^ (one + 1)).bit_length() - 1 for one in seen])
    row, bit = bits.nonzero()
    rank = bits.cumsum(axis=1, dtype=np.int64)[row, bit] - 1
    beyond = rank >= run[row]
    return _Tails(depth, run, row[beyond], rank[beyond], (bit - rank)[beyond])


def _write_groups(work: Sequence[Rows], groups: np.ndarray, tables: np.ndarray) -> np.ndarray:
    """Fill in groups and tables; returns where each row's table begins among all tables [rows, 1]."""
    begins: list[int] = []
    first = at = 0
    for part in work:
        count, pages = len(part.tokens), part.table.pages[: tables.shape[1]]
        for done in range(0, count, GROUP_ROWS):
            here = min(GROUP_ROWS, count - done)
            groups[at] = first + done, here
            tables[at, : len(pages)] = pages
            begins += [at * tables.shape[1]] * here
            at += 1
        first += count
    return np.array(begins)[:, None]


def _sections(packed: np.ndarray, bucket: Bucket) -> list[np.ndarray]:
    """The numbers of rows as one table, and the sections behind it."""
    return [
        packed[at : at + prod(shape)].reshape(shape)
        for shape, at in zip(_shapes(bucket), _offsets(bucket), strict=False)
    ]


@cache
def _counting(count: int) -> np.ndarray:
    return np.arange(count)


@cache
def _shapes(bucket: Bucket) -> tuple[tuple[int, ...], ...]:
    rows, groups, pages = bucket
    table = (PER_ROW + len(Choosing._fields), _aligned(rows))
    return (table, (groups, 2), (groups, pages), (rows, OWN), (ALIGNED,), (2, most_moves(rows)))


@cache
def _offsets(bucket: Bucket) -> tuple[int, ...]:
    """Where each section begins, and where the last one ends."""
    offsets = [0]
    for shape in _shapes(bucket):
        offsets.append(offsets[-1] + _aligned(prod(shape)))
    return tuple(offsets)


def _aligned(number: int) -> int:
    return -(-number // ALIGNED) * ALIGNED
