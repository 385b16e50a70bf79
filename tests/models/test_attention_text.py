"""Compiled attention by itself: every shape of heads against plain arithmetic, and a row's bits in any batch."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import pytest
import torch

from specbranch.core.pages import PAGE
from specbranch.models.cache.kv_memory import _quantised, widened
from specbranch.models.cpu.attention_text import SPLIT, Registers, attention, part_floats
from specbranch.models.cpu.kernels import load_kernel
from specbranch.models.cpu.machine_code import compile_text
from specbranch.models.cpu.operation_text import OPERATION_FIELDS, KernelShape
from specbranch.models.cpu.row_kernels import float_bits
from tiers import each_value

pytestmark = pytest.mark.skipif(load_kernel() is None, reason="no compiled kernels on this machine")

ARM, X86 = Registers(lanes=4, queries=4, sums=24), Registers(lanes=8, queries=3, sums=12)
LAYERS, LAYER = 2, 1


@dataclass
class Sequence:
    """Keys and values in pages in any order; slots behind `prefix` are reached by the path."""

    shape: KernelShape
    count: int
    prefix: int
    seed: int
    held: list[np.ndarray] = field(default_factory=list)

    def __post_init__(self) -> None:
        made, pages = torch.Generator().manual_seed(self.seed), -(-self.count // PAGE)
        memory = torch.randn(pages + 2, LAYERS, 2, self.shape.kv_heads, PAGE, self.shape.head_dim, generator=made)
        self.memory = {4: memory, 2: memory.bfloat16(), 1: _quantised(memory)}[self.shape.size]
        self.order = torch.randperm(pages + 2, generator=made)[:pages].numpy()
        self.query = torch.randn(self.shape.row, generator=made)

    def entry(self) -> list[int]:
        """Its row in the table."""
        kv_slots = np.arange(self.count)
        pages = self.memory.data_ptr() + self.order * self.memory[0].nbytes
        line = (pages[kv_slots // PAGE] + kv_slots % PAGE * self.shape.kv_slot)[self.prefix :].copy()
        self.held = [pages.copy(), line]
        return [self.held[0].ctypes.data, self.prefix, 0, self.count, line.ctypes.data]

    def expected(self) -> torch.Tensor:
        """Plain attention, in double precision."""
        held = widened(self.memory[self.order, LAYER], torch.float64)
        whole = held.permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, : self.count]
        group = self.shape.heads // self.shape.kv_heads
        query = self.query[: self.shape.heads * self.shape.head_dim].double().view(-1, group, self.shape.head_dim)
        scores = query @ whole[0].mT / self.shape.head_dim**0.5
        return (scores.softmax(-1) @ whole[1]).flatten()


def attended(shape: KernelShape, machine: Registers, rows: list[Sequence]) -> torch.Tensor:
    engine = compile_text(attention(shape, machine), optimise=False)
    table = np.array([row.entry() for row in rows], dtype=np.int64)
    queries, out = torch.stack([row.query for row in rows]), torch.zeros(len(rows), shape.heads * shape.head_dim)
    cuts = max(-(-row.count // SPLIT) for row in rows)
    parts = torch.full((len(rows) * cuts * shape.heads * part_floats(shape),), torch.nan)
    arrived = torch.zeros(len(rows) * shape.kv_heads, dtype=torch.int64)
    kv_slots = queries.data_ptr(), table.ctypes.data, out.data_ptr(), 0, parts.data_ptr(), arrived.data_ptr()
    numbers = [0, *kv_slots, len(rows), cuts, cuts, LAYER, float_bits(shape.head_dim**-0.5)]
    given = np.array(numbers + [0] * (OPERATION_FIELDS - len(numbers)), dtype=np.int64)
    ctypes.CFUNCTYPE(None, ctypes.c_void_p)(engine.get_function_address("attend"))(given.ctypes.data)
    assert not arrived.any(), "the next step counts from 0"
    return out


@each_value
@pytest.mark.parametrize("machine", [ARM, X86], ids=["arm", "x86"])
@pytest.mark.parametrize("size", [4, 2, 1])
@pytest.mark.parametrize(
    "heads, kv_heads, head_dim", [(9, 3, 64), (4, 4, 16), (14, 2, 64), (8, 1, 32), (2, 1, 128), (10, 2, 80), (2, 1, 6)]
)
def test_attention_is_that_of_plain_arithmetic(
    heads: int, kv_heads: int, head_dim: int, size: Literal[4, 2, 1], machine: Registers
) -> None:
    shape = KernelShape(heads, kv_heads, head_dim, size)
    counts = (1, 3, 4, SPLIT - 1, SPLIT, SPLIT + 1, PAGE + 5, 3 * PAGE)
    rows = [Sequence(shape, count, max(count - 7, 0), seed=count) for count in counts]
    for row, found in zip(rows, attended(shape, machine, rows), strict=True):
        assert torch.allclose(found.double(), row.expected(), rtol=1e-4, atol=1e-5), row.count


@each_value
@pytest.mark.parametrize("size", [4, 2, 1])
@pytest.mark.parametrize("count", [5, SPLIT, SPLIT + 1, 2 * PAGE + 77])
def test_a_rows_bits_depend_on_neither_the_batch_nor_where_the_prefix_ends(count: int, size: Literal[4, 2, 1]) -> None:
    shape = KernelShape(6, 2, 32, size)
    alone = attended(shape, ARM, [Sequence(shape, count, count - 1, seed=1)])[0]
    others = [Sequence(shape, many, many // 2, seed=many) for many in (3, 400, 1000)]
    own = [Sequence(shape, count, prefix, seed=1) for prefix in (0, count // 2)]
    found = attended(shape, ARM, [others[0], own[0], others[1], own[1], others[2]])
    assert torch.equal(found[1], alone) and torch.equal(found[3], alone)
