"""The steps of a model on a GPU: they are packed, copied up and launched.

Owns the order of a step: one copy brings all inputs up, a CUDA graph runs, one read brings the results. Owns moves of
KV slots that wait for the next step. Does not own what a step computes (`step.py`), or what is asked of its rows
(`answers.py`). Invariants: only that read waits for the device. Pending moves of KV slots come before anything else is
read or written. All work goes to the runner's one stream (`own_stream.py`), so two models overlap and neither waits for
the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from specbranch.core.request import Request
from specbranch.models.cache.kv_memory import Memory
from specbranch.models.forward.decoder import Decoder
from specbranch.models.forward.step_rows import ChunkRows, Rows, split_into_steps
from specbranch.models.forward.transfer import Reading, Transfer
from specbranch.models.gpu.attention import chunk_tile_rows, most_partial_rows
from specbranch.models.gpu.decode_rows import NO_VERIFY_ROWS, DecodeRows, VerifyRows
from specbranch.models.gpu.layout import (
    CHUNK_STEP_ROWS,
    GROUP_ROWS,
    Bucket,
    Choosing,
    brought_moves,
    fitting_chunks,
    most_moves,
    pack,
)
from specbranch.models.gpu.own_stream import DeviceStream
from specbranch.models.gpu.step import Graphs, Ran
from specbranch.models.gpu.tree_layout import NO_MOVES, TREE_MOVES
from specbranch.models.runners.pending_prefill import PendingChunk
from specbranch.models.runners.sequences import Sequences
from specbranch.models.sampling.sample import Asked
from specbranch.models.sampling.sheet import Arrays


class StepHost(Protocol):
    """The runner, as far as all parts that launch steps need it."""

    def request(self, seq: int) -> Request:
        """Return the request of a sequence."""
        ...

    def flush(self) -> None:
        """Compute all prefill that was put off."""
        ...

    def drop_ahead(self) -> None:
        """Forget steps that were started ahead: another one is about to run."""
        ...

    def rewind(self, seq: int, length: int) -> None:
        """Drop the tail of a sequence, and the prefix beyond its first `length` tokens."""
        ...


class StepLauncher:
    """Launches steps, which are captured as CUDA graphs; on a CPU, as in tests, they run without graphs."""

    def __init__(
        self,
        decoder: Decoder,
        memory: Memory,
        sequences: Sequences,
        transfer: Transfer,
        graphs: Graphs,
        stream: DeviceStream,
        spare: int,
        host: StepHost,
    ) -> None:
        """`spare`: the KV slot of the pool for padding."""
        self.transfer, self.graphs, self.stream, self.spare = transfer, graphs, stream, spare
        self._memory, self._sequences, self._host = memory, sequences, host
        self.device, self._arch, self._itemsize = decoder.norm.device, decoder.arch, decoder.dtype.itemsize
        self._tile_rows = chunk_tile_rows(self._arch.heads // self._arch.kv_heads, self._arch.head_dim)
        # pending moves: sequence, KV slots of the pool, and the lowest slot of the sequence that is written
        self.moves: list[tuple[int, np.ndarray, int]] = []
        self.launches = 0  # of steps; a step's results are valid until the next one is launched
        self.started = stream.moment()  # when the last timed step started

    @property
    def memory(self) -> Memory:
        """The model's KV memory."""
        return self._memory

    def run(self, work: list[Rows], layers: int) -> tuple[Tensor, Tensor | None]:
        """Run all rows, in several steps if they exceed one.

        `layers`: how many layers' hidden states come back with the logits.
        """
        self._host.drop_ahead()
        self.launches += 1
        blocks: list[Tensor] = []
        states: list[Tensor] = []
        for step in split_into_steps(work, self.most_rows(_longest(work))):
            packed, bucket = pack(step, self.spare, least=self.graphs.step.least)
            self.graphs.bring(self.up({"step": packed})["step"])
            ran = self.graphs.run_brought(bucket, layers)
            rows = sum(len(part.tokens) for part in step)
            blocks.append(wide(ran.logits[:rows]))
            states += [] if ran.states is None else [ran.states[:rows].clone()]
        return torch.cat(blocks) if len(blocks) > 1 else blocks[0], torch.cat(states) if states else None

    def chosen(self, rows: list[Rows], choosing: Choosing, count: int) -> tuple[Ran, Reading]:
        """Run rows as one step that samples, and start to read its results."""
        ran = self.start(rows, choosing, count)
        return ran, self.read_later(ran, len(choosing.said))

    def read_later(self, ran: Ran, rows: int) -> Reading:
        """Start to read the results of a step's first rows."""
        assert ran.results is not None
        return self.transfer.later(ran.results[:rows])

    def start(
        self,
        rows: list[Rows],
        choosing: Choosing,
        count: int,
        grows: bool = False,
        timed: bool = False,
        chunks: Sequence[ChunkRows] = (),
    ) -> Ran:
        """Run rows as one step that samples, together with `chunks`.

        `grows`: a tree grows from this step. `timed`: note when the device starts.
        """
        moves = self.moves_for(len(choosing.said))
        return self.run_packed(*self.packed(rows, choosing, moves, chunks), moves, count, grows, timed)

    def packed(
        self,
        rows: list[Rows],
        choosing: Choosing | None,
        moves: np.ndarray | None,
        chunks: Sequence[ChunkRows] = (),
    ) -> tuple[np.ndarray, Bucket]:
        """Pack a step for the device."""
        return pack(rows, self.spare, choosing, moves, self.graphs.step.least, chunks, self._tile_rows)

    def start_with_prefill(self, rows: list[Rows], choosing: Choosing, timed: bool = True) -> Ran:
        """Run rows as one step that samples, which also computes prefill that was put off."""
        return self._with_prefill(
            len(choosing.said), lambda chunks: self.start(rows, choosing, 1, timed=timed, chunks=chunks)
        )

    def launch_decode(
        self, rows: DecodeRows, verify: VerifyRows = NO_VERIFY_ROWS, layers: int = 0
    ) -> tuple[Ran, Bucket]:
        """Launch a plain decode step with rows of verify orders; it also computes prefill that was put off.

        `layers`: how many layers' hidden states come back. Then prefill is computed before it: steps with both are not
        captured. Returns its results, and its padded size.
        """
        self.up({})  # pending moves come first
        if layers:
            self._host.flush()
        least, spare = self.graphs.step.least, self.spare
        buckets: list[Bucket] = []

        def run(chunks: Sequence[ChunkRows]) -> Ran:
            packed, bucket = rows.pack(spare, least, chunks, self._tile_rows, verify)
            buckets.append(bucket)
            return self.run_packed(packed, bucket, None, 1, layers=layers)

        ran = self._with_prefill(len(rows) + len(verify), run)
        return ran, buckets[-1]

    def _with_prefill(self, rows: int, run: Callable[[Sequence[ChunkRows]], Ran]) -> Ran:
        """Run a step of `rows` sampled rows with prefill that was put off.

        What does not fit into the step is computed before it.
        """
        if not self._sequences.pending or not self.graphs.step.takes_chunks:
            self._host.flush()
            return run(())
        with self._sequences.taking_pending() as pending:
            return run(self._compute_until(pending, rows))

    def compute_chunks(self, pending: Sequence[PendingChunk]) -> None:
        """Compute prefill that was put off, several prompts in one step; only if steps take chunks."""
        if rest := self._compute_until(pending, 0):
            self._run_chunks(rest)

    def _compute_until(self, pending: Sequence[PendingChunk], rows: int) -> list[ChunkRows]:
        """Compute rows of prompts, until the others fit into a step with `rows` sampled rows; returns these."""
        chunks = [ChunkRows(chunk.table, chunk.tokens, chunk.start) for chunk in pending]
        while True:
            taken, rest = fitting_chunks(chunks, rows, self._tile_rows)
            if not rest:
                return taken
            first, chunks = fitting_chunks(chunks, 0, self._tile_rows)
            self._run_chunks(first)

    @torch.inference_mode()
    def _run_chunks(self, chunks: Sequence[ChunkRows]) -> None:
        """Run a step of rows of prompts alone.

        It samples its padding. The next step may begin with the tokens that the step before sampled, so these stay.
        """
        moves = self.moves_for(CHUNK_STEP_ROWS[0])
        picks = self.graphs.step.picks[: CHUNK_STEP_ROWS[0]]
        kept = picks.clone()
        try:
            self.run_packed(*self.packed([], None, moves, chunks), moves, 1)
        finally:
            picks.copy_(kept)

    def run_packed(
        self,
        packed: np.ndarray,
        bucket: Bucket,
        moves: np.ndarray | None,
        count: int,
        grows: bool = False,
        timed: bool = False,
        layers: int = 0,
    ) -> Ran:
        """Run a packed step, with the moves that come with it; `layers` as for `run`."""
        self.launches += 1
        if timed:
            self.started = self.stream.moment()
        with self._moving():
            self.transfer.into(self.graphs.input, packed)
            if moves is not None and not self.graphs.step.moves:
                self._memory.move(*brought_moves(self.graphs.input, bucket, moves.shape[1]))
            return self.graphs.run_brought(bucket, layers, count, grows)

    def run_brought(self, bucket: Bucket, count: int, grows: bool = False) -> Ran:
        """Run a step whose input the device has written itself, with the pending moves."""
        self.launches += 1
        with self._moving():
            return self.graphs.run_brought(bucket, 0, count, grows)

    def most_rows(self, longest: int) -> int:
        """Return how many rows a step takes; `longest`: tokens of the longest sequence.

        Fewer for long sequences, as each row has a partial result per block.
        """
        arch = self._arch
        most = most_partial_rows(longest, arch.heads, arch.head_dim, self._itemsize)
        return min(self.graphs.step.most_rows, most)

    def fits_one_step(self, rows: int, longest: int) -> bool:
        """True if so many rows are one step; `longest`: tokens of the longest sequence."""
        return 0 < rows <= GROUP_ROWS or GROUP_ROWS < rows <= self.most_rows(longest)

    def is_one_step(self, rows: list[Rows]) -> bool:
        """True if these rows are one step."""
        return self.fits_one_step(sum([len(part.tokens) for part in rows]), _longest(rows))

    @contextmanager
    def _moving(self) -> Iterator[None]:
        """Within this context a launch makes the pending moves; if it fails, they are dropped."""
        try:
            yield
            self.moves = []
        except BaseException:
            self._forget_moves()
            raise

    def tree_moves(self) -> np.ndarray:
        """Return the pending moves for the first step of a tree; if they do not fit, make them now."""
        if not self.moves:
            return NO_MOVES
        moves = self._waiting_moves()
        if self.graphs.step.moves and moves.shape[1] <= TREE_MOVES:
            return moves
        self.up({})
        return NO_MOVES

    def _waiting_moves(self) -> np.ndarray:
        return np.concatenate([kv_slots for _, kv_slots, _ in self.moves], axis=1)

    def moves_for(self, rows: int) -> np.ndarray | None:
        """Return the pending moves for a step of `rows` rows; if they do not fit, make them now and return None."""
        if not self.moves:
            return None
        moves = self._waiting_moves()
        # order matters: one `keep` may free a KV slot that the next one fills
        in_order = self.graphs.step.moves or len(self.moves) == 1
        if in_order and moves.shape[1] <= most_moves(rows):
            return moves
        self.up({})
        return None

    def move_kv(self, seq: int, moves: np.ndarray, lowest_written: int) -> None:
        """Move KV slots with the next step, or before it."""
        self.moves.append((seq, moves, lowest_written))

    @torch.inference_mode()
    def up(self, arrays: Arrays) -> Asked:
        """Copy arrays up together with the pending moves, and make these; if that fails, they are dropped."""
        if not arrays and not self.moves:
            return {}
        waiting = {f"moves {number}": moves for number, (_, moves, _) in enumerate(self.moves)}
        with self._moving():
            sent = self.transfer.up({**waiting, **arrays})
            for name in waiting:
                self._memory.move(*sent[name])
        return sent

    def _forget_moves(self) -> None:
        """Drop pending moves, and roll their sequences back to before them; the worker will compute the rest again."""
        for seq, _, first in self.moves:
            if seq in self._sequences:
                self._host.rewind(seq, min(first, len(self._sequences[seq].slots.prefix)))
        self.moves = []


def _longest(work: Sequence[Rows]) -> int:
    """Return the tokens of the longest sequence, its new rows included."""
    return max([part.start + len(part.tokens) for part in work], default=0)


def wide(logits: Tensor) -> Tensor:
    """Copy logits out of the graph's own memory, in float32 or better."""
    return logits.float() if logits.dtype.itemsize < 4 else logits.clone()
