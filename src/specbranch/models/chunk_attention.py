"""Attention of a chunk, the last rows of a text, to all of the text so far: each row sees what comes before it, and
itself.

Owns two ways to the same numbers: torch's flash kernel where it runs, and a masked product on any device, which it is
compared with. Invariants: which way is taken follows from the device and the model's shape alone; neither waits for the
device.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

log = logging.getLogger("specbranch")

AttendChunk = Callable[[Tensor, Tensor, Tensor], Tensor]

# difference between the two ways: bfloat16 has 64ths between 2 and 4; what a wrong mask lets through is of the order of
# 1
TOLERATED = 0.1


def choose_attend_chunk(
    device: torch.device, dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int
) -> AttendChunk:
    """Return the flash kernel where it works for this shape, else the masked way."""
    return attend_by_flash if flash_works(device, dtype, heads, kv_heads, head_dim) else attend_masked


def attend_by_flash(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Do as `attend_masked`, by torch's flash kernel: nothing that is hidden is computed, and key heads are shared
    as they are."""
    # Of the kernel itself, unlike of scaled_dot_product_attention, a causal mask is aligned to the last row and the
    # last key.
    rows = queries.transpose(0, 1)[None]
    out: Tensor = torch.ops.aten._scaled_dot_product_flash_attention(rows, keys[None], values[None], is_causal=True)[0]
    return out[0].transpose(0, 1).reshape(queries.shape[0], -1)


def attend_masked(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Attend with the last rows of a text [rows, heads, head_dim] to all of it [kv_heads, end, head_dim].

    Returns [rows, heads·head_dim].
    """
    rows, heads, head_dim = queries.shape
    keys, values = keys[None], values[None]
    at = torch.arange(keys.shape[2], device=queries.device)
    seen = at <= at[keys.shape[2] - rows :, None]
    if queries.device.type == "cpu":
        out = scaled_dot_product_attention(queries.transpose(0, 1)[None], keys, values, attn_mask=seen, enable_gqa=True)
        return out[0].transpose(0, 1).reshape(rows, heads * head_dim)
    # Masked kernels of GPUs know no groups of heads: those that share a key head are taken as several rows.
    group = heads // keys.shape[1]
    grouped = queries.view(rows, -1, group, head_dim).transpose(0, 1).reshape(1, -1, rows * group, head_dim)
    out = scaled_dot_product_attention(
        grouped, keys, values, attn_mask=seen.repeat_interleave(group, 0, output_size=rows * group)
    )
    return out.view(-1, rows, group, head_dim).transpose(0, 1).reshape(rows, heads * head_dim)


@cache
def flash_works(device: torch.device, dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int) -> bool:
    """Whether the flash kernel gives what the masked way gives, tried once for each shape; says so where a GPU must
    do without."""
    if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16):
        return False
    try:
        error = _largest_error(device, dtype, heads, kv_heads, head_dim)
    except Exception as reason:  # whatever torch may raise of a kernel that it does not have
        log.warning(
            "Prompts are read slowly: torch's flash attention does not run here (%s).", str(reason).partition("\n")[0]
        )
        return False
    if error < TOLERATED:
        return True
    log.warning("Prompts are read slowly: torch's flash attention is off by %.2g.", error)
    return False


@torch.inference_mode()
def _largest_error(device: torch.device, dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int) -> float:
    """Compare the two ways on the last rows of a short text, laid out as in a step: a wrong alignment shows."""
    random = torch.Generator().manual_seed(0)
    qkv = torch.randn(5, heads + 2 * kv_heads, head_dim, generator=random).to(device, dtype)
    keys, values = torch.randn(2, kv_heads, 256, head_dim, generator=random).to(device, dtype)[:, :, :9]
    ways = [attend(qkv[:, :heads], keys, values).float() for attend in (attend_by_flash, attend_masked)]
    return float((ways[0] - ways[1]).abs().max())
