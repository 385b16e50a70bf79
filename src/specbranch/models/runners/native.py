"""The native Runner: one decoder, one pool of KV pages, several sequences in one forward.

Owns the keys and values, and how rows and prefill become forwards on a CPU. Does not own which sequence holds which
pages (`sequences.py`) or the arithmetic (`forward/decoder.py`). Invariant: prefill that was put off is computed before
any row that reads it, or in the same forward.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor

from specbranch.core.pages import PAGE, Copy, Pool
from specbranch.core.runner import Feed
from specbranch.core.slots import ROOT, TAIL, Slots
from specbranch.errors import BadParameter, ModelError
from specbranch.models.cache.kv_memory import FeatureMemory, LayerMemory, Memory, Table
from specbranch.models.cache.pool_size import pool_pages
from specbranch.models.cpu.linear import PRODUCT_ROWS
from specbranch.models.files.stored_rows import looked_up
from specbranch.models.forward.decoder import ChunkView, Decoder, DecoderRows, OwnPaths, Step
from specbranch.models.forward.features import FeatureWriter, Fuse
from specbranch.models.forward.fused_step import STEP_ROWS, FusedStep, fuse
from specbranch.models.forward.step_rows import (
    Rows,
    positions_of,
    rows_of_nodes,
    shared_end,
    split_into_steps,
    tokens_of,
)
from specbranch.models.runners.pending_prefill import PendingChunk, packed
from specbranch.models.runners.precision import name_of
from specbranch.models.runners.sequences import Sequences
from specbranch.models.runners.torch_runner import TorchRunner
from specbranch.models.runners.weak_host import weakly
from specbranch.models.sampling.logit_rows import TensorRow
from specbranch.models.sampling.sheet import Arrays

log = logging.getLogger("specbranch")

# Prefill chunk of the compiled CPU step, in tokens. Measured with SmolLM2 on one core:
# - 128 tokens take 0.95 s compiled (chunks of 16, 32 or 64 alike) and 1.04 s in torch (chunks of 256);
# - behind 900 other tokens they take 1.55 s compiled and 1.46 s in torch;
# - a step of 8 rows takes 0.08 s, a chunk of 16 takes 0.12 s.
# So a round with both is shorter than three rounds with the step alone; with chunks of 32 it would not be.
COMPILED_CHUNK = 16

# Largest relative difference of logits between the compiled step and plain torch at which the compiled step is used.
STEP_TOLERANCE = 1e-3
# The same if activations, keys or values are rounded to int8: the last bit of a number may decide how it is rounded.
ROUNDED_STEP_TOLERANCE = 0.1


class NativeRunner(TorchRunner):
    """A Runner over the native decoder. Its rows are `TensorRow`s, in float32 or better."""

    page = PAGE

    def __init__(
        self,
        decoder: Decoder,
        context_length: int,
        tail: int = TAIL,
        pages: int | None = None,
        cache_dtype: torch.dtype | None = None,
    ) -> None:
        """Allocate the KV cache.

        `tail`: how many nodes behind the committed prefix a sequence may have. `pages`: size of the pool; None: as many
        as fit (see `pool_pages`). `cache_dtype`: type of keys and values; None: the type that the model computes in.
        """
        super().__init__(decoder.arch.vocabulary, decoder.norm.device)
        self.decoder = decoder
        self.architecture = decoder.arch
        self.dtype = decoder.dtype
        self.tail = tail
        self._context_length = context_length
        if not pages:  # the weights are loaded already: they need no more memory
            pages = pool_pages(
                decoder.arch, self.dtype, self.device, context_length, tail, weights=0, cache_dtype=cache_dtype
            )
        self.pool = Pool(pages)
        # The last page is for padding.
        self.memory = Memory(decoder.arch, self.pool.pages + 1, self.device, cache_dtype or self.dtype)
        self.memories: tuple[LayerMemory, ...] = (self.memory,)  # of each kind of layer
        self.features: FeatureWriter | None = None  # for a draft that reads them
        self._fused = self._self_tested(fuse(decoder, self.memory))
        if self._fused is not None:
            self.prefill_chunk = COMPILED_CHUNK
        self.sequences = Sequences(self.pool, context_length, tail, weakly(self))

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
        """How many KV slots can be taken: those of free and of evictable pages, less what copy-on-write will need."""
        return self.sequences.free_kv_slots

    @property
    def weights(self) -> str:
        """How the matrices are stored: float32, bfloat16, int8, int4 … ."""
        return self.decoder.stored

    @property
    def cache_dtype(self) -> str:
        """The type that keys and values are stored in."""
        return name_of(self.memory.data.dtype)

    @property
    def compiled(self) -> bool:
        """True if small steps run as one call of compiled CPU code."""
        return self._fused is not None

    def write_features(self, fuse: Fuse) -> None:
        """Write a feature with the keys and values of every row from now on, for a draft that reads them.

        No sequence may be open. Pages of the prefix cache have no features, so they are forgotten.
        """
        if self.sequences:
            raise ValueError("features are written from the beginning: load the draft before the first prompt")
        self.pool.forget_idle()
        memory = FeatureMemory(self.pool.pages + 1, fuse.hidden, self.device, self.dtype)
        self.features = FeatureWriter(fuse, memory)
        self.memories = (self.memory, memory)
        if self._fused is not None:
            self._fused.features = self.features

    def in_turn(self) -> AbstractContextManager[Any]:
        """Within this context work is ordered between earlier and later work of this model on its device."""
        return nullcontext()

    def check_layers(self, layers: int) -> None:
        """Raise a ModelError if the model has fewer layers than this."""
        if not 0 <= layers <= self.architecture.layers:
            raise ModelError(
                f"{self.architecture.name} has {self.architecture.layers} layers; the last {layers} of them were "
                "asked for."
            )

    def embedded(self, tokens: Sequence[int]) -> Tensor:
        """Return the input embeddings of tokens [tokens, hidden]."""
        return looked_up(self.decoder.embedding, torch.tensor(tokens, device=self.device))

    def slots(self, seq: int) -> Slots:
        """Return the sequence's committed prefix and the nodes of its tail."""
        return self.sequences[seq].slots

    def demand(self, seq: int, count: int) -> None:
        """Reserve KV slots for `count` more nodes, or raise CacheFull."""
        self.sequences.demand(seq, count)

    def check(self) -> None:
        """Raise if the pool's counts disagree with the open sequences, or if a page holds other tokens than registered.

        Sequences with different prefixes must not share a page.
        """
        self.sequences.check()

    def flush(self) -> None:
        """Compute all prefill that was put off.

        If that fails, the sequences whose chunks are not computed are rolled back to before them.
        """
        if self.sequences.pending:
            with self.sequences.taking_pending() as pending:
                self._compute_chunks(pending)

    @torch.inference_mode()
    def _compute_chunks(self, pending: Sequence[PendingChunk]) -> None:
        """Write the keys and values of pending chunks, several short ones in one forward.

        A prompt is cut at multiples of `prefill_chunk`.
        """
        parts = (part for chunk in pending for part in chunk.cut(self.prefill_chunk))
        for group in packed(parts, STEP_ROWS if self._fused else 1):
            self._store_chunks(group)

    @torch.inference_mode()
    def _score(self, work: Sequence[Feed]) -> list[list[TensorRow]]:
        """Append new nodes and compute their logits; returns one row for each node."""
        self.flush()
        with self.sequences.appending(work) as rows:
            logits, states = self._forward(rows)
        index = iter(range(logits.shape[0]))
        return [[TensorRow(logits, next(index), self.decoder.columns, states) for _ in feed.tokens] for feed in work]

    def move_kv(self, seq: int, moves: np.ndarray, lowest_written: int) -> None:
        """Copy KV slots `moves[0]` of the pool to `moves[1]`; see `KvHost`."""
        sources, targets = self.transfer.up({"moves": moves})["moves"]
        for memory in self.memories:
            memory.move(sources, targets)

    def copy_pages(self, copies: Sequence[Copy]) -> None:
        """Copy pages of the pool."""
        for memory in self.memories:
            memory.copy(copies)

    def rewinding(self, seq: int) -> None:
        """A sequence is about to be rolled back: there are no steps in flight to forget."""

    def drop_rows(self, seq: int, size: int) -> None:
        """Forget the logits of all but the first `size` nodes of a tail."""
        rows = self._rows[seq]
        for node in [node for node in rows if node >= size]:
            del rows[node]

    def _open(self, seq: int) -> None:
        self.sequences.open(seq)

    def _extend(self, seq: int, tokens: Sequence[int]) -> None:
        self.sequences.extend(seq, tokens)

    def _recall(self, seq: int, tokens: Sequence[int]) -> None:
        """Take cached pages. Pending chunks that can serve the prompt come first: equal prompts are computed once."""
        if self.sequences.waits(seq, tokens):
            self.flush()
        self.sequences.recall(seq, tokens)

    @torch.inference_mode()
    def _keep(self, seq: int, nodes: Sequence[int], commit: int) -> None:
        self.sequences.keep(seq, nodes, commit)

    def _rewind(self, seq: int, length: int) -> None:
        self.sequences.rewind(seq, length)

    def _close(self, seq: int) -> None:
        self.sequences.close(seq)

    @torch.inference_mode()
    def _self_tested(self, fused: FusedStep | None) -> FusedStep | None:
        """Return the compiled step if its logits of a small tree agree with plain torch, else None.

        The test runs at every load, as the code may never have run on this kind of processor.
        """
        if fused is None:
            return None
        slots, table = Slots(4, 4), Table(self.pool)
        table.reach(4)
        rows = [rows_of_nodes(table, slots, slots.grow((0, 0, 0), (ROOT, 0, 0)))]
        compiled = fused.logits(rows)
        plain = self.decoder.logits(self.decoder.forward(self._step(rows), self.memory))
        table.shrink(0)
        if self._agree(compiled, plain):
            return fused
        log.warning(
            "The compiled step disagrees with the plain one on this machine; decoding goes on with the plain one."
        )
        return None

    def _agree(self, compiled: Tensor, plain: Tensor) -> bool:
        rounded = self.weights == "stored" or self.cache_dtype == "int8"
        tolerance = ROUNDED_STEP_TOLERANCE if rounded else STEP_TOLERANCE
        largest = plain.abs().nan_to_num(0.0).max().item()  # other checks report NaN weights
        return torch.allclose(compiled, plain, rtol=tolerance, atol=tolerance * largest, equal_nan=True)

    def check_ids(self, tokens: Sequence[int]) -> None:
        """Raise a BadParameter unless all tokens are in the vocabulary."""
        if tokens and not 0 <= min(tokens) <= max(tokens) < self.vocabulary:
            wrong = next(token for token in tokens if not 0 <= token < self.vocabulary)
            raise BadParameter(
                f"Token id {wrong} is outside the vocabulary of {self.architecture.name} (0 to {self.vocabulary - 1})."
            )

    def _store_chunks(self, group: Sequence[PendingChunk]) -> None:
        """Prefill chunks: write their keys and values. Only the compiled step takes several at once."""
        if self._fused and sum(len(chunk.tokens) for chunk in group) <= STEP_ROWS:
            self._fused.store([chunk.rows() for chunk in group])
        else:
            for chunk in group:
                self._store(self._chunk_step(chunk.table, chunk.tokens, chunk.start))

    def _store(self, step: Step) -> None:
        """Write keys and values of a prefill chunk, and its features."""
        if self.features is None:
            self.decoder.store(step, self.memory)
            return
        layer_inputs: list[Tensor] = []
        if self.features.needs_all(self.architecture.layers):
            layer_inputs.append(self.decoder.forward(step, self.memory, layer_inputs))
        else:
            self.decoder.store(step, self.memory, layer_inputs)
        self.features.write_of(flat_slots(step.kv_slots), layer_inputs)

    def _forward(self, work: list[Rows]) -> tuple[Tensor, Tensor | None]:
        """Return the logits of all rows and, if they are requested (`state_layers`), the hidden states.

        The compiled step takes at most STEP_ROWS rows; more run in several steps, one after the other. Layers that are
        not plain take as many rows as the kernel of the products, whose rows do not depend on each other.
        """
        if self._fused is None and self.decoder.plain:
            return self._forward_in_torch(work)
        run, most = (self._forward_in_torch, PRODUCT_ROWS) if self._fused is None else (self._forward_fused, STEP_ROWS)
        logits, states = zip(*map(run, split_into_steps(work, most)), strict=True)
        return _concatenated(logits), _concatenated(states) if self.state_layers else None

    def _forward_fused(self, work: list[Rows]) -> tuple[Tensor, Tensor | None]:
        assert self._fused is not None
        return self._fused.logits_and_states(work, self.state_layers)

    def _forward_in_torch(self, work: list[Rows]) -> tuple[Tensor, Tensor | None]:
        layer_inputs: list[Tensor] | None = [] if self.state_layers or self.features else None
        step = self._step(work)
        hidden = self.decoder.forward(step, self.memory, layer_inputs)
        logits = self.decoder.logits(hidden)
        if self.features is not None and layer_inputs is not None:
            self.features.write_of(flat_slots(step.kv_slots), [*layer_inputs, hidden])
        states = self._last_states(layer_inputs, hidden) if self.state_layers and layer_inputs is not None else None
        return logits.float() if logits.dtype.itemsize < 4 else logits, states

    def _last_states(self, layer_inputs: Sequence[Tensor], hidden: Tensor) -> Tensor:
        """Return the outputs of the last `state_layers` layers side by side [rows, layers·hidden].

        A layer's output is the next layer's input. The last layer has no next one: its output is `hidden`, normed.
        """
        first = len(layer_inputs) - self.state_layers + 1
        return torch.cat((*layer_inputs[first:], self.decoder.normed(hidden)), dim=-1)

    def _step(self, work: Sequence[Rows]) -> Step:
        """Build the decode or verify step for rows of tails, and copy it to the device."""
        paths = [_path_arrays(rows) for rows in work]
        # one flat dictionary, so that everything goes up in one copy
        arrays = {f"{name} {number}": array for number, part in enumerate(paths) for name, array in part.items()}
        kv_slots = _page_and_slot(np.concatenate([rows.kv_slots() for rows in work]))
        sent = self.transfer.up(
            {"tokens": tokens_of(work), "positions": positions_of(work), "kv_slots": kv_slots, **arrays}
        )
        parts = [
            _decoder_rows(rows, {name: sent[f"{name} {number}"] for name in paths[number]})
            for number, rows in enumerate(work)
        ]
        return Step(sent["tokens"], sent["positions"], sent["kv_slots"], tuple(parts))

    def _chunk_step(self, table: Table, tokens: Sequence[int], start: int) -> Step:
        """Build the step that prefills a chunk, with the pages of all tokens so far, and copy it to the device."""
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
    """Split KV slots of the pool into page and offset within the page [2, KV slots]."""
    return np.stack(np.divmod(flat, PAGE))


