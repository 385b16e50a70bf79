"""The dense layer that most families share: attention over all positions or a window, then a gated MLP."""

from __future__ import annotations

from dataclasses import replace

from specbranch.file_values import MOST_CONTEXT_TOKENS, FileValues
from specbranch.models.families.family import Traits, layer_count, whole_window, windows_by_type
from specbranch.models.families.operations import Attention, GatedMlp, LayerForm, layer_form


def dense_layer(traits: Traits, index: int) -> LayerForm:
    """Return the layer of Llama, with a window if the traits name one; the first of some drafts reads features."""
    attention = Attention(
        window=traits.window_of(index), table=traits.table_of(index), skips_first=traits.join is not None
    )
    return layer_form(attention, GatedMlp(), join=traits.join if index == 0 else None)


def one_window(values: FileValues) -> tuple[int | None, ...]:
    """Return the windows of a family in which every layer slides if `sliding_window` is set."""
    return (() if whole_window(values) is None else windows_by_type(values, lambda layer: True)) or ()


def qwen_windows(values: FileValues) -> tuple[int | None, ...]:
    """Return the windows of Qwen: a flag switches them on, from a certain layer on."""
    if not values.flag("use_sliding_window", False):
        return ()
    first = values.count("max_window_layers", 0, least=0, most=layer_count(values) * 2)
    windows = windows_by_type(values, lambda layer: layer >= first)
    return windows if any(windows) else ()


def gguf_windows(values: FileValues, traits: Traits) -> Traits:
    """Add the window that a GGUF header names, of all layers."""
    window = values.count("attention.sliding_window", 0, least=0, most=MOST_CONTEXT_TOKENS)
    return traits if not window else replace(traits, windows=(window,) * gguf_layers(values))


def gguf_layers(values: FileValues) -> int:
    """Return the number of layers that a GGUF header names."""
    return values.count("block_count", most=1 << 20)
