"""gpt-oss-20b and -120b: attention sinks, a window in every second layer, experts with biases and bounded gates."""

from __future__ import annotations

from specbranch.errors import UnsupportedArchitecture
from specbranch.file_values import FileValues
from specbranch.models.families.family import Family, Traits, layer_count, windows_by_type
from specbranch.models.families.mixture import MOST_EXPERTS, checked, expert_count
from specbranch.models.families.operations import Attention, Experts, LayerForm, layer_form

ALPHA, LIMIT = 1.702, 7.0  # of the bounded gate, fixed in `forward/activations.py`


def _traits(values: FileValues, name: str) -> Traits:
    for key, expected in (("swiglu_alpha", ALPHA), ("swiglu_limit", LIMIT)):
        if values.number(key, expected, 0.0, 1e6) != expected:
            values.refuse(key, f"{expected}, which is what the native decoder computes")
    experts = Experts(
        expert_count(values, "num_local_experts", "num_experts"),
        values.count("num_experts_per_tok", 4, most=MOST_EXPERTS),
        values.count("intermediate_size", most=1 << 26),
        activation="bounded_swiglu",
        routing="best_first",
        biased=True,
    )
    biased = values.flag("attention_bias", True)
    return Traits(
        qkv_bias=biased,
        out_bias=biased,
        windows=windows_by_type(values, lambda layer: layer % 2 == 0, 128),
        experts=checked(experts, name),
        expert_layers=tuple(range(layer_count(values))),
    )


def _no_gguf(values: FileValues, traits: Traits) -> Traits:
    raise UnsupportedArchitecture(f"{values.name} is a GGUF file of gpt-oss; the native decoder reads its safetensors.")


def _layer(traits: Traits, index: int) -> LayerForm:
    assert traits.experts is not None
    return layer_form(Attention(window=traits.window_of(index), sinks=True), traits.experts)


GPT_OSS_FAMILY = Family(
    name="gpt_oss",
    about="gpt-oss-20b, gpt-oss-120b",
    limits="safetensors only; MXFP4 experts are widened at load",
    model_types=("gpt_oss",),
    gguf_names=("gpt-oss",),
    theta=150000.0,
    expert_files="gpt_oss",
    quantised_as=("mxfp4",),
    tensors={
        "sinks": "model.layers.{}.self_attn.sinks",
        "router": "model.layers.{}.mlp.router",
        "expert_gate_up": "model.layers.{}.mlp.experts.gate_up_proj",
        "expert_down": "model.layers.{}.mlp.experts.down_proj",
    },
    traits=_traits,
    gguf_traits=_no_gguf,
    layer=_layer,
)
