"""A step as one array of whole numbers: what rows of several sequences need on a device, carried there by one copy.

Owns the order of the sections and their padding. Invariant: where a section lies depends on the bucket alone, so a
captured graph reads every step of a bucket through the same views. A row reads the positions before `shared` through
its group's page table, the others, itself last, through its own path. Where the one ends follows from the row's
position alone, as long as the part of its tail that does not lie at its own positions is at most a group deep. What is
asked of the rows, and what is to be moved before, goes with them.
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
from specbranch.models.batch import GROUP, Rows

OWN = 192  # the longest own path
MOST_ROWS = 512  # in a step
GROUP_ROWS = 16  # rows of a sequence that read its shared positions together
ALIGNED = 32  # numbers: sections begin at whole cache lines, whatever the bucket
PER_ROW = 5  # sections of one number a row; they come first, so that they can be written as one table
OWN_LINES, COUNTS, MOVES = 3, 4, 5  # sections, by number
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
    slots: Tensor  # [rows] flat KV slots that keys and values are written to
    shared: Tensor  # [rows] how many positions are read through the table
    own_count: Tensor  # [rows] length of the own path, at least 1
    groups: Tensor  # [groups, 2] first row and how many, one after the other; 0 where a group is padding
    tables: Tensor  # [groups, pages]
    own: Tensor  # [rows, OWN] flat KV slots in the order of positions; beyond `own_count` they mean nothing
    choosing: Tensor | None = None  # [fields of Choosing, at least rows]
    counts: Tensor | None = None  # how many moves there are, and how deep the longest way from a root is
    # [2, some] flat KV slots: what lies at the first is copied to the second, one after the other
    moves: Tensor | None = None


def bucket_of(work: Sequence[Rows], least: Bucket = LEAST) -> Bucket:
    """Return the smallest bucket that holds these rows, and is nowhere smaller than `least`."""
    rows = sum([len(part.tokens) for part in work])
    if not 0 < rows <= MOST_ROWS:
        raise ValueError(f"a step takes 1 to {MOST_ROWS} rows, not {rows}; deal them out first")
    groups = sum([-(-len(part.tokens) // GROUP_ROWS) for part in work])
    kv_slots = max([part.start + len(part.tokens) for part in work])
    found = power_of_four(rows), power_of_four(groups), power_of_two(-(-kv_slots // PAGE))
    return Bucket(*map(max, found, least))


def most_moves(rows: int) -> int:
    """How many KV slots a step of so many rows can move."""
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
    """Write rows out for a device; padding is written to, and read from, the flat KV slot `spare`."""
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
        packed[_offsets(bucket)[COUNTS] + 1] = deepest(choosing.parent)
    if moves is not None:
        packed[_offsets(bucket)[COUNTS]] = moves.shape[1]
        _section(packed, bucket, MOVES)[:, : moves.shape[1]] = moves
    return packed, bucket


class Sheet:
    """A packed step whose tokens and moves are written over."""

    def __init__(self, packed: np.ndarray, bucket: Bucket) -> None:
        self.packed, self.bucket = packed, bucket
        per_row = _section(packed, bucket, 0)
        self._tokens, self._said = per_row[0], per_row[-1]
        self._counts, self._moves = (_section(packed, bucket, number) for number in (COUNTS, MOVES))

    def say(self, tokens: Sequence[int]) -> None:
        """Have its first rows be a chain of these tokens."""
        self._tokens[: len(tokens)] = tokens
        self._said[1 : len(tokens)] = tokens[1:]

    def move(self, moves: np.ndarray | None) -> None:
        """Have KV slots moved before, or none."""
        self._counts[0] = count = 0 if moves is None else moves.shape[1]
        if moves is not None:
            self._moves[:, :count] = moves


def padding(bucket: Bucket, spare: int) -> np.ndarray:
    """A packed step without a row: it reads and writes the flat KV slot `spare`."""
    packed = _blank(bucket, spare).copy()
    _section(packed, bucket, OWN_LINES)[:] = spare
    return packed


@lru_cache(maxsize=256)
def _blank(bucket: Bucket, spare: int) -> np.ndarray:
    """A packed step in which nothing but own paths has to be written where there is no row."""
    packed = np.zeros(packed_size(bucket), dtype=np.int32)
    per_row, _, tables, _ = _sections(packed, bucket)
    tables[:], per_row[2], per_row[4] = spare >> SHIFT, spare, 1
    per_row[PER_ROW], per_row[-2], per_row[-1] = ONE, _counting(per_row.shape[1]), ROOT_ROW
    return packed


def deepest(parents: np.ndarray | Tensor) -> int:
    """How many rows the longest way from a root has below it."""
    depth: list[int] = []
    for row, parent in enumerate(parents.tolist()):
        depth.append(depth[parent] + 1 if parent < row else 0)
    return max(depth)


def _write_paths(work: Sequence[Rows], per_row: np.ndarray, own: np.ndarray) -> None:
    """Write down the rows' positions, their KV slots, how much they share, and their own paths, with their lengths."""
    positions, slots, shared, counts = per_row
    firsts = [max(part.prefix // GROUP - 1, 0) * GROUP for part in work]  # no own path begins before
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
    """Where rows stand, how many positions each shares, and its own path, by KV slots in the window."""

    positions: np.ndarray  # [rows]
    shared: np.ndarray  # [rows]
    counts: np.ndarray  # [rows]
    paths: np.ndarray  # [rows, longest]


def _placed(tail: _Tails, prefix: int | np.ndarray, end: int | np.ndarray) -> _Placed:
    """Place rows behind prefixes that end at these KV slots of the window."""
    positions = tail.depth + prefix
    shared = np.maximum((positions & -GROUP) - GROUP, 0)
    if tail.deepest > GROUP:
        np.minimum(shared, tail.run + prefix, out=shared)
    counts = positions - shared + 1
    longest = int(counts.max())
    if longest > OWN:
        raise ValueError(f"a row's own path has {longest} KV slots, {OWN} fit; commit before the tail grows so deep")
    before = prefix - shared  # how much of a path is prefix
    paths = (end - before)[:, None] + _counting(longest)
    if tail.row.size:
        paths[tail.row, before[tail.row] + tail.rank] += tail.off
    return _Placed(positions, shared, counts, paths)


@lru_cache(maxsize=1024)  # chains come again and again: there are 32 of each length
def _placed_alone(seen: tuple[int, ...], prefix: int) -> _Placed:
    """The same for one sequence, counted from where its own paths may begin: a whole number of groups before."""
    return _placed(_tails(seen), prefix, prefix)


def _window(work: Sequence[Rows], firsts: Sequence[int]) -> np.ndarray:
    """The flat KV slots of every sequence from a KV slot on up to its last row's, one sequence behind the other."""
    pieces: list[np.ndarray] = []
    for part, first in zip(work, firsts, strict=True):
        end = part.start + len(part.tokens)
        for page in range(first >> SHIFT, (end - 1 >> SHIFT) + 1):
            begin = page << SHIFT
            within = _counting(PAGE)[max(first - begin, 0) : end - begin]
            pieces.append(within + (part.table.pages[page] << SHIFT))
    return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)


def _prefixes(work: Sequence[Rows], firsts: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """How long each row's prefix is, and where in the window it ends."""
    sizes = [part.start + len(part.tokens) - first for part, first in zip(work, firsts, strict=True)]
    ends = [
        at - first + part.prefix for part, first, at in zip(work, firsts, accumulate(sizes, initial=0), strict=False)
    ]
    each = np.array([[part.prefix for part in work], ends], dtype=np.int32)
    prefix, end = each.repeat([len(part.tokens) for part in work], axis=1)
    return prefix, end


class _Tails(NamedTuple):
    """What rows see of their tails. A run from the prefix on lies at its own positions; what comes after it is told
    one by one."""

    deepest: int
    depth: np.ndarray  # [rows] how much comes before the row itself
    run: np.ndarray  # [rows]
    row: np.ndarray  # [seen beyond runs]
    rank: np.ndarray  # which of the row's tail it is
    off: np.ndarray  # how far from its own position it lies


@lru_cache(maxsize=4096)  # trees of the same shape come again and again
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
    """Fill in groups and tables."""
    first = at = 0
    for part in work:
        count, pages = len(part.tokens), part.table.pages[: tables.shape[1]]
        for done in range(0, count, GROUP_ROWS):
            groups[at] = first + done, min(GROUP_ROWS, count - done)
            tables[at, : len(pages)] = pages
            at += 1
        first += count


def _sections(packed: np.ndarray, bucket: Bucket) -> list[np.ndarray]:
    """The numbers of rows as one table, and the sections that every step fills in behind it."""
    return [_section(packed, bucket, number) for number in range(COUNTS)]


def _section(packed: np.ndarray, bucket: Bucket, number: int) -> np.ndarray:
    return np.ndarray(_shapes(bucket)[number], np.int32, packed, _offsets(bucket)[number] * packed.itemsize)


@cache
def _counting(count: int) -> np.ndarray:
    return np.arange(count, dtype=np.int32)


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
