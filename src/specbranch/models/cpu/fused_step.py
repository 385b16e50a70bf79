"""A decoder's step for few rows on a CPU as one call: the list of operations that `row_kernels` carries out.

Owns the lists, the small buffers between operations, and the table of rows, in which stands all that tells one row from
another: the lists know only how many there are. Gives what `Decoder.forward` and `Decoder.logits` give, up to rounding.
Invariant: a row gets the same bits in any batch, as every operation on the list promises that.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from specbranch.core.pages import PAGE
from specbranch.models.batch import Rows, positions_of, tokens_of
from specbranch.models.cpu.attention_text import SPLIT, part_floats
from specbranch.models.cpu.block_kernels import BlockLinear
from specbranch.models.cpu.linear import KernelLinear, Linear
from specbranch.models.cpu.operation_text import ENTRY, FIELDS, KernelShape
from specbranch.models.cpu.rounding_text import ROUNDED
from specbranch.models.cpu.row_kernels import RowKernels, float_bits, load_row_kernels
from specbranch.models.cpu.thread_pace import PACE, StepTime, StepTimes, threads_now
from specbranch.models.decoder import Decoder, Layer
from specbranch.models.files.blocks import BLOCK
from specbranch.models.kv import Memory

STEP_ROWS = 64  # more are several steps: at so many, reading the weights again costs little, and the lists stay few
CUTS = 9  # the column of an attention that tells into how many cuts what rows see falls, at most
LOST = 4  # the number of a header that counts what threads lost, in nanoseconds
COUNTER = 1  # the column of an operation that counts what was taken; column 0 is its code


@dataclass(slots=True)
class Operations:
    """A list under construction, then in use as a table."""

    count: int  # rows of the step
    rows: list[list[int]] = field(default_factory=list)
    # by layer, operations after which the buffer x holds what it is given
    entered: list[int] = field(default_factory=list)
    attending: list[int] = field(default_factory=list)  # operations that cut what rows see
    written: int = 0  # operations after which all keys and values are stored
    table: np.ndarray = field(default_factory=lambda: np.empty(0, dtype=np.int64))

    def add(self, code: int, *arguments: int) -> None:
        """Append an operation."""
        self.rows.append([code, 0, *arguments, *[0] * (FIELDS - 2 - len(arguments))])

    def finish(self) -> Operations:
        """Turn what was appended into the table."""
        self.table = np.array(self.rows, dtype=np.int64)
        return self


class FusedStep:
    """Runs steps of at most STEP_ROWS rows."""

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
        self._most = -(-len(decoder.cos) // SPLIT)  # cuts of the longest text
        shape = _shape(decoder, memory)
        # Nothing of it is resident before it is written.
        self._parts = torch.empty(STEP_ROWS * self._most * arch.heads * part_floats(shape))
        self._arrived = torch.zeros(STEP_ROWS * arch.kv_heads, dtype=torch.int64)
        self._lists: dict[int, Operations] = {}  # by rows
        self.scored = arch.head_rows if decoder.columns is None else len(decoder.columns.ids)
        self._header = np.zeros(5, dtype=np.int64)
        self._times = StepTimes()
        self._paths: list[np.ndarray] = []  # what the table of rows points to

    def store(self, work: Sequence[Rows]) -> None:
        """Write the keys and values of some rows, and compute nothing that they do not need."""
        operations = self._prepare(work)
        self._run(operations, operations.written)

    def logits(self, work: Sequence[Rows]) -> Tensor:
        """Write the keys and values of some rows and score the vocabulary, or `columns` of it, for each."""
        return self.logits_and_states(work, 0)[0]

    def logits_and_states(self, work: Sequence[Rows], layers: int) -> tuple[Tensor, Tensor]:
        """The same, with the hidden states of the last layers side by side, the last of them normed [rows,
        layers·hidden]."""
        operations, rows, hidden = self._prepare(work), sum(len(some.tokens) for some in work), self.decoder.arch.hidden
        out, states = torch.empty(rows, self.scored), torch.empty(rows, layers, hidden)
        operations.table[-1, 5] = out.data_ptr()
        done = 0
        for at, end in enumerate(operations.entered[len(operations.entered) - layers + 1 :] if layers else ()):
            self._run(operations, end, done)
            states[:, at] = self.buffers["x"][:rows]
            done = end
        self._run(operations, len(operations.table), done)
        if layers:
            states[:, -1] = self.buffers["h"][:rows]
        return out, states.flatten(1)

    def _run(self, operations: Operations, end: int, start: int = 0) -> None:
        table, threads = operations.table, threads_now()
        begin = table.ctypes.data + start * table.strides[0]
        self._header[:] = 0, end - start, begin, self.kernels.team_size, 0
        before = time.perf_counter()
        self.kernels.run(self._header.ctypes.data, threads)
        seconds = max(time.perf_counter() - before, 1e-9)
        least = self._times.least((operations.count, start, end), seconds)
        if least is not None:
            PACE.note(StepTime(seconds, least, float(self._header[LOST]) / 1e9))

    def _prepare(self, work: Sequence[Rows]) -> Operations:
        """Fill the first buffers and the table of rows."""
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
        operations.table[operations.attending, CUTS] = int(positions.max()) // SPLIT + 1
        return operations

    def _look_up(self, tokens: Tensor, into: Tensor) -> None:
        table = self.decoder.embedding
        if isinstance(table, Tensor):
            torch.index_select(table, 0, tokens, out=into)
        else:
            into.copy_(table[tokens])

    def _enter(self, rows: Rows, entries: np.ndarray) -> None:
        """Fill the entries of some rows, but for their counts, in the order of ENTRY."""
        data, kv_slot = self.memory.data, self.memory.data.stride(4) * self.memory.data.element_size()
        pages = np.asarray(rows.table.pages, dtype=np.int64) * (data.stride(0) * data.element_size()) + data.data_ptr()
        behind = np.arange(rows.prefix, rows.start + len(rows.tokens))
        tail = pages[behind // PAGE] + behind % PAGE * kv_slot
        paths = _paths(rows, tail)
        entries[:, 0], entries[:, 1] = pages.ctypes.data, rows.prefix
        entries[:, 2] = tail[rows.start - rows.prefix :]
        entries[:, 4] = paths.ctypes.data + np.arange(len(paths)) * paths.strides[0]
        self._paths += [pages, paths]

    def _listed(self, rows: int) -> Operations:
        """List the operations of a step over so many rows."""
        operations = Operations(rows)
        for index, layer in enumerate(self.decoder.layers):
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
        """Where the operation before a layer is to put its rows rounded; nowhere unless the layer wants them so."""
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
        whole = arch.heads // arch.kv_heads * arch.head_dim % BLOCK == 0  # what one item computes
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
    """List what each row sees behind the prefix, by addresses; a parent's KV slot is below its child's, so these
    follow the path."""
    if len(rows.seen) == 1 and rows.seen[0] + 1 == 1 << len(tail):  # plain decoding
        return tail[None]
    seen = rows.behind()
    paths = np.zeros((len(seen), int(seen.sum(axis=1).max())), dtype=np.int64)
    for path, one in zip(paths, seen, strict=True):
        found = tail[one]
        path[: len(found)] = found
    return paths


def fuse(decoder: Decoder, memory: Memory) -> FusedStep | None:
    """Return the fused step of a decoder on a CPU whose matrices all use the small-row kernel; None for others."""
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
