"""Writing a finished draft into one folder: config.json, model.safetensors, README.md, provenance.json and
evaluation.json.

Owns what is written and in which order; the format is that of `models.drafts.draft_folder`. Invariant: config.json is
written last, so a folder that has one is whole.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save as as_safetensors
from torch import Tensor

from specbranch.core.draft_evaluation import DraftEvaluation
from specbranch.files import spoken
from specbranch.models.drafts.draft_folder import HEAD_IDS, DraftInfo, Storage, read_draft, scale_name
from specbranch.models.drafts.draft_name import KEY
from specbranch.models.drafts.evaluation_file import evaluation_text
from specbranch.models.families.family import HUGGING_FACE
from specbranch.models.families.rotary import rope_settings
from specbranch.models.files.architecture import Architecture
from specbranch.models.files.blocks import AnyMatrix
from specbranch.models.files.disk import RESUME, write_durably
from specbranch.models.files.identity import EVALUATION
from specbranch.models.files.matrix import Matrix
from specbranch.models.files.weights import D2T, NORMS, LayerWeights
from specbranch.training.distill.features import FeatureWeights

FEATURE_BLOCK = "features"  # in config.json: the form of a draft that reads features
# Where a target lies that is known by another name here.
ON_THE_HUB = {"smollm2-135m": "HuggingFaceTB/SmolLM2-135M-Instruct"}


@dataclass(frozen=True, slots=True)
class DraftWeights:
    """What a draft has of its own."""

    layers: Sequence[LayerWeights]
    norm: Tensor
    head_ids: Tensor | None = None  # [K], ascending


def save_draft(
    folder: Path | str,
    arch: Architecture,
    weights: DraftWeights | FeatureWeights,
    info: DraftInfo,
    *,
    taps: Sequence[int] = (),
    licence: str | None = None,
    figures: Mapping[str, Any] | None = None,
    provenance: Mapping[str, Any] | None = None,
    evaluation: DraftEvaluation | None = None,
) -> None:
    """Write a draft of the target `arch`, replacing one that is there; another target's is refused.

    `taps`: those of a feature draft.
    """
    path = Path(folder)
    refuse_other_draft(path, info.target_fingerprint)
    config = {**config_of(arch_of_layers(arch, info.layers)), KEY: asdict(info)}
    config |= {FEATURE_BLOCK: feature_form(taps)} if taps else {}
    measured, made = dict(figures or {}), dict(provenance or {})
    card = _card(info, taps, licence, measured, made)
    texts = {"README.md": card, "provenance.json": _json({**made, "figures": measured})}
    if evaluation is not None:
        texts[EVALUATION] = evaluation_text(evaluation)
    with spoken(path, RESUME):
        for name in ("config.json", EVALUATION):  # an earlier draft's evaluation is not this one's
            (path / name).unlink(missing_ok=True)
    write_durably(path / "model.safetensors", as_safetensors(_stored(arch, weights, info.storage), {"format": "pt"}))
    for name, text in {**texts, "config.json": _json(config)}.items():
        write_durably(path / name, text.encode())


def refuse_other_draft(folder: Path, fingerprint: str) -> None:
    """Refuse to write where the draft of another target, or another model, lies."""
    if (folder / "config.json").exists():
        read_draft(folder).info.check(fingerprint, folder)


def config_of(arch: Architecture) -> dict[str, Any]:
    """Write an architecture as the config.json from which it would be read again."""
    written = {
        "model_type": arch.of_family.model_types[0],
        "num_hidden_layers": arch.layers,
        "hidden_size": arch.hidden,
        "num_attention_heads": arch.heads,
        "num_key_value_heads": arch.kv_heads,
        "head_dim": arch.head_dim,
        "intermediate_size": arch.intermediate,
        "vocab_size": arch.vocabulary,
        "rms_norm_eps": arch.rms_eps,
        "rope_parameters": rope_settings(arch.rope),
        "attention_bias": arch.qkv_bias,
        "mlp_bias": arch.mlp_bias,
        "tie_word_embeddings": arch.tied,
        "max_position_embeddings": arch.context_length,
        arch.of_family.activation_key: arch.of_family.activations[0],
        "eos_token_id": list(arch.eos_ids),
        "bos_token_id": arch.bos_id,
    }
    return {**written, **arch.of_family.settings(arch, written)}


def arch_of_layers(arch: Architecture, layers: Sequence[int]) -> Architecture:
    """Return the architecture of a draft that began with some of a target's layers."""
    windows = tuple(arch.windows[layer] for layer in layers) if arch.windows else ()
    tables = tuple(arch.tables[layer] for layer in layers) if arch.tables else ()
    return replace(arch, layers=len(layers), windows=windows, tables=tables)


def feature_form(taps: Sequence[int]) -> dict[str, Any]:
    """Say how a draft reads its target's states: after which layers, and that neither the residual stream nor the state
    that is fed back is normed."""
    return {"taps": list(taps), "norm_before_residual": False, "norm_output": False}


