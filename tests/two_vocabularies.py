"""Tiny models with different tokenizers that have learned the same sentences by heart, as a user's folders would be."""

from __future__ import annotations

from pathlib import Path

import tokenizers
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from small_tokenizers import SENTENCES, byte_fallback, byte_level, save

TAUGHT = [SENTENCES[0], SENTENCES[1], SENTENCES[2], SENTENCES[4]]
STEPS = 40
MADE = {
    "bytes": lambda: byte_level(380),
    "more bytes": lambda: byte_level(620),
    "spaces": lambda: byte_fallback(340),
}


def make_model(folder: Path, kind: str) -> str:
    """Save a model with a tokenizer of that kind, taught the sentences."""
    made = MADE[kind]()
    torch.manual_seed(len(kind))
    config = LlamaConfig(
        vocab_size=made.get_vocab_size(),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        eos_token_id=2,
        bos_token_id=1,
    )
    model = _taught(LlamaForCausalLM(config), made)
    model.save_pretrained(folder / kind)
    save(made, folder / kind)
    return str(folder / kind)


def _taught(model: LlamaForCausalLM, made: tokenizers.Tokenizer) -> LlamaForCausalLM:
    texts = [[*made.encode(text).ids, 2] for text in TAUGHT]
    longest = max(map(len, texts))
    ids = torch.tensor([text + [0] * (longest - len(text)) for text in texts])
    labels = torch.tensor([text + [-100] * (longest - len(text)) for text in texts])
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = model(input_ids=ids, labels=labels).loss
        loss.backward()
        optimizer.step()
    return model.eval()
