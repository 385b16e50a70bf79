"""The Runner of a draft that reads its target's features (EAGLE-3): a native runner beside the target's.

Owns where each row's feature comes from. Owns a memory of the draft's own output states, at its own KV slots. Does not
own the formula (`forward/decoder.py`) or the target's memory. Invariants: a row reads the feature of the position
before it from the target if the target has computed that very text, and else the state that the draft itself gave for
its parent. The committed prefix has no rows of the second kind for which the target has a feature by now, once
`refresh` was called.

Both runners know a sequence by the same number. On a GPU this runner works on the target's stream, in plain torch.
Rounds that stay on the device need a draft that runs there by graphs (`GpuRunner.grows_with`), so such pairs have
rounds that the host plans.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
import torch

from specbranch.config import SamplingParams
from specbranch.core.pages import PAGE
from specbranch.core.request import Request
from specbranch.core.runner import Feed
from specbranch.core.slots import ROOT, TAIL, Slots
from specbranch.errors import ModelError
from specbranch.models.cache.kv_memory import FeatureMemory
from specbranch.models.forward.decoder import Decoder, Step
from specbranch.models.forward.step_rows import Rows
from specbranch.models.runners.native import NativeRunner, flat_slots
from specbranch.models.runners.pending_prefill import PendingChunk
from specbranch.models.runners.sequences import OpenSequence
from specbranch.models.sampling.logit_rows import TensorRow


class _Source(NamedTuple):
    """Where a row's feature lies: a KV slot of the target's memory, or of the draft's own."""

    of_target: bool
    kv_slot: int
    fed_back: bool = False  # it is the draft's own state


@dataclass(slots=True)
class _Made:
    """What the rows of a sequence were made from."""

    fed_back: int | None = None  # first position of the prefix that was made from a fed-back state; None: there is none
    tail: list[bool] = field(default_factory=list)  # for each node: made from a fed-back state


@dataclass(frozen=True, slots=True)
class _Part:
    """Rows of one sequence in one forward, and the sources of their features."""

    feed: int
    rows: Rows
    sources: list[_Source]


