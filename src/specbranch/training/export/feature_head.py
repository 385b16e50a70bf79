"""A feature draft in the layout of speculators (eagle3): config.json and model.safetensors.

Owns what that layout says. Ours has its tensors' names already; an export adds the output head, which comes from the
target, and says in config.json what the family says of itself. A family whose q, k and v have biases is written as
Llama's layer with biases: its output matrix gets one of zeros. Invariant: the tensors are those that the draft computes
with; the embedding stays the target's.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save as as_safetensors
from torch import Tensor

from specbranch.errors import BadParameter
from specbranch.models.drafts.load import DraftOfTarget
from specbranch.models.files.architecture import DRAFT_VOCABULARY, SPECULATORS_TYPE, Architecture
from specbranch.models.files.weights import D2T, read_part
from specbranch.training.distill.draft_saving import FEATURE_BLOCK, ON_THE_HUB, config_of
from specbranch.training.export.hf_files import ARCHITECTURES, DRAFTED, check_for_transformers, vocabulary_maps
from specbranch.training.export.whole_draft import HEAD_NAME, WholeDraft

EAGLE_KIND = "eagle3"


def reads_features(found: DraftOfTarget) -> bool:
    """True if a draft reads its target's hidden states."""
    return FEATURE_BLOCK in found.draft.config


def check_for_speculators(found: DraftOfTarget, form: str) -> None:
    """Refuse a form that has no feature drafts, and layers that speculators' layout has no words for."""
    if form != "speculators":
        raise BadParameter(
            f"{found.name} reads its target's hidden states, and --format {form} holds models of their own. Use "
            "--format speculators, or export a plain draft (`specbranch distill` without --kind features)."
        )
    check_for_transformers(found.arch)


def feature_head(found: DraftOfTarget) -> WholeDraft:
    """Read a feature draft's tensors, and the head from its target."""
    ids, stored = _head_ids(found), found.draft
    names = sorted(name for name in stored.names if name.endswith((".weight", ".bias")))
    tensors = {name: stored.tensor(name) for name in names}
    arch = found.arch
    for layer in range(arch.layers if arch.qkv_bias else 0):
        tensors.setdefault(f"layers.{layer}.self_attn.o_proj.bias", torch.zeros(arch.hidden))
    head = read_part(found.target, found.source, "head", torch.device("cpu"), torch.float32)
    tensors[HEAD_NAME] = head if ids is None else head.index_select(0, ids)
    return WholeDraft(stored.folder, arch, {name: one.contiguous() for name, one in tensors.items()}, ids)


def write_head(draft: WholeDraft, found: DraftOfTarget, into: Path) -> None:
    """Write both files in the draft's precision."""
    dtype = str(next(iter(draft.tensors.values())).dtype).removeprefix("torch.")
    config = {**_config(draft, found), "torch_dtype": dtype}
    (into / "config.json").write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    stored = as_safetensors({**draft.tensors, **vocabulary_maps(draft)}, {"format": "pt"})
    (into / "model.safetensors").write_bytes(stored)


def taps_of(found: DraftOfTarget) -> Sequence[int]:
    """Return after how many layers the draft reads its target's states."""
    taps: Sequence[int] = found.draft.config[FEATURE_BLOCK]["taps"]
    return taps


def _head_ids(found: DraftOfTarget) -> Tensor | None:
    if D2T not in found.draft:
        return None
    above = found.draft.tensor(D2T)
    return above + torch.arange(len(above))


def _config(draft: WholeDraft, found: DraftOfTarget) -> Mapping[str, Any]:
    form, target = found.draft.config[FEATURE_BLOCK], found.draft.info.target
    verifier = {"name_or_path": ON_THE_HUB.get(target, target), "architectures": [ARCHITECTURES[found.target.family]]}
    proposal = {"proposal_type": "greedy", "speculative_tokens": DRAFTED, "verifier_accept_k": 1}
    return {
        "architectures": ["Eagle3DraftModel"],
        SPECULATORS_TYPE: EAGLE_KIND,
        "transformer_layer_config": _layer_config(draft.arch),
        DRAFT_VOCABULARY: draft.arch.vocabulary if draft.head_ids is None else len(draft.head_ids),
        "target_hidden_size": found.target.hidden,
        "eagle_aux_hidden_state_layer_ids": list(form["taps"]),
        "norm_before_residual": form["norm_before_residual"],
        "norm_before_fc": False,
        "fc_norm": False,
        "norm_output": form["norm_output"],
        "tie_word_embeddings": False,
        "speculators_config": {
            "algorithm": EAGLE_KIND,
            "proposal_methods": [proposal],
            "default_proposal_method": proposal["proposal_type"],
            "verifier": verifier,
        },
    }


def _layer_config(arch: Architecture) -> dict[str, Any]:
    """Return the layer as one of Llama, or of Qwen3 if it norms queries and keys."""
    as_llama = replace(arch, family="llama", windows=(), out_bias=arch.qkv_bias, tied=False)
    return {**config_of(replace(arch, tied=False) if arch.qk_norm else as_llama), "rope_theta": arch.rope.theta}
