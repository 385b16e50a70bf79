"""SmolLM3: Llama, but every fourth layer does not turn queries and keys by their positions."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from specbranch.file_values import FileValues
from specbranch.models.families.dense import dense_layer, gguf_layers, qwen_windows
from specbranch.models.families.family import Family, Traits, layer_count, window_settings
from specbranch.models.families.rotary import Rope

EVERY = 4


def _unturned(head_dim: int) -> Rope:
    """Return the table that turns nothing: each frequency is divided by infinity."""
    return Rope(kind="divisors", divisors=(math.inf,) * (head_dim // 2))


def _traits(values: FileValues, name: str) -> Traits:
    count, biased = layer_count(values), values.flag("attention_bias", False)
    every = values.count("no_rope_layer_interval", EVERY)
    stated = values.counts("no_rope_layers", count) if values.items("no_rope_layers") else None
    turns = stated or tuple(int((layer + 1) % every != 0) for layer in range(count))
    head_dim = values.count("head_dim", values.count("hidden_size") // values.count("num_attention_heads"))
    return Traits(
        qkv_bias=biased,
        out_bias=biased,
        mlp_bias=values.flag("mlp_bias", False),
        windows=qwen_windows(values),
        tables=tuple(0 if turned else 1 for turned in turns),
        local_rope=_unturned(head_dim),
    )


def _gguf_traits(values: FileValues, traits: Traits) -> Traits:
    tables = tuple(0 if (layer + 1) % EVERY else 1 for layer in range(gguf_layers(values)))
    head_dim = values.count("embedding_length") // values.count("attention.head_count")
    return replace(traits, tables=tables, local_rope=_unturned(head_dim))


def _settings(traits: Traits, written: Mapping[str, Any]) -> dict[str, Any]:
    return {**window_settings(traits, written), "no_rope_layers": [1 - table for table in traits.tables]}


SMOLLM3_FAMILY = Family(
    name="smollm3",
    about="SmolLM3 3B",
    model_types=("smollm3",),
    gguf_names=("smollm3",),
    theta=5e6,
    interleaved_gguf=True,
    defaults={"tie_word_embeddings": True},
    traits=_traits,
    gguf_traits=_gguf_traits,
    layer=dense_layer,
    settings=_settings,
)
