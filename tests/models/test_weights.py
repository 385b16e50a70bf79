"""Weight files: GGUF beside safetensors, damaged and incomplete ones, and finding them."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from specbranch.core.runner import Feed
from specbranch.core.slots import ROOT
from specbranch.errors import ModelError
from specbranch.models.families.family import GGUF, HUGGING_FACE
from specbranch.models.files.encodings import gguf_encoding
from specbranch.models.files.gguf_file import GgufFile
from specbranch.models.files.locate import Located, locate
from specbranch.models.files.tensor_file import CPU_NUMBERS, UNPACKED_NUMBERS, StoredTensor, TensorFile, open_folder
from specbranch.models.files.weights import read_weights
from specbranch.models.loading import load_native, open_model
from tiny_models import CONFIGS, GREEDY, saved, some_tokens, tiny

torch.set_num_threads(1)
F32 = gguf.GGMLQuantizationType.F32


@pytest.fixture(autouse=True)
def torch_linear(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECBRANCH_LINEAR", "torch")


def interleaved(weight: np.ndarray, heads: int) -> np.ndarray:
    """Order the rows of each head as llama.cpp does for the llama architecture."""
    return weight.reshape(heads, 2, -1, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


def gguf_names(layers: int) -> dict[str, str]:
    pairs = {}
    for part, name in HUGGING_FACE.items():
        for layer in range(layers):
            for suffix in ("weight", "bias"):
                pairs[f"{name.format(layer)}.{suffix}"] = f"{GGUF[part].format(layer)}.{suffix}"
    return pairs


def write_gguf(model: str | PreTrainedModel, path: Path, stored: gguf.GGMLQuantizationType = F32) -> Path:
    """Write a tiny model as llama.cpp's converter would."""
    model = tiny(model) if isinstance(model, str) else model
    config, arch = model.config, model.config.model_type
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer = gguf.GGUFWriter(path, "llama" if arch == "mistral" else arch)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    writer.add_eos_token_id(5)
    writer.add_token_list([f"t{index}" for index in range(config.vocab_size)])
    names = gguf_names(config.num_hidden_layers)
    for name, value in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        held = value.numpy()
        if arch != "qwen2" and arch != "qwen3" and ("q_proj" in name or "k_proj" in name):
            held = interleaved(held, config.num_attention_heads if "q_proj" in name else config.num_key_value_heads)
        packed = stored if held.ndim == 2 and held.shape[1] % 32 == 0 else F32
        writer.add_tensor(names[name], gguf.quants.quantize(held, packed), raw_dtype=packed)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def logits(model: Path) -> torch.Tensor:
    runner = load_native(model, context_length=64, dtype="float64")
    runner.open(0, GREEDY)
    runner.extend(0, some_tokens(20))
    return runner.score([Feed(0, (3,), (ROOT,))])[0][0].logits


@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen2", "qwen3"])
def test_gguf_gives_the_logits_of_its_safetensors_twin(kind: str, tmp_path: Path) -> None:
    twin = saved(tiny(kind), tmp_path / "folder")
    got, expected = logits(write_gguf(kind, tmp_path / "model.gguf")), logits(twin)
    assert (got - expected).abs().max() < 1e-6 * expected.abs().max()  # the header stores rms_eps in float32


def test_llama3_scaling_comes_from_the_tensor_gguf_keeps_it_in(tmp_path: Path) -> None:
    from specbranch.models.files.architecture import Architecture
    from specbranch.models.forward.rope import frequencies

    scaled = Architecture.from_config(CONFIGS["llama-llama3"]().to_dict()).rope
    factors = (
        frequencies(Architecture.from_config(CONFIGS["llama"]().to_dict()).rope, 8) / frequencies(scaled, 8)
    ).numpy()
    original = gguf.GGUFWriter.write_header_to_file
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            gguf.GGUFWriter,
            "write_header_to_file",
            lambda writer: (writer.add_tensor("rope_freqs.weight", factors), original(writer)),
        )
        path = write_gguf("llama-llama3", tmp_path / "model.gguf")
    got, expected = logits(path), logits(saved(tiny("llama-llama3"), tmp_path / "folder"))
    assert (got - expected).abs().max() < 1e-5 * expected.abs().max()
    assert len(set(factors.tolist())) > 1


