"""A matrix product for few rows on CPUs, as machine code: its source, its compilation (llvmlite) and its launch on torch's own threads.

BLAS repacks the weights whenever there is more than one row; a decoder at 2 to 16 rows then waits for that instead of for memory. Here
each weight is loaded once for all rows. Owns no weights and chooses nothing (see `linear`).

Invariant: an element of the result is one chain of fused multiply-adds in a fixed order, whatever the number of rows or threads. Row i of
a call with many rows therefore equals, bit for bit, the call with that row alone.
"""

from __future__ import annotations

import ctypes
import platform
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

ROWS = 4  # rows of one tile; more rows reuse the tile's weights from the first cache level
PART = 1 << 16  # bytes of weights that a thread takes at a time

Launch = Callable[[int, int, int, int, int, int, int], None]
Arguments = ctypes.c_int64 * 9


@dataclass(frozen=True, slots=True)
class Machine:
    """Width of a vector and how many outputs a tile may hold before its sums no longer fit in registers."""

    lanes: int
    outs: int


@dataclass(frozen=True, slots=True)
class Kernel:
    """Compiled code for y = x·Wᵀ + b over contiguous float32, called with addresses."""

    work: int
    engine: object  # owns the code: must outlive `work`
    team: Callable[[int, object, int, int], None] | None  # runs `work` on every thread of torch's pool

    def __call__(self, x: int, weight: int, bias: int, y: int, rows: int, ins: int, outs: int) -> None:
        """Write the product of the rows at `x` to `y`; `bias` 0 means none."""
        # The first number counts the outputs already taken: threads help themselves, so a slow one holds nobody up.
        arguments = Arguments(0, x, weight, bias, y, rows, ins, outs, max(4, PART // (16 * ins) * 4))
        threads = torch.get_num_threads() if self.team else 1
        if self.team and threads > 1:
            self.team(self.work, arguments, threads, 0)
        else:
            _Work(self.work)(arguments)


_Work = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


@cache
def load_kernel() -> Kernel | None:
    """Compile the kernel for this machine, once a process; None where that cannot be done.

    Call it before weights are loaded: the compiler's own pages are given back afterwards and so never add to the peak.
    """
    try:
        import llvmlite.binding as llvm
    except ImportError:
        return None
    machine = _machine(dict(llvm.get_host_cpu_features()))
    if machine is None:
        return None
    try:
        engine = _compile(llvm, source(machine))
    except (RuntimeError, OSError):  # an LLVM too old for this source
        return None
    _forget_pages("llvmlite")
    return Kernel(engine.get_function_address("work"), engine, _torch_team())


def _machine(features: dict[str, bool]) -> Machine | None:
    if platform.machine() in ("aarch64", "arm64"):
        return Machine(lanes=4, outs=4)
    if not features.get("fma"):
        return None  # a fused multiply-add would be a library call for each number
    return Machine(lanes=16, outs=4) if features.get("avx512f") else Machine(lanes=8, outs=2)
