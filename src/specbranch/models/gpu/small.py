"""The three small functions between a layer's products, shared by all layers: each is one kernel on a GPU, through
torch.compile.

Owns their arithmetic and whether they are compiled. Invariant: they wait for nothing, and their shapes follow from the
bucket alone.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad, rms_norm, silu

from specbranch.core.pages import PAGE
from specbranch.models import rope

log = logging.getLogger("specbranch")

COMPILATIONS = 256  # of a function: one for each shape of a model and each number of rows


@dataclass(frozen=True, slots=True)
class Small:
    """The functions as a device runs them."""

    turned: Callable[..., Tensor]
    added: Callable[..., tuple[Tensor, Tensor]]
    gated: Callable[[Tensor], Tensor]


def turned(
    qkv: Tensor, norm: Tensor | None, eps: float, cos: Tensor, sin: Tensor, slots: Tensor, pages: Tensor
) -> Tensor:
    """Turn queries and keys, write keys and values to their KV slots; returns the queries [rows, heads, head_dim].

    `pages` [pages, PAGE, 2, kv_heads, head_dim] is written to as it was given: a view made in here would be copied when
    compiled.
    """
    kv_heads, head_dim = pages.shape[-2:]
    heads = qkv.view(qkv.shape[0], -1, head_dim)
    normed = heads if norm is None else rms_norm(heads, (head_dim,), eps=eps) * pad(norm, (0, 0, 0, kv_heads))
    all_turned = rope.turn(normed, cos, sin)
    # Values are turned for nothing and chosen as they were: a cat of keys and values would be a kernel of its own.
    is_value = torch.arange(2 * kv_heads, device=qkv.device)[:, None] >= kv_heads
    both = torch.where(is_value, heads[:, -2 * kv_heads :], all_turned[:, -2 * kv_heads :])
    at = slots.long()
    pages.index_put_((at // PAGE, at % PAGE), both.view(-1, 2, kv_heads, head_dim))
    return all_turned[:, : -2 * kv_heads].contiguous()


def added(x: Tensor, more: Tensor, norm: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return the sum, and the sum normed."""
    x = x + more
    return x, rms_norm(x, (x.shape[-1],), norm, eps)


def gated(gate_up: Tensor) -> Tensor:
    """Return silu(gate)·up."""
    gate, up = gate_up.chunk(2, -1)
    return silu(gate) * up


PLAIN = Small(turned, added, gated)


def small_functions(device: torch.device) -> Small:
    """Return the functions for a device."""
    return _compiled() if device.type == "cuda" else PLAIN


@cache
def _compiled() -> Small:
    import torch._dynamo as dynamo

    dynamo.config.recompile_limit = max(dynamo.config.recompile_limit, COMPILATIONS)
    return Small(_Compiled(turned), _Compiled(added), _Compiled(gated))


class _Compiled:
    """A function through torch.compile, and as it is from the first failure on."""

    def __init__(self, plain: Callable[..., Any]) -> None:
        self._plain = plain
        # Shapes are never left open: sums over an open width are slow, and rows come in few numbers. Nothing is tried
        # out either: that would make a copy of all pages, and a row's bits a matter of chance.
        options: dict[str, str | int | bool | Callable[..., Any]] = {"triton.autotune_pointwise": False}
        self._now: Callable[..., Any] = torch.compile(plain, dynamic=False, fullgraph=True, options=options)

    def __call__(self, *given: Any) -> Any:
        if self._now is self._plain:
            return self._plain(*given)
        try:
            return self._now(*given)
        except Exception as reason:  # whatever a compiler may raise
            log.warning(
                "A step's %s runs uncompiled, which is slow: %s: %s",
                self._plain.__name__,
                type(reason).__name__,
                reason,
            )
            self._now = self._plain
            return self._plain(*given)
