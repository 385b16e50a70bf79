"""What one file of this folder says of a model family, and the facts that a configuration adds.

Owns the two forms, and the tensor names that families share. Invariant: a `Family` reads no weights, and its layers
follow from the `Traits` and the number of layers alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from specbranch.file_values import MOST_CONTEXT_TOKENS, FileValues
from specbranch.models.families.operations import Experts, Join, LayerForm
from specbranch.models.families.rotary import Rope

# How experts lie in safetensors: each in tensors of its own, or all in one, as gpt-oss has them (floats or MXFP4).
ExpertFiles = Literal["separate", "gpt_oss"]
HUGGING_FACE: dict[str, str] = {
    "embedding": "model.embed_tokens",
    "norm": "model.norm",
    "head": "lm_head",
    "attention_norm": "model.layers.{}.input_layernorm",
    "q": "model.layers.{}.self_attn.q_proj",
    "k": "model.layers.{}.self_attn.k_proj",
    "v": "model.layers.{}.self_attn.v_proj",
    "q_norm": "model.layers.{}.self_attn.q_norm",
    "k_norm": "model.layers.{}.self_attn.k_norm",
    "out": "model.layers.{}.self_attn.o_proj",
    "mlp_norm": "model.layers.{}.post_attention_layernorm",
    "gate": "model.layers.{}.mlp.gate_proj",
    "up": "model.layers.{}.mlp.up_proj",
    "down": "model.layers.{}.mlp.down_proj",
}
OF_FEATURE_DRAFTS = {"hidden_norm": "model.layers.{}.hidden_norm"}  # no model has these, and no GGUF file
GGUF: dict[str, str] = {
    "embedding": "token_embd",
    "norm": "output_norm",
    "head": "output",
    "attention_norm": "blk.{}.attn_norm",
    "q": "blk.{}.attn_q",
    "k": "blk.{}.attn_k",
    "v": "blk.{}.attn_v",
    "q_norm": "blk.{}.attn_q_norm",
    "k_norm": "blk.{}.attn_k_norm",
    "out": "blk.{}.attn_output",
    "mlp_norm": "blk.{}.ffn_norm",
    "gate": "blk.{}.ffn_gate",
    "up": "blk.{}.ffn_up",
    "down": "blk.{}.ffn_down",
}
# of a model with experts; all of them lie in one tensor
GGUF_EXPERTS = {
    "router": "blk.{}.ffn_gate_inp",
    "expert_gate": "blk.{}.ffn_gate_exps",
    "expert_up": "blk.{}.ffn_up_exps",
    "expert_down": "blk.{}.ffn_down_exps",
}
# of a model with norms behind attention and MLP
NORMS_AFTER = {
    "attention_after_norm": "model.layers.{}.post_attention_layernorm",
    "mlp_norm": "model.layers.{}.pre_feedforward_layernorm",
    "mlp_after_norm": "model.layers.{}.post_feedforward_layernorm",
}
GGUF_NORMS_AFTER = {
    "attention_after_norm": "blk.{}.post_attention_norm",
    "mlp_after_norm": "blk.{}.post_ffw_norm",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Traits:
    """What a configuration says of a model beyond its sizes."""

    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    windows: tuple[int | None, ...] = ()  # by layer: how many positions a row sees; empty: all layers see everything
    tables: tuple[int, ...] = ()  # by layer: which rotary table turns queries and keys; empty: always the first
    local_rope: Rope | None = None  # the second rotary table
    query_scale: float | None = None  # factor of attention scores; None: 1 / √head_dim
    attention_softcap: float | None = None
    logit_softcap: float | None = None
    experts: Experts | None = None
    expert_layers: tuple[int, ...] = ()  # the layers that have experts
    join: Join | None = None  # of a draft that reads its target's features: how its first layer takes them

    def window_of(self, layer: int) -> int | None:
        """Return how many positions a row of a layer sees; None: all."""
        return self.windows[layer] if self.windows else None

    def table_of(self, layer: int) -> int:
        """Return which rotary table a layer turns by."""
        return self.tables[layer] if self.tables else 0


def window_settings(traits: Traits, written: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a config.json says of windows, beside the sizes that are `written`."""
    if traits.windows == ():
        return {"sliding_window": None, "use_sliding_window": False}
    return {
        "layer_types": ["sliding_attention" if window else "full_attention" for window in traits.windows],
        "sliding_window": min((window for window in traits.windows if window), default=None),
        "use_sliding_window": True,
        "max_window_layers": 0,
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """A model family: the names of its files, and what its layers compute."""

    name: str  # as in `Architecture.family`
    about: str  # models of this family that people know
    limits: str = ""  # what of the family is not native, as a clause
    compiled: bool = False  # the compiled CPU step runs its layers, unless a window is shorter
    model_types: tuple[str, ...]  # of config.json
    gguf_names: tuple[str, ...] = ()  # `general.architecture`
    activations: tuple[str, ...] = ("silu", "swish")  # names of the one activation that its layers compute
    activation_key: str = "hidden_act"
    theta: float = 10000.0  # rotary base where a configuration names none
    defaults: Mapping[str, int | float | bool] = field(default_factory=dict)  # values that its files may leave out
    norm_adds_one: bool = False  # a norm multiplies by 1 + weight; GGUF files hold the sum
    scales_embedding: bool = False  # embeddings are multiplied by √hidden
    interleaved_gguf: bool = False  # GGUF files pair dimension 2i with 2i + 1
    expert_files: ExpertFiles = "separate"
    quantised_as: tuple[str, ...] = ()  # quantisation methods whose files its own reader converts to floats
    tensors: Mapping[str, str] = field(default_factory=dict)  # names that differ from HUGGING_FACE, or come on top
    gguf_tensors: Mapping[str, str] = field(default_factory=dict)
    traits: Callable[[FileValues, str], Traits]  # from a config.json and the model's name
    gguf_traits: Callable[[FileValues, Traits], Traits]  # from a GGUF header, and what its tensors show
    layer: Callable[[Traits, int], LayerForm]  # what a layer computes, by its index
    # what a config.json says of the traits, beside what it says of any family: for drafts of this family
    settings: Callable[[Traits, Mapping[str, Any]], dict[str, Any]] = window_settings

    def layers(self, traits: Traits, count: int) -> tuple[LayerForm, ...]:
        """Return what each layer computes."""
        return tuple(self.layer(traits, index) for index in range(count))

    def name_of(self, part: str, in_gguf: bool) -> str:
        """Return a part's name in a file, without its suffix; "{}" stands for the layer."""
        own, usual = (self.gguf_tensors, GGUF) if in_gguf else (self.tensors, HUGGING_FACE | OF_FEATURE_DRAFTS)
        return own.get(part) or usual[part]


def layer_count(values: FileValues) -> int:
    """Return the number of layers that a config.json names."""
    return values.count("num_hidden_layers", most=1 << 20)


def whole_window(values: FileValues, default: int | None = None) -> int | None:
    """Return `sliding_window`; None if there is none."""
    return values.count("sliding_window", default or 0, least=0, most=MOST_CONTEXT_TOKENS) or None


def windows_by_type(
    values: FileValues, slides: Callable[[int], bool], default: int | None = None
) -> tuple[int | None, ...]:
    """Return each layer's window from `layer_types`; without these `slides` says which layers have one.

    `default`: the window if the file names none.
    """
    count, window = layer_count(values), whole_window(values, default)
    kinds = values.items("layer_types")
    if not kinds:
        return tuple(window if slides(layer) else None for layer in range(count))
    known = {"sliding_attention": window, "full_attention": None}
    if len(kinds) != count or any(kind not in known for kind in kinds):
        values.refuse("layer_types", f"a list of {count} entries, each one of {', '.join(map(repr, known))}")
    if window is None and "sliding_attention" in kinds:
        values.refuse("sliding_window", "the window of the layers that `layer_types` calls 'sliding_attention'")
    return tuple(known[kind] for kind in kinds)


def scale_of(values: FileValues, key: str, default: float) -> float:
    """Return 1 / √value: the factor of attention scores as Gemma states it."""
    return float(values.number(key, default, 1e-6, 1e9) ** -0.5)


def softcap_of(values: FileValues, key: str) -> float | None:
    """Return a bound of scores or logits; None if there is none."""
    return None if values.get(key) is None else values.number(key, None, 1e-6, 1e9)
