"""A decoder's forward over a packed step, and the CUDA graphs that replay it.

Owns the order of operations and the memory that graphs read and write. Invariant: a step waits for nothing, and its shapes and addresses
follow from its bucket alone. One stream runs a model's steps; what a run returns stands until the next one.
"""

from __future__ import annotations

import logging
import os
import time
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import embedding, rms_norm

from specbranch.models.decoder import Decoder
from specbranch.models.gpu.attention import Attend, choose_attend
from specbranch.models.gpu.layout import MOST_ROWS, Bucket, Views, packed_size, power_of_two, views
from specbranch.models.gpu.small import Small, small_functions
from specbranch.models.kv import Memory

log = logging.getLogger("specbranch")

VARIABLE = "SPECBRANCH_GRAPHS"  # 0: run steps without graphs
WARM_UPS = 2  # runs before a capture: they compile, and choose how to multiply


class GpuStep:
    """A decoder over one memory of pages, whose last page is spare."""

    def __init__(self, decoder: Decoder, memory: Memory, attend: Attend | None = None, small: Small | None = None) -> None:
        arch, device, dtype = decoder.arch, memory.data.device, memory.data.dtype
        self.decoder, self.memory = decoder, memory
        self.attend = attend or choose_attend(device, dtype, arch.heads, arch.kv_heads, arch.head_dim)
        self._small = small or small_functions(device)
        self._sides = [memory.layer(index) for index in range(arch.layers)]
        self._written = [memory.data[:, index].permute(0, 3, 1, 2, 4) for index in range(arch.layers)]
        norms = [layer.attention_norm for layer in decoder.layers]
        self._next_norms = (*norms[1:], decoder.norm)

    def forward(self, step: Views, tapped: int = 0) -> tuple[Tensor, Tensor | None]:
        """Run all layers, writing the pages; returns logits [rows, vocabulary or columns] and hidden states of the tapped layers.

        Those are what enters the last `tapped` - 1 layers, and the last of all, normed, side by side.
        """
        decoder, seen = self.decoder, list[Tensor]()
        eps, untapped = decoder.arch.rms_eps, len(decoder.layers) - tapped + 1
        turning = [table.index_select(0, step.positions).unsqueeze(1) for table in (decoder.cos, decoder.sin)]
        x = embedding(step.tokens, decoder.embedding)
        h = rms_norm(x, (x.shape[-1],), decoder.layers[0].attention_norm, eps)
        for index, layer in enumerate(decoder.layers):
            if tapped and index >= untapped:
                seen.append(x)
            queries = self._small.turned(layer.qkv(h), layer.qk_norm, eps, *turning, step.slots, self._written[index])
            x, h = self._small.added(x, layer.out(self.attend(queries, *self._sides[index], step)), layer.mlp_norm, eps)
            x, h = self._small.added(x, layer.down(self._small.gated(layer.gate_up(h))), self._next_norms[index], eps)
        return decoder.head(h), torch.cat((*seen, h), -1) if tapped else None


@dataclass(frozen=True, slots=True)
class _Captured:
    graph: torch.cuda.CUDAGraph
    logits: Tensor
    states: Tensor | None


class Graphs:
    """The steps of one model, captured when a bucket is first met; without graphs, the same forward."""

    def __init__(self, step: GpuStep, most_pages: int, capture: bool | None = None) -> None:
        self._step = step
        self._device = step.memory.data.device
        wanted = os.environ.get(VARIABLE) != "0" if capture is None else capture
        self.captures = wanted and self._device.type == "cuda"
        largest = Bucket(MOST_ROWS, MOST_ROWS, power_of_two(most_pages))
        self._input = torch.zeros(packed_size(largest), dtype=torch.int32, device=self._device)
        self._outs: dict[int, Tensor] = {}  # by tapped layers; 0: logits
        self._graphs: dict[tuple[Bucket, int], _Captured] = {}
        if self.captures:
            self._pool = torch.cuda.graph_pool_handle()
            # Of its own: graphs captured on one stream share cuBLAS' workspace.
            self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]

    def run(self, packed: np.ndarray | Tensor, bucket: Bucket) -> Tensor:
        """Return the logits of a packed step [the bucket's rows, vocabulary or columns]."""
        return self.run_tapped(packed, bucket, 0)[0]

    @torch.inference_mode()
    def run_tapped(self, packed: np.ndarray | Tensor, bucket: Bucket, layers: int) -> tuple[Tensor, Tensor | None]:
        """Return the logits and the hidden states of some last layers, side by side; of 0 layers, none."""
        self._bring(packed)
        if not self.captures:
            return self._step.forward(views(self._input, bucket), layers)
        captured = self._graphs.get((bucket, layers)) or self._capture(bucket, layers)
        captured.graph.replay()
        return captured.logits, captured.states

    def _bring(self, packed: np.ndarray | Tensor) -> None:
        """Copy a packed step to where graphs read it, without waiting."""
        if isinstance(packed, np.ndarray):
            host = torch.from_numpy(packed)
            packed = host.new_empty(host.shape, pin_memory=True).copy_(host) if self._device.type == "cuda" else host
        self._input[: packed.shape[0]].copy_(packed, non_blocking=True)  # torch keeps pinned memory until the copy is done

    def _capture(self, bucket: Bucket, layers: int) -> _Captured:
        begun = time.perf_counter()
        step = views(self._input, bucket)
        captured = _Captured(torch.cuda.CUDAGraph(), *self._warmed_up(step, bucket.rows, layers))
        with torch.cuda.graph(captured.graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            logits, states = self._step.forward(step, layers)
            captured.logits.copy_(logits)
            if states is not None and captured.states is not None:
                captured.states.copy_(states)
        self._graphs[bucket, layers] = captured
        size = f"{bucket.rows} rows in {bucket.groups} groups over {bucket.pages} pages"
        log.info("Captured a step of %s, %d layers tapped, in %.1f s.", size, layers, time.perf_counter() - begun)
        return captured

    def _warmed_up(self, step: Views, rows: int, layers: int) -> tuple[Tensor, Tensor | None]:
        """Run a step as it will be captured; returns where its results are to be copied to.

        Results have memory of their own: what is left in the graphs' own, another graph's replay would overwrite.
        """
        self._stream.wait_stream(torch.cuda.current_stream(self._device))  # the packed step comes from there
        with torch.cuda.stream(self._stream):
            for _ in range(WARM_UPS):
                logits, states = self._step.forward(step, layers)
        torch.cuda.synchronize(self._device)
        return self._out(0, logits)[:rows], None if states is None else self._out(layers, states)[:rows]

    def _out(self, key: int, like: Tensor) -> Tensor:
        if key not in self._outs:
            self._outs[key] = like.new_empty(MOST_ROWS, like.shape[1])
        return self._outs[key]
