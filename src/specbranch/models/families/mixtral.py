"""Mixtral: Mistral with eight experts instead of the MLP, two of which are active."""

from __future__ import annotations

from specbranch.file_values import FileValues
from specbranch.models.families.dense import gguf_windows, one_window
from specbranch.models.families.family import Family, Traits, layer_count
from specbranch.models.families.mixture import MOST_EXPERTS, checked, expert_count, mixture_layer
from specbranch.models.families.operations import Experts


def _traits(values: FileValues, name: str) -> Traits:
    count = expert_count(values, "num_local_experts", "num_experts")
    active = values.count("num_experts_per_tok", 2, most=MOST_EXPERTS)
    experts = Experts(count, active, values.count("intermediate_size", most=1 << 26))
    return Traits(
        windows=one_window(values),
        experts=checked(experts, name),
        expert_layers=tuple(range(layer_count(values))),
    )


MIXTRAL_FAMILY = Family(
    name="mixtral",
    about="Mixtral 8x7B and 8x22B (a GGUF file calls them llama)",
    model_types=("mixtral",),
    interleaved_gguf=True,
    theta=1e6,
    tensors={
        "router": "model.layers.{}.block_sparse_moe.gate",
        "expert_gate": "model.layers.{}.block_sparse_moe.experts.{expert}.w1",
        "expert_up": "model.layers.{}.block_sparse_moe.experts.{expert}.w3",
        "expert_down": "model.layers.{}.block_sparse_moe.experts.{expert}.w2",
    },
    traits=_traits,
    gguf_traits=gguf_windows,
    layer=mixture_layer,
)
