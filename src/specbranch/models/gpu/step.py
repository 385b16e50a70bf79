"""A decoder's forward over a packed step, and the CUDA graphs that replay it.

Owns the order of operations, and the memory that graphs read and write. Invariant: a step never waits for the device,
and its bucket alone decides its shapes and addresses. One stream runs a model's steps; the results of a run are valid
until the next one.
"""

from __future__ import annotations

import logging
import os
import time
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from specbranch.core.pages import PAGE
from specbranch.models.cache.kv_memory import Memory
from specbranch.models.families.operations import Attention, Experts, GatedMlp, attention_of
from specbranch.models.forward.arithmetic import normed
from specbranch.models.forward.decoder import Decoder, Layer
from specbranch.models.forward.features import FeatureWriter
from specbranch.models.gpu.attention import Attend, choose_attend
from specbranch.models.gpu.choice import Chooser
from specbranch.models.gpu.compiling import Compilation, Kernel, begin_compilation, ready_kernels
from specbranch.models.gpu.layout import (
    MOST_STEP_ROWS,
    SMALLEST_BUCKET,
    SPREAD_COUNT,
    USED_COUNT,
    Bucket,
    Views,
    alone_bucket,
    largest_size,
    padding,
    views,
)
from specbranch.models.gpu.small import Small, small_functions
from specbranch.models.gpu.trees import DeviceTree, growing_bucket

log = logging.getLogger("specbranch")

GRAPHS_VARIABLE = "SPECBRANCH_GRAPHS"  # 0: run steps without graphs
WARM_UPS = 2  # runs before a capture, in which kernels are compiled and cuBLAS chooses its algorithms
MOST_GRAPHS = 64  # beside those that a warm-up captured
TIMED_REPLAYS = 2  # runs of a captured step in a warm-up; the faster counts: the first may also upload the graph
PINNED_ROWS = 16
# bucket, number of layers whose hidden states are returned, number of best entries, True if a tree grows by them
StepKind = tuple[Bucket, int, int, bool]


class GpuStep:
    """A decoder's forward over one KV memory, whose last page is for padding."""

    lasting = False  # True if logits have their own memory, which only the next forward of as many rows overwrites
    moves = False  # True if a forward makes the moves that come with its step
    only_kernels = False  # True if Triton kernels compute everything, so that it may run without its launches
    takes_chunks = False  # True if a step may have rows of prompts: their bits do not depend on where prompts are cut
    most_rows = MOST_STEP_ROWS
    least = SMALLEST_BUCKET  # smallest bucket of a step

    def __init__(
        self, decoder: Decoder, memory: Memory, attend: Attend | None = None, small: Small | None = None
    ) -> None:
        arch, device, dtype = decoder.arch, memory.data.device, memory.data.dtype
        self.decoder, self.memory = decoder, memory
        forms = [attention_of(layer.form) for layer in decoder.layers]
        self.attend = attend or choose_attend(device, dtype, arch.heads, arch.kv_heads, arch.head_dim, forms)
        self._small = small or small_functions(device)
        self._sides = [memory.layer(index) for index in range(arch.layers)]
        self._written = [memory.data[:, index].permute(0, 3, 1, 2, 4) for index in range(arch.layers)]
        self._next_norms = next_norms(decoder)
        self.features: FeatureWriter | None = None  # of a target whose draft reads them
        # the tokens that rows sampled last; an input token −1 − i stands for that of row i
        self.picks = torch.zeros(MOST_STEP_ROWS, dtype=torch.int32, device=device)

    def pin(self) -> None:
        """Give all steps the same number of rows.

        The order of sums in torch's products depends on the number of rows. If that is always the same, a row's bits do
        not depend on other rows.
        """
        if self.memory.data.device.type == "cuda":
            self.most_rows = PINNED_ROWS
            self.least = alone_bucket(PINNED_ROWS)

    def forward(self, step: Views, tapped: int = 0) -> tuple[Tensor, Tensor | None]:
        """Run all layers and write keys and values; returns logits [rows, vocabulary or columns] and hidden states.

        `tapped`: how many last layers' outputs to return, side by side. The output of the last layer is normed; those
        of the others are the inputs of the layers after them. Rows of prompts get neither.
        """
        decoder, seen, stream, rows = self.decoder, list[Tensor](), list[Tensor](), len(step.shared)
        eps, untapped = decoder.arch.rms_eps, len(decoder.layers) - tapped + 1
        angles = [[half.index_select(0, step.positions).unsqueeze(1) for half in table] for table in decoder.tables]
        chosen = self.picks[(-1 - step.tokens).clamp(min=0)]  # where a token is negative
        x = decoder.embedded(torch.where(step.tokens < 0, chosen, step.tokens))
        h = normed(x, decoder.layers[0].attention_norm, eps)
        for index, layer in enumerate(decoder.layers):
            if tapped and index >= untapped:
                seen.append(x[:rows])
            if self.features is not None:
                stream.append(x)
            for residual, next_norm in zip(layer.form, self._next_norms[index], strict=True):
                if isinstance(residual.operation, Attention):
                    change = self._run_attention(index, h, step, residual.operation, angles[residual.operation.table])
                else:
                    change = self._run_mlp(layer, residual.operation, h)
                if residual.after is not None:
                    change = normed(change, layer.norm(residual.after), eps)
                x, h = self._small.added(x, change, next_norm, eps)
        if self.features is not None:
            self.features.write_of(step.slots.long(), [*stream, x])
        h = h[:rows]
        return decoder.scored(h), torch.cat((*seen, h), -1) if tapped else None

    def _run_attention(
        self, index: int, h: Tensor, step: Views, attention: Attention, angles: Sequence[Tensor]
    ) -> Tensor:
        """Write keys and values of all rows, and return the output of attention."""
        layer = self.decoder.layers[index]
        queries = self._small.turned(
            layer.qkv(h), layer.qk_norm, self.decoder.arch.rms_eps, *angles, step.slots, self._written[index]
        )
        if attention.is_plain:
            return layer.out(self.attend(queries, *self._sides[index], step))
        return layer.out(self.attend(queries, *self._sides[index], step, None, False, attention, layer.sinks))

    def _run_mlp(self, layer: Layer, operation: GatedMlp | Experts, h: Tensor) -> Tensor:
        if layer.gate_up is None or layer.down is None or operation != GatedMlp():
            return layer.run_mlp(operation, h)
        return layer.down(self._small.gated(layer.gate_up(h)))


