"""The native Runner's steps on a GPU: they are packed, copied up and launched, and their rows of logits are kept.

Owns the order of a step: the host appends nodes, one copy brings all inputs up, a CUDA graph runs, one read brings the
results. Does not own what a step computes (`runner.py`, `step.py`). Invariants: only that read waits for the device.
Pending moves of KV slots come before anything else is read or written. All work of a runner goes to its one stream
(`here`), so two models overlap and neither waits for the other.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from specbranch.core.pages import PAGE, Copy
from specbranch.core.request import Request, Spot
from specbranch.core.runner import Feed, PlainStep
from specbranch.core.slots import TAIL
from specbranch.core.warm_up import ForwardSizes, StepTime, not_late
from specbranch.models.cache.kv_memory import Table
from specbranch.models.forward.decoder import Decoder
from specbranch.models.forward.step_rows import ChunkRows, Rows, split_into_steps
from specbranch.models.forward.transfer import Reading
from specbranch.models.gpu import asking
from specbranch.models.gpu.attention import chunk_tile_rows, most_partial_rows
from specbranch.models.gpu.choice import Chooser
from specbranch.models.gpu.decode_rows import DecodeRows
from specbranch.models.gpu.kernel_step import step_of
from specbranch.models.gpu.kinds_file import KindsFile
from specbranch.models.gpu.layout import (
    CHUNK_STEP_ROWS,
    GROUP_ROWS,
    MOST_STEP_ROWS,
    MOST_TOTAL_ROWS,
    Bucket,
    Choosing,
    brought_moves,
    chunk_step_rows,
    fitting_chunks,
    most_moves,
    pack,
    power_of_four,
)
from specbranch.models.gpu.own_stream import OnStream, own_stream
from specbranch.models.gpu.plain_decode import PlainDecoder, Texts
from specbranch.models.gpu.step import GpuStep, Graphs, Ran, StepKind
from specbranch.models.gpu.stream_clock import DeviceMoment, StreamClock
from specbranch.models.gpu.tree_layout import NO_MOVES, TREE_MOVES
from specbranch.models.gpu.warm_up import (
    KERNEL_WATCH,
    ForwardTable,
    kinds_in_order,
    limits_of,
    run_outside_graphs,
    step_times,
)
from specbranch.models.runners.native import NativeRunner
from specbranch.models.runners.pending_prefill import PendingChunk
from specbranch.models.runners.sequences import OpenSequence
from specbranch.models.runners.torch_runner import PREFILL_CHUNKS, ProbeNetwork
from specbranch.models.sampling.logit_rows import TensorRow
from specbranch.models.sampling.sample import Asked
from specbranch.models.sampling.sheet import Arrays


class StepLauncher(NativeRunner):
    """A Runner whose steps are captured as CUDA graphs; on a CPU, as in tests, they run without graphs."""

    def __init__(self, decoder: Decoder, context_length: int, tail: int = TAIL, pages: int | None = None) -> None:
        super().__init__(decoder, context_length, tail, pages)
        self._fused = None
        self.stream = own_stream(self, self.device) if self.device.type == "cuda" else None
        self.clock = None if self.stream is None else StreamClock(self.stream)
        self.transfer.stream = self.stream
        self._most_pages = -(-(context_length + tail) // PAGE)
        with self.in_turn():  # weights and pages were made on the caller's stream
            self.graphs = self._make_graphs(step_of(decoder, self.memory))
            self.graphs.choose_with(self._chooser())
        KERNEL_WATCH.count_for(self.graphs)
        self._kinds: dict[ForwardSizes, KindsFile] = {}  # of the sizes that it is warmed up for
        self._compiling: dict[ForwardSizes, tuple[KindsFile, list[StepKind]]] = {}  # being compiled for
        self._times = ForwardTable(self.graphs)
        # Where a step takes rows of prompts, a prompt may be cut anywhere.
        takes_chunks = self.graphs.step.takes_chunks
        self.prefill_chunk = 1 if takes_chunks else PREFILL_CHUNKS["cuda"]
        self.most_prefill = MOST_TOTAL_ROWS - CHUNK_STEP_ROWS[2] if takes_chunks else None
        self._tile_rows = chunk_tile_rows(self.architecture.heads // self.architecture.kv_heads)
        # pending moves: sequence, KV slots of the pool, and the lowest slot of the sequence that is written
        self.moves: list[tuple[int, np.ndarray, int]] = []
        self.launches = 0  # of steps; a step's results are valid until the next one is launched
        self.plain = PlainDecoder(self)
        self.started = self.moment()  # when the last timed step started

    @property
    def note(self) -> Callable[[], DeviceMoment] | None:
        """A function that notes when the device has done all work given to it so far; None on a CPU."""
        return None if self.clock is None else self.clock.note

    def padded(self, rows: int) -> int:
        """Return the padded number of rows of a step."""
        return max(power_of_four(rows), self.graphs.step.least.rows)

    @property
    def late_captures(self) -> int:
        """How many graphs were captured, or kernels compiled, when a step needed them."""
        return self.graphs.late

    @late_captures.setter
    def late_captures(self, count: int) -> None:
        self.graphs.late = count

    def warm_up(self, sizes: ForwardSizes) -> None:
        """Capture and time the kinds of steps that forwards of these sizes can have; on a CPU there are none."""
        if not self.graphs.captures or sizes in self._kinds:
            return
        self.start_compiling(sizes)
        file, kinds = self._compiling.pop(sizes)
        with not_late([self]), self.graphs.warming_up():
            with self.in_turn():
                self.graphs.capture(kinds)
                self._warm_up_kernels()
            run_outside_graphs(self)
        self._kinds[sizes], self._times = file, ForwardTable(self.graphs)

    def start_compiling(self, sizes: ForwardSizes, draft: object | None = None) -> None:
        """Start to compile the kernels that `warm_up` needs, in threads, so that two models' compile together.

        `draft`: the model whose trees this one verifies, for the kernels of `warm_up_receiver`.
        """
        if not self.graphs.captures or sizes in self._kinds or sizes in self._compiling:
            return
        layers = self._probe[0] if sizes.hidden and self._probe is not None else 0
        file = KindsFile(self._kinds_key(sizes))
        kinds = list(kinds_in_order(sizes, limits_of(self.graphs), layers, file.read()))
        with not_late([self]), self.in_turn():
            self.graphs.compile(kinds, (self._warm_up_kernels, partial(self._launch_receiver, draft)))
        self._compiling[sizes] = file, kinds

    def stop_compiling(self) -> None:
        """Compile no more: a process that ends would wait for its threads."""
        self.graphs.stop_compiling()
        self._compiling.clear()

    def step_times(self) -> list[StepTime]:
        """Return the times of all kinds of steps that a warm-up has captured, the smallest first."""
        return step_times(self.graphs)

    def forward_seconds(self, rows: int, prompt_tokens: int = 0) -> float | None:
        """Return the seconds of a forward of this many decode rows and prompt tokens without context; None: it was
        not timed."""
        if prompt_tokens and rows <= MOST_STEP_ROWS:  # the decode rows beside prompt tokens are padded first
            rows = chunk_step_rows(rows)
        return self._times.seconds(rows + prompt_tokens)

    def save_kinds(self) -> None:
        """Save which kinds of steps were run, so that the next process captures them first."""
        for file in self._kinds.values():
            file.add(self.graphs.met)

    def limit(self, vocabulary: int) -> None:
        """Never sample a token with this id or a higher one, as the other model does not know it."""
        super().limit(vocabulary)
        with self.in_turn():
            self.graphs.choose_with(self._chooser())

    def probe(self, layers: int, network: ProbeNetwork | None) -> None:
        """Attach the output of a network over hidden states to every verdict; see `TorchRunner`."""
        with self.in_turn():
            super().probe(layers, network)

    def feed(self, work: Sequence[Feed]) -> None:
        """Compute new nodes of several sequences in one forward."""
        with self.here():
            super().feed(work)

    def score(self, work: Sequence[Feed]) -> list[list[TensorRow]]:
        """Compute new nodes; returns one row for each, which the caller's stream may read."""
        with self.in_turn():
            return super().score(work)

    def margin(self, seq: int, node: int, first: int, second: int) -> float:
        """Return by how many logits `first` is preferred to `second` after a node; 0 is a tie."""
        with self.here():
            return super().margin(seq, node, first, second)

    def _forward(self, work: list[Rows]) -> tuple[Tensor, Tensor | None]:
        return self.run(work, {})[0]

    def launch(self, work: Sequence[Feed], rows: list[Rows], arrays: Arrays) -> Asked:
        """Copy everything up, start the forward, and keep its rows; returns the arrays as tensors of the device."""
        if not rows:
            return self.up(arrays)
        (block, states), sent = self.run(rows, arrays)
        self.hold(work, block, states)
        return sent

    def hold(self, work: Sequence[Feed], block: Tensor, states: Tensor | None) -> None:
        """Keep the rows of a forward, as later calls may need them."""
        made = iter(range(block.shape[0]))
        for feed, start in zip(work, self.sequences.first_nodes(work), strict=True):
            kept = (
                (start + at, TensorRow(block, next(made), self.decoder.columns, states))
                for at in range(len(feed.tokens))
            )
            self._rows[feed.seq].update(kept)

    def run(self, work: list[Rows], arrays: Arrays) -> tuple[tuple[Tensor, Tensor | None], Asked]:
        """Run all rows, in several steps if they exceed one; the last copy up carries the arrays, too."""
        self.drop_ahead()
        self.launches += 1
        blocks: list[Tensor] = []
        states: list[Tensor] = []
        steps = list(split_into_steps(work, self._most_rows(_longest(work))))
        for number, step in enumerate(steps, 1):
            packed, bucket = pack(step, self.pool.pages * PAGE, least=self.graphs.step.least)
            sent = self.up({"step": packed, **(arrays if number == len(steps) else {})})
            self.graphs.bring(sent["step"])
            ran = self.graphs.run_brought(bucket, self.state_layers)
            rows = sum(len(part.tokens) for part in step)
            blocks.append(wide(ran.logits[:rows]))
            states += [] if ran.states is None else [ran.states[:rows].clone()]
        return (torch.cat(blocks) if len(blocks) > 1 else blocks[0], torch.cat(states) if states else None), sent

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
        least, spare = self.graphs.step.least, self.pool.pages * PAGE
        return pack(rows, spare, choosing, moves, least, chunks, self._tile_rows)

    def start_with_prefill(self, rows: list[Rows], choosing: Choosing, timed: bool = True) -> Ran:
        """Run rows as one step that samples, which also computes prefill that was put off."""
        return self._with_prefill(
            len(choosing.said), lambda chunks: self.start(rows, choosing, 1, timed=timed, chunks=chunks)
        )

    @torch.inference_mode()
    def decode(self, texts: Texts, going_on: Collection[int]) -> PlainStep | None:
        """Decode one token of each sequence, and launch the next step; see `DecodesBatches`."""
        with self.here():
            return self.plain.decode(texts, going_on)

    def decodes(self, seq: int, length: int) -> bool:
        """True if the device samples the token behind `length` tokens by itself; so it does for all later ones."""
        return asking.is_chosen_in_graph(Spot(self._requests[seq], length, list))

    def join(self, seq: int, token: int) -> None:
        """Give a sequence that begins to decode a row in the next decode step; see `DecodesBatches`."""
        self.plain.join(seq, token)

    def sequence(self, seq: int) -> OpenSequence | None:
        """Return a sequence if it is open."""
        return self.sequences.get(seq)

    def reserve(self, seq: int, start: int, stop: int) -> Table:
        """Make KV slots writable, or raise CacheFull; returns the page table."""
        return self.sequences.reserve(seq, start, stop)

    def request(self, seq: int) -> Request:
        """Return the request of a sequence."""
        return self._requests[seq]

    def commit(self, seq: int, token: int) -> None:
        """Append a token to the prefix, once a step has computed it."""
        self.sequences[seq].slots.prefix.append(token)
        self._rows[seq].clear()

    def launch_decode(self, rows: DecodeRows) -> Reading:
        """Launch a plain decode step, which also computes prefill that was put off; returns its results in flight."""
        self.up({})  # pending moves come first
        least, spare = self.graphs.step.least, self.pool.pages * PAGE

        def run(chunks: Sequence[ChunkRows]) -> Ran:
            return self.run_packed(*rows.pack(spare, least, chunks, self._tile_rows), None, 1)

        return self.read_later(self._with_prefill(len(rows), run), len(rows))

    def _with_prefill(self, rows: int, run: Callable[[Sequence[ChunkRows]], Ran]) -> Ran:
        """Run a step of `rows` sampled rows with prefill that was put off.

        What does not fit into the step is computed before it.
        """
        if not self.sequences.pending or not self.graphs.step.takes_chunks:
            self.flush()
            return run(())
        with self.sequences.taking_pending() as pending:
            return run(self._compute_until(pending, rows))

    def _compute_chunks(self, pending: Sequence[PendingChunk]) -> None:
        """Compute prefill that was put off, several prompts in one step."""
        if not self.graphs.step.takes_chunks:
            self.up({})
            super()._compute_chunks(pending)
            return
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
    ) -> Ran:
        """Run a packed step, with the moves that come with it."""
        self.launches += 1
        if timed:
            self.started = self.moment()
        with self.moving():
            self.transfer.into(self.graphs.input, packed)
            if moves is not None and not self.graphs.step.moves:
                self.memory.move(*brought_moves(self.graphs.input, bucket, moves.shape[1]))
            return self.graphs.run_brought(bucket, 0, count, grows)

    def run_brought(self, bucket: Bucket, count: int, grows: bool = False) -> Ran:
        """Run a step whose input the device has written itself, with the pending moves."""
        self.launches += 1
        with self.moving():
            return self.graphs.run_brought(bucket, 0, count, grows)

    def _most_rows(self, longest: int) -> int:
        """Return how many rows a step takes: fewer for long sequences, as each row has a partial result per block."""
        arch = self.architecture
        most = most_partial_rows(longest, arch.heads, arch.head_dim, self.dtype.itemsize)
        return min(self.graphs.step.most_rows, most)

    def fits_one_step(self, rows: int, longest: int) -> bool:
        """True if so many rows are one step; `longest`: tokens of the longest sequence."""
        return 0 < rows <= GROUP_ROWS or GROUP_ROWS < rows <= self._most_rows(longest)

    def is_one_step(self, rows: list[Rows]) -> bool:
        """True if these rows are one step."""
        return self.fits_one_step(sum([len(part.tokens) for part in rows]), _longest(rows))

    def _make_graphs(self, step: GpuStep) -> Graphs:
        return Graphs(step, self._most_pages)

    def _kinds_key(self, sizes: ForwardSizes) -> dict[str, Any]:
        """Return the key of the file of kinds: what decides which steps a model has, and how they are compiled."""
        cuda = self.device.type == "cuda"
        device = torch.cuda.get_device_name(self.device) if cuda else self.device.type
        shape = {name: value for name, value in asdict(self.architecture).items() if isinstance(value, int | float)}
        made = {"dtype": str(self.dtype), "weights": self.weights, "pages": self._most_pages}
        return {"device": device, "shape": shape, "method": sizes.method, "sessions": sizes.sessions, **made}

    def _warm_up_kernels(self) -> None:
        """Compile kernels that run outside graphs; subclasses have some."""

    def _launch_receiver(self, draft: object | None) -> None:
        """Launch the kernels that bring a draft's tree to a step; subclasses have some."""

    def _chooser(self) -> Chooser:
        columns = self.decoder.columns
        return Chooser(self.graphs.step.picks, self.sampler.width(columns), columns)

    @contextmanager
    def moving(self) -> Iterator[None]:
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
        with self.moving():
            sent = self.transfer.up({**waiting, **arrays})
            for name in waiting:
                self.memory.move(*sent[name])
        return sent

    def _forget_moves(self) -> None:
        """Drop pending moves, and roll their sequences back to before them; the worker will compute the rest again."""
        for seq, _, first in self.moves:
            if seq in self.sequences:
                self.rewind(seq, min(first, len(self.slots(seq).prefix)))
        self.moves = []

    def drop_ahead(self) -> None:
        """Forget steps that were started ahead: another one is about to run."""
        self.plain.forget_all()

    def rewinding(self, seq: int) -> None:
        """Forget the row of a sequence in flight: it is about to be rolled back."""
        self.plain.forget(seq)

    def copy_pages(self, copies: Sequence[Copy]) -> None:
        """Copy pages of the pool, once the pending moves are made."""
        with self.here():
            self.up({})
            super().copy_pages(copies)

    def _extend(self, seq: int, tokens: Sequence[int]) -> None:
        with self.here():
            super()._extend(seq, tokens)

    def flush(self) -> None:
        """Compute all prefill that was put off; see `NativeRunner`."""
        if self.sequences.pending:
            with self.here():
                super().flush()

    def moment(self) -> DeviceMoment:
        """Note when the device reaches this point of its work; on a CPU that is now."""
        if self.clock is not None:
            return self.clock.note()
        moment = time.perf_counter()
        return lambda: moment

    def here(self) -> AbstractContextManager[Any]:
        """Launch kernels on the runner's own stream within this context."""
        return nullcontext() if self.stream is None else OnStream(self.stream)

    @contextmanager
    def in_turn(self) -> Iterator[None]:
        """Do as `here`, ordered after earlier and before later work of the caller's stream.

        This is for tensors that pass between the two streams.
        """
        around = None if self.stream is None else torch.cuda.current_stream(self.device)
        if self.stream is not None and around is not None:
            self.stream.wait_stream(around)
        try:
            with self.here():
                yield
        finally:
            if self.stream is not None and around is not None:
                around.wait_stream(self.stream)


def _longest(work: Sequence[Rows]) -> int:
    """Return the tokens of the longest sequence, its new rows included."""
    return max([part.start + len(part.tokens) for part in work], default=0)


def wide(logits: Tensor) -> Tensor:
    """Copy logits out of the graph's own memory, in float32 or better."""
    return logits.float() if logits.dtype.itemsize < 4 else logits.clone()
