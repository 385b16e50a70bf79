"""The open sequences of a native runner: their tokens and tails, their pages, and prefill that was put off.

Owns which sequence holds which pages. Registers the pages that prefill filled in the prefix cache, by their content.
Does not own keys and values, which its host writes, or the page counting (`core/pages.py`). Invariant: a sequence's
`Slots`, its page table and the contents of its pages agree after every call, also after one that fails.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from specbranch.core.pages import PAGE, Copy, Pool, PrefilledPrompt, check_shared
from specbranch.core.runner import Feed
from specbranch.core.slots import Slots
from specbranch.models.cache.kv_memory import Table
from specbranch.models.forward.step_rows import Rows, rows_of_nodes
from specbranch.models.runners.pending_prefill import PendingChunk, PendingPrefill


@dataclass(frozen=True, slots=True)
class OpenSequence:
    """An open sequence: its tokens and tail, its pages, and how much of it the prefix cache may serve to others."""

    slots: Slots
    table: Table
    prompt: PrefilledPrompt


class KvHost(Protocol):
    """The runner, as far as its sequences need it."""

    @property
    def prefix_cache(self) -> bool:
        """True if prompts share computed pages."""
        ...

    @property
    def prefill_chunk(self) -> int:
        """Tokens of a prefill chunk."""
        ...

    def check_ids(self, tokens: Sequence[int]) -> None:
        """Raise unless all tokens are in the vocabulary."""
        ...

    def move_kv(self, seq: int, moves: np.ndarray, lowest_written: int) -> None:
        """Copy KV slots `moves[0]` of the pool to `moves[1]`, now or before the next step.

        `lowest_written`: the lowest slot of the sequence that is written; a move that fails rolls it back to there.
        """
        ...

    def copy_pages(self, copies: Sequence[Copy]) -> None:
        """Copy pages of the pool."""
        ...

    def rewinding(self, seq: int) -> None:
        """A sequence is about to be rolled back: forget steps in flight that its new tokens would not match."""
        ...

    def drop_rows(self, seq: int, size: int) -> None:
        """Forget the logits of all but the first `size` nodes of a tail."""
        ...


class Sequences(Mapping[int, OpenSequence]):
    """The open sequences by their numbers."""

    def __init__(self, pool: Pool, context_length: int, tail: int, host: KvHost) -> None:
        self._pool, self._context_length, self._tail, self._host = pool, context_length, tail, host
        self._open: dict[int, OpenSequence] = {}
        self.pending = PendingPrefill(self._open)

    def __getitem__(self, seq: int) -> OpenSequence:
        return self._open[seq]

    def __iter__(self) -> Iterator[int]:
        return iter(self._open)

    def __len__(self) -> int:
        return len(self._open)

    @property
    def free_kv_slots(self) -> int:
        """How many KV slots can be taken: those of free and of evictable pages, less what copy-on-write will need."""
        due = self._pool.copies_due(sequence.table for sequence in self._open.values())
        return max(self._pool.free - due, 0) * PAGE

    def check(self) -> None:
        """Raise if the pool's counts disagree with the sequences, or if a page holds other tokens than registered.

        Sequences with different prefixes must not share a page.
        """
        self._pool.check([sequence.table for sequence in self._open.values()])
        check_shared((sequence.table, sequence.slots.prefix) for sequence in self._open.values())
        for sequence in self._open.values():
            sequence.prompt.check()
        self.pending.check()

    def open(self, seq: int) -> None:
        """Make room for a new, empty sequence."""
        if seq in self._open:
            raise ValueError(f"sequence {seq} is open already")
        if not self._open:  # every page is free or evictable now; recover any that an interrupt has lost
            self._pool.settle(())
        table = Table(self._pool)
        slots = Slots(self._context_length + self._tail, self._tail)
        self._open[seq] = OpenSequence(slots, table, PrefilledPrompt(table))

    def close(self, seq: int) -> None:
        """Drop a sequence and free its pages."""
        self._open.pop(seq).table.shrink(0)
        self.pending.trim()

    def demand(self, seq: int, count: int) -> None:
        """Reserve KV slots for `count` more nodes, or raise CacheFull."""
        slots = self._open[seq].slots
        slots.demand(count)
        self.reserve(seq, len(slots), len(slots) + count)

    def reserve(self, seq: int, start: int, stop: int) -> Table:
        """Allocate pages up to KV slot `stop`, or raise CacheFull; returns the page table.

        Shared pages from `start` on are copied, as the caller will write to them.
        """
        table = self._open[seq].table
        try:
            table.reserve(start, stop, self._host.copy_pages)
        except BaseException:
            self.recount_pages()
            raise
        return table

    def extend(self, seq: int, tokens: Sequence[int]) -> None:
        """Append tokens to the prefix and reserve their pages; their forward is put off."""
        self._host.check_ids(tokens)
        self.pending.trim()  # what an interrupt left of earlier chunks
        sequence = self._open[seq]
        before = len(sequence.slots.prefix)
        try:
            kv_slots = sequence.slots.extend(tokens)
            self.reserve(seq, kv_slots.start, kv_slots.stop)
            self.pending.add(PendingChunk(seq, sequence.table, tuple(tokens), before))
        except BaseException:
            self._undo_prefill(seq, before)
            raise

    def commit(self, tokens: Mapping[int, int]) -> None:
        """Append a token to the prefix of each sequence, once a step has computed them."""
        for seq, token in tokens.items():
            self._open[seq].slots.prefix.append(token)

    @contextmanager
    def taking_pending(self) -> Iterator[list[PendingChunk]]:
        """Yield the pending chunks to a body that launches their forward; then let the prefix cache serve them.

        If the body fails, their sequences are rolled back to before them.
        """
        try:
            pending = self.pending.held()
            yield pending
            for chunk in pending:
                self.publish(chunk)
            self.pending.clear()
        except BaseException:
            self._drop_pending()
            raise

    def publish(self, chunk: PendingChunk) -> None:
        """Let the prefix cache serve a chunk whose forward was launched."""
        if self._host.prefix_cache:
            sequence = self._open[chunk.seq]
            sequence.prompt.note(sequence.slots.prefix, chunk.start, chunk.stop, self._host.prefill_chunk)

    def waits(self, seq: int, tokens: Sequence[int]) -> bool:
        """True if `recall` should wait for pending chunks, which would serve the prompt."""
        return bool(self.pending) and self.pending.serve(seq, tokens, self._host.prefill_chunk)

    def recall(self, seq: int, tokens: Sequence[int]) -> None:
        """Take the pages that the prefix cache has for the beginning of a prompt."""
        sequence = self._open[seq]
        before = len(sequence.slots.prefix)
        try:
            length = sequence.prompt.recall(tokens, before, self._host.prefill_chunk)
            sequence.slots.extend(tokens[before:length])
        except BaseException:
            self._undo_prefill(seq, before)
            raise

    @contextmanager
    def appending(self, work: Sequence[Feed]) -> Iterator[list[Rows]]:
        """Append nodes to the tails; drop them again if the body of the `with` statement fails."""
        sizes = {feed.seq: len(self._open[feed.seq].slots.tokens) for feed in work}
        try:
            yield [self._append(feed) for feed in work if feed.tokens]
        except BaseException:
            for seq, size in sizes.items():
                self._drop_nodes(seq, size)
            self.recount_pages()
            raise

    def first_nodes(self, work: Sequence[Feed]) -> list[int]:
        """Return the node of each feed's first token; the nodes must be appended already."""
        return [len(self._open[feed.seq].slots.tokens) - len(feed.tokens) for feed in work]

    def keep(self, seq: int, nodes: Sequence[int], commit: int) -> None:
        """Keep some nodes of the tail, the first `commit` as prefix, and move their keys and values together."""
        sequence = self._open[seq]
        moves = sequence.slots.keep(nodes, commit)  # pairs of KV slots: from, to; ascending
        if moves:
            lowest_written = moves[0][1]
            self._host.move_kv(seq, sequence.table.flat(np.array(moves).T), lowest_written)
        sequence.table.shrink(len(sequence.slots))

    def rewind(self, seq: int, length: int) -> None:
        """Forget the tail and all but the first `length` tokens; later tokens overwrite their keys and values."""
        self._host.rewinding(seq)
        sequence = self._open[seq]
        # First, as an interrupt may come: the prefix cache must never believe more than the sequence holds.
        sequence.prompt.cut(length, self._host.prefill_chunk)
        sequence.slots.truncate(length)
        self.pending.trim()
        sequence.table.shrink(length)

    def _append(self, feed: Feed) -> Rows:
        self._host.check_ids(feed.tokens)
        sequence = self._open[feed.seq]
        start = len(sequence.slots)
        nodes = sequence.slots.grow(feed.tokens, feed.parents)
        self.reserve(feed.seq, start, len(sequence.slots))
        return rows_of_nodes(sequence.table, sequence.slots, nodes)

    def _drop_nodes(self, seq: int, size: int) -> None:
        """Drop all but the first `size` nodes of a tail, with their rows of logits."""
        sequence = self._open[seq]
        del sequence.slots.tokens[size:], sequence.slots.parents[size:]
        self._host.drop_rows(seq, size)
        sequence.table.shrink(len(sequence.slots))

    def _drop_pending(self) -> None:
        """Roll all sequences with pending chunks back to before them."""
        for seq, length in self.pending.starts().items():
            self._undo_prefill(seq, length)
        self.pending.clear()

    def _undo_prefill(self, seq: int, length: int) -> None:
        """Roll a sequence back to its first `length` tokens after a failed prefill, and recount the pages."""
        sequence = self._open[seq]
        if len(sequence.slots.prefix) > length:
            self.rewind(seq, length)
        # `rewind` is not enough: after an interrupt within `recall` the prompt may be longer than the prefix.
        sequence.prompt.cut(length, self._host.prefill_chunk)
        sequence.table.shrink(len(sequence.slots))
        self.recount_pages()

    def recount_pages(self) -> None:
        """Count anew which tables hold which pages, after a failure that may have lost some."""
        self._pool.settle([sequence.table for sequence in self._open.values()])