def next_norms(decoder: Decoder) -> list[tuple[Tensor, ...]]:
    """Return, for each layer, the norm that follows each of its operations: the next one's, at the end the last."""
    before = [layer.norm(residual.norm) for layer in decoder.layers for residual in layer.form]
    behind = iter((*before[1:], decoder.norm))
    return [tuple(next(behind) for _ in layer.form) for layer in decoder.layers]


@dataclass(frozen=True, slots=True)
class Ran:
    """The results of a step, valid until the next one."""

    logits: Tensor  # [the bucket's rows, vocabulary or columns]
    states: Tensor | None  # hidden states of the last layers, side by side
    results: Tensor | None  # sampled tokens and more, see `choice.Chooser`


class Captured:
    """A captured step: its CUDA graph, and the tensors that hold its results after each run."""

    __slots__ = ("graph", "met", "ran")

    def __init__(self, graph: torch.cuda.CUDAGraph | None, ran: Ran) -> None:
        self.graph, self.ran = graph, ran
        self.met = False  # True once it ran for an order

    def run(self) -> Ran:
        """Launch the step."""
        assert self.graph is not None
        self.graph.replay()
        return self.ran

    def less(self, layers: int, count: int) -> Captured:
        """Return the same graph for orders that need fewer of its results."""
        ran = self.ran
        return Captured(self.graph, Ran(ran.logits, ran.states if layers else None, ran.results if count else None))


