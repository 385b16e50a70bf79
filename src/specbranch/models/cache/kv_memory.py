"""The memory of a model's KV cache: one tensor of pages for all sequences; features are one more tensor beside it.

Owns where a KV slot lies in memory, and the int8 layout of keys and values. Does not own who holds which page
(`core/pages.py`). Invariant: a page is contiguous and holds all layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from specbranch.core.pages import PAGE, Copy, PageTable
from specbranch.models.files.architecture import Architecture
from specbranch.models.files.matrix import SCALE_BYTES


class Table(PageTable):
    """The page table of one sequence, with its KV slots as numbers for the memory."""

    def flat(self, kv_slots: np.ndarray) -> np.ndarray:
        """Translate KV slots of the sequence into KV slots of the pool, counted through all its pages."""
        found: np.ndarray = np.asarray(self.pages, dtype=np.int64)[kv_slots // PAGE] * PAGE + kv_slots % PAGE
        return found


class LayerMemory(Protocol):
    """What a kind of layer keeps of the tokens so far. Attention keeps keys and values of each of them (`Memory`).

    A layer with a recurrent state has no such memory yet; docs/gpu.md says how a state would fork and roll back.
    """

    def move(self, sources: Tensor, targets: Tensor) -> None:
        """Make the KV slots `targets` of the pool stand for the tokens of `sources`: accepted nodes close up."""
        ...

    def copy(self, copies: Sequence[Copy]) -> None:
        """Make pages stand for the tokens of others: a sequence forks, or writes to a page that it shares."""
        ...


class Memory:
    """Keys and values of all pages [pages, layers, 2, kv_heads, PAGE, head_dim].

    In int8 the last dimension is SCALE_BYTES longer: each head's numbers are followed by their scale.
    """

    def __init__(self, arch: Architecture, pages: int, device: torch.device, dtype: torch.dtype) -> None:
        shape = (pages, arch.layers, 2, arch.kv_heads, PAGE, _width(arch, dtype))
        # On a CPU memory is resident only once it is written, so it stays empty. Elsewhere a kernel multiplies masked
        # slots by 0: they must not be NaN.
        make = torch.empty if device.type == "cpu" else torch.zeros
        self.data = make(shape, device=device, dtype=dtype)

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """Return the keys and the values of one layer, each [pages, kv_heads, PAGE, head_dim]."""
        both = self.data[:, index]
        return both[:, 0], both[:, 1]

    def move(self, sources: Tensor, targets: Tensor) -> None:
        """Copy KV slots of the pool to others, in every layer; sources and targets may overlap."""
        self.data[targets // PAGE, :, :, :, targets % PAGE] = self.data[sources // PAGE, :, :, :, sources % PAGE]

    def copy(self, copies: Sequence[Copy]) -> None:
        """Copy whole pages."""
        for source, target in copies:
            self.data[target].copy_(self.data[source])


class FeatureMemory:
    """One vector for each KV slot of all pages [KV slots, hidden]: what a draft reads of its target's hidden states.

    It moves and is copied with keys and values, so whoever takes pages has their features. The last page, for padding,
    begins with zeros.
    """

    def __init__(self, pages: int, hidden: int, device: torch.device, dtype: torch.dtype) -> None:
        make = torch.empty if device.type == "cpu" else torch.zeros  # see `Memory`
        self.data = make(pages * PAGE, hidden, device=device, dtype=dtype)
        self.data[-PAGE:] = 0

    def put(self, kv_slots: Tensor, rows: Tensor) -> None:
        """Write rows [rows, hidden] to KV slots of the pool [rows]."""
        self.data[kv_slots] = rows.to(self.data.dtype)

    def move(self, sources: Tensor, targets: Tensor) -> None:
        """Copy KV slots of the pool to others; sources and targets may overlap."""
        self.data[targets] = self.data[sources]

    def copy(self, copies: Sequence[Copy]) -> None:
        """Copy whole pages."""
        pages = self.data.view(-1, PAGE, self.data.shape[-1])
        for source, target in copies:
            pages[target].copy_(pages[source])


def put(side: Tensor, kv_slots: Tensor, new: Tensor) -> None:
    """Write rows [rows, kv_heads, head_dim] to the keys or the values of one layer.

    `kv_slots` [2, rows]: the page of each row, and its offset within the page.
    """
    stored = _quantised(new) if side.dtype is torch.int8 else new.to(side.dtype)
    _in_words(side)[kv_slots[0], :, kv_slots[1]] = _in_words(stored)


def widened(stored: Tensor, dtype: torch.dtype) -> Tensor:
    """Return stored keys or values in the type that the model computes in."""
    if stored.dtype is not torch.int8:
        return stored.to(dtype)
    scale = stored[..., -SCALE_BYTES:].contiguous().view(torch.float32)
    return (stored[..., :-SCALE_BYTES] * scale).to(dtype)


def _quantised(new: Tensor) -> Tensor:
    """Round each head's numbers to int8, scaled so that the greatest becomes 127; append the scale."""
    greatest = new.float().abs().amax(-1, keepdim=True)
    numbers = (new * torch.where(greatest == 0, 0.0, 127 / greatest)).round().to(torch.int8)
    return torch.cat((numbers, (greatest / 127).view(torch.int8)), dim=-1)


def gathered(side: Tensor, pages: Tensor, end: int) -> Tensor:
    """Copy the first `end` KV slots of a sequence out of its pages [kv_heads, end, head_dim].

    `side`: the keys or the values of one layer.
    """
    found = _in_words(side).transpose(0, 1)[:, pages]  # [kv_heads, pages, PAGE, words]
    return found.reshape(found.shape[0], -1, found.shape[-1]).view(side.dtype)[:, :end]


def _in_words(x: Tensor) -> Tensor:
    """View the last dimension in words of 16 bytes if its size allows that.

    Torch's indexing moves one element at a time, however small; few large ones are faster.
    """
    return x.view(torch.complex128) if x.shape[-1] * x.element_size() % 16 == 0 else x


def page_bytes(arch: Architecture, dtype: torch.dtype) -> int:
    """Return the bytes of a page."""
    return 2 * arch.layers * arch.kv_heads * PAGE * _width(arch, dtype) * dtype.itemsize


def _width(arch: Architecture, dtype: torch.dtype) -> int:
    """Return how many numbers of this type one head takes in a KV slot, its scale included."""
    return arch.head_dim + (SCALE_BYTES if dtype is torch.int8 else 0)
