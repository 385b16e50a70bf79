"""A decoder's forward over a packed step, and the CUDA graphs that replay it.

Owns the order of operations and the memory that graphs read and write. Invariant: a step waits for nothing, and its
shapes and addresses follow from its bucket alone. One stream runs a model's steps; what a run returns stands until the
next one.
"""

from __future__ import annotations

import logging
import os
import time
from collections import OrderedDict
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import rms_norm

from specbranch.core.pages import PAGE
from specbranch.models.decoder import Decoder
from specbranch.models.files.stored_rows import looked_up
from specbranch.models.gpu.attention import Attend, attend_by_kernels, choose_attend
from specbranch.models.gpu.choice import Chooser
from specbranch.models.gpu.layout import LEAST, MOST_ROWS, Bucket, Views, packed_size, padding, power_of_two, views
from specbranch.models.gpu.small import Small, small_functions
from specbranch.models.gpu.trees import DeviceTree, growing_bucket
from specbranch.models.kv import Memory

log = logging.getLogger("specbranch")

VARIABLE = "SPECBRANCH_GRAPHS"  # 0: run steps without graphs
WARM_UPS = 2  # runs before a capture: they compile, and choose how to multiply
MOST_GRAPHS = 64
PINNED_ROWS = 16
# a bucket, the number of tapped layers, that of best entries, and whether a tree grows by them
StepKind = tuple[Bucket, int, int, bool]


class GpuStep:
    """A decoder over one memory of pages, whose last page is spare."""

    lasting = False  # whether logits lie where the next forward of as many rows leaves its own, and no other
    moves = False  # whether a forward makes the moves that come with its step
    most_rows = MOST_ROWS
    least = LEAST  # how large a step's bucket is at the least

    def __init__(
        self, decoder: Decoder, memory: Memory, attend: Attend | None = None, small: Small | None = None
    ) -> None:
        arch, device, dtype = decoder.arch, memory.data.device, memory.data.dtype
        self.decoder, self.memory = decoder, memory
        self.attend = attend or choose_attend(device, dtype, arch.heads, arch.kv_heads, arch.head_dim)
        self._small = small or small_functions(device)
        self._sides = [memory.layer(index) for index in range(arch.layers)]
        self._written = [memory.data[:, index].permute(0, 3, 1, 2, 4) for index in range(arch.layers)]
        norms = [layer.attention_norm for layer in decoder.layers]
        self._next_norms = (*norms[1:], decoder.norm)
        # what rows chose last; a token −1 − i stands for the i-th
        self.picks = torch.zeros(MOST_ROWS, dtype=torch.int32, device=device)

    def pin(self, pages: int) -> None:
        """Have steps always as wide as this, up to so many pages.

        torch's products sum in an order that hangs on how many rows there are, its plain attention on how many pages:
        where both are always the same, a row's bits hang on no other row.
        """
        if self.memory.data.device.type == "cuda":
            self.most_rows = PINNED_ROWS
            self.least = Bucket(
                PINNED_ROWS, 1, LEAST.pages if self.attend is attend_by_kernels else max(pages, LEAST.pages)
            )

    def forward(self, step: Views, tapped: int = 0) -> tuple[Tensor, Tensor | None]:
        """Run all layers, writing the pages; returns logits [rows, vocabulary or columns] and hidden states of the
        tapped layers.

        Those are what enters the last `tapped` - 1 layers, and the last of all, normed, side by side.
        """
        decoder, seen = self.decoder, list[Tensor]()
        eps, untapped = decoder.arch.rms_eps, len(decoder.layers) - tapped + 1
        turning = [table.index_select(0, step.positions).unsqueeze(1) for table in (decoder.cos, decoder.sin)]
        chosen = self.picks[(-1 - step.tokens).clamp(min=0)]  # where a token is negative
        x = looked_up(decoder.embedding, torch.where(step.tokens < 0, chosen, step.tokens))
        h = rms_norm(x, (x.shape[-1],), decoder.layers[0].attention_norm, eps)
        for index, layer in enumerate(decoder.layers):
            if tapped and index >= untapped:
                seen.append(x)
            queries = self._small.turned(layer.qkv(h), layer.qk_norm, eps, *turning, step.slots, self._written[index])
            x, h = self._small.added(x, layer.out(self.attend(queries, *self._sides[index], step)), layer.mlp_norm, eps)
            x, h = self._small.added(x, layer.down(self._small.gated(layer.gate_up(h))), self._next_norms[index], eps)
        return decoder.head(h), torch.cat((*seen, h), -1) if tapped else None


@dataclass(frozen=True, slots=True)
class Ran:
    """What a step gave; it stands until the next one."""

    logits: Tensor  # [the bucket's rows, vocabulary or columns]
    states: Tensor | None  # hidden states of some last layers, side by side
    results: Tensor | None  # what was chosen, see `choice.Choice`


