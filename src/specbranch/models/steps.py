"""From the bookkeeping of sequences to the tensors of one step: positions, places, and who sees whom.

Owns the padding. On a CPU sizes are exact; elsewhere rows are padded to powers of two and spans to multiples of 256, so that few
shapes occur and each can be captured. Invariant: a padding row writes to the cache's spare place and sees place 0 only; no row that
counts ever sees the spare place.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from specbranch.core.slots import ROOT, Slots
from specbranch.models.decoder import Cache, Lines, Part, Step

SPAN = 256


@dataclass(frozen=True, slots=True)
class Rows:
    """New rows of one sequence: consecutive places from `start`; `seen[i]` has bit j set where row i sees place `prefix + j`."""

    cache: Cache
    tokens: Sequence[int]
    start: int
    prefix: int  # places that every row sees
    seen: Sequence[int]

    def cut(self, count: int) -> tuple[Rows, Rows]:
        """Return the first `count` rows and the others."""
        first = Rows(self.cache, self.tokens[:count], self.start, self.prefix, self.seen[:count])
        return first, Rows(self.cache, self.tokens[count:], self.start + count, self.prefix, self.seen[count:])


def rows_of_nodes(cache: Cache, slots: Slots, nodes: range) -> Rows:
    """Describe nodes of the tail: each sees the prefix, its ancestors and itself."""
    seen: list[int] = []
    for node, parent in enumerate(slots.parents[: nodes.stop]):
        seen.append((0 if parent == ROOT else seen[parent]) | 1 << node)
    return Rows(cache, slots.tokens[nodes.start : nodes.stop], slots.place(nodes.start), len(slots.prefix), seen[nodes.start : nodes.stop])


def rows_of_chunk(cache: Cache, tokens: Sequence[int], start: int) -> Rows:
    """Describe consecutive tokens of the prefix: each sees all before it and itself."""
    return Rows(cache, tokens, start, start, [(2 << row) - 1 for row in range(len(tokens))])


def dealt(work: Sequence[Rows], most: int) -> Iterator[list[Rows]]:
    """Deal rows out to steps of at most `most`, in their order: what a row sees is written by its own step or by one before it."""
    step: list[Rows] = []
    room = most
    for rows in work:
        rest = rows
        while len(rest.tokens) >= room:
            first, rest = rest.cut(room)
            yield [*step, first]
            step, room = [], most
        step += [rest] if rest.tokens else []
        room -= len(rest.tokens)
    if step:
        yield step


class Planner:
    """Makes steps for one device."""

    def __init__(self, device: torch.device, dtype: torch.dtype, group: int) -> None:
        self.device = device
        self.dtype = dtype
        self.group = group  # query heads that share a key head
        self.exact = device.type == "cpu"

    def places(self, capacity: int) -> int:
        """How many places a cache needs for `capacity` tokens, the spare one included."""
        return capacity if self.exact else -(-(capacity + 1) // SPAN) * SPAN

    def rows(self, count: int) -> int:
        """How many rows are run for `count` that count."""
        return count if self.exact else 1 << (count - 1).bit_length()

    def step(self, work: Sequence[Rows], compiled: bool = False) -> Step:
        """Put the rows of several sequences into one step; the compiled one takes lines in place of masks."""
        columns = np.concatenate([self._columns(rows) for rows in work], axis=1)  # tokens, positions, places
        tokens, positions, places = self._send(torch.from_numpy(columns))
        counts = [self.rows(len(rows.tokens)) for rows in work]
        parts = [self._part(rows, own, compiled) for rows, own in zip(work, torch.split(places, counts), strict=True)]
        return Step(tokens, positions, tuple(parts))

    def counted(self, work: Sequence[Rows], hidden: Tensor) -> Tensor:
        """Drop the padding rows of a step's result."""
        if self.exact:
            return hidden
        kept, first = [], 0
        for rows in work:
            kept.append(hidden[first : first + len(rows.tokens)])
            first += self.rows(len(rows.tokens))
        return kept[0] if len(kept) == 1 else torch.cat(kept)

    def _part(self, rows: Rows, places: Tensor, compiled: bool) -> Part:
        span = self._span(rows)
        if compiled:
            return Part(rows.cache, places, span, None, _lines(rows))
        return Part(rows.cache, places, span, self._mask(rows, places.shape[0], span))

    def _span(self, rows: Rows) -> int:
        end = rows.start + len(rows.tokens)
        return end if self.exact else -(-end // SPAN) * SPAN

    def _columns(self, rows: Rows) -> np.ndarray:
        count = len(rows.tokens)
        columns = np.zeros((3, self.rows(count)), dtype=np.int64)
        columns[0, :count] = rows.tokens
        columns[1, :count] = [rows.prefix + seen.bit_count() - 1 for seen in rows.seen]
        columns[2, :count] = np.arange(rows.start, rows.start + count)
        columns[2, count:] = rows.cache.data.shape[3] - 1
        return columns

    def _mask(self, rows: Rows, count: int, span: int) -> Tensor | None:
        tail = rows.start + len(rows.tokens) - rows.prefix
        if self.exact and all(seen == (1 << tail) - 1 for seen in rows.seen):
            return None
        mask = torch.full((count, span), float("-inf"), dtype=self.dtype)
        mask[: len(rows.tokens), : rows.prefix] = 0
        mask[: len(rows.tokens), rows.prefix : rows.prefix + tail].masked_fill_(torch.from_numpy(_bits(rows.seen, tail)), 0)
        mask[len(rows.tokens) :, 0] = 0
        return mask if self.exact else self._send(mask).repeat_interleave(self.group, 0, output_size=count * self.group)

    def _send(self, held: Tensor) -> Tensor:
        return held if self.exact else held.to(self.device, non_blocking=True)


def _lines(rows: Rows) -> Lines:
    """List what each row sees behind the prefix; a parent's place is below its child's, so ascending places follow the line."""
    counts = np.array([seen.bit_count() for seen in rows.seen], dtype=np.int64)
    places = np.zeros((len(rows.seen), counts.max()), dtype=np.int64)
    for line, count, seen in zip(places, counts, _bits(rows.seen, rows.start + len(rows.tokens) - rows.prefix), strict=True):
        line[:count] = np.flatnonzero(seen) + rows.prefix
    return Lines(rows.prefix, places, counts + rows.prefix)


def _bits(numbers: Sequence[int], width: int) -> np.ndarray:
    """Write numbers out in bits, lowest first [numbers, width]."""
    size = -(-width // 8)
    packed = np.frombuffer(b"".join(number.to_bytes(size, "little") for number in numbers), dtype=np.uint8)
    return np.unpackbits(packed.reshape(-1, size), axis=1, bitorder="little")[:, :width].astype(np.bool_)
