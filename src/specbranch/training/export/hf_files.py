"""A draft as a model folder of transformers: config.json, generation_config.json, model.safetensors and the tokenizer.

Owns these files, and what `speculators` adds to them: the tokens of a reduced head, and which model verifies. The form
`independent` of speculators is a plain model with an entry `speculators_config`. A reduced head has a row for each of
its tokens. Row i stands for token i + d2t[i] of the target, and t2d says which of the target's tokens have a row.
Invariant: a folder with a whole head loads in transformers, with or without the entry.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save as as_safetensors
from torch import Tensor

from specbranch.errors import BadParameter
from specbranch.models.files.architecture import DRAFT_VOCABULARY, INDEPENDENT, SPECULATORS_TYPE, Architecture
from specbranch.models.files.weights import D2T
from specbranch.text.conversion import TOKENIZER
from specbranch.training.distill.draft_saving import ON_THE_HUB, config_of
from specbranch.training.export.whole_draft import WholeDraft

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma3": "Gemma3ForCausalLM",
}
TOKENIZER_FILES = (
    TOKENIZER,
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
)
T2D = "t2d"
DRAFTED = 5  # tokens a round that an engine drafts unless it is told otherwise


def check_for_transformers(arch: Architecture) -> None:
    """Refuse what a config.json of transformers has no words for."""
    if arch.rope.kind == "divisors":
        raise BadParameter(
            f"{arch.name} has its rotary frequencies as a list of divisors, as GGUF files have them, and transformers "
            "has no name for these. Use --format gguf, or distill a draft from the target's own folder."
        )


def write_model(draft: WholeDraft, tokenizer: Path, into: Path, extra: dict[str, Any] | None = None) -> None:
    """Write a draft in its precision; `tokenizer`: the folder with the target's tokenizer."""
    arch = draft.arch
    dtype = str(next(iter(draft.tensors.values())).dtype).removeprefix("torch.")
    config = {"architectures": [ARCHITECTURES[arch.family]], **config_of(arch), "dtype": dtype, **(extra or {})}
    ends = {"bos_token_id": arch.bos_id, "eos_token_id": list(arch.eos_ids)}
    _write_json(into / "config.json", config)
    _write_json(into / "generation_config.json", {name: value for name, value in ends.items() if value is not None})
    stored = as_safetensors({**draft.tensors, **vocabulary_maps(draft)}, {"format": "pt"})
    (into / "model.safetensors").write_bytes(stored)
    for name in TOKENIZER_FILES:
        if (tokenizer / name).is_file():
            shutil.copyfile(tokenizer / name, into / name)


def speculators_entries(draft: WholeDraft, target: str, target_family: str) -> dict[str, Any]:
    """Return what config.json says in addition, in the form of speculators for a draft that is a model of its own."""
    proposal = {"proposal_type": "greedy", "speculative_tokens": DRAFTED, "verifier_accept_k": 1}
    verifier = {"name_or_path": ON_THE_HUB.get(target, target), "architectures": [ARCHITECTURES[target_family]]}
    rows = {} if draft.head_ids is None else {DRAFT_VOCABULARY: len(draft.head_ids)}
    return {
        SPECULATORS_TYPE: INDEPENDENT,
        **rows,
        "speculators_config": {
            "algorithm": INDEPENDENT,
            "proposal_methods": [proposal],
            "default_proposal_method": proposal["proposal_type"],
            "verifier": verifier,
        },
    }


def vocabulary_maps(draft: WholeDraft) -> dict[str, Tensor]:
    """Return d2t and t2d of a reduced head."""
    if (ids := draft.head_ids) is None:
        return {}
    kept = torch.zeros(draft.arch.vocabulary, dtype=torch.bool)
    kept[ids] = True
    return {D2T: ids - torch.arange(len(ids)), T2D: kept}


def _write_json(path: Path, values: dict[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
