"""Attention over packed batches, for training: each token sees its own segment up to itself.

Owns both implementations, masked (any device) and by segments (GPUs), and the choice between them. Invariant: both give
the same result up to rounding.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import cache, partial

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from specbranch.training.distill.material import Batch

log = logging.getLogger("specbranch")

SLOW_ATTENTION = "Training attends with masks, which is slow, because attention by segments does not work here: %s."

# queries, keys, values [batch, length, heads, head_dim] to the same shape
AttendPacked = Callable[[Tensor, Tensor, Tensor], Tensor]


def attention(batch: Batch, dtype: torch.dtype, window: int | None = None) -> AttendPacked:
    """Choose for a batch: by segments if it has their edges, else with one mask for all layers of a window."""
    if batch.edges is not None:
        return partial(by_stretches, batch.edges, window=window)
    return partial(masked, mask_of(batch.segments, dtype, window))


def masked(mask: Tensor, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Attend where the mask [batch, 1, length, length] allows it."""
    out = scaled_dot_product_attention(
        queries.transpose(1, 2), keys.transpose(1, 2), values.transpose(1, 2), attn_mask=mask
    )
    return out.transpose(1, 2)


def by_stretches(edges: Tensor, queries: Tensor, keys: Tensor, values: Tensor, window: int | None = None) -> Tensor:
    """Attend causally within each segment of the flattened batch, with the kernel for variable-length sequences."""
    from torch.nn.attention.varlen import varlen_attn  # not in older versions; `has_stretches` asks first

    longest = queries.shape[1]  # no stretch is longer than a row
    q, k, v = (one.flatten(0, 1) for one in (queries, keys, values))
    sees = (-1 if window is None else window - 1, 0)
    out = varlen_attn(q, k, v, edges, edges, longest, longest, window_size=sees)
    assert isinstance(out, Tensor)
    return out.view(queries.shape)


def mask_of(segments: Tensor, dtype: torch.dtype, window: int | None = None) -> Tensor:
    """Return 0 where a token sees another, -inf elsewhere [batch, 1, length, length]."""
    seen = (segments.unsqueeze(2) == segments.unsqueeze(1)).tril()
    seen = seen if window is None else seen.triu(1 - window)
    return torch.zeros_like(seen, dtype=dtype).masked_fill_(~seen, -torch.inf).unsqueeze(1)


@cache
@torch.enable_grad()  # the answer is kept, and whoever asks first may be in no_grad
def has_stretches(device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
    """True if attention by segments is available and correct, forward and backward; tested on random numbers."""
    if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16):
        return False
    segments = torch.tensor([[0] * 40 + [1] * 20 + [-1] * 4, [0] * 64])
    batch = Batch(segments, segments, segments, segments, segments).with_edges()
    assert batch.edges is not None
    inputs = [torch.randn(2, 64, 2, head_dim, device=device, dtype=dtype, requires_grad=True) for _ in range(3)]
    try:
        fast = _with_gradients(partial(by_stretches, batch.edges.to(device)), inputs)
    except (ImportError, RuntimeError, TypeError) as error:
        log.warning(SLOW_ATTENTION, error)
        return False
    plain = _with_gradients(partial(masked, mask_of(segments.to(device), dtype)), inputs)
    return agrees(fast, plain)


def agrees(fast: Sequence[Tensor], plain: Sequence[Tensor]) -> bool:
    """True if a fast attention gives what products with a mask give; warns if not."""
    right = all(torch.allclose(a, b, atol=0.05, rtol=0.05) for a, b in zip(fast, plain, strict=True))
    if not right:
        log.warning(SLOW_ATTENTION, "its results differ from those with a mask")
    return right


def _with_gradients(attend: AttendPacked, inputs: list[Tensor]) -> list[Tensor]:
    out = attend(*inputs)
    return [out, *torch.autograd.grad(out.float().square().sum(), inputs)]
