"""Running a draft folder beside its target: the layers are the draft's, embedding and output head the target's.

Owns how the two are put together. Invariant: nothing of the target is stored twice in one process; a draft of another target is refused.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from specbranch.core.runner import Runner
from specbranch.core.slots import TAIL
from specbranch.distill.draft_folder import DraftFile, fingerprint_of, read_draft
from specbranch.models.architecture import Architecture
from specbranch.models.decoder import Decoder
from specbranch.models.linear import Linear, choose_linear
from specbranch.models.locate import locate
from specbranch.models.native import NativeRunner, open_model
from specbranch.models.tensor_file import TensorSource
from specbranch.models.weights import HUGGING_FACE, LayerWeights, Matrix, Weights, read_weights


@dataclass(frozen=True, slots=True)
class Shared:
    """What a draft takes from its target."""

    embedding: Tensor
    head: Tensor  # [vocabulary, hidden]

    @classmethod
    def of(cls, runner: Runner | None, device: torch.device, dtype: torch.dtype) -> Shared | None:
        """Take it from a target that runs in this process, on the same device and in the same precision."""
        if not isinstance(runner, NativeRunner) or (runner.device, runner.dtype) != (device, dtype):
            return None
        return cls(runner.decoder.embedding, runner.decoder.head_weight)


def load_draft(
    folder: str | Path,
    target: str | Path,
    *,
    beside: Runner | None = None,
    context_length: int | None = None,
    device: str | torch.device = "cpu",
    dtype: torch.dtype | None = None,
    tail: int = TAIL,
) -> NativeRunner:
    """Load a draft; what it shares is taken from the target that runs `beside` it, or read from the target's file."""
    place = torch.device(device)
    precision = dtype or (torch.float32 if place.type == "cpu" else torch.bfloat16)
    target_arch, source = open_model(locate(str(target)))
    draft = read_draft(folder, fingerprint_of(target_arch, source))
    arch = Architecture.from_config(draft.config, draft.name)
    shared = Shared.of(beside, place, precision) or _read_shared(target_arch, source, place, precision)
    context = arch.choose_context(context_length, shorten=True)
    decoder = Decoder(arch, _weights(arch, draft, shared, place, precision), context + tail)
    if draft.head_ids is not None:
        decoder.head = ReducedHead(shared.head, draft.head_ids.to(place))
    return NativeRunner(decoder, context, tail)


class ReducedHead:
    """Scores some tokens only; the others can never be said."""

    def __init__(self, head: Tensor, ids: Tensor) -> None:
        self.ids = ids
        self.vocabulary = head.shape[0]
        self.weight = head.index_select(0, ids)
        self._score: Linear = choose_linear(self.weight, None)

    def __call__(self, x: Tensor) -> Tensor:
        """Return logits [rows, vocabulary], −inf for the tokens left out."""
        scores = self._score(x)
        return scores.new_full((x.shape[0], self.vocabulary), float("-inf")).index_copy_(1, self.ids, scores)


def _read_shared(arch: Architecture, source: TensorSource, device: torch.device, dtype: torch.dtype) -> Shared:
    """Read embedding and head, and of the layers only one, which is forgotten at once."""
    whole = read_weights(replace(arch, layers=1), source, device, dtype)
    return Shared(whole.embedding, whole.head)


def _weights(arch: Architecture, draft: DraftFile, shared: Shared, device: torch.device, dtype: torch.dtype) -> Weights:
    def tensor(part: str, index: int = 0, suffix: str = "weight") -> Tensor:
        return draft.tensor(f"{HUGGING_FACE[part].format(index)}.{suffix}").to(device, dtype)

    def matrix(parts: tuple[str, ...], index: int, bias: bool) -> Matrix:
        weight = torch.cat([tensor(part, index) for part in parts])
        return Matrix(weight, torch.cat([tensor(part, index, "bias") for part in parts]) if bias else None)

    layers = tuple(
        LayerWeights(
            attention_norm=tensor("attention_norm", index),
            qkv=matrix(("q", "k", "v"), index, arch.qkv_bias),
            q_norm=tensor("q_norm", index) if arch.qk_norm else None,
            k_norm=tensor("k_norm", index) if arch.qk_norm else None,
            out=matrix(("out",), index, arch.out_bias),
            mlp_norm=tensor("mlp_norm", index),
            gate_up=matrix(("gate", "up"), index, arch.mlp_bias),
            down=matrix(("down",), index, arch.mlp_bias),
        )
        for index in range(arch.layers)
    )
    return Weights(shared.embedding, layers, tensor("norm"), shared.head)
