"""Gemma 3, text: five layers with a window and a rotary table of their own for each one that sees everything."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from specbranch.file_values import FileValues
from specbranch.models.families.dense import gguf_layers
from specbranch.models.families.family import Traits
from specbranch.models.families.gemma2 import GEMMA2_FAMILY, gemma_settings, gemma_traits, gguf_scale
from specbranch.models.families.rotary import THETAS, Rope, rope_settings

LOCAL_THETA, PATTERN = 10000.0, 6


def _traits(values: FileValues, name: str) -> Traits:
    if values.flag("use_bidirectional_attention", False):
        values.refuse("use_bidirectional_attention", "false: a decoder must not see later tokens")
    every = values.count("sliding_window_pattern", values.count("_sliding_window_pattern", PATTERN))
    traits = gemma_traits(values, lambda layer: (layer + 1) % every != 0)
    return _with_tables(replace(traits, qk_norm=True, local_rope=Rope(_local_theta(values))))


def _local_theta(values: FileValues) -> float:
    older = values.number("rope_local_base_freq", LOCAL_THETA, *THETAS)
    return values.group("rope_parameters").group("sliding_attention").number("rope_theta", older, *THETAS)


def _gguf_traits(values: FileValues, traits: Traits) -> Traits:
    window = values.count("attention.sliding_window", 1024)
    every = values.count("attention.sliding_window_pattern", PATTERN)
    layers = range(gguf_layers(values))
    traits = replace(
        traits,
        windows=tuple(window if (layer + 1) % every else None for layer in layers),
        local_rope=Rope(values.number("rope.freq_base_swa", LOCAL_THETA, *THETAS)),
        query_scale=gguf_scale(values, layers_of_27b=62),
    )
    return _with_tables(traits)


def _with_tables(traits: Traits) -> Traits:
    """Layers with a window turn by the second table."""
    return replace(traits, tables=tuple(0 if window is None else 1 for window in traits.windows))


def _settings(traits: Traits, written: Mapping[str, Any]) -> dict[str, Any]:
    local = rope_settings(traits.local_rope or Rope(LOCAL_THETA))
    ropes = {"full_attention": written["rope_parameters"], "sliding_attention": local}
    return {**gemma_settings(traits, written), "rope_parameters": ropes}


GEMMA3_FAMILY = replace(
    GEMMA2_FAMILY,
    name="gemma3",
    about="Gemma 3 270M, 1B, 4B, 12B, 27B (text part)",
    limits="no pictures",
    model_types=("gemma3_text", "gemma3"),
    gguf_names=("gemma3",),
    theta=1e6,
    # what the configurations of the 4B, 12B and 27B leave to transformers' defaults
    defaults={
        "vocab_size": 262_208,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 131_072,
        "tie_word_embeddings": True,
    },
    traits=_traits,
    gguf_traits=_gguf_traits,
    settings=_settings,
)
