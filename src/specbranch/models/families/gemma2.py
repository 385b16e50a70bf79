"""Gemma 2: norms before and behind attention and MLP, bounded scores and logits, a window in every second layer."""

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


def _traits(values: FileValues, name: str) -> Traits:
    biased = values.flag("attention_bias", False)
    return Traits(
        qkv_bias=biased,
        out_bias=biased,
        windows=windows_by_type(values, lambda layer: layer % 2 == 0, 4096),
        query_scale=scale_of(values, "query_pre_attn_scalar", 256),
        attention_softcap=softcap_of(values, "attn_logit_softcapping"),
        logit_softcap=softcap_of(values, "final_logit_softcapping"),
    )


def _gguf_traits(values: FileValues, traits: Traits) -> Traits:
    window = values.count("attention.sliding_window", 4096)
    # Gemma 2 27B divides by hidden / heads, which GGUF files do not say; the others by the head dimension.
    wide = gguf_layers(values) == 46
    divided = values.count("embedding_length") // values.count("attention.head_count") if wide else None
    return replace(
        traits,
        windows=tuple(None if layer % 2 else window for layer in range(gguf_layers(values))),
        query_scale=None if divided is None else divided**-0.5,
        attention_softcap=values.number("attn_logit_softcapping", 50.0, 1e-6, 1e9),
        logit_softcap=values.number("final_logit_softcapping", 30.0, 1e-6, 1e9),
    )


def _layer(traits: Traits, index: int) -> LayerForm:
    attention = Attention(window=traits.window_of(index), scale=traits.query_scale, softcap=traits.attention_softcap)
    return layer_form(attention, GatedMlp("gelu_tanh"), norms_after=True)


FAMILY = Family(
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
    traits=_traits,
    gguf_traits=_gguf_traits,
    layer=_layer,
)
