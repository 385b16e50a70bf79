"""A whole target and draft on disk: tiny random models with a small tokenizer and a chat template, as a user's
folders would be."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from small_tokenizers import byte_level, save

VOCABULARY = 421  # of the byte-level tokenizer, its added token included


SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.2,
}
KERNEL_SIZES = {  # of a model that a GPU's own kernels run: heads of 64
    "hidden_size": 384,
    "intermediate_size": 640,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "initializer_range": 0.1,
}


def make_pair(
    folder: Path, vocabulary: int = VOCABULARY, positions: int = 512, sizes: Mapping[str, float] = SIZES
) -> tuple[str, str]:
    """Save a target and a draft that is the target disturbed; returns both folders."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocabulary, max_position_embeddings=positions, eos_token_id=2, bos_token_id=1, **sizes
    )
    model = LlamaForCausalLM(config)
    target = _save(model, folder / "target")
    for parameter in model.parameters():
        parameter.data.add_(torch.randn_like(parameter) * parameter.data.std() * 0.1)
    return target, _save(model, folder / "draft")


def make_gpt2(folder: Path) -> str:
    """Save a tiny model of an architecture the native decoder does not know."""
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, n_positions=256, initializer_range=0.2, eos_token_id=2
    )
    return _save(GPT2LMHeadModel(config), folder)


def _save(model: PreTrainedModel, folder: Path) -> str:
    model.save_pretrained(folder)
    save(byte_level(), folder)
    return str(folder)
