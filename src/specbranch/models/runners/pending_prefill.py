"""Prefill that is put off: the chunks of prompts whose keys and values are not computed yet, in the order they came.

Owns the list, and how it is cut and packed into forwards. Does not own the forward (`native.py`, on a GPU
`gpu/launching.py`). Invariant: a pending chunk is the end of its sequence's prefix. So a chunk that its sequence no
longer holds, or holds in part, counts only as far as it is held. An interrupt may leave such a chunk in the list.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import lcm
from typing import Protocol

from specbranch.core.pages import PAGE, PrefilledPrompt, chunks
from specbranch.core.slots import Slots
from specbranch.models.cache.kv_memory import Table
from specbranch.models.forward.step_rows import Rows, rows_of_chunk


@dataclass(frozen=True, slots=True)
class PendingChunk:
    """Tokens of one sequence's prefix that have pages, but no keys and values yet."""

    seq: int
    table: Table
    tokens: Sequence[int]
    start: int  # KV slot of the first token

    @property
    def stop(self) -> int:
        """The KV slot behind the last token."""
        return self.start + len(self.tokens)

    def part(self, start: int, stop: int) -> PendingChunk:
        """Return the tokens between two KV slots."""
        return PendingChunk(self.seq, self.table, self.tokens[start - self.start : stop - self.start], start)

    def cut(self, prefill_chunk: int) -> Iterator[PendingChunk]:
        """Cut at absolute multiples of the chunk size."""
        for start, stop in chunks(range(self.start, self.stop), prefill_chunk):
            yield self.part(start, stop)

    def rows(self) -> Rows:
        """Return the tokens as rows of a step."""
        return rows_of_chunk(self.table, self.tokens, self.start)


class OpenSequence(Protocol):
    """What the list has to know of a sequence."""

    @property
    def slots(self) -> Slots:
        """Its prefix and tail."""
        ...

    @property
    def table(self) -> Table:
        """Its pages."""
        ...

    @property
    def prompt(self) -> PrefilledPrompt:
        """What the prefix cache may serve of it."""
        ...


class PendingPrefill:
    """The chunks that are put off."""

    def __init__(self, sequences: Mapping[int, OpenSequence]) -> None:
        """Make an empty list; `sequences`: the open sequences, which their runner changes."""
        self._sequences = sequences
        self._chunks: list[PendingChunk] = []

    def __bool__(self) -> bool:
        return bool(self._chunks)

    def add(self, chunk: PendingChunk) -> None:
        """Put a chunk off."""
        self._chunks.append(chunk)

    def held(self) -> list[PendingChunk]:
        """Return the chunks, each as far as its sequence holds it, in their order."""
        found = []
        for chunk in self._chunks:
            sequence = self._sequences.get(chunk.seq)
            length = len(sequence.slots.prefix) if sequence and sequence.table is chunk.table else 0
            if length > chunk.start:
                found.append(chunk if length >= chunk.stop else chunk.part(chunk.start, length))
        return found

    def trim(self) -> None:
        """Drop what no sequence holds any more."""
        self._chunks = self.held() if self._chunks else []

    def clear(self) -> None:
        """Drop all chunks."""
        self._chunks = []

    def starts(self) -> dict[int, int]:
        """Return how much of each sequence with pending chunks is computed."""
        found: dict[int, int] = {}
        for chunk in self.held():
            found[chunk.seq] = min(found.get(chunk.seq, chunk.start), chunk.start)
        return found

    def serve(self, seq: int, tokens: Sequence[int], prefill_chunk: int) -> bool:
        """True if a prompt has to wait for pending chunks: its own, or some that the prefix cache can serve it."""
        return any(chunk.seq == seq or self._serves(chunk, tokens, prefill_chunk) for chunk in self.held())

    def check(self) -> None:
        """Raise unless the chunks of each sequence, one after the other, are the end of its prefix."""
        ends: dict[int, int] = {}
        for chunk in self.held():
            sequence = self._sequences[chunk.seq]
            if list(chunk.tokens) != sequence.slots.prefix[chunk.start : chunk.stop]:
                raise AssertionError(f"sequence {chunk.seq} holds other tokens than its pending chunk")
            if chunk.start != ends.get(chunk.seq, chunk.start) or sequence.prompt.whole > chunk.start:
                raise AssertionError(f"pending chunk {chunk.start} of sequence {chunk.seq} is out of place")
            ends[chunk.seq] = chunk.stop
        for seq, end in ends.items():
            if end != len(self._sequences[seq].slots):
                raise AssertionError(f"sequence {seq} goes on behind its pending chunks")

    def _serves(self, chunk: PendingChunk, tokens: Sequence[int], prefill_chunk: int) -> bool:
        """True if the prefix cache can serve a prompt more pages once a chunk is computed."""
        stop, unit = min(chunk.stop, len(tokens)), lcm(prefill_chunk, PAGE)
        # Only whole units of a longer text are shared, and those before the chunk can be had already.
        ends_here = chunk.stop == len(tokens)
        if not ends_here and stop - stop % unit <= chunk.start:
            return False
        prefix = self._sequences[chunk.seq].slots.prefix
        shared = stop if ends_here else stop - stop % unit
        return prefix[:shared] == list(tokens[:shared])


def packed(parts: Iterable[PendingChunk], most: int) -> Iterator[list[PendingChunk]]:
    """Pack chunks into forwards of at most `most` rows, in their order; none is cut, and a longer one is alone."""
    group: list[PendingChunk] = []
    room = most
    for part in parts:
        if group and len(part.tokens) > room:
            yield group
            group, room = [], most
        group.append(part)
        room -= len(part.tokens)
    if group:
        yield group
