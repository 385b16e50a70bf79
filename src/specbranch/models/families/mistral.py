"""Mistral and Mistral Small: Llama without biases, in its first version with a window in every layer."""

from __future__ import annotations

from specbranch.file_values import FileValues
from specbranch.models.families.dense import dense_layer, gguf_windows, one_window
from specbranch.models.families.family import Family, Traits


def _traits(values: FileValues, name: str) -> Traits:
    return Traits(windows=one_window(values))


MISTRAL_FAMILY = Family(
    name="mistral",
    about="Mistral 7B, Mistral Nemo, Mistral Small (its text part)",
    model_types=("mistral",),
    gguf_names=("mistral",),
    interleaved_gguf=True,
    compiled=True,
    traits=_traits,
    gguf_traits=gguf_windows,
    layer=dense_layer,
)
