"""Files of families whose layers are not Llama's: GGUF beside safetensors, MXFP4, wrapped models, and refusals."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Gemma2Config, Gemma3TextConfig, MixtralConfig, Qwen3MoeConfig

from specbranch.core.runner import Feed
from specbranch.core.slots import ROOT
from specbranch.errors import ModelError
from specbranch.models.cpu.block_kernels import BlockLinear, BlockTwin
from specbranch.models.families.table import FAMILIES
from specbranch.models.files.architecture import Architecture
from specbranch.models.files.locate import locate
from specbranch.models.files.weights import Weights, read_weights
from specbranch.models.forward.decoder import Decoder
from specbranch.models.loading import load_native, open_model
from specbranch.models.runners.native import NativeRunner
from tiny_models import EXPERTS, FURTHER, GEMMA, GREEDY, SHAPE, random_model, saved, some_tokens, tiny

torch.set_num_threads(1)
F32 = gguf.GGMLQuantizationType.F32
IN_GGUF = {
    "gemma2": Gemma2Config(
        **{**GEMMA, "query_pre_attn_scalar": 16}, attn_logit_softcapping=5.0, final_logit_softcapping=3.0
    ),
    "gemma3": Gemma3TextConfig(**{**GEMMA, "query_pre_attn_scalar": 16}, sliding_window_pattern=2),
    "mixtral": MixtralConfig(**SHAPE, **EXPERTS),
    "qwen3_moe": Qwen3MoeConfig(
        **SHAPE, head_dim=16, num_experts=6, num_experts_per_tok=3, moe_intermediate_size=32, norm_topk_prob=True
    ),
}
GGUF_NAMES = {"mixtral": "llama", "qwen3_moe": "qwen3moe"}


@pytest.fixture(autouse=True)
def torch_linear(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECBRANCH_LINEAR", "torch")


def logits(model: Path, context: int = 128, **options: Any) -> torch.Tensor:
    runner = load_native(model, context_length=context, dtype="float64", **options)
    runner.open(0, GREEDY)
    runner.extend(0, some_tokens(70))
    return runner.score([Feed(0, (3,), (ROOT,))])[0][0].logits


def in_gguf(
    kind: str, config: Any, tensors: dict[str, torch.Tensor], path: Path, stored: gguf.GGMLQuantizationType = F32
) -> Path:
    """Write tensors as llama.cpp's converter would: experts stacked, q and k interleaved, Gemma's norms plus one."""
    name = GGUF_NAMES.get(kind, kind)
    writer = gguf.GGUFWriter(path, name)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    head_dim = config.head_dim or config.hidden_size // config.num_attention_heads
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_token_list([f"t{index}" for index in range(config.vocab_size)])
    whole = config.rope_parameters.get("full_attention", config.rope_parameters)
    writer.add_rope_freq_base(whole["rope_theta"])
    if "gemma" in kind:
        writer.add_sliding_window(config.sliding_window)
    if kind == "gemma3":
        writer.add_uint32("gemma3.attention.sliding_window_pattern", 2)
    if kind == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    if hasattr(config, "num_local_experts"):
        writer.add_expert_count(config.num_local_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
    if kind == "qwen3_moe":
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    for part, value in _parts(kind, config, tensors).items():
        packed = stored if value.dim() > 1 and value.shape[-1] % 32 == 0 else F32
        writer.add_tensor(part, gguf.quants.quantize(value.float().numpy(), packed), raw_dtype=packed)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _parts(kind: str, config: Any, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    family, found = FAMILIES[kind], dict[str, torch.Tensor]()
    in_file = FAMILIES["llama"] if kind == "mixtral" else family
    parts = ["embedding", "norm", "head", "attention_norm", "q", "k", "v", "q_norm", "k_norm", "out", "mlp_norm"]
    parts += ["gate", "up", "down", *family.tensors]
    for part in parts:
        for layer in range(config.num_hidden_layers):
            stem = family.name_of(part, False)
            if part.startswith("expert_"):
                names = [stem.format(layer, expert=expert) for expert in range(config.num_local_experts)]
                value = torch.stack([tensors[f"{name}.weight"] for name in names])
            elif f"{stem.format(layer)}.weight" in tensors:
                value = tensors[f"{stem.format(layer)}.weight"]
            else:
                continue
            if kind == "mixtral" and part in ("q", "k"):
                value = value.view(-1, 2, 4, value.shape[-1]).transpose(1, 2).reshape(value.shape)
            if "gemma" in kind and part.endswith("norm"):
                value = value + 1
            found[f"{in_file.name_of(part, True).format(layer)}.weight"] = value
    return found


@pytest.mark.parametrize("kind", IN_GGUF)
def test_gguf_gives_the_logits_of_its_safetensors_twin(kind: str, tmp_path: Path) -> None:
    twin = saved(random_model(IN_GGUF[kind]), tmp_path / "folder")
    tensors = load_file(twin / "model.safetensors")
    expected = logits(twin)
    got = logits(in_gguf(kind, IN_GGUF[kind], tensors, tmp_path / "model.gguf"))
    assert (got - expected).abs().max() < 1e-6 * expected.abs().max()  # the header stores rms_eps in float32


@pytest.mark.parametrize("stored", ["Q8_0", "Q4_0"])
def test_experts_of_a_quantised_gguf_stay_in_its_blocks(
    stored: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SPECBRANCH_LINEAR")
    config = Qwen3MoeConfig(
        **{**SHAPE, "hidden_size": 64, "intermediate_size": 96},
        head_dim=16, num_experts=6, num_experts_per_tok=3, moe_intermediate_size=32, norm_topk_prob=True,
    )  # fmt: skip
    tensors = load_file(saved(random_model(config), tmp_path / "folder") / "model.safetensors")
    path = in_gguf("qwen3_moe", config, tensors, tmp_path / "model.gguf", gguf.GGMLQuantizationType[stored])
    small, wide = (load_native(path, context_length=128, **how) for how in ({}, {"dtype": "float32"}))
    rows = []
    for runner in (small, wide):
        runner.open(0, GREEDY)
        runner.extend(0, some_tokens(70))
        rows.append(runner.score([Feed(0, (3,), (ROOT,))])[0][0].logits)
    experts = small.decoder.layers[0].experts
    assert small.weights == "stored" and experts is not None
    assert isinstance(experts.gate_up[5], BlockLinear | BlockTwin) and isinstance(
        experts.down[5], BlockLinear | BlockTwin
    )
    assert 0 < (rows[0] - rows[1]).abs().max() < 0.1 * rows[1].abs().max()  # activations are rounded, too


def packed_in_mxfp4(matrix: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return blocks, scales and the exact values of random MXFP4 numbers in the shape [experts, outs, ins]."""
    values = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    table = np.array([*values, *(-one for one in values)])
    random = np.random.default_rng(0)
    nibbles = random.integers(0, 16, (*matrix.shape[:-1], matrix.shape[-1] // 32, 32), dtype=np.uint8)
    scales = random.integers(122, 127, nibbles.shape[:-1], dtype=np.uint8)
    exact = (table[nibbles] * 2.0 ** (scales[..., None].astype(int) - 127)).reshape(matrix.shape)
    blocks = nibbles[..., ::2] | nibbles[..., 1::2] << 4
    return torch.from_numpy(blocks), torch.from_numpy(scales), torch.from_numpy(exact)


def test_experts_in_mxfp4_have_the_values_that_the_format_says(tmp_path: Path) -> None:
    sizes = {**SHAPE, "hidden_size": 64, "intermediate_size": 96}
    config = type(FURTHER["gpt-oss"]())(**sizes, head_dim=16, **EXPERTS, sliding_window=24)
    plain = saved(random_model(config), tmp_path / "plain")
    tensors = load_file(plain / "model.safetensors")
    packed = dict(tensors)
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        blocks, scales, exact = packed_in_mxfp4(tensors[name].transpose(1, 2))
        tensors[name] = exact.transpose(1, 2).float().contiguous()
        packed |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        del packed[name]
    save_file(tensors, plain / "model.safetensors")
    stored = tmp_path / "packed"
    stored.mkdir()
    save_file(packed, stored / "model.safetensors")
    settings = json.loads((plain / "config.json").read_text())
    (stored / "config.json").write_text(json.dumps({**settings, "quantization_config": {"quant_method": "mxfp4"}}))
    assert torch.equal(logits(stored), logits(plain))


@pytest.mark.parametrize("prefix", ["language_model.{}", "model.language_model.{}"])
def test_the_text_part_of_a_model_with_pictures_is_read(prefix: str, tmp_path: Path) -> None:
    plain = saved(tiny("gemma3"), tmp_path / "plain")
    wrapped = tmp_path / "wrapped"
    wrapped.mkdir()
    tensors = load_file(plain / "model.safetensors")
    named = {
        prefix.format(name if prefix.startswith("language") else name.removeprefix("model.")): tensor
        for name, tensor in tensors.items()
    }
    save_file({**named, "vision_tower.patch.weight": torch.zeros(2)}, wrapped / "model.safetensors")
    text = json.loads((plain / "config.json").read_text())
    (wrapped / "config.json").write_text(json.dumps({"model_type": "gemma3", "text_config": text}))
    assert torch.equal(logits(wrapped), logits(plain))


def logits_of_weights(arch: Architecture, weights: Weights) -> torch.Tensor:
    runner = NativeRunner(Decoder(arch, weights, 256), 128, pages=4)
    runner.open(0, GREEDY)
    runner.extend(0, some_tokens(70))
    return runner.score([Feed(0, (3,), (ROOT,))])[0][0].logits


@pytest.mark.parametrize("kind", ["gemma3", "mixtral", "gpt-oss"])
def test_matrices_in_int8_are_multiplied_as_the_numbers_they_stand_for(kind: str, tmp_path: Path) -> None:
    located = locate(str(saved(tiny(kind), tmp_path)))
    arch, source = open_model(located)
    small = read_weights(arch, source, torch.device("cpu"), torch.float64, "int8")
    layers = [
        replace(
            layer,
            **{name: getattr(layer, name).in_floats(torch.float64) for name in ("qkv", "out", "gate_up", "down")},
        )
        for layer in small.layers
    ]
    wide = replace(small, layers=tuple(layers), head=small.head.in_floats(torch.float64))
    expected = logits_of_weights(arch, wide)
    assert small.stored == "int8"
    assert (logits_of_weights(arch, small) - expected).abs().max() < 1e-5 * expected.abs().max()


@pytest.mark.parametrize("kind", ["gemma3", "mixtral", "gpt-oss"])
def test_a_model_in_bfloat16_says_about_what_it_says_in_float64(kind: str, tmp_path: Path) -> None:
    folder = saved(tiny(kind), tmp_path)
    expected = logits(folder)
    runner = load_native(folder, context_length=128, dtype="bfloat16")
    runner.open(0, GREEDY)
    runner.extend(0, some_tokens(70))
    got = runner.score([Feed(0, (3,), (ROOT,))])[0][0].logits
    assert (got - expected).abs().max() < 0.1 * expected.abs().max()


def configured(kind: str, **changes: Any) -> dict[str, Any]:
    return {**FURTHER[kind]().to_dict(), **changes}


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (configured("gemma3", layer_types=["sliding_attention"]), "layer_types; expected a list of 3 entries"),
        (configured("gemma3", layer_types=["full_attention", "other", "full_attention"]), "'sliding_attention'"),
        (configured("gpt-oss", sliding_window=None, layer_types=["full_attention"] * 3), ""),
        (configured("gemma3", use_bidirectional_attention=True), "must not see later tokens"),
        (configured("gemma3", hidden_activation="relu"), "activation 'relu'"),
        (configured("gemma2", query_pre_attn_scalar=0), "query_pre_attn_scalar; expected a number"),
        (configured("mixtral", num_experts_per_tok=7), "6 experts, and each token chooses 7"),
        (configured("mixtral", num_local_experts=0), "num_local_experts"),
        (configured("gpt-oss", swiglu_limit=5.0), "swiglu_limit; expected 7.0"),
        (configured("mixtral", quantization_config={"quant_method": "mxfp4"}), "'mxfp4' quantisation"),
    ],
)
def test_contradictions_are_refused_by_name(config: dict[str, Any], said: str) -> None:
    if not said:
        assert Architecture.from_config(config).window is None
        return
    with pytest.raises(ModelError, match=said):
        Architecture.from_config(config, "here")


def test_mxfp4_of_inputs_that_are_no_whole_groups_is_refused(tmp_path: Path) -> None:
    folder = saved(tiny("gpt-oss"), tmp_path)
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if name.endswith("gate_up_proj")]:
        tensors[f"{name}_blocks"] = torch.zeros(1, dtype=torch.uint8)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ModelError, match="48 inputs in MXFP4; expected a multiple of 32"):
        load_native(folder, context_length=64)


def test_an_expert_that_is_missing_is_named(tmp_path: Path) -> None:
    folder = saved(tiny("mixtral"), tmp_path)
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.block_sparse_moe.experts.3.w2.weight"]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ModelError, match=r"no tensor 'model.layers.1.block_sparse_moe.experts.3.w2.weight'"):
        load_native(folder, context_length=64)