def flat_slots(kv_slots: Tensor) -> Tensor:
    """Return KV slots of the pool, counted through all its pages, of pages and offsets [2, rows]."""
    return kv_slots[0] * PAGE + kv_slots[1]


def _path_arrays(rows: Rows) -> Arrays:
    """Return what each row of a tail attends to.

    `shared` [rows]: positions that it has in common with all rows of the sequence. `own` [rows, longest]: the KV slots
    of the rest of its path, padded with the first of them. `counts` [rows]: how many of these are not padding.
    """
    shared = np.array([shared_end(position, rows.prefix) for position in rows.positions])
    paths = [rows.table.flat(rows.path(row, start)) for row, start in enumerate(shared)]
    counts = np.array([len(path) for path in paths])
    own = np.zeros((len(paths), max(map(len, paths))), dtype=np.int64)
    for padded, path in zip(own, paths, strict=True):
        padded[: len(path)] = path
        padded[len(path) :] = path[0]
    return {"shared": shared, "own": own, "counts": counts}


def _decoder_rows(rows: Rows, sent: Mapping[str, Tensor]) -> DecoderRows:
    """Return the attention metadata of one sequence's rows; `sent`: its `_path_arrays` on the device."""
    most_shared = shared_end(max(rows.positions), rows.prefix)
    return DecoderRows(
        len(rows.tokens), OwnPaths(rows.table.pages, most_shared, sent["shared"], sent["own"], sent["counts"])
    )


def _concatenated(blocks: Sequence[Tensor]) -> Tensor:
    return blocks[0] if len(blocks) == 1 else torch.cat(tuple(blocks))