class FeatureRunner(NativeRunner):
    """A draft's Runner; its target writes features."""

    def __init__(
        self,
        decoder: Decoder,
        target: NativeRunner,
        context_length: int,
        tail: int = TAIL,
        pages: int | None = None,
        cache_dtype: torch.dtype | None = None,
        *,
        feeds_normed: bool = False,
    ) -> None:
        """Allocate both memories; `feeds_normed`: the draft reads its own states behind the last norm."""
        super().__init__(decoder, context_length, tail, pages, cache_dtype)
        if target.features is None:
            raise ValueError("the target writes no features")
        self.target, self._read, self._feeds_normed = target, target.features.memory, feeds_normed
        self.own = FeatureMemory(self.pool.pages + 1, decoder.arch.hidden, self.device, self.dtype)
        self.memories = (self.memory, self.own)
        self._nothing = _Source(False, self.pool.pages * PAGE)  # the page for padding is never written: zeros
        self._made: dict[int, _Made] = {}

    # --- what workers ask; see `ReadsFeatures` ---

    def reads(self, seq: int, length: int) -> bool:
        """True if the target has computed all tokens before the last of these `length`."""
        return len(self._computed(seq)) >= length - 1

    def refresh(self, seq: int) -> None:
        """Drop rows that were made from fed-back states where the target has computed the features since."""
        made, slots, computed = self._made[seq], self.slots(seq), self._computed(seq)
        if made.fed_back is not None and len(computed) >= made.fed_back:
            self.rewind(seq, made.fed_back)
            return
        known = _known(slots, computed)
        if any(known[parent] and fed_back for parent, fed_back in zip(slots.parents, made.tail, strict=True)):
            self.keep(seq, (), 0)

    @contextmanager
    def target_reads(self, seq: int, tokens: Sequence[int]) -> Iterator[None]:
        """Within this context the target holds a text under this number, for a text that no session has."""
        self.target.open(seq, Request(SamplingParams(), seed=0, prompt_length=len(tokens)))
        try:
            self.target.extend(seq, tokens)
            yield
        finally:
            self.target.close(seq)

    def _computed(self, seq: int) -> Sequence[int]:
        """Return the tokens whose features the target has; those of its prompt that were put off it computes now."""
        sequence = self.target.sequences.get(seq)
        if sequence is None:
            return ()
        if seq in self.target.sequences.pending.starts():
            self.target.flush()
        return sequence.slots.prefix

    # --- forwards ---

    @torch.inference_mode()
    def _score(self, work: Sequence[Feed]) -> list[list[TensorRow]]:
        """Append new nodes and compute their logits; a row whose parent's own state it reads comes after its parent."""
        self.flush()
        with self.sequences.appending(work) as rows:
            cut = [
                list(_parts(number, some, self.slots(feed.seq), self._sources(feed.seq, some)))
                for number, (feed, some) in enumerate(zip(work, rows, strict=True))
            ]
            made: list[list[TensorRow]] = [[] for _ in work]
            for at in range(max(map(len, cut), default=0)):
                self._run([parts[at] for parts in cut if at < len(parts)], made)
            for feed, parts in zip(work, cut, strict=True):
                self._made[feed.seq].tail += [source.fed_back for part in parts for source in part.sources]
        return made

    def _run(self, parts: Sequence[_Part], made: list[list[TensorRow]]) -> None:
        """Run one forward, and append its rows to those of their feeds."""
        with self.target.in_turn():
            step = self._reading(self._step([part.rows for part in parts]), [s for part in parts for s in part.sources])
            hidden = self.decoder.forward(step, self.memory)
            self.own.put(flat_slots(step.kv_slots), self.decoder.normed(hidden) if self._feeds_normed else hidden)
            logits = self.decoder.logits(hidden)
            logits = logits.float() if logits.dtype.itemsize < 4 else logits
        index = iter(range(logits.shape[0]))
        for part in parts:
            made[part.feed] += [TensorRow(logits, next(index), self.decoder.columns, None) for _ in part.sources]

    def _store_chunks(self, group: Sequence[PendingChunk]) -> None:
        for chunk in group:
            sources = self._sources_of_chunk(chunk)
            with self.target.in_turn():
                self.decoder.store(
                    self._reading(self._chunk_step(chunk.table, chunk.tokens, chunk.start), sources), self.memory
                )

    def _reading(self, step: Step, sources: Sequence[_Source]) -> Step:
        """Add the features of all rows to a step."""
        of_target = np.array([source.of_target for source in sources])
        kv_slots = np.array([source.kv_slot for source in sources], dtype=np.int64)
        arrays = {"of target": of_target.astype(np.int64), "read": np.where(of_target, kv_slots, 0)}
        sent = self.transfer.up({**arrays, "own": np.where(of_target, self._nothing.kv_slot, kv_slots)})
        read, own = self._read.data[sent["read"]], self.own.data[sent["own"]]
        return replace(step, features=torch.where(sent["of target"].bool()[:, None], read, own))

    # --- where features come from ---

    def _sources(self, seq: int, rows: Rows) -> list[_Source]:
        """Return the source of each new row's feature."""
        slots = self.slots(seq)
        known, first = _known(slots, self._computed(seq)), rows.start - rows.prefix
        parents = slots.parents[first : first + len(rows.tokens)]
        return [
            self._true(seq, position - 1) if known[parent] else self._own(seq, slots.slot_of(parent))
            for parent, position in zip(parents, rows.positions, strict=True)
        ]

    def _sources_of_chunk(self, chunk: PendingChunk) -> list[_Source]:
        """Return the sources of a prompt's rows; the target has computed it up to there."""
        if len(self._computed(chunk.seq)) < chunk.stop - 1:
            raise ModelError(
                f"The draft was to read a prompt up to token {chunk.stop}, and its target has computed "
                f"{len(self._computed(chunk.seq))}. Please report this."
            )
        return [self._true(chunk.seq, position) for position in range(chunk.start - 1, chunk.stop - 1)]

    def _true(self, seq: int, position: int) -> _Source:
        """Return the target's feature of a position that it has computed; there is none before the first."""
        if position < 0:
            return self._nothing
        return _Source(True, _in_pool(self.target.sequences[seq], position))

    def _own(self, seq: int, kv_slot: int) -> _Source:
        """Return the draft's own state at a KV slot of its sequence."""
        return _Source(False, _in_pool(self.sequences[seq], kv_slot), fed_back=True)

    # --- what rows were made from ---

    def drop_rows(self, seq: int, size: int) -> None:
        """Forget the logits of all but the first `size` nodes of a tail."""
        super().drop_rows(seq, size)
        del self._made[seq].tail[size:]

    def _open(self, seq: int) -> None:
        super()._open(seq)
        self._made[seq] = _Made()

    def _keep(self, seq: int, nodes: Sequence[int], commit: int) -> None:
        made, before = self._made[seq], len(self.slots(seq).prefix)
        super()._keep(seq, nodes, commit)
        kept = [made.tail[node] for node in nodes]
        if made.fed_back is None and True in kept[:commit]:
            made.fed_back = before + kept.index(True)
        made.tail = kept[commit:]

    def _rewind(self, seq: int, length: int) -> None:
        super()._rewind(seq, length)
        made = self._made[seq]
        made.tail = []
        if made.fed_back is not None and length <= made.fed_back:
            made.fed_back = None

    def _close(self, seq: int) -> None:
        super()._close(seq)
        del self._made[seq]


def _in_pool(sequence: OpenSequence, kv_slot: int) -> int:
    """Return a KV slot of the pool."""
    return sequence.table.pages[kv_slot // PAGE] * PAGE + kv_slot % PAGE


def _known(slots: Slots, computed: Sequence[int]) -> list[bool]:
    """Return for each node, and for ROOT at the end, whether the target has computed its text."""
    held = len(slots.prefix)
    root = len(computed) >= held
    known, positions = list[bool](), list[int]()
    for token, parent in zip(slots.tokens, slots.parents, strict=True):
        position = held if parent == ROOT else positions[parent] + 1
        above = root if parent == ROOT else known[parent]
        known.append(above and position < len(computed) and computed[position] == token)
        positions.append(position)
    return [*known, root]


def _parts(feed: int, rows: Rows, slots: Slots, sources: list[_Source]) -> Iterator[_Part]:
    """Cut rows so that none reads the own state of another one of its part."""
    first = rows.start - rows.prefix
    start = first
    for node in range(first + 1, first + len(sources)):
        if sources[node - first].fed_back and slots.parents[node] >= start:
            done, rows = rows.cut(node - start)
            yield _Part(feed, done, sources[start - first : node - first])
            start = node
    yield _Part(feed, rows, sources[start - first :])
