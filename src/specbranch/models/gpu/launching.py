"""The native Runner's steps on a GPU: they are packed, copied up and launched, and their rows of logits are kept.

Owns the order of a step: the host appends nodes, one copy brings all inputs up, a CUDA graph runs, one read brings the
results. Does not own what a step computes (`runner.py`, `step.py`). Invariants: only that read waits for the device.
Pending moves of KV slots come before anything else is read or written. All work of a runner goes to its one stream
(`_here`), so two models overlap and neither waits for the other.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict
from typing import Any

import numpy as np
import torch
from torch import Tensor

from specbranch.core.pages import PAGE, Copy
from specbranch.core.runner import Feed
from specbranch.core.slots import TAIL
from specbranch.core.warm_up import ForwardSizes, StepTime, not_late
from specbranch.models.forward.decoder import Decoder
from specbranch.models.forward.step_rows import Rows, split_into_steps
from specbranch.models.forward.transfer import Reading
from specbranch.models.gpu.attention import blocks_of
from specbranch.models.gpu.begun import Ahead, Followed, Received
from specbranch.models.gpu.choice import Chooser
from specbranch.models.gpu.growing import TextRead
from specbranch.models.gpu.kernel_step import step_of
from specbranch.models.gpu.kinds_file import KindsFile
from specbranch.models.gpu.layout import (
    GROUP_ROWS,
    Bucket,
    Choosing,
    brought_moves,
    most_moves,
    pack,
    power_of_four,
)
from specbranch.models.gpu.own_stream import OnStream, own_stream
from specbranch.models.gpu.step import GpuStep, Graphs, Ran
from specbranch.models.gpu.stream_clock import DeviceMoment, StreamClock
from specbranch.models.gpu.warm_up import (
    KERNEL_WATCH,
    forward_seconds,
    kinds_in_order,
    limits_of,
    run_outside_graphs,
    step_times,
)
from specbranch.models.runners.native import NativeRunner
from specbranch.models.runners.torch_runner import PREFILL_CHUNKS, ProbeNetwork
from specbranch.models.sampling.logit_rows import TensorRow
from specbranch.models.sampling.sample import Asked
from specbranch.models.sampling.sheet import Arrays

PARTIAL_BYTES = 1 << 28  # bytes of attention's partial results in a step, at most


class StepLauncher(NativeRunner):
    """A Runner whose steps are captured as CUDA graphs; on a CPU, as in tests, they run without graphs."""

    def __init__(self, decoder: Decoder, context_length: int, tail: int = TAIL, pages: int | None = None) -> None:
        super().__init__(decoder, context_length, tail, pages)
        self._fused, self.prefill_chunk = None, PREFILL_CHUNKS["cuda"]
        self._stream = own_stream(self, self.device) if self.device.type == "cuda" else None
        self._clock = None if self._stream is None else StreamClock(self._stream)
        self.transfer.stream = self._stream
        self._most_pages = -(-(context_length + tail) // PAGE)
        with self._in_turn():  # weights and pages were made on the caller's stream
            self._graphs = self._make_graphs(step_of(decoder, self.memory))
            self._graphs.choose_with(self._chooser())
        KERNEL_WATCH.count_for(self._graphs)
        self._kinds: dict[ForwardSizes, KindsFile] = {}  # of the sizes that it is warmed up for
        # pending moves: sequence, KV slots of the pool, and the lowest slot of the sequence that is written
        self._moves: list[tuple[int, np.ndarray, int]] = []
        # started ahead of the worker's order: a step, and a text behind which a tree may grow
        self._ahead: Ahead | Received | Followed | None = None
        self._read: TextRead | None = None
        self._started = self._moment()  # when the last timed step started

    @property
    def note(self) -> Callable[[], DeviceMoment] | None:
        """A function that notes when the device has done all work given to it so far; None on a CPU."""
        return None if self._clock is None else self._clock.note

    def padded(self, rows: int) -> int:
        """Return the padded number of rows of a step."""
        return max(power_of_four(rows), self._graphs.step.least.rows)

    @property
    def late_captures(self) -> int:
        """How many graphs were captured, or kernels compiled, when a step needed them."""
        return self._graphs.late

    @late_captures.setter
    def late_captures(self, count: int) -> None:
        self._graphs.late = count

    def warm_up(self, sizes: ForwardSizes) -> None:
        """Capture and time the kinds of steps that forwards of these sizes can have; on a CPU there are none."""
        if not self._graphs.captures or sizes in self._kinds:
            return
        layers = self._probe[0] if sizes.hidden and self._probe is not None else 0
        file = KindsFile(self._kinds_key(sizes.method))
        with not_late([self]), self._graphs.warming_up():
            with self._in_turn():
                self._warm_up_kernels()
                limits = limits_of(self._graphs, self._most_pages)
                self._graphs.capture(kinds_in_order(sizes, limits, layers, file.read()))
            run_outside_graphs(self)
        self._kinds[sizes] = file

    def step_times(self) -> list[StepTime]:
        """Return the times of all kinds of steps that a warm-up has captured, the smallest first."""
        return step_times(self._graphs)

    def forward_seconds(self, rows: int) -> float | None:
        """Return the seconds of a forward of this many rows without context; None: it was not timed."""
        return forward_seconds(self._graphs, rows)

    def save_kinds(self) -> None:
        """Save which kinds of steps were run, so that the next process captures them first."""
        for file in self._kinds.values():
            file.add(self._graphs.met)

    def limit(self, vocabulary: int) -> None:
        """Never sample a token with this id or a higher one, as the other model does not know it."""
        super().limit(vocabulary)
        with self._in_turn():
            self._graphs.choose_with(self._chooser())

    def probe(self, layers: int, network: ProbeNetwork | None) -> None:
        """Attach the output of a network over hidden states to every verdict; see `TorchRunner`."""
        with self._in_turn():
            super().probe(layers, network)

    def feed(self, work: Sequence[Feed]) -> None:
        """Compute new nodes of several sequences in one forward."""
        with self._here():
            super().feed(work)

    def score(self, work: Sequence[Feed]) -> list[list[TensorRow]]:
        """Compute new nodes; returns one row for each, which the caller's stream may read."""
        with self._in_turn():
            return super().score(work)

    def margin(self, seq: int, node: int, first: int, second: int) -> float:
        """Return by how many logits `first` is preferred to `second` after a node; 0 is a tie."""
        with self._here():
            return super().margin(seq, node, first, second)

    def _forward(self, work: list[Rows]) -> tuple[Tensor, Tensor | None]:
        return self._run(work, {})[0]

    def _launch(self, work: Sequence[Feed], rows: list[Rows], arrays: Arrays) -> Asked:
        """Copy everything up, start the forward, and keep its rows; returns the arrays as tensors of the device."""
        if not rows:
            return self._up(arrays)
        (block, states), sent = self._run(rows, arrays)
        self._hold(work, block, states)
        return sent

    def _hold(self, work: Sequence[Feed], block: Tensor, states: Tensor | None) -> None:
        """Keep the rows of a forward, as later calls may need them."""
        made = iter(range(block.shape[0]))
        for feed, start in zip(work, self._first_nodes(work), strict=True):
            kept = (
                (start + at, TensorRow(block, next(made), self.decoder.columns, states))
                for at in range(len(feed.tokens))
            )
            self._rows[feed.seq].update(kept)

    def _first_nodes(self, work: Sequence[Feed]) -> list[int]:
        """Return the node of each feed's first token; the nodes must be appended already."""
        return [len(self.slots(feed.seq).tokens) - len(feed.tokens) for feed in work]

    def _run(self, work: list[Rows], arrays: Arrays) -> tuple[tuple[Tensor, Tensor | None], Asked]:
        """Run all rows, in several steps if they exceed one; the last copy up carries the arrays, too."""
        self._ahead = self._read = None
        blocks: list[Tensor] = []
        states: list[Tensor] = []
        steps = list(split_into_steps(work, self._most_rows(work)))
        for number, step in enumerate(steps, 1):
            packed, bucket = pack(step, self.pool.pages * PAGE, least=self._graphs.step.least)
            sent = self._up({"step": packed, **(arrays if number == len(steps) else {})})
            self._graphs.bring(sent["step"])
            ran = self._graphs.run_brought(bucket, self._state_layers)
            rows = sum(len(part.tokens) for part in step)
            blocks.append(wide(ran.logits[:rows]))
            states += [] if ran.states is None else [ran.states[:rows].clone()]
        return (torch.cat(blocks) if len(blocks) > 1 else blocks[0], torch.cat(states) if states else None), sent

    def _chosen(self, rows: list[Rows], choosing: Choosing, count: int, timed: bool = False) -> tuple[Ran, Reading]:
        """Run rows as one step that samples, and start to read its results."""
        ran = self._start(rows, choosing, count, timed=timed)
        return ran, self._read_later(ran, len(choosing.said))

    def _read_later(self, ran: Ran, rows: int) -> Reading:
        assert ran.results is not None
        return self.transfer.later(ran.results[:rows])

    def _start(
        self, rows: list[Rows], choosing: Choosing, count: int, tree_step: Bucket | None = None, timed: bool = False
    ) -> Ran:
        """Run rows as one step that samples.

        `tree_step`: the bucket of the steps of a tree that grows from this one. `timed`: note when the device starts.
        """
        moves = self._moves_for(len(choosing.said))
        return self._run_packed(
            *self._packed(rows, choosing, moves, tree_step), moves, count, tree_step is not None, timed
        )

    def _packed(
        self, rows: list[Rows], choosing: Choosing, moves: np.ndarray | None, tree_step: Bucket | None = None
    ) -> tuple[np.ndarray, Bucket]:
        """Pack a step for the device."""
        least = self._graphs.step.least
        if tree_step is not None:  # the graph writes the tree's first step, which has as many pages
            least = least._replace(pages=max(tree_step.pages, least.pages))
        return pack(rows, self.pool.pages * PAGE, choosing, moves, least)

    def _run_packed(
        self,
        packed: np.ndarray,
        bucket: Bucket,
        moves: np.ndarray | None,
        count: int,
        grows: bool = False,
        timed: bool = False,
    ) -> Ran:
        """Run a packed step, with the moves that come with it."""
        self._read = None
        if timed:
            self._started = self._moment()
        with self._moving():
            self.transfer.into(self._graphs.input, packed)
            if moves is not None and not self._graphs.step.moves:
                self.memory.move(*brought_moves(self._graphs.input, bucket, moves.shape[1]))
            return self._graphs.run_brought(bucket, 0, count, grows)

    def _most_rows(self, work: Sequence[Rows]) -> int:
        """Return how many rows a step takes: fewer for long sequences, as each row has a partial result per block."""
        arch, pages = self.architecture, max(-(-(part.start + len(part.tokens)) // PAGE) for part in work)
        blocks = blocks_of(2 * pages)  # a bucket may have twice as many pages
        row = arch.heads * (arch.head_dim * self.dtype.itemsize + 8) * (1 + blocks)
        return min(self._graphs.step.most_rows, max(PARTIAL_BYTES // row // GROUP_ROWS, 1) * GROUP_ROWS)

    def _is_one_step(self, rows: list[Rows]) -> bool:
        count = sum([len(part.tokens) for part in rows])
        return 0 < count <= GROUP_ROWS or GROUP_ROWS < count <= self._most_rows(rows)

    def _make_graphs(self, step: GpuStep) -> Graphs:
        return Graphs(step, self._most_pages)

    def _kinds_key(self, method: str) -> dict[str, Any]:
        """Return the key of the file of kinds: what decides which steps a model has, and how they are compiled."""
        cuda = self.device.type == "cuda"
        device = torch.cuda.get_device_name(self.device) if cuda else self.device.type
        shape = {name: value for name, value in asdict(self.architecture).items() if isinstance(value, int | float)}
        made = {"dtype": str(self.dtype), "weights": self.weights, "pages": self._most_pages}
        return {"device": device, "shape": shape, "method": method, **made}

    def _warm_up_kernels(self) -> None:
        """Compile kernels that run outside graphs; subclasses have some."""

    def _chooser(self) -> Chooser:
        columns = self.decoder.columns
        return Chooser(self._graphs.step.picks, self.sampler.width(columns), columns)

    @contextmanager
    def _moving(self) -> Iterator[None]:
        """Within this context a launch makes the pending moves; if it fails, they are dropped."""
        try:
            yield
            self._moves = []
        except BaseException:
            self._forget_moves()
            raise

    def _waiting_moves(self) -> np.ndarray:
        return np.concatenate([kv_slots for _, kv_slots, _ in self._moves], axis=1)

    def _moves_for(self, rows: int) -> np.ndarray | None:
        """Return the pending moves for a step of `rows` rows; if they do not fit, make them now and return None."""
        if not self._moves:
            return None
        moves = self._waiting_moves()
        # order matters: one `keep` may free a KV slot that the next one fills
        in_order = self._graphs.step.moves or len(self._moves) == 1
        if in_order and moves.shape[1] <= most_moves(rows):
            return moves
        self._up({})
        return None

    def _move(self, seq: int, moves: np.ndarray, lowest_written: int) -> None:
        self._moves.append((seq, moves, lowest_written))

    @torch.inference_mode()
    def _up(self, arrays: Arrays) -> Asked:
        """Copy arrays up together with the pending moves, and make these; if that fails, they are dropped."""
        if not arrays and not self._moves:
            return {}
        waiting = {f"moves {number}": moves for number, (_, moves, _) in enumerate(self._moves)}
        with self._moving():
            sent = self.transfer.up({**waiting, **arrays})
            for name in waiting:
                self.memory.move(*sent[name])
        return sent

    def _forget_moves(self) -> None:
        """Drop pending moves, and roll their sequences back to before them; the worker will compute the rest again."""
        for seq, _, first in self._moves:
            if seq in self._sequences:
                self.rewind(seq, min(first, len(self.slots(seq).prefix)))
        self._moves = []

    def _rewind(self, seq: int, length: int) -> None:
        self._ahead = None
        super()._rewind(seq, length)

    def _copy(self, copies: Sequence[Copy]) -> None:
        self._ahead = None
        with self._here():
            self._up({})
            super()._copy(copies)

    def _extend(self, seq: int, tokens: Sequence[int]) -> None:
        self._ahead = None  # a page that it wrote to may be free by now, and may be written
        with self._here():
            self._up({})
            super()._extend(seq, tokens)

    def _moment(self) -> DeviceMoment:
        """Note when the device reaches this point of its work; on a CPU that is now."""
        if self._clock is not None:
            return self._clock.note()
        moment = time.perf_counter()
        return lambda: moment

    def _here(self) -> AbstractContextManager[Any]:
        """Launch kernels on the runner's own stream within this context."""
        return nullcontext() if self._stream is None else OnStream(self._stream)

    @contextmanager
    def _in_turn(self) -> Iterator[None]:
        """Do as `_here`, ordered after earlier and before later work of the caller's stream.

        This is for tensors that pass between the two streams.
        """
        around = None if self._stream is None else torch.cuda.current_stream(self.device)
        if self._stream is not None and around is not None:
            self._stream.wait_stream(around)
        try:
            with self._here():
                yield
        finally:
            if self._stream is not None and around is not None:
                around.wait_stream(self._stream)


def wide(logits: Tensor) -> Tensor:
    """Copy logits out of the graph's own memory, in float32 or better."""
    return logits.float() if logits.dtype.itemsize < 4 else logits.clone()
