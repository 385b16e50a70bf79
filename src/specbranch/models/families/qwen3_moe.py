"""Qwen3 with experts: Qwen3-30B-A3B, Qwen3-Coder-30B-A3B, Qwen3-235B-A22B."""

from __future__ import annotations

from dataclasses import replace

from specbranch.file_values import FileValues
from specbranch.models.families.dense import gguf_layers, gguf_windows, qwen_windows
from specbranch.models.families.family import GGUF_EXPERTS, Family, Traits, layer_count
from specbranch.models.families.mixture import MOST_EXPERTS, checked, expert_count, gguf_experts, mixture_layer
from specbranch.models.families.operations import Experts


def _traits(values: FileValues, name: str) -> Traits:
    experts = Experts(
        expert_count(values, "num_experts", "num_local_experts"),
        values.count("num_experts_per_tok", 8, most=MOST_EXPERTS),
        values.count("moe_intermediate_size", 768, most=1 << 26),
        weights_sum_to_one=values.flag("norm_topk_prob", False),
    )
    dense = set(values.items("mlp_only_layers"))
    every = values.count("decoder_sparse_step", 1, most=1 << 20)
    biased = values.flag("attention_bias", False)
    return Traits(
        qkv_bias=biased,
        out_bias=biased,
        qk_norm=True,
        windows=qwen_windows(values),
        experts=checked(experts, name),
        expert_layers=tuple(
            layer for layer in range(layer_count(values)) if layer not in dense and (layer + 1) % every == 0
        ),
    )


def _gguf_traits(values: FileValues, traits: Traits) -> Traits:
    experts = gguf_experts(values, "expert_feed_forward_length")
    layers = tuple(range(gguf_layers(values))) if experts else ()
    return replace(gguf_windows(values, traits), experts=experts, expert_layers=layers)


QWEN3_MOE_FAMILY = Family(
    name="qwen3_moe",
    about="Qwen3-30B-A3B, Qwen3-Coder-30B-A3B, Qwen3-235B-A22B",
    model_types=("qwen3_moe",),
    gguf_names=("qwen3moe",),
    tensors={
        "router": "model.layers.{}.mlp.gate",
        "expert_gate": "model.layers.{}.mlp.experts.{expert}.gate_proj",
        "expert_up": "model.layers.{}.mlp.experts.{expert}.up_proj",
        "expert_down": "model.layers.{}.mlp.experts.{expert}.down_proj",
    },
    gguf_tensors=GGUF_EXPERTS,
    traits=_traits,
    gguf_traits=_gguf_traits,
    layer=mixture_layer,
)