class Graphs:
    """The CUDA graphs of one model's steps, captured by a warm-up or when a kind of step first occurs.

    See `StepKind`. Of the latter the least recently used are dropped. Without graphs the same forward runs directly.
    """

    def __init__(
        self, step: GpuStep, most_pages: int, capture: bool | None = None, chooser: Chooser | None = None
    ) -> None:
        self._step = step
        self._device = step.memory.data.device
        wanted = os.environ.get(GRAPHS_VARIABLE) != "0" if capture is None else capture
        self.captures = wanted and self._device.type == "cuda"
        self._step.pin()
        self._most_pages = most_pages
        # the packed step that graphs read
        self.input = torch.zeros(largest_size(most_pages), dtype=torch.int32, device=self._device)
        self.chooser = chooser
        self.tree: DeviceTree | None = None
        self.late = 0  # kinds captured when they were met, and kernels compiled outside a capture
        self.capturing = False
        self.notes_met = True  # False while a warm-up runs steps
        self.warm_up_bytes = 0  # of the device, taken by graphs that a warm-up captured
        self.seconds: dict[StepKind, float] = {}  # of a step of padding, for each kind of a warm-up
        self._outs: dict[int, Tensor] = {}  # by number of layers with hidden states; 0: logits
        self._warmed: dict[StepKind, Captured] = {}  # these stay
        self._compilation: Compilation | None = None
        self._collected: dict[StepKind, tuple[Ran, list[Kernel]]] = {}  # results and kernels, before a capture
        self._launched: set[Kernel] = set()  # kernels that ran before a capture
        self._spent: defaultdict[str, float] = defaultdict(float)  # seconds of a warm-up, by what was done
        self._graphs: OrderedDict[StepKind, Captured] = OrderedDict()
        if self.captures:
            self._pool = torch.cuda.graph_pool_handle()
            # A stream for captures only: graphs captured on one stream share cuBLAS' workspace.
            self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]

    @property
    def step(self) -> GpuStep:
        """The forward that is captured."""
        return self._step

    @property
    def met(self) -> list[StepKind]:
        """The kinds of steps that orders needed."""
        return [kind for kind, one in (*self._warmed.items(), *self._graphs.items()) if one.met]

    def choose_with(self, chooser: Chooser) -> None:
        """Sample with another chooser from now on; drops all graphs."""
        for kept in (self._graphs, self._warmed, self.seconds, self._collected):
            kept.clear()
        self.chooser = chooser

    @contextmanager
    def warming_up(self) -> Iterator[None]:
        """Within this context steps are not noted as met."""
        self.notes_met = False
        try:
            yield
        finally:
            self.notes_met = True

    @torch.inference_mode()
    def compile(self, kinds: Iterable[StepKind], others: Iterable[Callable[[], None]] = ()) -> None:
        """Start to compile the kernels of kinds of steps, in threads; `capture` waits for them.

        `others`: functions that launch further kernels. Nothing is launched here. If this is not possible, captures
        compile.
        """
        new = [kind for kind in dict.fromkeys(kinds) if kind not in self._warmed and kind not in self._collected]
        apart = self._step.only_kernels and (self.chooser is None or self.chooser.by_kernels)
        if self._compilation is not None:
            return
        self._spent.clear()  # captures in the middle of answers are not a warm-up's
        if not new or not self.captures or not apart:
            return
        compilation = begin_compilation()
        if compilation is None:
            return
        try:
            with self._spending("compiled"), self._counting_bytes():
                self._collect(compilation, new, others)
            self._compilation = compilation
        except Exception as reason:  # captures compile then, and raise what is wrong
            log.debug("Kernels are compiled one by one (%s: %s).", type(reason).__name__, reason)
        finally:
            if self._compilation is None:
                compilation.cancel()
                self._collected.clear()

    def stop_compiling(self) -> None:
        """Give up what `compile` started and no capture has waited for."""
        compilation, self._compilation = self._compilation, None
        if compilation is not None:
            compilation.cancel()
            self._collected.clear()

    def _collect(
        self, compilation: Compilation, kinds: Iterable[StepKind], others: Iterable[Callable[[], None]]
    ) -> None:
        """Run steps without their launches: only compilations start, and results get their memory."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        try:
            with torch.cuda.stream(self._stream):
                for kind in kinds:
                    with self._on_padding(kind), compilation.collecting() as kernels:
                        ran = self._forward(*kind)
                    self._collected[kind] = self._lasting(kind, ran), kernels
                for other in others:
                    with compilation.collecting():
                        other()
        finally:
            self._synchronize()  # other streams use the same input

    def _finish_compiling(self) -> None:
        """Wait for the kernels that are being compiled. Errors come up again when the kernels are launched."""
        compilation, self._compilation = self._compilation, None
        if compilation is None:
            return
        try:
            with self._spending("compiled"):
                compilation.finish()
        except Exception as reason:
            log.debug("Kernels are compiled one by one (%s: %s).", type(reason).__name__, reason)
            self._collected.clear()

    @torch.inference_mode()
    def capture(self, kinds: Iterable[StepKind]) -> int:
        """Capture and time kinds of steps before they are met; returns how many of them are ready.

        If the memory does not suffice, it captures no more, and gives up the last one so that some memory is left.
        """
        wanted = list(dict.fromkeys(kinds)) if self.captures else []
        missing = [kind for kind in wanted if kind not in self._warmed]
        self._finish_compiling()
        with self._counting_bytes():
            for number, kind in enumerate(missing):
                log.info("CUDA graph %d of %d", number + 1, len(missing), extra={"done": number, "of": len(missing)})
                try:
                    self._warm_up(kind)
                except torch.OutOfMemoryError:
                    self._give_up(missing[max(number - 1, 0) :])
                    break
        self._collected.clear()
        ready = sum(kind in self._warmed for kind in wanted)
        if missing:
            self._say_ready(ready)
        return ready

    def _say_ready(self, ready: int) -> None:
        seconds, megabytes = sum(self._spent.values()), self.warm_up_bytes / 1e6
        parts = ", ".join(f"{what} {self._spent[what]:.1f} s" for what in ("compiled", "run", "captured", "timed"))
        log.info("%d CUDA graphs are ready after %.1f s (%s); they take %.0f MB.", ready, seconds, parts, megabytes)
        self._spent.clear()

    @contextmanager
    def _spending(self, what: str) -> Iterator[None]:
        """Add the seconds of this context to those of a warm-up."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self._spent[what] += time.perf_counter() - start

    @contextmanager
    def _counting_bytes(self) -> Iterator[None]:
        """Add the memory that torch takes within this context, graphs included."""
        before = self._reserved_bytes()
        try:
            yield
        finally:
            self.warm_up_bytes += max(self._reserved_bytes() - before, 0)  # something else may have been freed

    def _reserved_bytes(self) -> int:
        """Return the memory that torch holds for this process.

        The device's free memory would also change with other processes. The driver's own memory for graphs and kernels
        is left out.
        """
        if self._device.type != "cuda":
            return 0
        torch.cuda.empty_cache()  # a capture would free it, too
        return int(torch.cuda.memory_reserved(self._device))

    def run(self, packed: np.ndarray | Tensor, bucket: Bucket) -> Tensor:
        """Copy a packed step up, run it, and return its logits."""
        self.bring(packed)
        return self.run_brought(bucket).logits

    def run_brought(self, bucket: Bucket, layers: int = 0, count: int = 0, grows: bool = False) -> Ran:
        """Run the step in `input`.

        `layers`: how many last layers' hidden states to return. `count`: how many best entries of every row to return;
        0: sample nothing. `grows`: the tree grows by the results, and its next step is written to `input`.
        """
        kind = (bucket, layers, count, grows)
        if not self.captures:
            with torch.inference_mode():
                return self._forward(*kind)
        found = self._warmed.get(kind) or self._found(kind)
        found.met |= self.notes_met
        return found.run()

    def _found(self, kind: StepKind) -> Captured:
        """Return the graph of a kind that no warm-up has captured; it is captured now if there is none."""
        if kind in self._graphs:
            self._graphs.move_to_end(kind)
            return self._graphs[kind]
        larger = next((one for one in self._warmed if serves(one, kind)), None)
        if larger is not None:
            self._warmed[kind] = self._warmed[larger].less(*kind[1:3])
            return self._warmed[kind]
        self.late += 1
        log.info("Capturing a step of %s in the middle of an answer.", described(kind))
        made = self._graphs[kind] = self._captured(kind)
        if len(self._graphs) > MOST_GRAPHS:
            self._synchronize()
            self._graphs.popitem(last=False)
        return made

    def _warm_up(self, kind: StepKind) -> None:
        made = self._graphs.pop(kind, None) or self._captured(kind)
        with self._spending("timed"):
            self.seconds[kind] = self._timed(kind, made)
        self._warmed[kind] = made

    def _give_up(self, kinds: Sequence[StepKind]) -> None:
        """Drop graphs for want of memory, and say so."""
        self._synchronize()
        for kind in kinds:
            self._warmed.pop(kind, None)
            self.seconds.pop(kind, None)
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
        log.warning(
            "The GPU's memory does not hold all CUDA graphs of the warm-up: %d kinds of steps are captured when they "
            "first occur, which delays that answer. Lower max_batch, cache_tokens or context_length.",
            len(kinds),
        )

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _timed(self, kind: StepKind, captured: Captured) -> float:
        """Return the seconds of a captured step without context: the fastest of a few runs."""
        times: list[float] = []
        for _ in range(TIMED_REPLAYS):
            with self._on_padding(kind):
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
                step = views(self.input, kind[0], self._most_pages)
                if step.counts is not None:
                    step.counts[USED_COUNT] = kind[0].total  # otherwise rows of prompts would be left out
                    step.counts[SPREAD_COUNT] = 1  # and experts
                begin.record()
                captured.run()
                end.record()
                end.synchronize()
                times.append(begin.elapsed_time(end) / 1000)
        return min(times)

    def bring(self, packed: np.ndarray | Tensor) -> None:
        """Copy a packed step to `input`, asynchronously."""
        if isinstance(packed, np.ndarray):
            host = torch.from_numpy(packed)
            packed = host.new_empty(host.shape, pin_memory=True).copy_(host) if self._device.type == "cuda" else host
        # torch does not reuse pinned memory before the copy is done
        self.input[: packed.shape[0]].copy_(packed, non_blocking=True)

    def _forward(self, bucket: Bucket, layers: int, count: int, grows: bool) -> Ran:
        step = views(self.input, bucket, self._most_pages)
        logits, states = self._step.forward(step, layers)
        if not count or self.chooser is None or step.choosing is None or step.counts is None:
            return Ran(logits, states, None)
        results = self.chooser(logits, step.choosing, step.counts, count)
        if grows and self.tree is not None:
            self.tree.grow(results, self.input, growing_bucket(self._step.least))
        return Ran(logits, states, results)

    @torch.inference_mode()
    def _captured(self, kind: StepKind) -> Captured:
        """Capture a kind of step."""
        start, self.capturing = time.perf_counter(), True
        try:
            with self._on_padding(kind):
                with self._spending("run"):
                    ran = self._warmed_up(kind)
                with self._spending("captured"):
                    graph = self._graph(kind, ran)
        finally:
            self.capturing = False
        log.debug("Captured a step of %s in %.2f s.", described(kind), time.perf_counter() - start)
        return Captured(graph, ran)

    def _graph(self, kind: StepKind, ran: Ran) -> torch.cuda.CUDAGraph:
        """Capture a step whose results go to `ran`."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            again = self._forward(*kind)
            for lasting, made in ((ran.logits, again.logits), (ran.states, again.states)):
                if lasting is not None and made is not None and lasting.data_ptr() != made.data_ptr():
                    lasting.copy_(made)
        return graph

    @contextmanager
    def _on_padding(self, kind: StepKind) -> Iterator[None]:
        """Within this context `input` is a step of padding alone: moves and tree growth must not happen twice."""
        changed = [self.input, self._step.picks, *([self.tree.state] if self.tree is not None else [])]
        before = [tensor.clone() for tensor in changed]
        try:
            if self.tree is not None:
                self.tree.clear()
            self.bring(padding(kind[0], (self._step.memory.data.shape[0] - 1) * PAGE))
            yield
        finally:
            for tensor, saved in zip(changed, before, strict=True):
                tensor.copy_(saved)
            if self.tree is not None:
                self.tree.forget_reported()

    def _warmed_up(self, kind: StepKind) -> Ran:
        """Run a step as it will be captured, unless all its kernels ran before; returns the tensors for its results.

        Kernels are loaded when they first run, and that must not happen in a capture.
        """
        ran, collected = self._collected.pop(kind, (None, ()))
        kernels = ready_kernels(collected)
        if ran is None or kernels is None:  # not collected, or not compiled
            return self._lasting(kind, self._run_directly(kind, WARM_UPS))
        if not kernels <= self._launched:
            self._run_directly(kind, 1)
            self._launched |= kernels
        return ran

    def _run_directly(self, kind: StepKind, times: int) -> Ran:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))  # the packed step comes from there
        with torch.cuda.stream(self._stream):
            for _ in range(times):
                ran = self._forward(*kind)
        torch.cuda.synchronize(self._device)
        return ran

    def _lasting(self, kind: StepKind, ran: Ran) -> Ran:
        """Return the tensors that take a kind's results.

        They have their own memory: in the graphs' pool another graph's replay would overwrite them.
        """
        logits = ran.logits if self._step.lasting else self._out(0, ran.logits)
        return Ran(logits, None if ran.states is None else self._out(kind[1], ran.states), ran.results)

    def _out(self, key: int, like: Tensor) -> Tensor:
        if key not in self._outs or len(self._outs[key]) < len(like):
            self._outs[key] = like.new_empty(like.shape)
        return self._outs[key][: len(like)]


def serves(captured: StepKind, needed: StepKind) -> bool:
    """True if the graph of one kind gives all results of another kind, and perhaps more."""
    (bucket, layers, count, grows), (needed_bucket, needed_layers, needed_count, needed_grows) = captured, needed
    same = bucket == needed_bucket and grows == needed_grows
    return same and count >= needed_count and needed_layers in (0, layers)


def described(kind: StepKind) -> str:
    """Return a kind of step in words."""
    bucket, layers, count, grows = kind
    sizes = ", ".join(f"{size} {name}" for name, size in zip(bucket._fields, bucket, strict=True))
    more = [f"{layers} layers' hidden states"] if layers else []
    more += [f"{count} best"] if count > 1 else []
    more += ["a tree grows"] if grows else []
    return ", ".join([sizes, *more])
