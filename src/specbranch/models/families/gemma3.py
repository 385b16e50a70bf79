"""Gemma 3, text: five layers with a window and a rotary table of their own for each one that sees everything."""

from __future__ import annotations

from dataclasses import replace

from specbranch.file_values import FileValues
from specbranch.models.families.dense import gguf_layers
from specbranch.models.families.family import (
    GGUF_NORMS_AFTER,
    NORMS_AFTER,
    Family,
    Traits,
    scale_of,
    softcap_of,
    windows_by_type,
)
from specbranch.models.families.operations import Attention, GatedMlp, LayerForm, layer_form
from specbranch.models.families.rotary import THETAS, Rope

LOCAL_THETA, PATTERN = 10000.0, 6


def _traits(values: FileValues, name: str) -> Traits:
    if values.flag("use_bidirectional_attention", False):
        values.refuse("use_bidirectional_attention", "false: a decoder must not see later tokens")
    biased = values.flag("attention_bias", False)
    every = values.count("sliding_window_pattern", values.count("_sliding_window_pattern", PATTERN))
    return Traits(
        qkv_bias=biased,
        out_bias=biased,
        qk_norm=True,
        windows=windows_by_type(values, lambda layer: (layer + 1) % every != 0, 4096),
        local_rope=Rope(_local_theta(values)),
        query_scale=scale_of(values, "query_pre_attn_scalar", 256),
        attention_softcap=softcap_of(values, "attn_logit_softcapping"),
        logit_softcap=softcap_of(values, "final_logit_softcapping"),
    )


def _local_theta(values: FileValues) -> float:
    older = values.number("rope_local_base_freq", LOCAL_THETA, *THETAS)
    return values.group("rope_parameters").group("sliding_attention").number("rope_theta", older, *THETAS)


def _gguf_traits(values: FileValues, traits: Traits) -> Traits:
    window = values.count("attention.sliding_window", 1024)
    every = values.count("attention.sliding_window_pattern", PATTERN)
    layers = range(gguf_layers(values))
    # Gemma 3 27B divides by hidden / heads, which GGUF files do not say; the others by the head dimension.
    divided = values.count("embedding_length") // values.count("attention.head_count") if len(layers) == 62 else None
    return replace(
        traits,
        windows=tuple(window if (layer + 1) % every else None for layer in layers),
        local_rope=Rope(values.number("rope.freq_base_swa", LOCAL_THETA, *THETAS)),
        query_scale=None if divided is None else divided**-0.5,
    )


def _layer(traits: Traits, index: int) -> LayerForm:
    window = traits.window_of(index)
    attention = Attention(
        window=window,
        table=0 if window is None or traits.local_rope is None else 1,
        scale=traits.query_scale,
        softcap=traits.attention_softcap,
    )
    return layer_form(attention, GatedMlp("gelu_tanh"), norms_after=True)


FAMILY = Family(
    name="gemma3",
    about="Gemma 3 270M, 1B, 4B, 12B, 27B (text part)",
    limits="no pictures",
    model_types=("gemma3_text", "gemma3"),
    gguf_names=("gemma3",),
    activations=("gelu_pytorch_tanh",),
    activation_key="hidden_activation",
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
    norm_adds_one=True,
    scales_embedding=True,
    tensors=NORMS_AFTER,
    gguf_tensors=GGUF_NORMS_AFTER,
    traits=_traits,
    gguf_traits=_gguf_traits,
    layer=_layer,
)
