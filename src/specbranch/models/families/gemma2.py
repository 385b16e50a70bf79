"""Gemma 2: norms before and behind attention and MLP, bounded scores and logits, a window in every second layer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from specbranch.file_values import FileValues
from specbranch.models.families.dense import gguf_layers
from specbranch.models.families.family import (
    GGUF_NORMS_AFTER,
    NORMS_AFTER,
    Family,
    Traits,
    scale_of,
    softcap_of,
    window_settings,
    windows_by_type,
)
from specbranch.models.families.operations import Attention, GatedMlp, LayerForm, layer_form


def gemma_traits(values: FileValues, slides: Callable[[int], bool]) -> Traits:
    """Return what Gemma 2 and 3 share; `slides`: which layers have a window where the file does not list them."""
    biased = values.flag("attention_bias", False)
    return Traits(
        qkv_bias=biased,
        out_bias=biased,
        windows=windows_by_type(values, slides, 4096),
        query_scale=scale_of(values, "query_pre_attn_scalar", 256),
        attention_softcap=softcap_of(values, "attn_logit_softcapping"),
        logit_softcap=softcap_of(values, "final_logit_softcapping"),
    )


def gemma_layer(traits: Traits, index: int) -> LayerForm:
    """Return a layer with norms before and behind its operations."""
    window, table = traits.window_of(index), traits.table_of(index)
    attention = Attention(window, table, traits.query_scale, traits.attention_softcap)
    return layer_form(attention, GatedMlp("gelu_tanh"), norms_after=True)


def gemma_settings(traits: Traits, written: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a config.json says of windows, and of the scale of scores."""
    scale = traits.query_scale or written["head_dim"] ** -0.5
    return {**window_settings(traits, written), "query_pre_attn_scalar": round(scale**-2)}


def gguf_scale(values: FileValues, layers_of_27b: int) -> float | None:
    """Return the factor of scores, which GGUF files do not say: the 27B divides by √(hidden / heads)."""
    if gguf_layers(values) != layers_of_27b:
        return None
    return float((values.count("embedding_length") // values.count("attention.head_count")) ** -0.5)


def _gguf_traits(values: FileValues, traits: Traits) -> Traits:
    window = values.count("attention.sliding_window", 4096)
    return replace(
        traits,
        windows=tuple(None if layer % 2 else window for layer in range(gguf_layers(values))),
        query_scale=gguf_scale(values, layers_of_27b=46),
        attention_softcap=values.number("attn_logit_softcapping", 50.0, 1e-6, 1e9),
        logit_softcap=values.number("final_logit_softcapping", 30.0, 1e-6, 1e9),
    )


GEMMA2_FAMILY = Family(
    name="gemma2",
    about="Gemma 2 2B, 9B, 27B",
    model_types=("gemma2",),
    gguf_names=("gemma2",),
    activations=("gelu_pytorch_tanh",),
    activation_key="hidden_activation",
    defaults={"tie_word_embeddings": True},
    norm_adds_one=True,
    scales_embedding=True,
    tensors=NORMS_AFTER,
    gguf_tensors=GGUF_NORMS_AFTER,
    traits=lambda values, name: gemma_traits(values, lambda layer: layer % 2 == 0),
    gguf_traits=_gguf_traits,
    layer=gemma_layer,
    settings=gemma_settings,
)
