"""The check that a model can roll back: its KV cache must have an entry for every token of the context.

Owns the refusal of recurrent and windowed models, for every runner. Invariant: a model that passes keeps keys and
values of all `context_length` tokens, so dropping the last ones restores the state before them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specbranch.errors import ModelError
from specbranch.file_values import MOST_CONTEXT_TOKENS, FileValues

RECURRENT_FAMILIES = frozenset(
    (
        "mamba",
        "mamba2",
        "falcon_mamba",
        "rwkv",
        "rwkv5",
        "rwkv6",
        "rwkv6qwen2",
        "rwkv7",
        "xlstm",
        "recurrent_gemma",
        "jamba",
        "zamba",
        "zamba2",
        "bamba",
        "falcon_h1",
        "falcon-h1",
        "granitemoehybrid",
        "granitehybrid",
        "nemotron_h",
        "nemotron_hybrid",
        "lfm2",
        "lfm2_moe",
        "minimax",
        "qwen3_next",
        "qwen3next",
        "qwen3_5",
        "qwen3_5_moe",
        "kimi_linear",
        "plamo2",
        "olmo_hybrid",
        "bailing_hybrid",
        "bailing_moe_linear",
        "retnet",
        "griffin",
        "hgrn",
    )
)
RECURRENT_LAYERS = ("linear_attention", "recurrent", "mamba", "conv", "ssm", "hybrid", "rwkv", "lightning")
WINDOWED_LAYERS = {"sliding_attention": "sliding_window", "chunked_attention": "attention_chunk_size"}


def refuse_if_cannot_roll_back(config: Mapping[str, Any], context_length: int, name: str) -> None:
    """Raise a ModelError if the model's cache forgets tokens within `context_length`; `config` is its config.json."""
    config = FileValues(config, f"The configuration of {name}").group("text_config").values or config
    family = str(config.get("model_type", "unknown"))
    if why := _recurrent(FileValues(config, f"The configuration of {name}"), family):
        raise ModelError(
            f"{name} has architecture {family!r}, {why}: it folds past tokens into a state and cannot take rejected "
            "ones back. Choose a model whose layers all attend to a cache of keys and values (`specbranch models "
            "families` lists those)."
        )
    window = active_window(config, name)
    if window is not None and window < context_length:
        raise ModelError(
            f"{name} (architecture {family!r}) attends to the last {window} tokens only, fewer than the context of "
            f"{context_length} asked for: tokens that left the window cannot be brought back. Set context_length to "
            f"{window} or less."
        )


def active_window(config: Mapping[str, Any], name: str = "the model") -> int | None:
    """Return how many tokens the narrowest layer sees; None: every layer sees all of them."""
    values = FileValues(config, f"The configuration of {name}")
    if kinds := values.items("layer_types"):
        keys = [key for kind, key in WINDOWED_LAYERS.items() if kind in kinds]
    else:
        keys = ["sliding_window"] if _slides(values) else []
    windows = [values.count(key, 0, least=0, most=MOST_CONTEXT_TOKENS) for key in keys]
    return min((window for window in windows if window), default=None)


def _slides(values: FileValues) -> bool:
    """True if a configuration without `layer_types` uses its `sliding_window`.

    Qwen models switch it on by a flag, from a certain layer on.
    """
    qwen = str(values.get("model_type")).startswith("qwen")
    layers = values.count("num_hidden_layers", MOST_CONTEXT_TOKENS)
    first = values.count("max_window_layers", 0, least=0)
    return values.flag("use_sliding_window", not qwen) and first < layers


def _recurrent(values: FileValues, family: str) -> str | None:
    """Return what makes the model recurrent, as a clause; None: it is not."""
    if family in RECURRENT_FAMILIES:
        return "which is recurrent"
    for key in ("layer_types", "layers_block_type", "block_types", "attn_type_list"):
        for kind in values.items(key):
            if any(word in str(kind) for word in RECURRENT_LAYERS):
                return f"which has {kind!r} layers"
    return "which has state-space layers" if values.get("ssm_cfg") or values.get("hybrid_override_pattern") else None
