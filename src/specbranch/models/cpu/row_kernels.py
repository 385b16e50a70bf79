"""The small operations of a decode step on CPUs, and the execution of a whole step, as machine code (llvmlite).

At one row, dispatching the small operations from Python costs as much as a third of the matrix products. Here a step is
a list of operations, which all threads run together in one call from Python. Owns the compiled code and its launch;
`row_kernel_text.py` owns the LLVM text, `forward/fused_step.py` the list.

Invariant: a row's result depends on that row and on the tokens it sees, in their order. It does not depend on other
rows, on the number of threads, or on the KV slots of its tokens. So a token has the same bits alone, in a chain and in
a tree.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

from specbranch.models.cpu.attention_text import Registers, attention
from specbranch.models.cpu.kernels import is_arm
from specbranch.models.cpu.machine_code import CannotCompile, Team, compile_text, team_size_address, torch_team
from specbranch.models.cpu.operation_text import KernelShape
from specbranch.models.cpu.row_kernel_text import source

Operation = Literal["norm", "turn", "attend", "gate"]
OF_ROWS: tuple[Operation, ...] = ("norm", "turn", "gate")
_Run = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


@dataclass(frozen=True, slots=True)
class RowKernels:
    """Compiled code for one shape of heads."""

    engines: tuple[Any, ...]  # own the code
    addresses: dict[Operation, int]
    run_address: int
    alone: Callable[[Any], None]
    team: Team | None
    team_size: int  # address of the function that returns the number of threads

    def run(self, header: int, threads: int) -> None:
        """Run a list of operations.

        `header`: address of five numbers: arrived threads, operations, address of the list, `team_size`, and the
        nanoseconds that threads lost.
        """
        if self.team is None or threads == 1:
            self.alone(header)
        else:
            self.team(self.run_address, header, threads, 0)


@cache
def load_row_kernels(shape: KernelShape) -> RowKernels | None:
    """Compile for this machine, once per process and shape; None if that is impossible."""
    try:
        engine = compile_text(source(shape), optimise=True)
        attending = compile_text(attention(shape, _registers()), optimise=False)
    except CannotCompile:
        return None
    address, size = engine.get_function_address, team_size_address()
    addresses: dict[Operation, int] = {name: address(name) for name in OF_ROWS}
    addresses["attend"] = attending.get_function_address("attend")
    return RowKernels(
        (engine, attending), addresses, address("run"), _Run(address("run")), torch_team() if size else None, size
    )


def _registers() -> Registers:
    """Return the vector registers of this machine."""
    return Registers(lanes=4, queries=4, sums=24) if is_arm() else Registers(lanes=8, queries=3, sums=12)


def float_bits(value: float) -> int:
    """Return the bits of a float32; operations take float arguments as bits."""
    return int(struct.unpack("<i", struct.pack("<f", value))[0])
