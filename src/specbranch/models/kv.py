"""The memory behind the pages of a model's cache, one pool for all its sequences.

Owns where a KV slot lies in it. Who holds which page, and what is known to lie there, is told by `core.pages`.
Invariant: a page is one piece, all layers in it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from specbranch.core.pages import PAGE, Copy, PageTable
from specbranch.models.files.architecture import Architecture


class Table(PageTable):
    """The pages of one sequence, as KV slots in the memory."""

    def flat(self, kv_slots: np.ndarray) -> np.ndarray:
        """Where KV slots lie in the pool, counted through all its pages."""
        found: np.ndarray = np.asarray(self.pages, dtype=np.int64)[kv_slots // PAGE] * PAGE + kv_slots % PAGE
        return found


SCALE = 4  # bytes behind the int8 numbers of a head: their scale, in float32


class Memory:
    """Keys and values of all pages [pages, layers, 2, kv_heads, PAGE, head_dim]; a page is one piece, all layers in
    it. In int8 the last dimension is longer by the scale."""

    def __init__(self, arch: Architecture, pages: int, device: torch.device, dtype: torch.dtype) -> None:
        shape = (pages, arch.layers, 2, arch.kv_heads, PAGE, _width(arch, dtype))
        # On a CPU nothing is resident before it is written. Elsewhere what a mask hides is still multiplied by 0, and
        # must not be NaN.
        make = torch.empty if device.type == "cpu" else torch.zeros
        self.data = make(shape, device=device, dtype=dtype)

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """The keys and the values of one layer, each [pages, kv_heads, PAGE, head_dim]."""
        both = self.data[:, index]
        return both[:, 0], both[:, 1]

    def move(self, sources: Tensor, targets: Tensor) -> None:
        """Copy KV slots, counted through all pages, to others, in every layer at once; the two may overlap."""
        self.data[targets // PAGE, :, :, :, targets % PAGE] = self.data[sources // PAGE, :, :, :, sources % PAGE]

    def copy(self, copies: Sequence[Copy]) -> None:
        """Copy whole pages."""
        for source, target in copies:
            self.data[target].copy_(self.data[source])


def put(side: Tensor, kv_slots: Tensor, new: Tensor) -> None:
    """Write rows [rows, kv_heads, head_dim] to the keys or the values of one layer; `kv_slots` [2, rows]: pages, and
    KV slots within them."""
    kept = _whole(new) if side.dtype is torch.int8 else new.to(side.dtype)
    _in_words(side)[kv_slots[0], :, kv_slots[1]] = _in_words(kept)


def widened(held: Tensor, dtype: torch.dtype) -> Tensor:
    """Return keys or values as they are computed with."""
    if held.dtype is not torch.int8:
        return held.to(dtype)
    scale = held[..., -SCALE:].contiguous().view(torch.float32)
    return (held[..., :-SCALE] * scale).to(dtype)


def _whole(new: Tensor) -> Tensor:
    """Round the numbers of each head to whole ones, the greatest to 127; their scale lies behind them."""
    greatest = new.float().abs().amax(-1, keepdim=True)
    numbers = (new * torch.where(greatest == 0, 0.0, 127 / greatest)).round().to(torch.int8)
    return torch.cat((numbers, (greatest / 127).view(torch.int8)), dim=-1)


def gathered(side: Tensor, pages: Tensor, end: int) -> Tensor:
    """Copy the first `end` KV slots of some pages, one behind the other, from the keys or the values of one layer.

    Returns [kv_heads, end, head_dim].
    """
    found = _in_words(side).transpose(0, 1)[:, pages]  # [kv_heads, pages, PAGE, words]
    return found.reshape(found.shape[0], -1, found.shape[-1]).view(side.dtype)[:, :end]


def _in_words(x: Tensor) -> Tensor:
    """View the last dimension in words of 16 bytes, if it can be: what is indexed is moved number by number, however
    small those are."""
    return x.view(torch.complex128) if x.shape[-1] * x.element_size() % 16 == 0 else x


def page_bytes(arch: Architecture, dtype: torch.dtype) -> int:
    """How much memory a page takes."""
    return 2 * arch.layers * arch.kv_heads * PAGE * _width(arch, dtype) * dtype.itemsize


def _width(arch: Architecture, dtype: torch.dtype) -> int:
    """How many numbers of this type a head has at a KV slot."""
    return arch.head_dim + (SCALE if dtype is torch.int8 else 0)
