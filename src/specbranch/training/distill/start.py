"""A finished draft as the start of a training, instead of layers of its target.

Owns how a draft's tensors become those of a student. Invariant: a student that was started and not trained gives the
draft's logits, in the precision of training.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from specbranch.models.drafts.load import DraftOfTarget
from specbranch.models.files.weights import LayerWeights, Weights, read_layers
from specbranch.training.distill.model import Stack, TrainedLayer


@dataclass(frozen=True, slots=True)
class StartingDraft:
    """The tensors that a draft has of its own."""

    layers: tuple[LayerWeights, ...]
    norm: Tensor
    head_ids: Tensor | None

    @classmethod
    def of(cls, found: DraftOfTarget, device: torch.device) -> StartingDraft:
        """Read a draft in float32."""
        layers, norm = read_layers(found.arch, found.draft, device, torch.float32, None)
        ids = found.draft.head_ids
        return cls(layers, norm, None if ids is None else ids.to(device))

    @torch.no_grad()
    def give(self, student: Stack) -> None:
        """Set a student's weights, in place: an optimiser that has them keeps them."""
        for block, layer in zip(student.blocks, self.layers, strict=True):
            block.load_state_dict(TrainedLayer(layer, trained=True).state_dict())
        student.norm.copy_(self.norm)

    def student(self, found: DraftOfTarget, weights: Weights) -> Stack:
        """Return the draft as a stack."""
        made = Stack(found.target, weights, found.draft.info.layers, trained=True, head_ids=self.head_ids)
        self.give(made)
        return made
