"""A draft with everything that it takes from its target, in floats, under Hugging Face's names.

Owns which tensors an export has, and the least precision that holds them all. Invariant: the tensors are those that the
draft computes with in float32, number by number; only a reduced head leaves out rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from specbranch.models.drafts.load import DraftOfTarget
from specbranch.models.families.family import HUGGING_FACE
from specbranch.models.files.architecture import Architecture
from specbranch.models.files.weights import read_layers, read_part
from specbranch.progress import StepsDone
from specbranch.training.distill.draft_saving import layer_tensors, norm_in_file

EMBEDDING_NAME, HEAD_NAME, NORM_NAME = (f"{HUGGING_FACE[part]}.weight" for part in ("embedding", "head", "norm"))
HALF_SIZES = (torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True)
class WholeDraft:
    """A draft that needs no target's file beside it."""

    folder: Path  # of the draft
    arch: Architecture  # tied: the head is the embedding
    tensors: Mapping[str, Tensor]
    head_ids: Tensor | None  # tokens of a reduced head, ascending; None: the head is whole

    @property
    def parameters(self) -> int:
        """The number of weights."""
        return sum(tensor.numel() for tensor in self.tensors.values())

    @property
    def layers(self) -> int:
        """The number of layers."""
        return self.arch.layers

    def fits(self, dtype: torch.dtype) -> bool:
        """True if a type holds every number exactly."""
        return all(torch.equal(tensor.to(dtype).float(), tensor) for tensor in self.tensors.values())

    def stored_as(self, dtype: torch.dtype) -> WholeDraft:
        """Return the draft with all tensors in another precision."""
        return replace(self, tensors={name: tensor.to(dtype) for name, tensor in self.tensors.items()})


def whole_draft(found: DraftOfTarget, steps: StepsDone) -> WholeDraft:
    """Read a draft's layers, and embedding and head from its target."""
    cpu, ids = torch.device("cpu"), found.draft.head_ids
    arch = replace(found.arch, tied=found.arch.tied and ids is None)
    steps("Reading the draft", 0, 2)
    layers, norm = read_layers(arch, found.draft, cpu, torch.float32, None)
    tensors = {EMBEDDING_NAME: _from_target(found, "embedding")}
    for index, layer in enumerate(layers):
        tensors |= layer_tensors(arch, layer, index)
    tensors[NORM_NAME] = norm_in_file(arch, norm)
    steps("Reading the target's embedding", 1, 2)
    if not arch.tied:
        head = _from_target(found, "head")
        tensors[HEAD_NAME] = head if ids is None else head.index_select(0, ids)
    whole = {name: tensor.contiguous() for name, tensor in tensors.items()}
    return WholeDraft(found.draft.folder, arch, whole, ids)


def least_precision(draft: WholeDraft) -> torch.dtype:
    """Return the smallest type that holds every number of a draft exactly; float32 if no half does."""
    return next((half for half in HALF_SIZES if draft.fits(half)), torch.float32)


def _from_target(found: DraftOfTarget, part: str) -> Tensor:
    return read_part(found.target, found.source, part, torch.device("cpu"), torch.float32)
