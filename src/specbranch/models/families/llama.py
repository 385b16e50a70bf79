"""Llama 2 to 3.3, SmolLM2, and others of this form; in GGUF files Mistral and Mixtral, too."""

from __future__ import annotations

from dataclasses import replace

from specbranch.file_values import FileValues
from specbranch.models.families.dense import dense_layer, gguf_layers, gguf_windows
from specbranch.models.families.family import GGUF_EXPERTS, Family, Traits
from specbranch.models.families.mixture import gguf_experts, mixture_layer


def _traits(values: FileValues, name: str) -> Traits:
    biased = values.flag("attention_bias", False)
    return Traits(qkv_bias=biased, out_bias=biased, mlp_bias=values.flag("mlp_bias", False))


def _gguf_traits(values: FileValues, traits: Traits) -> Traits:
    experts = gguf_experts(values, "feed_forward_length")
    layers = tuple(range(gguf_layers(values))) if experts else ()
    return replace(gguf_windows(values, traits), experts=experts, expert_layers=layers)


LLAMA_FAMILY = Family(
    name="llama",
    about="Llama 2 to 3.3, SmolLM2, TinyLlama, Yi",
    model_types=("llama",),
    gguf_names=("llama",),
    interleaved_gguf=True,
    gguf_tensors=GGUF_EXPERTS,
    compiled=True,
    traits=_traits,
    gguf_traits=_gguf_traits,
    layer=lambda traits, index: (mixture_layer if traits.experts else dense_layer)(traits, index),
)
