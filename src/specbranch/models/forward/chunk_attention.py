"""Prefill attention: the rows of a chunk attend causally to all tokens of the sequence so far.

Owns two implementations: torch's flash kernel on GPUs, and a masked product on any device, which the flash kernel is
compared with. Windows, sinks and bounded scores take the masked product. Invariants: the device and the model's shape
alone decide which one runs; neither waits for the device.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from specbranch.models.families.operations import PLAIN_ATTENTION, Attention
from specbranch.models.forward.arithmetic import outside, shares

log = logging.getLogger("specbranch")

AttendChunk = Callable[[Tensor, Tensor, Tensor], Tensor]

# Largest difference between the two implementations. bfloat16 has steps of 1/64 between 2 and 4; a wrong mask causes
# differences of about 1.
TOLERATED_ERROR = 0.1


def choose_attend_chunk(
    device: torch.device, dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int
) -> AttendChunk:
    """Return the flash kernel if it works for this shape, else the masked product."""
    return attend_by_flash if flash_works(device, dtype, heads, kv_heads, head_dim) else attend_masked


def attend_by_flash(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Compute `attend_masked` with torch's flash kernel, which skips masked keys and does not repeat key heads."""
    # The kernel itself, unlike scaled_dot_product_attention, aligns a causal mask to the last row and the last key.
    rows = queries.transpose(0, 1)[None]
    out: Tensor = torch.ops.aten._scaled_dot_product_flash_attention(rows, keys[None], values[None], is_causal=True)[0]
    return out[0].transpose(0, 1).reshape(queries.shape[0], -1)


def attend_masked(
    queries: Tensor, keys: Tensor, values: Tensor, attention: Attention = PLAIN_ATTENTION, sinks: Tensor | None = None
) -> Tensor:
    """Attend from the last rows of a sequence [rows, heads, head_dim] to all of it [kv_heads, end, head_dim].

    Returns [rows, heads·head_dim]. `sinks` [heads].
    """
    at = torch.arange(keys.shape[1], device=queries.device)
    own = at[len(at) - len(queries) :, None]
    seen = at <= own
    if attention.window is not None:
        seen = seen & ~outside(attention, at, own + 1 - attention.window)
    if attention.skips_first:
        seen = seen & ((at > 0) | (own == 0))
    if attention.softcap is None and sinks is None:
        return _attend_seen(queries, keys, values, seen, attention.scale)
    rows, heads, head_dim = queries.shape
    grouped = queries.view(rows, keys.shape[0], -1, head_dim).transpose(0, 1)  # [kv_heads, rows, group, head_dim]
    scores = (grouped.flatten(1, 2) @ keys.mT).view(*grouped.shape[:3], -1) * (attention.scale or head_dim**-0.5)
    last = None if sinks is None else sinks.view(keys.shape[0], 1, -1, 1)
    found = shares(scores, ~seen[:, None], attention.softcap, last).to(queries.dtype).flatten(1, 2) @ values
    return found.view(grouped.shape).transpose(0, 1).reshape(rows, heads * head_dim)


def _attend_seen(queries: Tensor, keys: Tensor, values: Tensor, seen: Tensor, scale: float | None) -> Tensor:
    rows, heads, head_dim = queries.shape
    keys, values = keys[None], values[None]
    if queries.device.type == "cpu":
        out = scaled_dot_product_attention(
            queries.transpose(0, 1)[None], keys, values, attn_mask=seen, enable_gqa=True, scale=scale
        )
        return out[0].transpose(0, 1).reshape(rows, heads * head_dim)
    # Masked GPU kernels do not support grouped heads: query heads that share a key head become rows of one head.
    group = heads // keys.shape[1]
    grouped = queries.view(rows, -1, group, head_dim).transpose(0, 1).reshape(1, -1, rows * group, head_dim)
    repeated = seen.repeat_interleave(group, 0, output_size=rows * group)
    out = scaled_dot_product_attention(grouped, keys, values, attn_mask=repeated, scale=scale)
    return out.view(-1, rows, group, head_dim).transpose(0, 1).reshape(rows, heads * head_dim)


@cache
def flash_works(device: torch.device, dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int) -> bool:
    """True if the flash kernel agrees with the masked product; tested once for each shape.

    Warns if a GPU cannot use it.
    """
    if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16):
        return False
    try:
        error = _largest_error(device, dtype, heads, kv_heads, head_dim)
    except Exception as reason:  # torch raises errors of several kinds if it lacks a kernel
        log.warning(
            "Prompts are read slowly: torch's flash attention does not run here (%s).", str(reason).partition("\n")[0]
        )
        return False
    if error < TOLERATED_ERROR:
        return True
    log.warning("Prompts are read slowly: torch's flash attention is off by %.2g.", error)
    return False


@torch.inference_mode()
def _largest_error(device: torch.device, dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int) -> float:
    """Compare both implementations on 5 rows behind 4 others, strided as in a step; shows a misaligned mask."""
    random = torch.Generator().manual_seed(0)
    qkv = torch.randn(5, heads + 2 * kv_heads, head_dim, generator=random).to(device, dtype)
    keys, values = torch.randn(2, kv_heads, 256, head_dim, generator=random).to(device, dtype)[:, :, :9]
    ways = [attend(qkv[:, :heads], keys, values).float() for attend in (attend_by_flash, attend_masked)]
    return float((ways[0] - ways[1]).abs().max())
