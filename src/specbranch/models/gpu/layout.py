"""A step as one array of whole numbers: what rows of several sequences need on a device, carried there by one copy.

Owns the order of the sections and their padding. Invariant: where a section lies depends on the bucket alone, so a captured graph reads
every step of a bucket through the same views. A row reads the positions before `shared` through its group's page table, the others,
itself last, through its own line. Where the one ends follows from the row's position alone, as long as the part of its tail that
does not lie at its own positions is at most a group deep.
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
MOST_ROWS = 128  # in a step
GROUP_ROWS = 16  # rows of a sequence that read its shared positions together
ALIGNED = 32  # numbers: sections begin at whole cache lines, whatever the bucket
PER_ROW = 5  # sections of one number a row; they come first, so that they can be written as one table
SHIFT = PAGE.bit_length() - 1


class Bucket(NamedTuple):
    """The padded size of a step, all powers of two."""

    rows: int
    groups: int
    pages: int  # in the longest table


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


def bucket_of(work: Sequence[Rows]) -> Bucket:
    """Return the smallest bucket that holds these rows."""
    rows = sum([len(part.tokens) for part in work])
    if not 0 < rows <= MOST_ROWS:
        raise ValueError(f"a step takes 1 to {MOST_ROWS} rows, not {rows}; deal them out first")
    groups = sum([-(-len(part.tokens) // GROUP_ROWS) for part in work])
    places = max([part.start + len(part.tokens) for part in work])
    return Bucket(power_of_two(rows), power_of_two(groups), power_of_two(-(-places // PAGE)))


def power_of_two(number: int) -> int:
    """The least power of two that is not below a number."""
    return 1 << (number - 1).bit_length()


def packed_size(bucket: Bucket) -> int:
    """How many numbers a packed step has."""
    return _offsets(bucket)[-1]


def views(packed: Tensor, bucket: Bucket) -> Views:
    """The sections of a packed step, or of a longer buffer that begins with one."""
    pairs = zip(_shapes(bucket), _offsets(bucket), strict=False)
    return Views(*(packed[at : at + prod(shape)].view(shape) for shape, at in pairs))


def pack(work: Sequence[Rows], spare: int) -> tuple[np.ndarray, Bucket]:
    """Write rows out for a device; padding is written to, and read from, the flat place `spare`."""
    work = [part for part in work if part.tokens]
    bucket = bucket_of(work)
    packed = np.zeros(packed_size(bucket), dtype=np.int32)
    per_row, groups, tables, own = _sections(packed, bucket)
    first_pages = _write_groups(work, groups, tables, spare)
    lines = _lines(work)
    rows = len(lines.shared)
    table = (tables - _counting(bucket.pages)) << SHIFT  # what makes of a place a flat one, by page
    flat = lines.places + table.take((lines.places >> SHIFT) + first_pages, mode="clip")
    own[:rows, : flat.shape[1]] = flat
    slots = flat[_counting(rows), lines.counts - 1]  # a row is the last of its own line
    per_row[:, :rows] = [token for part in work for token in part.tokens], lines.positions, slots, lines.shared, lines.counts
    if rows < bucket.rows:
        own[rows:], per_row[2, rows : bucket.rows], per_row[4, rows : bucket.rows] = spare, spare, 1
    return packed, bucket


class _Lines(NamedTuple):
    positions: np.ndarray  # [rows]
    shared: np.ndarray  # [rows]
    counts: np.ndarray  # [rows]
    places: np.ndarray  # [rows, longest line], in the sequence


def _lines(work: Sequence[Rows]) -> _Lines:
    """Find every row's own line, all sequences at once."""
    tail = _tails(tuple([seen for part in work for seen in part.seen]))
    prefix = work[0].prefix if len(work) == 1 else np.repeat([part.prefix for part in work], [len(part.tokens) for part in work])
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
    """What rows see of their tails. A run from the prefix on lies at its own positions; what comes after it is told one by one."""

    depth: np.ndarray  # [rows] how much comes before the row itself
    run: np.ndarray  # [rows]
    row: np.ndarray  # [seen beyond runs]
    rank: np.ndarray  # which of the row's tail it is
    off: np.ndarray  # how far from its own position it lies


@lru_cache(maxsize=4096)  # trees of the same shape come again and again
def _tails(seen: tuple[int, ...]) -> _Tails:
    width = -(-max(seen).bit_length() // 8)
    packed = np.frombuffer(b"".join([one.to_bytes(width, "little") for one in seen]), dtype=np.uint8).reshape(len(seen), width)
    bits = np.unpackbits(packed, axis=1, bitorder="little")
    depth = np.array([one.bit_count() - 1 for one in seen])
    run = np.array([(one ^ (one + 1)).bit_length() - 1 for one in seen])
    row, bit = bits.nonzero()
    rank = bits.cumsum(axis=1, dtype=np.int64)[row, bit] - 1
    beyond = rank >= run[row]
    return _Tails(depth, run, row[beyond], rank[beyond], (bit - rank)[beyond])


def _write_groups(work: Sequence[Rows], groups: np.ndarray, tables: np.ndarray, spare: int) -> np.ndarray:
    """Fill in groups and tables; returns where each row's table begins among all tables [rows, 1]."""
    tables[:] = spare >> SHIFT
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


def _sections(packed: np.ndarray, bucket: Bucket) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """The numbers of rows as one table [PER_ROW, at least rows], and the three sections behind them."""
    offsets, (groups, tables, own) = _offsets(bucket), _shapes(bucket)[PER_ROW:]
    per_row = packed[: offsets[5]].reshape(PER_ROW, -1)
    own_section = packed[offsets[7] : offsets[8]].reshape(own)  # rows of 192: never padded
    return per_row, _section(packed, offsets[5], groups), _section(packed, offsets[6], tables), own_section


def _section(packed: np.ndarray, at: int, shape: tuple[int, ...]) -> np.ndarray:
    return packed[at : at + shape[0] * shape[1]].reshape(shape)


@cache
def _counting(count: int) -> np.ndarray:
    return np.arange(count)


@cache
def _shapes(bucket: Bucket) -> tuple[tuple[int, ...], ...]:
    rows, groups, pages = bucket
    return ((rows,),) * PER_ROW + ((groups, 2), (groups, pages), (rows, OWN))


@cache
def _offsets(bucket: Bucket) -> tuple[int, ...]:
    """Where each section begins, and where the last one ends."""
    offsets = [0]
    for shape in _shapes(bucket):
        offsets.append(offsets[-1] + -(-prod(shape) // ALIGNED) * ALIGNED)
    return tuple(offsets)
