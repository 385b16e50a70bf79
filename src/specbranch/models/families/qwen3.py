"""Qwen3, dense: each head's queries and keys are normed."""

from __future__ import annotations

from specbranch.file_values import FileValues
from specbranch.models.families.dense import dense_layer, gguf_windows, qwen_windows
from specbranch.models.families.family import Family, Traits


def _traits(values: FileValues, name: str) -> Traits:
    biased = values.flag("attention_bias", False)
    return Traits(qkv_bias=biased, out_bias=biased, qk_norm=True, windows=qwen_windows(values))


QWEN3_FAMILY = Family(
    name="qwen3",
    about="Qwen3 0.6B to 32B",
    model_types=("qwen3",),
    gguf_names=("qwen3",),
    compiled=True,
    traits=_traits,
    gguf_traits=gguf_windows,
    layer=dense_layer,
)