HALVES = {  # where the blocks of each kind keep their numbers in half precision
    "Q4_0": (0,),
    "Q4_1": (0, 2),
    "Q5_0": (0,),
    "Q5_1": (0, 2),
    "Q8_0": (0,),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
}


def random_blocks(kind: str, blocks: int) -> np.ndarray:
    """Blocks of random bytes with finite scales, negative and subnormal ones too: every pattern of bits that a file
    may hold."""
    rng, size = np.random.default_rng(0), gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]][1]
    held = rng.integers(0, 256, (blocks, size), dtype=np.uint8)
    for offset in HALVES[kind]:
        scales = rng.standard_normal(blocks) * 10.0 ** rng.integers(-7, 2, blocks)
        held[:, offset : offset + 2] = scales.astype(np.float16).view(np.uint8).reshape(-1, 2)
    return held


def widened(packed: np.ndarray, stored: gguf.GGMLQuantizationType) -> torch.Tensor:
    """What the gguf package makes of the same bytes."""
    return torch.from_numpy(gguf.quants.dequantize(packed, stored).reshape(-1).copy())


def same_bits(got: torch.Tensor, expected: torch.Tensor) -> bool:
    """Unlike torch.equal it tells -0 from 0."""
    return torch.equal(got.view(torch.int32), expected.view(torch.int32))


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "TQ2_0"])
def test_unpacking_equals_the_gguf_package_bit_for_bit(kind: str) -> None:
    stored = gguf.GGMLQuantizationType[kind]
    packed = gguf.quants.quantize(np.random.default_rng(0).standard_normal((6, 1280), dtype=np.float32), stored)
    raw = torch.from_numpy(packed.view(np.uint8).reshape(-1).copy())
    assert same_bits(gguf_encoding(stored.value).decode(raw).float(), widened(packed, stored))


@pytest.mark.parametrize("kind", HALVES)
@pytest.mark.parametrize("blocks", [1, 700])
def test_any_bytes_are_unpacked_as_the_gguf_package_does(kind: str, blocks: int) -> None:
    stored, packed = gguf.GGMLQuantizationType[kind], random_blocks(kind, blocks)
    got = gguf_encoding(stored.value).decode(torch.from_numpy(packed.reshape(-1)))
    assert same_bits(got, widened(packed, stored))


@pytest.mark.parametrize("kind", HALVES)
def test_blocks_are_unpacked_on_the_device_they_are_on(kind: str) -> None:
    encoding = gguf_encoding(gguf.GGMLQuantizationType[kind].value)
    # nothing can be read from there
    found = encoding.decode(torch.empty(3 * encoding.size, dtype=torch.uint8, device="meta"))
    assert (found.device.type, found.dtype, found.numel()) == ("meta", torch.float32, 3 * encoding.block)


