"""Attention of a draft that is fed its own states: rows of the text, and after them a few keys of each query's own.

Owns the softmax over both parts and its gradient, and the kernels of the first part: masked (any device) and flash
attention by segments (GPUs). Invariants: the result is that of one softmax over all keys, and so is the gradient. No
scores are kept for the backward pass, so memory does not grow with the number of unrolled steps.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor

from specbranch.training.distill.attention import SLOW_ATTENTION, agrees, mask_of
from specbranch.training.distill.material import Batch

log = logging.getLogger("specbranch")

MASKED_SCORES = 1 << 28  # scores that exist at once


class Kernel(Protocol):
    """Causal attention within segments; all tensors are [batch, length, heads, head_dim]."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Return the result, and the logarithm of the sum of exponentials of scores [batch, length, heads]."""

    def backward(
        self, gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, log_sum: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of q, k and v, where `out` and `log_sum` may be those over further keys, too."""


def attend_unrolled(
    kernel: Kernel, q: Tensor, k: Tensor, v: Tensor, own_keys: Sequence[Tensor], own_values: Sequence[Tensor]
) -> Tensor:
    """Attend to k and v as the kernel does, and to each query's own keys, which stand at its place in `own_keys`."""
    out: Tensor = _Unrolled.apply(kernel, q, k, v, *own_keys, *own_values)  # type: ignore[no-untyped-call]
    return out


class _Unrolled(torch.autograd.Function):
    """Two softmaxes become one by their sums of exponentials. Backwards, each part needs the common sum only."""

    @staticmethod
    def forward(ctx: Any, kernel: Kernel, q: Tensor, k: Tensor, v: Tensor, *own: Tensor) -> Tensor:
        keys, values = own[: len(own) // 2], own[len(own) // 2 :]
        text, log_sum = kernel.forward(q, k, v)
        scores = [_score(q, key) for key in keys]
        whole = torch.stack((log_sum, *scores), -1).logsumexp(-1)
        out = text * (log_sum - whole).exp().unsqueeze(-1).to(text.dtype)
        for score, value in zip(scores, values, strict=True):
            out = out + (score - whole).exp().unsqueeze(-1).to(text.dtype) * value
        ctx.kernel, ctx.count = kernel, len(keys)
        ctx.save_for_backward(q, k, v, out, whole, *own)
        return out

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, whole, *own = ctx.saved_tensors
        gradient, keys, values = outer[0].contiguous(), own[: ctx.count], own[ctx.count :]
        for_q, for_k, for_v = ctx.kernel.backward(gradient, q, k, v, out, whole)
        mean = (gradient * out).to(whole.dtype).sum(-1)
        for_keys, for_values = [], []
        for key, value in zip(keys, values, strict=True):
            share = (_score(q, key) - whole).exp()
            change = share * ((gradient * value).to(whole.dtype).sum(-1) - mean) * q.shape[-1] ** -0.5
            change, share = (one.unsqueeze(-1).to(q.dtype) for one in (change, share))
            for_q = for_q + change * key
            for_keys.append(change * q)
            for_values.append(share * gradient)
        return None, for_q, for_k, for_v, *for_keys, *for_values


def _score(q: Tensor, key: Tensor) -> Tensor:
    """Return the score of each query with its own key [batch, length, heads], in float32 or better."""
    products = (q * key).to(_wide_type(q.dtype))
    return products.sum(-1).mul(q.shape[-1] ** -0.5)


def _wide_type(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


@dataclass(frozen=True, slots=True)
class MaskedKernel:
    """Plain products with a mask [batch, 1, length, length], in float32 or better; some rows of a batch at a time."""

    mask: Tensor

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """See Kernel."""
        out, sums = torch.empty_like(q), q.new_empty(q.shape[:-1], dtype=self.mask.dtype)
        for part in self._parts(q):
            scores = self._scores(q, k, part)
            log_sum = scores.logsumexp(-1)
            out[part] = (scores.sub_(log_sum.unsqueeze(-1)).exp_() @ self._turned(v[part])).transpose(1, 2).to(q.dtype)
            sums[part] = log_sum.transpose(1, 2)
        return out, sums

    def backward(
        self, gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, log_sum: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See Kernel."""
        found = tuple(torch.empty_like(one) for one in (q, k, v))
        for part in self._parts(q):
            share = self._scores(q, k, part).sub_(log_sum[part].transpose(1, 2).unsqueeze(-1)).exp_()
            g, keys, queries = (self._turned(one[part]) for one in (gradient, k, q))
            change = g @ self._turned(v[part]).transpose(-1, -2)
            change.sub_((g * self._turned(out[part])).sum(-1, keepdim=True)).mul_(share).mul_(q.shape[-1] ** -0.5)
            products = change @ keys, change.transpose(-1, -2) @ queries, share.transpose(-1, -2) @ g
            for into, product in zip(found, products, strict=True):
                into[part] = product.transpose(1, 2).to(q.dtype)
        for_q, for_k, for_v = found
        return for_q, for_k, for_v

    def _parts(self, q: Tensor) -> list[slice]:
        batch, length, heads, _ = q.shape
        step = max(MASKED_SCORES // (heads * length * length), 1)
        return [slice(start, start + step) for start in range(0, batch, step)]

    def _scores(self, q: Tensor, k: Tensor, part: slice) -> Tensor:
        scores = self._turned(q[part]) @ self._turned(k[part]).transpose(-1, -2)
        return scores.mul_(q.shape[-1] ** -0.5).add_(self.mask[part])

    def _turned(self, x: Tensor) -> Tensor:
        return x.transpose(1, 2).to(self.mask.dtype)


@dataclass(frozen=True, slots=True)
class FlashKernel:
    """Flash attention of torch over variable lengths; `edges`: where the segments of the flattened batch begin."""

    edges: Tensor

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """See Kernel."""
        longest = q.shape[1]  # no segment is longer than a row
        flat = [one.flatten(0, 1) for one in (q, k, v)]
        out, log_sum, *_ = torch.ops.aten._flash_attention_forward(
            *flat, self.edges, self.edges, longest, longest, 0.0, True, return_debug_mask=False
        )
        return out.view(q.shape), log_sum.t().reshape(q.shape[:-1])  # from [heads, tokens]

    def backward(
        self, gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, log_sum: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See Kernel."""
        longest = q.shape[1]
        flat = [one.contiguous().flatten(0, 1) for one in (gradient, q, k, v, out)]
        no_dropout = torch.zeros(2, dtype=torch.uint64, device=q.device), torch.empty(0, device=q.device)
        sums = log_sum.flatten(0, 1).t().contiguous()
        found = torch.ops.aten._flash_attention_backward(
            *flat, sums, self.edges, self.edges, longest, longest, 0.0, True, *no_dropout
        )
        for_q, for_k, for_v = (one.view(q.shape) for one in found)
        return for_q, for_k, for_v


def kernel_of(batch: Batch, dtype: torch.dtype, head_dim: int) -> Kernel:
    """Choose for a batch on its device: flash attention if it has edges and works here, else products with a mask."""
    if batch.edges is not None and has_flash(batch.edges.device, dtype, head_dim):
        return FlashKernel(batch.edges)
    return MaskedKernel(mask_of(batch.segments, _wide_type(dtype)))


@cache
@torch.enable_grad()  # the answer is kept, and whoever asks first may be in no_grad
def has_flash(device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
    """True if the flash kernel is there and agrees with the masked one, forward and backward, on random numbers."""
    if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16):
        return False
    segments = torch.tensor([[0] + [1] * 39 + [2] + [3] * 19 + [-1] * 4, [0] + [1] * 63])
    batch = Batch(*[segments] * 5).with_edges()
    assert batch.edges is not None
    kernels = FlashKernel(batch.edges.to(device)), MaskedKernel(mask_of(segments.to(device), torch.float32))
    given = [torch.randn(2, 64, 2, head_dim, device=device, dtype=dtype, requires_grad=True) for _ in range(5)]
    try:
        fast, plain = (_tried(kernel, given) for kernel in kernels)
    except (AttributeError, IndexError, NotImplementedError, RuntimeError, TypeError, ValueError) as error:
        log.warning(SLOW_ATTENTION, error)
        return False
    return agrees(fast, plain)


def _tried(kernel: Kernel, given: list[Tensor]) -> list[Tensor]:
    q, k, v, key, value = given
    out = attend_unrolled(kernel, q, k, v, [key], [value])
    return [out, *torch.autograd.grad(out.float().square().sum(), given)]
