"""The three small functions between a layer's products; torch.compile makes each one GPU kernel.

Owns their arithmetic, and whether they are compiled. Invariant: they never wait for the device, and the bucket alone
decides their shapes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from specbranch.core.pages import PAGE
from specbranch.models.forward import rope
from specbranch.models.forward.arithmetic import gated, heads_normed, normed

log = logging.getLogger("specbranch")

COMPILATIONS = 256  # of a function, at most: one for each model shape and each number of rows


@dataclass(frozen=True, slots=True)
class Small:
    """The three functions, compiled or plain."""

    turned: Callable[..., Tensor]
    added: Callable[..., tuple[Tensor, Tensor]]
    gated: Callable[[Tensor], Tensor]


def turned(
    qkv: Tensor, norm: Tensor | None, eps: float, cos: Tensor, sin: Tensor, slots: Tensor, pages: Tensor
) -> Tensor:
    """Rotate queries and keys, and write keys and values to their KV slots; returns queries [rows, heads, head_dim].

    `pages`: [pages, PAGE, 2, kv_heads, head_dim]. The caller makes this view: compiled code would copy one made here.
    """
    kv_heads, head_dim = pages.shape[-2:]
    heads = qkv.view(qkv.shape[0], -1, head_dim)
    scaled = heads if norm is None else heads_normed(heads, pad(norm, (0, 0, 0, kv_heads)), eps)
    all_turned = rope.turn(scaled, cos, sin)
    # Values are rotated in vain, and taken as they were: a `cat` of keys and values would be another kernel.
    is_value = torch.arange(2 * kv_heads, device=qkv.device)[:, None] >= kv_heads
    both = torch.where(is_value, heads[:, -2 * kv_heads :], all_turned[:, -2 * kv_heads :])
    at = slots.long()
    pages.index_put_((at // PAGE, at % PAGE), both.view(-1, 2, kv_heads, head_dim))
    return all_turned[:, : -2 * kv_heads].contiguous()


def added(x: Tensor, more: Tensor, norm: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return x + more, and its norm."""
    x = x + more
    return x, normed(x, norm, eps)


PLAIN_FUNCTIONS = Small(turned, added, gated)


def small_functions(device: torch.device) -> Small:
    """Return the functions for a device."""
    return _compiled() if device.type == "cuda" else PLAIN_FUNCTIONS


@cache
def _compiled() -> Small:
    import torch._dynamo as dynamo

    dynamo.config.recompile_limit = max(dynamo.config.recompile_limit, COMPILATIONS)
    return Small(_Compiled(turned), _Compiled(added), _Compiled(gated))


class _Compiled:
    """A function compiled by torch.compile; after the first failure it runs uncompiled."""

    def __init__(self, plain: Callable[..., Any]) -> None:
        self._plain = plain
        # No dynamic shapes: sums over a dynamic width are slow, and there are few numbers of rows. No autotuning: it
        # would copy all pages, and a row's bits would depend on its timings.
        options: dict[str, str | int | bool | Callable[..., Any]] = {"triton.autotune_pointwise": False}
        self._now: Callable[..., Any] = torch.compile(plain, dynamic=False, fullgraph=True, options=options)

    def __call__(self, *given: Any) -> Any:
        if self._now is self._plain:
            return self._plain(*given)
        try:
            return self._now(*given)
        except Exception as reason:  # compilers raise errors of all kinds
            log.warning(
                "A step's %s runs uncompiled, which is slow: %s: %s",
                self._plain.__name__,
                type(reason).__name__,
                reason,
            )
            self._now = self._plain
            return self._plain(*given)