def written(
    path: Path, kind: str, packed: np.ndarray, decode: Callable[[torch.Tensor], torch.Tensor] | None = None
) -> TensorFile:
    """A file with one tensor w."""
    encoding = gguf_encoding(gguf.GGMLQuantizationType[kind].value)
    path.write_bytes(b"head" + packed.tobytes())
    numbers = packed.size // encoding.size * encoding.block
    return TensorFile(path, {"w": StoredTensor((numbers,), 4, replace(encoding, decode=decode or encoding.decode))})


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("kind", ["Q8_0", "Q4_K", "Q6_K"])
def test_a_tensor_of_several_parts_is_read_whole(kind: str, dtype: torch.dtype, tmp_path: Path) -> None:
    stored = gguf.GGMLQuantizationType[kind]
    packed = random_blocks(kind, CPU_NUMBERS * 5 // 2 // gguf.GGML_QUANT_SIZES[stored][0])
    file = written(tmp_path / "weights", kind, packed)
    into = torch.empty(file.entries["w"].shape, dtype=dtype)
    file.read("w", into)
    assert torch.equal(into, widened(packed, stored).to(dtype))


def test_a_device_is_sent_stored_bytes_in_parts_of_bounded_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[torch.Tensor] = []

    def decode(raw: torch.Tensor) -> torch.Tensor:
        sent.append(raw)
        return torch.empty(raw.numel() // 144 * 256, device=raw.device)

    monkeypatch.setattr("specbranch.models.files.tensor_file.UNPACKED_NUMBERS", 1024)
    file = written(tmp_path / "weights", "Q4_K", random_blocks("Q4_K", 10), decode)
    file.read("w", torch.empty(2560, dtype=torch.bfloat16, device="meta"))
    assert [(raw.device.type, raw.dtype, raw.numel()) for raw in sent] == [
        ("meta", torch.uint8, 144 * n) for n in (4, 4, 2)
    ]
    assert UNPACKED_NUMBERS % 256 == 0 and UNPACKED_NUMBERS * 8 < 100e6


def test_tied_head_shares_the_embedding_and_matrices_are_fused(tmp_path: Path) -> None:
    arch, source = open_model(locate(str(saved(tiny("qwen2"), tmp_path))))
    weights = read_weights(arch, source, torch.device("cpu"), torch.float32)
    assert weights.head.weight.data_ptr() == weights.embedding.data_ptr()
    assert weights.layers[0].qkv.weight.shape == (10 * arch.head_dim, arch.hidden)
    assert weights.layers[0].gate_up.weight.shape == (2 * arch.intermediate, arch.hidden)


def test_rows_that_pad_the_vocabulary_are_left_in_the_file(tmp_path: Path) -> None:
    folder = saved(tiny("llama"), tmp_path)
    before = logits(folder)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.embed_tokens.weight"] = torch.cat((tensors["model.embed_tokens.weight"], torch.full((5, 48), 9.0)))
    save_file(tensors, folder / "model.safetensors")
    assert torch.equal(logits(folder), before)


def test_end_tokens_come_from_both_configurations(tmp_path: Path) -> None:
    folder = saved(tiny("llama"), tmp_path)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [9, 2]}))
    assert open_model(Located("folder", folder))[0].eos_ids == (2, 9)


def test_long_metadata_arrays_are_read_on_demand(tmp_path: Path) -> None:
    tokens = GgufFile(write_gguf("llama", tmp_path / "model.gguf")).metadata["tokenizer.ggml.tokens"]
    assert len(tokens) == 131
    assert list(tokens)[-1] == "t130"


@pytest.mark.parametrize("kept", [0.0, 0.02, 0.5, 0.999])
def test_truncated_safetensors_is_refused(kept: float, tmp_path: Path) -> None:
    file = saved(tiny("llama"), tmp_path) / "model.safetensors"
    file.write_bytes(file.read_bytes()[: int(file.stat().st_size * kept)])
    with pytest.raises(ModelError, match=r"model\.safetensors .*(cut short|damaged)"):
        load_native(tmp_path)


@pytest.mark.parametrize("kept", [0.0, 0.0001, 0.01, 0.5, 0.999])
def test_truncated_gguf_is_refused(kept: float, tmp_path: Path) -> None:
    file = write_gguf("llama", tmp_path / "model.gguf")
    file.write_bytes(file.read_bytes()[: int(file.stat().st_size * kept)])
    with pytest.raises(ModelError, match=r"model\.gguf .*(cut short|damaged)"):
        load_native(file)


