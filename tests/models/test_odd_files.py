"""Files that are not what they should be: whatever stands in them, what comes out is a sentence, never a traceback."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from specbranch.errors import ModelError, SpecBranchError
from specbranch.models.files.architecture import Architecture
from specbranch.models.files.gguf_file import GgufFile
from specbranch.models.files.tensor_file import open_folder
from specbranch.models.loading import load_native
from specbranch.text.tokenizer import Tokenizer

DEEP: Any = json.loads("[" * 300 + "]" * 300)
ODD: dict[str, Any] = {
    "null": None,
    "text": "x",
    "empty text": "",
    "below zero": -1,
    "zero": 0,
    "two": 2,
    "half": 0.5,
    "large": 1e308,
    "infinite": float("inf"),
    "no number": float("nan"),
    "list": [],
    "list of lists": [[1]],
    "list of texts": ["x"],
    "object": {},
    "odd object": {"x": [1], "content": 5, "name": "default", "rope_type": 7, "factor": "x"},
    "true": True,
    "nested": DEEP,
    "huge": 10**30,
    "half a character": "\ud800",
}
ROPE = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 32.0, "beta_slow": 1.0}
YARN = {**ROPE, "attention_factor": 1.1, "mscale": 1.0, "mscale_all_dim": 1.0, "truncate": True, "rope_theta": 1e4}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
CONFIG: dict[str, Any] = {  # every field that is read, of any variant
    "head_dim": 8,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e4,
    "hidden_act": "silu",
    "partial_rotary_factor": 1.0,
    "quantization_config": {},
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": False,
    "sliding_window": None,
    "use_sliding_window": False,
    "max_window_layers": 4,
    "layer_types": None,
    "layers_block_type": None,
    "attention_chunk_size": None,
    "text_config": None,
    "ssm_cfg": None,
    "rope_parameters": None,
}
TOKENIZER: dict[str, Any] = {
    "added_tokens_decoder": {"0": {"content": "<unk>", "special": True}, "9": {"content": "<nine>", "lstrip": False}},
    "additional_special_tokens": ["<more>", {"content": "<most>"}],
    "extra_special_tokens": {"image_token": "<image>"},
    "chat_template": [{"name": "default", "template": "{{ messages }}"}],
    "eos_token": {"content": "</s>"},
}
NO_OBJECTS = ["", "[", "[]", "5", "null", "[" * 200_000, '{"a":' * 200_000, "\ufeff{}", "{'a': 1}"]
NO_OBJECTS += ['{"a": 1' + "0" * 5000 + "}"]  # more digits than Python reads


@pytest.fixture
def folder(pair: tuple[str, str], tmp_path: Path) -> Path:
    """A tiny model of its own, with every field spelled out."""
    shutil.copytree(pair[0], tmp_path / "model")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    (tmp_path / "model" / "config.json").write_text(json.dumps({**CONFIG, **config, "rope_parameters": None}))
    return tmp_path / "model"


def odd_ones(values: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """An object with each of its fields, and those within them, replaced by each odd value in turn."""
    for key, value in values.items():
        for name, odd in ODD.items():
            yield f"{key}: {name}", {**values, key: odd}
        if isinstance(value, dict):
            for reported, inner in odd_ones(value):
                yield f"{key}.{reported}", {**values, key: inner}


def refused(cases: Iterator[tuple[str, dict[str, Any]]], load: Callable[[dict[str, Any]], object]) -> int:
    """How many of some cases end in a sentence; anything but that or success is a failure of the test."""
    count = 0
    for reported, values in cases:
        try:
            load(values)
        except SpecBranchError as error:
            assert str(error).rstrip().endswith((".", ")", "'?")), f"{reported}: {error}"
            count += 1
        except Exception as error:
            pytest.fail(f"{reported}: {type(error).__name__}: {error}")
    return count


@pytest.mark.parametrize("rope", [None, YARN, LLAMA3], ids=["default", "yarn", "llama3"])
def test_any_field_of_a_configuration_may_hold_anything(folder: Path, rope: dict[str, Any] | None) -> None:
    config = json.loads((folder / "config.json").read_text())
    whole = {**config, "rope_scaling": rope}

    def load(values: dict[str, Any]) -> None:
        Architecture.from_config(values, "here")
        if rope is None:
            (folder / "config.json").write_text(json.dumps(values))
            load_native(folder, context_length=32)

    cases = odd_ones(whole) if rope is None else odd_ones({**whole, "rope_scaling": rope})
    chosen = ((reported, values) for reported, values in cases if rope is None or reported.startswith("rope_scaling."))
    assert refused(chosen, load) > 60


def test_the_sound_configurations_are_read(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    for rope in (None, YARN, LLAMA3):
        assert Architecture.from_config({**config, "rope_scaling": rope}, "here").hidden == 32
    load_native(folder, context_length=32)


@pytest.mark.parametrize("file", ["generation_config.json", "config.json"])
def test_any_value_may_stand_for_the_end_token(folder: Path, file: str) -> None:
    (folder / "generation_config.json").unlink(missing_ok=True)
    config = json.loads((folder / "config.json").read_text())

    def load(values: dict[str, Any]) -> None:
        (folder / file).write_text(json.dumps({**config, **values} if file == "config.json" else values))
        Tokenizer.from_folder(folder)
        load_native(folder, context_length=32)

    assert refused(odd_ones({"eos_token_id": 2}), load) > 8


@pytest.mark.slow
@pytest.mark.parametrize("file", ["tokenizer_config.json", "special_tokens_map.json"])
def test_any_field_of_a_tokenizers_settings_may_hold_anything(folder: Path, file: str) -> None:
    def load(values: dict[str, Any]) -> None:
        (folder / file).write_text(json.dumps(values))
        Tokenizer.from_folder(folder).encode("one two")

    assert refused(odd_ones(TOKENIZER), load) > (40 if file == "tokenizer_config.json" else 3)


@pytest.mark.parametrize(
    "name", ["config.json", "generation_config.json", "tokenizer_config.json", "special_tokens_map.json"]
)
@pytest.mark.parametrize("text", NO_OBJECTS, ids=range(len(NO_OBJECTS)))
def test_a_file_that_is_no_object_gets_a_sentence(folder: Path, name: str, text: str) -> None:
    (folder / name).write_text(text, encoding="utf-8")
    with pytest.raises(ModelError, match=name):
        Tokenizer.from_folder(folder)
        load_native(folder, context_length=32)


def test_a_file_that_is_no_text_gets_a_sentence(folder: Path) -> None:
    (folder / "chat_template.jinja").write_bytes(b"\xff\xfe")
    with pytest.raises(ModelError, match="chat_template"):
        Tokenizer.from_folder(folder)


@pytest.mark.parametrize(
    "template",
    ["{{ 1 // 0 }}", "{{ messages[7].content }}", "{{ 'a' * 10**15 }}", "{{ [].pop() }}", "{{ 2 ** -1 % 0 }}"],
)
def test_a_template_that_fails_gets_a_sentence(folder: Path, template: str) -> None:
    (folder / "chat_template.jinja").write_text(template)
    with pytest.raises(SpecBranchError, match="chat template"):
        Tokenizer.from_folder(folder).chat([{"role": "user", "content": "one"}])


HEADERS: dict[str, Any] = {
    "nested": "[" * 200_000,
    "nested objects": '{"a":' * 200_000,
    "a list": "[]",
    "no object": '{"a": 5}',
    "texts as shape": '{"a": {"dtype": "F32", "shape": ["x"], "data_offsets": [0, 4]}}',
    "a shape below zero": '{"a": {"dtype": "F32", "shape": [-1, -1], "data_offsets": [0, 4]}}',
    "a shape of an unknown type": '{"a": {"dtype": "X", "shape": ["x", 2], "data_offsets": [0, 4]}}',
    "a type that is a list": '{"a": {"dtype": [], "shape": [1], "data_offsets": [0, 4]}}',
    "halves of bytes": '{"a": {"dtype": "F32", "shape": [1], "data_offsets": [0.5, 4.5]}}',
    "one offset": '{"a": {"dtype": "F32", "shape": [1], "data_offsets": [0]}}',
    "no offsets": '{"a": {"dtype": "F32", "shape": [1], "data_offsets": null}}',
    "endless": '{"a": {"dtype": "F32", "shape": [1' + "0" * 4000 + '], "data_offsets": [0, 4]}}',
}


@pytest.mark.parametrize("header", HEADERS)
def test_an_odd_header_of_weights_gets_a_sentence(folder: Path, header: str) -> None:
    said = HEADERS[header].encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(said)) + said + bytes(4))
    with pytest.raises(ModelError, match=r"model\.safetensors"):
        open_folder(folder)


@pytest.mark.parametrize(
    "index",
    ['{"weight_map": {"a": 5}}', '{"weight_map": {"a": 5, "b": "x"}}', '{"weight_map": [1]}', "[]", "[" * 200_000],
)
def test_an_odd_index_of_weights_gets_a_sentence(folder: Path, index: str) -> None:
    (folder / "model.safetensors.index.json").write_text(index)
    with pytest.raises(ModelError, match=r"model\.safetensors\.index\.json"):
        open_folder(folder)


KINDS = {bool: 7, int: 11, float: 12, str: 8, list: 9}


def packed(value: Any) -> bytes:
    """A value as GGUF stores it: its kind, then itself."""
    return struct.pack("<I", KINDS[type(value)]) + _plain(value)


def _plain(value: Any) -> bytes:
    if isinstance(value, str):
        return struct.pack("<Q", len(value.encode())) + value.encode()
    if isinstance(value, list):
        kind = KINDS[type(value[0])] if value else 4
        return struct.pack("<IQ", kind, len(value)) + b"".join(_plain(item) for item in value)
    return struct.pack({bool: "<?", int: "<q", float: "<d"}[type(value)], value)


def gguf(path: Path, metadata: dict[str, Any]) -> Path:
    """A GGUF file without tensors."""
    pairs = b"".join(_plain(key) + packed(value) for key, value in metadata.items())
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, len(metadata)) + pairs)
    return path


GGUF: dict[str, Any] = {
    "general.architecture": "llama",
    "general.alignment": 32,
    "llama.block_count": 2,
    "llama.embedding_length": 32,
    "llama.feed_forward_length": 48,
    "llama.context_length": 512,
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2,
    "llama.attention.key_length": 8,
    "llama.attention.value_length": 8,
    "llama.attention.sliding_window": 0,
    "llama.attention.layer_norm_rms_epsilon": 1e-6,
    "llama.vocab_size": 131,
    "llama.expert_count": 0,
    "llama.rope.dimension_count": 8,
    "llama.rope.freq_base": 1e4,
    "llama.rope.scaling.type": "yarn",
    "llama.rope.scaling.factor": 4.0,
    "llama.rope.scaling.attn_factor": 1.0,
    "llama.rope.scaling.original_context_length": 128,
    "tokenizer.ggml.tokens": ["a", "b"],
    "tokenizer.ggml.eos_token_id": 2,
    "tokenizer.ggml.eot_token_id": 2,
    "tokenizer.ggml.bos_token_id": 1,
}
STORABLE = [odd for odd in ODD.values() if type(odd) in KINDS and (not isinstance(odd, int) or abs(odd) < 2**62)]


def test_any_field_of_a_gguf_header_may_hold_anything(tmp_path: Path) -> None:
    assert Architecture.from_gguf(GgufFile(gguf(tmp_path / "sound.gguf", GGUF))).hidden == 32
    odd = [one for one in STORABLE if one != DEEP and one != "\ud800"] + [[0.5, 1.0], ["x"] * 20, 2**61]
    cases = ((f"{key}: {value!r:.30}", {**GGUF, key: value}) for key in GGUF for value in odd)
    assert refused(cases, lambda values: Architecture.from_gguf(GgufFile(gguf(tmp_path / "m.gguf", values)))) > 200


@pytest.mark.parametrize("alignment", [0, -1, 0.5, [0], [], "x", True, 2**61])
def test_an_odd_alignment_gets_a_sentence(tmp_path: Path, alignment: Any) -> None:
    with pytest.raises(ModelError, match="alignment"):
        GgufFile(gguf(tmp_path / "odd.gguf", {**GGUF, "general.alignment": alignment}))