class Graphs:
    """The steps of one model, captured when a kind of step is first met; without graphs, the same forward.

    A kind is a bucket, how many layers are tapped, and how many best entries of a row are wanted. The least recently
    used are dropped.
    """

    def __init__(
        self, step: GpuStep, most_pages: int, capture: bool | None = None, chooser: Chooser | None = None
    ) -> None:
        self._step = step
        self._device = step.memory.data.device
        wanted = os.environ.get(VARIABLE) != "0" if capture is None else capture
        self.captures = wanted and self._device.type == "cuda"
        self._step.pin(power_of_two(most_pages))
        largest = Bucket(MOST_ROWS, MOST_ROWS, max(power_of_two(most_pages), LEAST.pages))
        # where graphs read a packed step
        self.input = torch.zeros(packed_size(largest), dtype=torch.int32, device=self._device)
        self.chooser = chooser
        self.tree: DeviceTree | None = None
        self._outs: dict[int, Tensor] = {}  # by tapped layers; 0: logits
        self._graphs: OrderedDict[StepKind, tuple[torch.cuda.CUDAGraph, Ran]] = OrderedDict()
        if self.captures:
            self._pool = torch.cuda.graph_pool_handle()
            # Of its own: graphs captured on one stream share cuBLAS' workspace.
            self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]

    @property
    def step(self) -> GpuStep:
        """What is captured."""
        return self._step

    def choose_with(self, chooser: Chooser) -> None:
        """Have tokens chosen by another chooser from now on."""
        self._graphs.clear()
        self.chooser = chooser

    def run(self, packed: np.ndarray | Tensor, bucket: Bucket) -> Tensor:
        """Bring a packed step, and return its logits."""
        self.bring(packed)
        return self.run_brought(bucket).logits

    def run_brought(self, bucket: Bucket, layers: int = 0, count: int = 0, grows: bool = False) -> Ran:
        """Run the step that lies in `input`: tap so many last layers, and choose so many best entries of every row; of
        0 none.

        `grows`: the tree grows by what is chosen, and the step that follows is left in `input`.
        """
        kind = (bucket, layers, count, grows)
        if not self.captures:
            with torch.inference_mode():
                return self._forward(*kind)
        if kind not in self._graphs:
            with torch.inference_mode():
                self._graphs[kind] = self._captured(kind)
            if len(self._graphs) > MOST_GRAPHS:
                torch.cuda.synchronize(self._device)
                self._graphs.popitem(last=False)
        self._graphs.move_to_end(kind)
        graph, ran = self._graphs[kind]
        graph.replay()
        return ran

    def bring(self, packed: np.ndarray | Tensor) -> None:
        """Copy a packed step to where graphs read it, without waiting."""
        if isinstance(packed, np.ndarray):
            host = torch.from_numpy(packed)
            packed = host.new_empty(host.shape, pin_memory=True).copy_(host) if self._device.type == "cuda" else host
        # torch keeps pinned memory until the copy is done
        self.input[: packed.shape[0]].copy_(packed, non_blocking=True)

    def _forward(self, bucket: Bucket, layers: int, count: int, grows: bool) -> Ran:
        step = views(self.input, bucket)
        logits, states = self._step.forward(step, layers)
        if not count or self.chooser is None or step.choosing is None or step.counts is None:
            return Ran(logits, states, None)
        results = self.chooser(logits, step.choosing, step.counts, count)
        if grows and self.tree is not None:
            self.tree.grow(results, self.input, growing_bucket(bucket.pages * PAGE, self._step.least))
        return Ran(logits, states, results)

    def _captured(self, kind: StepKind) -> tuple[torch.cuda.CUDAGraph, Ran]:
        """Capture a kind of step, on one of padding alone: what moves or goes on from what was chosen must happen
        once."""
        size = f"{kind[0].rows} rows in {kind[0].groups} groups over {kind[0].pages} pages"
        log.info("Capturing a step of %s.", size)
        changed = [self.input, self._step.picks, *([self.tree.state] if self.tree is not None else [])]
        begun, held = time.perf_counter(), [tensor.clone() for tensor in changed]
        try:
            if self.tree is not None:
                self.tree.clear()
            self.bring(padding(kind[0], (self._step.memory.data.shape[0] - 1) * PAGE))
            ran, graph = self._warmed_up(kind), torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
                again = self._forward(*kind)
                for lasting, made in ((ran.logits, again.logits), (ran.states, again.states)):
                    if lasting is not None and made is not None and lasting.data_ptr() != made.data_ptr():
                        lasting.copy_(made)
        finally:
            for tensor, before in zip(changed, held, strict=True):
                tensor.copy_(before)
            if self.tree is not None:
                self.tree.forget_reported()
        log.info(
            "Captured a step of %s, %d layers tapped, %d chosen, in %.2f s.",
            size,
            *kind[1:3],
            time.perf_counter() - begun,
        )
        return graph, ran

    def _warmed_up(self, kind: StepKind) -> Ran:
        """Run a step as it will be captured; returns where its results are to be.

        Results have memory of their own: what is left in the graphs' own, another graph's replay would overwrite.
        """
        self._stream.wait_stream(torch.cuda.current_stream(self._device))  # the packed step comes from there
        with torch.cuda.stream(self._stream):
            for _ in range(WARM_UPS):
                ran = self._forward(*kind)
        torch.cuda.synchronize(self._device)
        logits = ran.logits if self._step.lasting else self._out(0, ran.logits)
        return Ran(logits, None if ran.states is None else self._out(kind[1], ran.states), ran.results)

    def _out(self, key: int, like: Tensor) -> Tensor:
        if key not in self._outs or len(self._outs[key]) < len(like):
            self._outs[key] = like.new_empty(like.shape)
        return self._outs[key][: len(like)]