def test_every_damaged_byte_of_a_gguf_header_gives_a_sentence_or_a_model(tmp_path: Path) -> None:
    good = write_gguf("llama", tmp_path / "good.gguf").read_bytes()
    rng, outcomes = np.random.default_rng(0), set()
    for _ in range(150):
        bad = bytearray(good)
        bad[rng.integers(0, 2000)] ^= int(rng.integers(1, 256))
        path = tmp_path / "bad.gguf"
        path.write_bytes(bad)
        try:
            open_model(Located("gguf", path))
            outcomes.add("model")
        except ModelError:
            outcomes.add("sentence")
    assert outcomes == {"model", "sentence"}


def test_file_that_is_no_safetensors_is_refused(tmp_path: Path) -> None:
    folder = saved(tiny("llama"), tmp_path)
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", 10) + b"not json!!" + bytes(100))
    with pytest.raises(ModelError, match="damaged or no safetensors"):
        load_native(folder)


def test_missing_tensor_is_named(tmp_path: Path) -> None:
    folder = saved(tiny("qwen3"), tmp_path)
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.self_attn.q_norm.weight"]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(
        ModelError, match=r"model\.safetensors has no tensor 'model\.layers\.1\.self_attn\.q_norm\.weight'"
    ):
        load_native(folder)


def test_misshapen_tensor_is_named(tmp_path: Path) -> None:
    folder = saved(tiny("llama"), tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "intermediate_size": 81}))
    with pytest.raises(ModelError, match=r"gate_proj\.weight' has shape \[80, 48\]; its configuration says \[81, 48\]"):
        load_native(folder)


def test_missing_shard_is_named(tmp_path: Path) -> None:
    folder = saved(tiny("llama"), tmp_path, shards=True)
    next(folder.glob("model-00002*")).unlink()
    with pytest.raises(ModelError, match=r"model-00002.*is missing"):
        load_native(folder)


def test_folder_without_weights_says_what_it_holds(tmp_path: Path) -> None:
    folder = saved(tiny("llama"), tmp_path)
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"neither model\.safetensors.*config\.json"):
        load_native(folder)


def test_tensor_of_a_type_that_is_not_read_is_named(tmp_path: Path) -> None:
    folder = saved(tiny("llama"), tmp_path)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"] = tensors["model.norm.weight"].to(torch.int32)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ModelError, match=r"'model\.norm\.weight' is stored as I32"):
        load_native(folder)
    with pytest.raises(ModelError, match=r"'model\.norm\.weight' is stored as I32"):
        open_folder(folder).read("model.norm.weight", torch.empty(48, device="meta"))


def test_mistyped_path_is_answered_with_the_nearest_name(tmp_path: Path) -> None:
    saved(tiny("llama"), tmp_path / "smollm-tiny")
    with pytest.raises(ModelError, match="Did you mean 'smollm-tiny'"):
        locate(str(tmp_path / "smolm-tiny"))
    with pytest.raises(ModelError, match="does not exist either"):
        locate(str(tmp_path / "a" / "b.gguf"))


def test_local_models_are_found_by_folder_and_file(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"neither config\.json nor a \.gguf"):
        locate(str(tmp_path))
    file = write_gguf("llama", tmp_path / "model.gguf")
    assert locate(str(file)) == locate(str(tmp_path)) == Located("gguf", file)
    (tmp_path / "config.json").write_text("{}")
    assert locate(str(tmp_path)) == Located("folder", tmp_path)
    with pytest.raises(ModelError, match=r"no \.gguf"):
        locate(str(tmp_path / "config.json"))


def test_hub_id_that_is_not_cached_offline_says_what_was_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ModelError, match=r"no local path 'some/model'.*HF_HUB_OFFLINE"):
        locate("some/model")


def test_hub_snapshot_without_configuration_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda name, **_: str(tmp_path))
    with pytest.raises(ModelError, match=r"has no config\.json"):
        locate("some/model")
    (tmp_path / "config.json").write_text("{}")
    assert locate("some/model") == Located("folder", tmp_path)
