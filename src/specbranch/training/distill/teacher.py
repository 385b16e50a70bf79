"""The target's hidden states over its own material: computed per batch, or once if they fit into memory.

Owns that memory. Invariant: a stored state is that of the same token of the same conversation. Conversations do not see
each other, so packing changes it by rounding alone.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from specbranch.models.files.architecture import Architecture
from specbranch.progress import Onlooker
from specbranch.training.distill.attention import has_stretches
from specbranch.training.distill.material import PADDING, Batch, Material
from specbranch.training.distill.model import Stack, sent

log = logging.getLogger("specbranch")

CPU_ROOM = 1 << 30  # bytes that may be filled on a CPU
GPU_SHARE = 0.5  # of the memory that is free on a GPU


class OnDevice(Protocol):
    """Whatever computes with a target's embedding."""

    arch: Architecture
    embedding: Tensor


def moved(batch: Batch, stack: OnDevice) -> Batch:
    """Copy the inputs of the stacks to their device; the weights stay, see `counted`."""
    device, dtype = stack.embedding.device, stack.embedding.dtype
    edges = batch.with_edges().edges if has_stretches(device, dtype, stack.arch.head_dim) else None
    tokens, positions, segments, source = (
        sent(one, device) for one in (batch.tokens, batch.positions, batch.segments, batch.source)
    )
    return Batch(tokens, positions, segments, batch.weight, source, None if edges is None else sent(edges, device))


class Teacher:
    """The target's stack and its hidden states over batches of one material: the normed one, then those after `taps`
    layers."""

    def __init__(self, stack: Stack, taps: Sequence[int] = ()) -> None:
        self.stack, self.taps = stack, tuple(taps)
        self._memory: Tensor | None = None  # [tokens of the material, width]

    @property
    def width(self) -> int:
        """The size of all states of a token."""
        return (1 + len(self.taps)) * self.stack.embedding.shape[1]

    def has_room(self, material: Material) -> bool:
        """True if all hidden states of a material fit into memory next to the training."""
        table = self.stack.embedding
        needed = material.tokens.numel() * self.width * table.itemsize
        if not table.is_cuda:
            return needed <= CPU_ROOM
        torch.cuda.empty_cache()  # what torch keeps of earlier work counts as taken
        return needed <= torch.cuda.mem_get_info(table.device)[0] * GPU_SHARE

    @torch.no_grad()
    def remember(self, material: Material, length: int, rows: int, watch: Onlooker) -> None:
        """Process the whole material once and store the states."""
        table = self.stack.embedding
        memory = table.new_zeros(material.tokens.numel(), self.width)
        done, whole = 0, int(material.lengths.clamp(max=length).sum())
        for batch in material.batches(length, rows, seed=0, epoch=0):
            filled = (batch.segments != PADDING).flatten().nonzero().view(-1)
            at = moved(batch, self.stack)
            on_device = sent(filled, table.device)
            memory[at.source.flatten()[on_device]] = self.listen(at).flatten(0, 1)[on_device]
            done += filled.numel()
            watch("Listening", done, whole, f"{done:,} tokens")
        self._memory = memory

    @torch.no_grad()
    def __call__(self, batch: Batch) -> Tensor:
        """Return the states [batch, length, width] of a batch of the material; those of padding are undefined."""
        return self.listen(batch) if self._memory is None else self._memory[batch.source]

    @torch.no_grad()
    def listen(self, batch: Batch) -> Tensor:
        """Compute the states of any batch."""
        return torch.cat(self.stack.states(batch, self.taps), dim=-1)
