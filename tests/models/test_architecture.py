"""What is read from configurations, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from specbranch.errors import ModelError
from specbranch.models.families.rotary import Rope
from specbranch.models.files.architecture import Architecture
from specbranch.models.files.rollback import refuse_if_cannot_roll_back
from tiny_models import CONFIGS

PLAIN: dict[str, Any] = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "vocab_size": 100,
    "max_position_embeddings": 128,
}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}


def read(**changes: Any) -> Architecture:
    return Architecture.from_config({**PLAIN, **changes}, "here")


def test_old_and_new_spelling_of_rotary_settings_mean_the_same() -> None:
    old = read(rope_theta=5e5, rope_scaling={"type": "llama3", **LLAMA3})
    new = read(rope_parameters={"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3})
    assert old == new
    assert new.rope == Rope(5e5, "llama3", 8.0, 64, 1.0, 4.0)
    assert read(rope_theta=7.0, rope_scaling=None).rope == Rope(7.0)


@pytest.mark.parametrize("kind", CONFIGS)
def test_configurations_as_transformers_writes_them_are_read(kind: str) -> None:
    config = CONFIGS[kind]()
    arch = Architecture.from_config(config.to_dict())
    assert (arch.layers, arch.heads, arch.kv_heads, arch.vocabulary) == (3, 6, 2, 131)
    assert arch.family == config.model_type
    assert arch.tied == config.tie_word_embeddings


def test_what_a_short_configuration_leaves_out_has_its_usual_value() -> None:
    arch = read()
    assert (arch.kv_heads, arch.head_dim, arch.tied, arch.window, arch.eos_ids) == (4, 16, False, None, ())
    assert not (arch.qkv_bias or arch.out_bias or arch.mlp_bias or arch.qk_norm)


def test_each_family_has_its_biases_and_norms() -> None:
    assert read(model_type="qwen2").qkv_bias and not read(model_type="qwen2").out_bias
    assert read(model_type="qwen3").qk_norm and not read(model_type="qwen3").qkv_bias
    assert read(attention_bias=True, mlp_bias=True).out_bias


def test_several_end_tokens_are_kept_in_order() -> None:
    assert read(eos_token_id=[7, 3, 7], bos_token_id=1).eos_ids == (7, 3)
    assert read(eos_token_id=2).eos_ids == (2,)


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"model_type": "mamba"}, "'mamba'"),
        ({"model_type": "rwkv"}, "'rwkv'"),
        ({"model_type": "qwen3_next", "layer_types": ["linear_attention", "full_attention"]}, "'qwen3_next'"),
        ({"model_type": "new", "layer_types": ["linear_attention", "full_attention"]}, "'linear_attention' layers"),
        ({"model_type": "new", "layers_block_type": ["mamba", "attention"]}, "'mamba' layers"),
        ({"model_type": "wrapper", "text_config": {"model_type": "jamba"}}, "'jamba'"),
    ],
)
def test_recurrent_models_are_refused_by_name(config: dict[str, Any], named: str) -> None:
    with pytest.raises(ModelError, match=f"org/name has architecture .*{named}"):
        refuse_if_cannot_roll_back(config, 16, "org/name")


def test_gemma_like_window_shorter_than_the_context_is_refused() -> None:
    config = {
        "model_type": "gemma3_text",
        "sliding_window": 512,
        "layer_types": ["sliding_attention", "full_attention"],
    }
    with pytest.raises(ModelError, match=r"'gemma3_text'.* last 512 tokens"):
        refuse_if_cannot_roll_back(config, 513, "g")
    refuse_if_cannot_roll_back(config, 512, "g")
    refuse_if_cannot_roll_back({**config, "layer_types": ["full_attention"]}, 513, "g")


def test_a_window_of_every_layer_bounds_the_default_context_only() -> None:
    arch = read(model_type="mistral", sliding_window=64)
    assert arch.choose_context(128) == 128
    assert arch.choose_context(None) == 64
    assert arch.windows == (64, 64) and arch.window == 64
    assert arch.is_plain(64) and not arch.is_plain(65)
    assert read(model_type="mistral", sliding_window=None).choose_context(None) == 128


def test_qwen_window_counts_only_when_switched_on() -> None:
    window = {"model_type": "qwen2", "sliding_window": 64}
    assert read(**window, use_sliding_window=False).windows == ()
    assert read(**window).windows == ()
    assert read(**window, use_sliding_window=True, max_window_layers=2).windows == ()
    assert read(**window, use_sliding_window=True, max_window_layers=1).windows == (None, 64)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model_type": "gpt2"}, r"'gpt2'.*runner='transformers'"),
        ({"hidden_act": "gelu"}, r"'gelu'.*runner='transformers'"),
        ({"partial_rotary_factor": 0.5}, "only 0.5 of each head"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, r"'dynamic' rotary scaling.*runner='transformers'"),
        ({"rope_scaling": {"type": "llama3", "factor": 2.0}}, "no rope_scaling.low_freq_factor"),
        ({"quantization_config": {"quant_method": "hqq"}}, "'hqq' quantisation"),
        ({"hidden_size": None}, "no hidden_size; expected a whole number"),
        ({"num_key_value_heads": 3}, "4 attention heads over 3 key heads"),
    ],
)
def test_what_the_decoder_cannot_do_is_refused_with_its_name(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ModelError, match=said):
        read(**changes)
