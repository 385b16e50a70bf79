"""A decoder's step for few rows on a CPU, as one call of compiled code.

The call runs a list of operations, which depends only on the number of rows. What differs between rows stands in the
table of rows. Owns the lists, that table and the buffers between operations; `row_kernels` owns the compiled code.
Computes what `Decoder.forward` and `Decoder.logits` compute, up to rounding. Invariant: a row's bits do not depend on
the other rows of the batch, as every operation on the list guarantees that.

Under a draft window, a row's entry in the table lists the KV slots of the few positions that it sees, so the compiled
code is the same.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from specbranch.core.pages import PAGE
from specbranch.models.cache.kv_memory import Memory
from specbranch.models.cpu.attention_text import SPLIT, part_floats
from specbranch.models.cpu.block_kernels import BlockLinear
from specbranch.models.cpu.linear import KernelLinear, Linear
from specbranch.models.cpu.operation_text import ENTRY, OPERATION_FIELDS, KernelShape
from specbranch.models.cpu.rounding_text import ROUNDED
from specbranch.models.cpu.row_kernels import RowKernels, float_bits, load_row_kernels
from specbranch.models.cpu.thread_pace import PACE, StepTime, StepTimes, threads_now
from specbranch.models.families.operations import attention_of
from specbranch.models.files.blocks import BLOCK
from specbranch.models.forward.decoder import Decoder, Layer
from specbranch.models.forward.features import FeatureWriter
from specbranch.models.forward.step_rows import Rows, positions_of, tokens_of

# Rows of a step at most; more run as several steps. With 64 rows reading the weights again costs little, and there are
# few lists.
STEP_ROWS = 64
CUTS_COLUMN = 9  # column of an attention operation: the most parts (of SPLIT positions) that a row's keys are cut into
LOST_FIELD = 4  # field of the header: nanoseconds that threads lost
COUNTER = 1  # column of an operation: how many of its items threads have taken; column 0 is its code


@dataclass(slots=True)
class Operations:
    """A list of operations; `finish` turns it into the table that compiled code reads."""

    count: int  # rows of the step
    rows: list[list[int]] = field(default_factory=list)
    # by layer: after this many operations, buffer x holds the layer's input
    entered: list[int] = field(default_factory=list)
    attending: list[int] = field(default_factory=list)  # indices of the attention operations
    written: int = 0  # after this many operations all keys and values are stored
    table: np.ndarray = field(default_factory=lambda: np.empty(0, dtype=np.int64))

    def add(self, code: int, *arguments: int) -> None:
        """Append an operation; unused columns are 0."""
        self.rows.append([code, 0, *arguments, *[0] * (OPERATION_FIELDS - 2 - len(arguments))])

    def finish(self) -> Operations:
        """Make the table of the appended operations."""
        self.table = np.array(self.rows, dtype=np.int64)
        return self


class FusedStep:
    """The compiled step of one decoder, for at most STEP_ROWS rows."""

    def __init__(self, decoder: Decoder, kernels: RowKernels, memory: Memory) -> None:
        self.decoder, self.kernels, self.memory = decoder, kernels, memory
        arch = decoder.arch
        sizes = {
            "x": arch.hidden,
            "h": arch.hidden,
            "change": arch.hidden,
            "qkv": (arch.heads + 2 * arch.kv_heads) * arch.head_dim,
        }
        sizes |= {"seen": arch.heads * arch.head_dim, "both": 2 * arch.intermediate, "gated": arch.intermediate}
        sizes |= {"cos": arch.head_dim, "sin": arch.head_dim}
        sizes["rounded"] = (
            max(sizes[name] for name in ("h", "seen", "gated")) * ROUNDED // (4 * BLOCK)
        )  # counted in floats
        self.buffers = {name: torch.zeros(STEP_ROWS, size) for name, size in sizes.items()}
        self.table = np.zeros((STEP_ROWS, len(ENTRY)), dtype=np.int64)
        self._attention = attention_of(decoder.layers[0].form)  # all layers have the same
        self._most = -(-len(decoder.cos) // SPLIT)  # parts that attention cuts the longest context into
        shape = _shape(decoder, memory)
        # Its memory is resident only once it is written.
        self._parts = torch.empty(STEP_ROWS * self._most * arch.heads * part_floats(shape))
        self._arrived = torch.zeros(STEP_ROWS * arch.kv_heads, dtype=torch.int64)
        self._lists: dict[int, Operations] = {}  # by number of rows
        self.scored = arch.head_rows if decoder.columns is None else len(decoder.columns.ids)
        self._header = np.zeros(5, dtype=np.int64)
        self._times = StepTimes()
        self.features: FeatureWriter | None = None  # of a target whose draft reads them
        self._paths: list[np.ndarray] = []  # keeps alive the arrays that the table of rows points to

    def store(self, work: Sequence[Rows]) -> None:
        """Write the keys and values of some rows; computes no logits."""
        if self.features is not None and self.features.needs_all(len(self.decoder.layers)):
            self.logits(work)
            return
        operations = self._prepare(work)
        self._run_through(operations, operations.written, work, ())

    def logits(self, work: Sequence[Rows]) -> Tensor:
        """Write the keys and values of some rows, and return their logits over the vocabulary, or `columns` of it."""
        return self.logits_and_states(work, 0)[0]

    def logits_and_states(self, work: Sequence[Rows], layers: int) -> tuple[Tensor, Tensor]:
        """Do as `logits`, and return the hidden states of the last layers [rows, layers·hidden], too.

        Those of the last layer are normed.
        """
        operations, rows, hidden = self._prepare(work), sum(len(some.tokens) for some in work), self.decoder.arch.hidden
        out, states = torch.empty(rows, self.scored), torch.empty(rows, layers, hidden)
        operations.table[-1, 5] = out.data_ptr()
        count = len(operations.entered)
        asked = range(count - layers + 1, count) if layers else range(0)
        seen = self._run_through(operations, len(operations.table), work, asked)
        for at, layer in enumerate(asked):
            states[:, at] = seen[layer]
        if layers:
            states[:, -1] = self.buffers["h"][:rows]
        return out, states.flatten(1)

    def _run_through(
        self, operations: Operations, end: int, work: Sequence[Rows], asked: Iterable[int]
    ) -> dict[int, Tensor]:
        """Run the operations up to `end`, and write features; returns copies of the inputs of the `asked` layers."""
        count, rows = len(operations.entered), operations.count
        taps = self.features.fuse.taps if self.features else ()
        seen, done = dict[int, Tensor](), 0
        for layer in sorted({*asked, *taps} - {count}):
            self._run(operations, operations.entered[layer], done)
            seen[layer], done = self.buffers["x"][:rows].clone(), operations.entered[layer]
        self._run(operations, end, done)
        if self.features is not None:
            seen[count] = self.buffers["x"][:rows]
            kv_slots = torch.from_numpy(np.concatenate([some.kv_slots() for some in work]))
            self.features.write(kv_slots, [seen[tap] for tap in taps])
        return seen

    def _run(self, operations: Operations, end: int, start: int = 0) -> None:
        table, threads = operations.table, threads_now()
        begin = table.ctypes.data + start * table.strides[0]
        self._header[:] = 0, end - start, begin, self.kernels.team_size, 0
        before = time.perf_counter()
        self.kernels.run(self._header.ctypes.data, threads)
        seconds = max(time.perf_counter() - before, 1e-9)
        least = self._times.least((operations.count, start, end), seconds)
        if least is not None:
            PACE.note(StepTime(seconds, least, float(self._header[LOST_FIELD]) / 1e9))

    def _prepare(self, work: Sequence[Rows]) -> Operations:
        """Fill the input buffers and the table of rows; returns the list of operations for this many rows."""
        tokens, positions = torch.from_numpy(tokens_of(work)), positions_of(work)
        rows, turned = len(tokens), torch.from_numpy(positions)
        self._look_up(tokens, self.buffers["x"][:rows])
        torch.index_select(self.decoder.cos, 0, turned, out=self.buffers["cos"][:rows])
        torch.index_select(self.decoder.sin, 0, turned, out=self.buffers["sin"][:rows])
        self.table[:rows, 3] = positions + 1
        self._paths.clear()
        first = 0
        for some in work:
            self._enter(some, self.table[first : first + len(some.tokens)])
            first += len(some.tokens)
        if rows not in self._lists:
            self._lists[rows] = self._listed(rows)
        operations = self._lists[rows]
        operations.table[:, COUNTER] = 0
        operations.table[operations.attending, CUTS_COLUMN] = (int(self.table[:rows, 3].max()) - 1) // SPLIT + 1
        return operations

    def _look_up(self, tokens: Tensor, into: Tensor) -> None:
        table = self.decoder.embedding
        if isinstance(table, Tensor):
            torch.index_select(table, 0, tokens, out=into)
        else:
            into.copy_(table[tokens])

    def _enter(self, rows: Rows, entries: np.ndarray) -> None:
        """Fill the table entries of some rows, in the order of ENTRY; column 3 holds how many positions there are."""
        data, kv_slot = self.memory.data, self.memory.data.stride(4) * self.memory.data.element_size()
        pages = np.asarray(rows.table.pages, dtype=np.int64) * (data.stride(0) * data.element_size()) + data.data_ptr()
        behind = np.arange(rows.prefix, rows.start + len(rows.tokens))
        tail = pages[behind // PAGE] + behind % PAGE * kv_slot
        paths = _paths(rows, tail)
        entries[:, 0], entries[:, 1] = pages.ctypes.data, rows.prefix
        entries[:, 2] = tail[rows.start - rows.prefix :]
        entries[:, 4] = paths.ctypes.data + np.arange(len(paths)) * paths.strides[0]
        self._paths += [pages, paths]
        if self._attention.window is not None:
            self._narrow(rows, entries, pages, kv_slot)

    def _narrow(self, rows: Rows, entries: np.ndarray, pages: np.ndarray, kv_slot: int) -> None:
        """List what a row sees for those rows from which the draft window hides something."""
        first, window = self._attention.first, self._attention.window
        assert window is not None
        for row in np.flatnonzero(entries[:, 3] > first + window):
            seen = _visible(rows, int(row), int(entries[row, 3]), first, window)
            path = pages[seen // PAGE] + seen % PAGE * kv_slot
            entries[row, 1], entries[row, 3], entries[row, 4] = 0, len(path), path.ctypes.data
            self._paths.append(path)

    def _listed(self, rows: int) -> Operations:
        """Make the list of operations of a step over `rows` rows."""
        operations = Operations(rows)
        for index, layer in enumerate(self.decoder.layers):
            assert layer.gate_up is not None and layer.down is not None  # `fuse` takes plain layers only
            self._add_norm(operations, layer.attention_norm, rows, layer.qkv, change=index > 0)
            operations.entered.append(len(operations.rows))
            self._add_attention(operations, index, layer, rows)
            self._add_norm(operations, layer.mlp_norm, rows, layer.gate_up)
            self._add_linear(operations, layer.gate_up, "h", "both", rows)
            code, rounded = self.kernels.addresses["gate"], self._rounded(layer.down)
            operations.add(code, self._at("both"), self._at("gated"), rounded, rows, self.decoder.arch.intermediate)
            self._add_linear(operations, layer.down, "gated", "change", rows)
        self._add_norm(operations, self.decoder.norm, rows, self.decoder.head)
        self._add_linear(operations, self.decoder.head, "h", None, rows)
        return operations.finish()

    def _add_norm(self, operations: Operations, weight: Tensor, rows: int, before: Linear, change: bool = True) -> None:
        arch, added = self.decoder.arch, self._at("change") if change else 0
        code, eps = self.kernels.addresses["norm"], float_bits(arch.rms_eps)
        pointers = self._at("x"), added, weight.data_ptr(), self._at("h"), self._rounded(before)
        operations.add(code, *pointers, rows, arch.hidden, eps)

    def _rounded(self, layer: Linear) -> int:
        """Return where the operation before a layer stores its output rounded to int8; 0: the layer takes floats."""
        return self._at("rounded") if isinstance(layer, BlockLinear) else 0

    def _add_linear(self, operations: Operations, layer: Linear, source: str, target: str | None, rows: int) -> None:
        to = self._at(target) if target else 0
        if isinstance(layer, BlockLinear):
            for code, *arguments in layer.products(self._at("rounded"), to, rows):
                operations.add(code.address, *arguments)
        else:
            assert isinstance(layer, KernelLinear)
            operations.add(layer.kernel.work, *layer.arguments(self._at(source), to, rows))

    def _add_attention(self, operations: Operations, index: int, layer: Layer, rows: int) -> None:
        arch, norm, table = self.decoder.arch, layer.qk_norm, self.table.ctypes.data
        turn, attend = self.kernels.addresses["turn"], self.kernels.addresses["attend"]
        self._add_linear(operations, layer.qkv, "h", "qkv", rows)
        norms = (0, 0) if norm is None else (norm[0].data_ptr(), norm[arch.heads].data_ptr())
        angles = self._at("cos"), self._at("sin")
        operations.add(turn, self._at("qkv"), *angles, table, *norms, rows, index, float_bits(arch.rms_eps))
        operations.written = len(operations.rows)
        scale = float_bits(1.0 / math.sqrt(arch.head_dim))
        # True if one item of the attention computes whole blocks; then it can round them itself
        whole = arch.heads // arch.kv_heads * arch.head_dim % BLOCK == 0
        pointers = self._at("qkv"), table, self._at("seen"), self._rounded(layer.out) if whole else 0
        operations.attending.append(len(operations.rows))
        tables = self._parts.data_ptr(), self._arrived.data_ptr()
        operations.add(attend, *pointers, *tables, rows, 1, self._most, index, scale)
        if isinstance(layer.out, BlockLinear) and not whole:
            code, *arguments = layer.out.rounding(self._at("seen"), self._at("rounded"), rows)
            operations.add(code.address, *arguments)
        self._add_linear(operations, layer.out, "seen", "change", rows)

    def _at(self, buffer: str) -> int:
        return self.buffers[buffer].data_ptr()


def _paths(rows: Rows, tail: np.ndarray) -> np.ndarray:
    """Return the addresses of the KV slots behind the prefix that each row sees, in the order of its path.

    Slot order is path order, as a parent's KV slot is below its child's.
    """
    if len(rows.seen) == 1 and rows.seen[0] + 1 == 1 << len(tail):  # plain decoding
        return tail[None]
    seen = rows.behind()
    paths = np.zeros((len(seen), int(seen.sum(axis=1).max())), dtype=np.int64)
    for path, one in zip(paths, seen, strict=True):
        found = tail[one]
        path[: len(found)] = found
    return paths


def _visible(rows: Rows, row: int, count: int, first: int, window: int) -> np.ndarray:
    """Return the KV slots of the `first` and the last `window` of the `count` positions up to a row, in order."""
    head = np.arange(first) if first <= rows.prefix else rows.path(row, 0)[:first]
    return np.concatenate((head, rows.path(row, count - window)))


def fuse(decoder: Decoder, memory: Memory) -> FusedStep | None:
    """Return the compiled step if it computes these layers and all matrices use compiled CPU kernels, else None."""
    if not decoder.compilable:
        return None
    matrices = [
        decoder.head,
        *(matrix for layer in decoder.layers for matrix in (layer.qkv, layer.out, layer.gate_up, layer.down)),
    ]
    if not all(isinstance(matrix, KernelLinear | BlockLinear) for matrix in matrices):
        return None
    kernels = load_row_kernels(_shape(decoder, memory))
    return FusedStep(decoder, kernels, memory) if kernels else None


def _shape(decoder: Decoder, memory: Memory) -> KernelShape:
    arch = decoder.arch
    sizes: dict[torch.dtype, Literal[2, 1]] = {torch.bfloat16: 2, torch.int8: 1}
    return KernelShape(arch.heads, arch.kv_heads, arch.head_dim, sizes.get(memory.data.dtype, 4))
