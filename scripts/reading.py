"""How fast a GPU's memory can be read: what all steps are held against."""

# mypy: disable-error-code="untyped-decorator,no-untyped-def"

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 8192
PROGRAMS = 132 * 16


@triton.jit
def _read(x, sums, blocks, BLOCK: tl.constexpr):
    """Add up every so manieth block, so that nothing that was read is left out."""
    total = tl.zeros((BLOCK,), tl.float32)
    for block in tl.range(tl.program_id(0), blocks, tl.num_programs(0), loop_unroll_factor=2):
        total += tl.load(x + block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)).to(tl.float32)
    tl.store(sums + tl.program_id(0), tl.sum(total, 0))


def read_all(much: Tensor) -> Tensor:
    """Read a tensor whole; its size is a multiple of the block's."""
    sums = torch.empty(PROGRAMS, device=much.device)
    _read[(PROGRAMS,)](much, sums, much.numel() // BLOCK, BLOCK=BLOCK, num_warps=8)
    return sums
