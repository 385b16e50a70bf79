"""The native Runner: one decoder, one pool of cache pages, several sequences in one forward.

Owns which sequence has which pages, and which of them are known by content: those that `extend` filled. Invariant: a
sequence's `Slots`, its table and what lies in its pages agree after every call, also one that fails.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from specbranch.core.pages import PAGE, Copy, Pool, PrefilledPrompt, check_shared, chunks
from specbranch.core.runner import Feed
from specbranch.core.slots import ROOT, TAIL, Slots
from specbranch.errors import BadParameter, ModelError
from specbranch.models.batch import Rows, dealt, positions_of, rows_of_chunk, rows_of_nodes, shared_end, tokens_of
from specbranch.models.cpu.fused_step import STEP_ROWS, FusedStep, fuse
from specbranch.models.decoder import ChunkView, Decoder, DecoderRows, OwnPaths, Step
from specbranch.models.files.stored_rows import looked_up
from specbranch.models.kv import Memory, Table
from specbranch.models.model import TorchRunner
from specbranch.models.room import pool_pages
from specbranch.models.rows import TensorRow
from specbranch.models.sheet import Arrays
from specbranch.models.storage import name_of

log = logging.getLogger("specbranch")

# Tokens of a prompt in one forward of the compiled step, which is as fast in chunks of 16 as of 32 or 64, and as torch
# is in chunks of 256: 128 tokens of SmolLM2 take 0.95 s of one core, torch's 1.04; behind 900 others 1.55 against 1.46.
# A step of 8 rows takes 0.08 s and a chunk of 16 0.12, so that a round with both is shorter than three without; with 32
# it would not be.
COMPILED_CHUNK = 16

ALIKE = 1e-3  # how near the compiled step must come to the plain one
ROUNDED_ALIKE = (
    0.1  # where rows, or keys and values, are rounded in between: the last bit of one decides which way another goes
)


@dataclass(frozen=True, slots=True)
class Held:
    """An open sequence: its bookkeeping, its pages, and what of it was read as a prompt."""

    slots: Slots
    table: Table
    read: PrefilledPrompt


class NativeRunner(TorchRunner):
    """A Runner over the native decoder. Rows are `TensorRow`s, in float32 or better."""

    page = PAGE

    def __init__(
        self,
        decoder: Decoder,
        context_length: int,
        tail: int = TAIL,
        pages: int | None = None,
        cache_dtype: torch.dtype | None = None,
    ) -> None:
        """`pages`: of the pool; nothing: what there is room for (see `room`). `cache_dtype`: what keys and values are
        stored in; nothing: what is computed in."""
        super().__init__(decoder.arch.vocabulary, decoder.norm.device)
        self.decoder = decoder
        self.architecture = decoder.arch
        self.dtype = decoder.norm.dtype
        self.tail = tail
        self._context_length = context_length
        room = decoder.arch, self.dtype, self.device, context_length, tail
        self.pool = Pool(pages or pool_pages(*room, weights=0, kept=cache_dtype))
        # The last page is for padding.
        self.memory = Memory(decoder.arch, self.pool.pages + 1, self.device, cache_dtype or self.dtype)
        self._fused = self._trusted(fuse(decoder, self.memory))
        self.prefill_chunk = self.prefill_chunk if self._fused is None else COMPILED_CHUNK
        self._held: dict[int, Held] = {}

    @property
    def vocabulary(self) -> int:
        """How many token ids the model scores."""
        return self.architecture.vocabulary

    @property
    def context_length(self) -> int:
        """How many tokens one sequence may hold."""
        return self._context_length

    @property
    def kv_slots(self) -> int:
        """How many KV slots the cache has, for all sequences together."""
        return self.pool.pages * PAGE

    @property
    def kv_slots_free(self) -> int:
        """How many of them can be had: nobody holds them, though what lies there may be known, and no copy of a shared
        page will take them."""
        due = self.pool.copies_due(held.table for held in self._held.values())
        return max(self.pool.free - due, 0) * PAGE

    @property
    def weights(self) -> str:
        """How the matrices are stored: float32, bfloat16, int8, int4 … ."""
        return self.decoder.stored

    @property
    def cache_dtype(self) -> str:
        """What keys and values are stored in."""
        return name_of(self.memory.data.dtype)

    @property
    def compiled(self) -> bool:
        """Whether few rows run as one compiled step."""
        return self._fused is not None

    def check_layers(self, layers: int) -> None:
        """Raise a ModelError unless the model has so many layers."""
        if not 0 <= layers <= self.architecture.layers:
            raise ModelError(
                f"{self.architecture.name} has {self.architecture.layers} layers; the last {layers} of them were "
                "asked for."
            )

    def embedded(self, tokens: Sequence[int]) -> Tensor:
        """The input embeddings of tokens [tokens, hidden]."""
        return looked_up(self.decoder.embedding, torch.tensor(tokens, device=self.device))

    def slots(self, seq: int) -> Slots:
        """The sequence's KV slots."""
        return self._held[seq].slots

    def demand(self, seq: int, count: int) -> None:
        """Make sure that so many more nodes can be fed, or raise CacheFull."""
        held = self._held[seq]
        held.slots.demand(count)
        self._reach(held, len(held.slots), len(held.slots) + count)

    def check(self) -> None:
        """Raise if the pool and the open sequences do not agree, or a page has two meanings."""
        self.pool.check([held.table for held in self._held.values()])
        check_shared((held.table, held.slots.prefix) for held in self._held.values())
        for held in self._held.values():
            held.read.check()

    def _open(self, seq: int) -> None:
        if seq in self._held:
            raise ValueError(f"sequence {seq} is open already")
        if not self._held:
            self.pool.settle(())
        table = Table(self.pool)
        self._held[seq] = Held(Slots(self._context_length + self.tail, self.tail), table, PrefilledPrompt(table))

    @torch.inference_mode()
    def _extend(self, seq: int, tokens: Sequence[int]) -> None:
        """Read tokens in chunks that end at multiples of `prefill_chunk`, without scoring the vocabulary."""
        self._check_ids(tokens)
        held = self._held[seq]
        before = len(held.slots.prefix)
        try:
            kv_slots = held.slots.extend(tokens)
            self._reach(held, kv_slots.start, kv_slots.stop)
            for start, stop in chunks(kv_slots, self.prefill_chunk):
                self._store(held.table, tokens[start - kv_slots.start : stop - kv_slots.start], start)
                if self.prefix_cache:
                    held.read.note(held.slots.prefix, start, stop, self.prefill_chunk)
        except BaseException:
            self._give_up(seq, before)
            raise

    def _recall(self, seq: int, tokens: Sequence[int]) -> None:
        held = self._held[seq]
        before = len(held.slots.prefix)
        try:
            kv_slots = held.read.recall(tokens, before, self.prefill_chunk)
            held.slots.extend(tokens[before:kv_slots])
        except BaseException:
            self._give_up(seq, before)
            raise

    def _give_up(self, seq: int, length: int) -> None:
        """Forget what of a prompt was not read to its end, and find the pages that were lost with it."""
        held = self._held[seq]
        if len(held.slots.prefix) > length:
            self._rewind(seq, length)
        held.read.cut(length, self.prefill_chunk)  # an interrupt may have come between the two
        held.table.shrink(len(held.slots))
        self._settle()

    @torch.inference_mode()
    def _score(self, work: Sequence[Feed]) -> list[list[TensorRow]]:
        """Score new nodes in one forward; beyond what a compiled step takes, in several, one after the other."""
        with self._grown(work) as grown:
            block, states = self._forward(grown)
        rows = iter(range(block.shape[0]))
        return [[TensorRow(block, next(rows), self.decoder.columns, states) for _ in feed.tokens] for feed in work]

    @torch.inference_mode()
    def _keep(self, seq: int, nodes: Sequence[int], commit: int) -> None:
        held = self._held[seq]
        moves = held.slots.keep(nodes, commit)
        if moves:
            self._move(seq, held.table.flat(np.array(moves).T), moves[0][1])
        held.table.shrink(len(held.slots))

    def _rewind(self, seq: int, length: int) -> None:
        """Forget KV slots; what lies there is written over later."""
        held = self._held[seq]
        held.read.cut(
            length, self.prefill_chunk
        )  # first, as an interrupt may come: more than is held must never be believed
        held.slots.truncate(length)
        held.table.shrink(length)

    def _close(self, seq: int) -> None:
        self._held.pop(seq).table.shrink(0)

    def _move(self, seq: int, moves: np.ndarray, first: int) -> None:
        """Copy KV slots of the pool, those of the first row to those of the second; `first` is the lowest of these in
        the sequence."""
        self.memory.move(*self.transfer.up({"moves": moves})["moves"])

    def _reach(self, held: Held, start: int, stop: int) -> None:
        """Have pages for the KV slots up to `stop`, those from `start` on, which are to be written, nobody else's."""
        try:
            held.table.reserve(start, stop, self._copy)
        except BaseException:
            self._settle()
            raise

    def _settle(self) -> None:
        self.pool.settle([held.table for held in self._held.values()])

    def _copy(self, copies: Sequence[Copy]) -> None:
        self.memory.copy(copies)

    def _grow(self, feed: Feed) -> Rows:
        self._check_ids(feed.tokens)
        held = self._held[feed.seq]
        start = len(held.slots)
        nodes = held.slots.grow(feed.tokens, feed.parents)
        self._reach(held, start, len(held.slots))
        return rows_of_nodes(held.table, held.slots, nodes)

    @contextmanager
    def _grown(self, work: Sequence[Feed]) -> Iterator[list[Rows]]:
        """Add nodes, and take them back should what follows fail."""
        sizes = {feed.seq: len(self.slots(feed.seq).tokens) for feed in work}
        try:
            yield [self._grow(feed) for feed in work if feed.tokens]
        except BaseException:
            for seq, size in sizes.items():
                self._take_back(seq, size)
            self._settle()
            raise

    def _take_back(self, seq: int, size: int) -> None:
        held, rows = self._held[seq], self._rows[seq]
        del held.slots.tokens[size:], held.slots.parents[size:]
        for node in [node for node in rows if node >= size]:
            del rows[node]
        held.table.shrink(len(held.slots))

    @torch.inference_mode()
    def _trusted(self, fused: FusedStep | None) -> FusedStep | None:
        """Return the compiled step if it scores a small tree as the plain one does: it may never have run on such a
        processor."""
        if fused is None:
            return None
        slots, table = Slots(4, 4), Table(self.pool)
        table.reach(4)
        rows = [rows_of_nodes(table, slots, slots.grow((0, 0, 0), (ROOT, 0, 0)))]
        compiled = fused.logits(rows)
        plain = self.decoder.logits(self.decoder.forward(self._step(rows), self.memory))
        table.shrink(0)
        near = ROUNDED_ALIKE if self.weights == "stored" or self.cache_dtype == "int8" else ALIKE
        most = plain.abs().nan_to_num(0.0).max().item()  # weights may be no numbers, which is for others to find
        if torch.allclose(compiled, plain, rtol=near, atol=near * most, equal_nan=True):
            return fused
        log.warning(
            "The compiled step disagrees with the plain one on this machine; decoding goes on with the plain one."
        )
        return None

    def _check_ids(self, tokens: Sequence[int]) -> None:
        if tokens and not 0 <= min(tokens) <= max(tokens) < self.vocabulary:
            wrong = next(token for token in tokens if not 0 <= token < self.vocabulary)
            raise BadParameter(
                f"Token id {wrong} is outside the vocabulary of {self.architecture.name} (0 to {self.vocabulary - 1})."
            )

    def _store(self, table: Table, tokens: Sequence[int], start: int) -> None:
        """Read a chunk."""
        if self._fused and len(tokens) <= STEP_ROWS:
            self._fused.store([rows_of_chunk(table, tokens, start)])
        else:
            self.decoder.store(self._chunk_step(table, tokens, start), self.memory)

    def _forward(self, work: list[Rows]) -> tuple[Tensor, Tensor | None]:
        """Score all rows; returns logits and, where they are tapped, hidden states."""
        if self._fused is None:
            return self._forward_plainly(work)
        steps = dealt(work, STEP_ROWS)
        logits, states = zip(*(self._fused.logits_and_states(step, self._tapped) for step in steps), strict=True)
        return _joined(logits), _joined(states) if self._tapped else None

    def _forward_plainly(self, work: list[Rows]) -> tuple[Tensor, Tensor | None]:
        seen: list[Tensor] | None = [] if self._tapped else None
        hidden = self.decoder.forward(self._step(work), self.memory, seen)
        logits = self.decoder.logits(hidden)
        states = (
            None
            if seen is None
            else torch.cat((*seen[len(seen) - self._tapped + 1 :], self.decoder.normed(hidden)), dim=-1)
        )
        return logits.float() if logits.dtype.itemsize < 4 else logits, states

    def _step(self, work: Sequence[Rows]) -> Step:
        """Bring rows of tails to the device."""
        own = [_path_arrays(rows) for rows in work]
        arrays = {f"{name} {number}": array for number, part in enumerate(own) for name, array in part.items()}
        kv_slots = _page_and_slot(np.concatenate([rows.kv_slots() for rows in work]))
        sent = self.transfer.up(
            {"tokens": tokens_of(work), "positions": positions_of(work), "kv_slots": kv_slots, **arrays}
        )
        parts = [
            _part(rows, {name: sent[f"{name} {number}"] for name in own[number]}) for number, rows in enumerate(work)
        ]
        return Step(sent["tokens"], sent["positions"], sent["kv_slots"], tuple(parts))

    def _chunk_step(self, table: Table, tokens: Sequence[int], start: int) -> Step:
        """Bring a chunk of a text to the device, and which pages hold the text so far."""
        end = start + len(tokens)
        kv_slots, pages = table.flat(np.arange(start, end)), np.array(table.pages[: -(-end // PAGE)], dtype=np.int64)
        sent = self.transfer.up(
            {"tokens": np.array(tokens, dtype=np.int64), "kv_slots": _page_and_slot(kv_slots), "pages": pages}
        )
        positions = torch.arange(start, end, device=self.device)
        return Step(
            sent["tokens"], positions, sent["kv_slots"], (DecoderRows(len(tokens), ChunkView(sent["pages"], end)),)
        )


def _page_and_slot(flat: np.ndarray) -> np.ndarray:
    """Which page KV slots of the pool lie in, and where in it [2, KV slots]."""
    return np.stack(np.divmod(flat, PAGE))


def _path_arrays(rows: Rows) -> Arrays:
    """How many positions each row reads in common, the KV slots of its own path, and how many those are."""
    shared = np.array([shared_end(position, rows.prefix) for position in rows.positions])
    paths = [rows.table.flat(rows.path(row, start)) for row, start in enumerate(shared)]
    own, counts = np.zeros((len(paths), max(map(len, paths))), dtype=np.int64), np.array([len(path) for path in paths])
    for held, path in zip(own, paths, strict=True):
        held[: len(path)], held[len(path) :] = path, path[0]
    return {"shared": shared, "own": own, "counts": counts}


def _part(rows: Rows, sent: Mapping[str, Tensor]) -> DecoderRows:
    most_shared = shared_end(max(rows.positions), rows.prefix)
    return DecoderRows(
        len(rows.tokens), OwnPaths(rows.table.pages, most_shared, sent["shared"], sent["own"], sent["counts"])
    )


def _joined(blocks: Sequence[Tensor]) -> Tensor:
    return blocks[0] if len(blocks) == 1 else torch.cat(tuple(blocks))
