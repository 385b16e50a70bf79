"""Read a GPU's memory as fast as it can be read: the reference for all steps."""

# mypy: disable-error-code="untyped-decorator,no-untyped-def"

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 8192
PROGRAMS = 132 * 16


@triton.jit
def _read(x, sums, blocks, BLOCK: tl.constexpr):
    """Add up every n-th block, n programs side by side; the sum keeps the compiler from dropping a read."""
    total = tl.zeros((BLOCK,), tl.float32)
    for block in tl.range(tl.program_id(0), blocks, tl.num_programs(0), loop_unroll_factor=2):
        total += tl.load(x + block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)).to(tl.float32)
    tl.store(sums + tl.program_id(0), tl.sum(total, 0))


def read_all(much: Tensor) -> Tensor:
    """Read a whole tensor, whose size is a multiple of the block's."""
    sums = torch.empty(PROGRAMS, device=much.device)
    _read[(PROGRAMS,)](much, sums, much.numel() // BLOCK, BLOCK=BLOCK, num_warps=8)
    return sums