def _stored(arch: Architecture, weights: DraftWeights | FeatureWeights, storage: Storage) -> dict[str, Tensor]:
    ids = weights.head_ids
    if isinstance(weights, FeatureWeights):
        named = feature_tensors(arch, weights)
        columns = {} if ids is None else {D2T: ids.cpu() - torch.arange(len(ids))}
    else:
        named = {f"{HUGGING_FACE['norm']}.weight": norm_in_file(arch, weights.norm)}
        for index, layer in enumerate(weights.layers):
            named |= layer_tensors(arch, layer, index)
        columns = {} if ids is None else {HEAD_IDS: ids.cpu()}
    stored = {name: tensor.int().contiguous() for name, tensor in columns.items()}
    for name, tensor in named.items():
        stored |= _encoded(name, tensor.detach().cpu(), storage)
    return stored


def feature_tensors(arch: Architecture, weights: FeatureWeights) -> dict[str, Tensor]:
    """Return a feature draft's tensors under the names of speculators (eagle3)."""
    named = {"fc.weight": weights.fc, "norm.weight": weights.norm, "layers.0.hidden_norm.weight": weights.hidden_norm}
    for index, layer in enumerate(weights.layers):
        parts = layer_tensors(arch, layer, index)
        named |= {name.removeprefix("model."): tensor for name, tensor in parts.items()}
    return named


def layer_tensors(arch: Architecture, layer: LayerWeights, index: int) -> dict[str, Tensor]:
    """Take a layer's joined matrices apart, under Hugging Face's names."""
    q, kv = arch.heads * arch.head_dim, arch.kv_heads * arch.head_dim
    parts = {
        **_parts(layer.qkv, {"q": q, "k": kv, "v": kv}),
        **_parts(layer.out, {"out": arch.hidden}),
        **_parts(layer.gate_up, {"gate": arch.intermediate, "up": arch.intermediate}),
        **_parts(layer.down, {"down": arch.hidden}),
    }
    for part in NORMS:
        if (vector := getattr(layer, part)) is not None:
            parts[part, "weight"] = norm_in_file(arch, vector)
    name_of = arch.of_family.name_of
    return {f"{name_of(part, False).format(index)}.{suffix}": tensor for (part, suffix), tensor in parts.items()}


def norm_in_file(arch: Architecture, weight: Tensor) -> Tensor:
    """Return the weight of a norm as its family's files have it."""
    return weight - 1 if arch.of_family.norm_adds_one else weight


def _parts(matrix: AnyMatrix, sizes: Mapping[str, int]) -> dict[tuple[str, str], Tensor]:
    assert isinstance(matrix, Matrix)  # what is trained is in floats
    whole = {"weight": matrix.weight} if matrix.bias is None else {"weight": matrix.weight, "bias": matrix.bias}
    return {
        (part, suffix): rows
        for suffix, tensor in whole.items()
        for part, rows in zip(sizes, torch.split(tensor, list(sizes.values())), strict=True)
    }


def _encoded(name: str, tensor: Tensor, storage: Storage) -> dict[str, Tensor]:
    if storage == "bfloat16" or tensor.dim() < 2:  # norms and biases are small, and coarse steps would hurt them most
        return {name: tensor.bfloat16().contiguous()}
    wide = tensor.float()
    scale = wide.abs().amax(-1).clamp(min=torch.finfo(torch.float32).tiny) / 127
    return {name: (wide / scale.unsqueeze(-1)).round().to(torch.int8), scale_name(name): scale}


def _json(values: Any) -> str:
    return json.dumps(values, indent=2, ensure_ascii=False) + "\n"


def _card(
    info: DraftInfo, taps: Sequence[int], licence: str | None, figures: Mapping[str, Any], provenance: Mapping[str, Any]
) -> str:
    head = (
        "the target's whole vocabulary"
        if info.head_tokens is None
        else f"the {info.head_tokens} tokens the target wrote most often"
    )
    layers = ", ".join(map(str, info.layers))
    after = ", ".join(map(str, taps))
    reads = f"It reads the target's hidden states after {after} layers (EAGLE-3's form).\n" if taps else ""
    return f"""---
license: {(licence or "other").lower()}
base_model: {ON_THE_HUB.get(info.target, info.target)}
library_name: specbranch
---

# Draft for {info.target}

A draft for speculative decoding of {info.target}: {len(info.layers)} layers, started from the target's layers
{layers} and trained to give the target's own distribution on text the target wrote. It proposes {head}.
{reads}Embedding and output head are the target's and are not in this folder, so the draft runs only with its target
(sha256 of the embedding in float32: `{info.target_fingerprint}`). Weights are stored as {info.storage}.

Licence: {licence_sentence(licence)}

## Figures
{card_table(figures)}
## How it was made
{card_table(provenance)}"""


def licence_sentence(licence: str | None) -> str:
    """Say under which licence a draft is."""
    if licence is None:
        return "that of the target, from which the draft is derived; see there."
    return f"{licence}, as the target from which the draft is derived."


def card_table(values: Mapping[str, Any]) -> str:
    """Return values as a table without a head."""
    lines = [f"| {name} | {json.dumps(value, ensure_ascii=False).strip(chr(34))} |" for name, value in values.items()]
    return "\n".join(["", "| | |", "|---|---|", *lines, ""])
