"""The layer with experts that Mixtral and Qwen3-MoE share, and what their files say of experts."""

from __future__ import annotations

from specbranch.errors import ModelError
from specbranch.file_values import FileValues
from specbranch.models.families.dense import dense_layer
from specbranch.models.families.family import Traits
from specbranch.models.families.operations import Attention, Experts, LayerForm, layer_form

MOST_EXPERTS = 4096


def mixture_layer(traits: Traits, index: int) -> LayerForm:
    """Return a layer with experts, or the dense one if it has none."""
    if traits.experts is None or index not in traits.expert_layers:
        return dense_layer(traits, index)
    return layer_form(Attention(window=traits.window_of(index), table=traits.table_of(index)), traits.experts)


def expert_count(values: FileValues, *keys: str) -> int:
    """Return the number of experts by the first key that is there."""
    return values.count(next((key for key in keys if values.get(key) is not None), keys[0]), most=MOST_EXPERTS)


def checked(experts: Experts, name: str) -> Experts:
    """Return the experts, or refuse a router that chooses more of them than there are."""
    if experts.active > experts.count:
        raise ModelError(
            f"{name} has {experts.count} experts, and each token chooses {experts.active} of them; expected at most "
            "as many as there are. The file may be damaged: fetch it again."
        )
    return experts


def gguf_experts(values: FileValues, size_key: str, weights_sum_to_one: bool = True) -> Experts | None:
    """Return the experts that a GGUF header names; None: the model is dense."""
    count = values.count("expert_count", 0, least=0, most=MOST_EXPERTS)
    if not count:
        return None
    active = values.count("expert_used_count", most=MOST_EXPERTS)
    size = values.count(size_key, most=1 << 26)
    return checked(Experts(count, active, size, weights_sum_to_one=weights_sum_to_one), values.name)
