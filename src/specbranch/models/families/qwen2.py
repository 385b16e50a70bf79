"""Qwen2 and Qwen2.5: queries, keys and values have biases."""

from __future__ import annotations

from specbranch.file_values import FileValues
from specbranch.models.families.dense import dense_layer, gguf_windows, qwen_windows
from specbranch.models.families.family import Family, Traits


def _traits(values: FileValues, name: str) -> Traits:
    return Traits(qkv_bias=True, windows=qwen_windows(values))


QWEN2_FAMILY = Family(
    name="qwen2",
    about="Qwen2, Qwen2.5, Qwen2.5-Coder",
    model_types=("qwen2",),
    gguf_names=("qwen2",),
    compiled=True,
    traits=_traits,
    gguf_traits=gguf_windows,
    layer=dense_layer,
)
