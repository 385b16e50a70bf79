"""A draft folder gives back what was saved, says what it belongs to, and refuses the rest."""

from __future__ import annotations

import errno
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from specbranch.core.draft_evaluation import JudgedPosition, evaluate
from specbranch.core.runner import Feed
from specbranch.core.slots import ROOT
from specbranch.errors import BadParameter, ModelError
from specbranch.models.drafts.draft_folder import DraftInfo, Storage, fingerprint_of, read_draft
from specbranch.models.drafts.evaluation_file import read_evaluation
from specbranch.models.drafts.load import load_draft
from specbranch.models.files.architecture import Architecture
from specbranch.models.files.disk import write_durably
from specbranch.models.files.locate import locate
from specbranch.models.files.tensor_file import TensorSource
from specbranch.models.files.weights import Weights, read_weights
from specbranch.models.forward.decoder import Decoder
from specbranch.models.loading import open_model
from specbranch.models.runners.native import NativeRunner
from specbranch.training.distill import draft_saving
from specbranch.training.distill.draft_saving import DraftWeights, arch_of_layers, config_of, save_draft
from tiny_models import CONFIGS, DENSE, GREEDY, saved, some_tokens, tiny

LAYERS = (0, 2)


def opened(kind: str, folder: Path, seed: int = 0) -> tuple[Architecture, TensorSource, Weights]:
    arch, source = open_model(locate(str(saved(tiny(kind, seed), folder))))
    return arch, source, read_weights(arch, source, torch.device("cpu"), torch.float32)


def saved_draft(folder: Path, target: Path, kind: str = "qwen3", storage: Storage = "bfloat16") -> Path:
    arch, source, weights = opened(kind, target)
    own = DraftWeights([weights.layers[index] for index in LAYERS], weights.norm, torch.tensor([1, 5, 100]))
    info = DraftInfo("tiny", fingerprint_of(arch, source), LAYERS, 3, storage)
    save_draft(folder, arch, own, info, licence="Apache-2.0", figures={"top1": 0.5}, provenance={"seed": 7})
    return folder


@pytest.mark.parametrize(("storage", "error"), [("bfloat16", 2**-8), ("int8", 0.5 / 127)])
@pytest.mark.parametrize("kind", ["qwen3", "llama-linear-biases"])
def test_every_tensor_comes_back_under_its_own_name(kind: str, storage: Storage, error: float, tmp_path: Path) -> None:
    draft = read_draft(saved_draft(tmp_path / "draft", tmp_path / "target", kind, storage))
    state = tiny(kind).state_dict()
    for index, start in enumerate(LAYERS):
        names = [name for name in state if name.startswith(f"model.layers.{start}.")]
        assert names
        for name in names:
            got = draft.tensor(name.replace(f"layers.{start}.", f"layers.{index}."))
            largest = state[name].abs().amax(-1, keepdim=True) if state[name].dim() == 2 else state[name].abs()
            allowed = largest * (error if state[name].dim() == 2 else 2**-8)
            assert (got - state[name]).abs().le(allowed * 1.0001).all(), name
    assert torch.allclose(draft.tensor("model.norm.weight"), state["model.norm.weight"], rtol=2**-8)
    assert draft.head_ids is not None and draft.head_ids.tolist() == [1, 5, 100]


def test_neither_embedding_nor_head_is_stored(tmp_path: Path) -> None:
    names = load_file(saved_draft(tmp_path / "draft", tmp_path / "target") / "model.safetensors").keys()
    assert all(
        name.startswith(("model.layers.0.", "model.layers.1.", "model.norm.", "draft.head_ids")) for name in names
    )


def test_int8_takes_half_the_room_and_its_scales_are_one_a_row(tmp_path: Path) -> None:
    wide, narrow = (
        saved_draft(tmp_path / kind, tmp_path / "target", storage=kind) / "model.safetensors"
        for kind in ("bfloat16", "int8")
    )
    assert narrow.stat().st_size < 0.75 * wide.stat().st_size  # tiny matrices: headers and scales weigh much
    tensors = load_file(narrow)
    matrix, scale = tensors["model.layers.0.mlp.down_proj.weight"], tensors["model.layers.0.mlp.down_proj.scale"]
    assert matrix.dtype == torch.int8 and scale.shape == matrix.shape[:1]


@pytest.mark.parametrize("kind", [*CONFIGS, *DENSE])
def test_the_config_is_read_again_as_the_same_architecture(kind: str, tmp_path: Path) -> None:
    arch, _, _ = opened(kind, tmp_path / "target")
    assert Architecture.from_config(config_of(arch), arch.name) == arch


@pytest.mark.parametrize("kind", DENSE)
def test_a_draft_of_some_layers_keeps_their_windows_and_norms(kind: str, tmp_path: Path) -> None:
    arch, source, weights = opened(kind, tmp_path / "target")
    info = DraftInfo("tiny", fingerprint_of(arch, source), (1, 2))
    chosen = DraftWeights(weights.layers[1:], weights.norm)
    save_draft(tmp_path / "draft", arch, chosen, info)
    draft = load_draft(tmp_path / "draft", tmp_path / "target", context_length=96, dtype=torch.float64)
    expected = Decoder(arch_of_layers(arch, (1, 2)), replace(weights, layers=weights.layers[1:]), 256)
    reference = NativeRunner(expected, 96, pages=4)
    logits = []
    for runner in (draft, reference):
        runner.open(0, GREEDY)
        runner.extend(0, some_tokens(60))
        logits.append(runner.score([Feed(0, (3,), (ROOT,))])[0][0].logits.double())
    assert (logits[0] - logits[1]).abs().max() < 0.05 * logits[1].abs().max()  # the folder is in bfloat16


def test_the_config_says_what_the_draft_is(tmp_path: Path) -> None:
    folder = saved_draft(tmp_path / "draft", tmp_path / "target", storage="int8")
    config = json.loads((folder / "config.json").read_text())
    arch, source, _ = opened("qwen3", tmp_path / "target")
    assert config["num_hidden_layers"] == 2
    assert config["specbranch_draft"] == {
        "format": 1,
        "target": "tiny",
        "target_fingerprint": fingerprint_of(arch, source),
        "layers": [0, 2],
        "head_tokens": 3,
        "storage": "int8",
    }
    card = (folder / "README.md").read_text()
    assert "license: apache-2.0" in card and "| top1 | 0.5 |" in card
    assert json.loads((folder / "provenance.json").read_text()) == {"seed": 7, "figures": {"top1": 0.5}}


def test_a_draft_of_another_target_is_refused(tmp_path: Path) -> None:
    folder = saved_draft(tmp_path / "draft", tmp_path / "target")
    arch, source, weights = opened("qwen3", tmp_path / "other", seed=1)
    other = fingerprint_of(arch, source)
    with pytest.raises(ModelError, match="was made for tiny"):
        read_draft(folder, other)
    info = DraftInfo("other", other, (0,))
    with pytest.raises(ModelError, match="was made for tiny"):
        save_draft(folder, arch, DraftWeights(weights.layers[:1], weights.norm), info)
    assert read_draft(folder).info.target == "tiny"


def test_a_model_folder_is_not_overwritten_with_a_draft(tmp_path: Path) -> None:
    arch, source, weights = opened("qwen3", tmp_path / "target")
    info = DraftInfo("tiny", fingerprint_of(arch, source), (0,))
    with pytest.raises(ModelError, match="no draft made by"):
        save_draft(tmp_path / "target", arch, DraftWeights(weights.layers[:1], weights.norm), info)
    assert (tmp_path / "target" / "model.safetensors").stat().st_size > 0


def test_a_damaged_draft_is_named_in_a_sentence(tmp_path: Path) -> None:
    folder = saved_draft(tmp_path / "draft", tmp_path / "target")
    config = json.loads((folder / "config.json").read_text())
    wrongs: list[tuple[dict[str, object], str]] = [({"format": 9}, "format 9"), ({"storage": "int4"}, "'int4'")]
    wrongs += [({"layers": 5}, "specbranch_draft.layers"), ({"target": 7}, "specbranch_draft.target")]
    for wrong, words in wrongs:
        changed = {**config, "specbranch_draft": {**config["specbranch_draft"], **wrong}}
        (folder / "config.json").write_text(json.dumps(changed))
        with pytest.raises(ModelError, match=words):
            read_draft(folder)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").write_bytes(b"no tensors here")
    with pytest.raises(ModelError, match="damaged"):
        read_draft(folder)


@pytest.mark.parametrize(("scale", "words"), [(None, "cannot be read"), (torch.ones(3), r"a scale of shape \[3\]")])
def test_a_matrix_without_its_scales_is_a_sentence(scale: torch.Tensor | None, words: str, tmp_path: Path) -> None:
    file = saved_draft(tmp_path / "draft", tmp_path / "target", storage="int8") / "model.safetensors"
    tensors = load_file(file)
    del tensors["model.layers.0.mlp.down_proj.scale"]
    save_file(tensors if scale is None else {**tensors, "model.layers.0.mlp.down_proj.scale": scale}, file)
    with pytest.raises(ModelError, match=words):
        read_draft(file.parent).tensor("model.layers.0.mlp.down_proj.weight")


def test_a_head_that_is_no_list_of_ids_is_a_sentence(tmp_path: Path) -> None:
    file = saved_draft(tmp_path / "draft", tmp_path / "target") / "model.safetensors"
    for wrong in (torch.ones(3), torch.ones(2, 3, dtype=torch.int32)):
        save_file({**load_file(file), "draft.head_ids": wrong}, file)
        with pytest.raises(ModelError, match="no list of token ids"):
            _ = read_draft(file.parent).head_ids


def test_the_card_names_a_known_target_as_the_hub_does(tmp_path: Path) -> None:
    arch, source, weights = opened("qwen3", tmp_path / "target")
    info = DraftInfo("smollm2-135m", fingerprint_of(arch, source), (0,))
    save_draft(tmp_path / "draft", arch, DraftWeights(weights.layers[:1], weights.norm), info)
    assert "base_model: HuggingFaceTB/SmolLM2-135M-Instruct\n" in (tmp_path / "draft" / "README.md").read_text()


def test_a_full_disk_is_a_sentence_and_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "file"
    write_durably(file, b"old")

    def full(path: Path, data: bytes) -> None:
        path.write_text("n")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(BadParameter, match="The disk is full"):
        write_durably(file, b"new")
    assert file.read_bytes() == b"old" and list(tmp_path.iterdir()) == [file]


def test_a_folder_has_its_config_only_when_it_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = saved_draft(tmp_path / "draft", tmp_path / "target")

    def killed(path: Path, data: bytes) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(draft_saving, "write_durably", killed)
    with pytest.raises(KeyboardInterrupt):
        saved_draft(folder, tmp_path / "target")
    assert not (folder / "config.json").exists()


def test_a_draft_that_replaces_another_has_no_evaluation_but_its_own(tmp_path: Path) -> None:
    arch, source, weights = opened("qwen3", tmp_path / "target")
    info, own = DraftInfo("tiny", fingerprint_of(arch, source), (0,)), DraftWeights(weights.layers[:1], weights.norm)
    some = evaluate([JudgedPosition((0.7, 0.2), 0)])
    save_draft(tmp_path / "draft", arch, own, info, evaluation=some)
    assert read_evaluation(str(tmp_path / "draft")) == some
    save_draft(tmp_path / "draft", arch, own, info)
    assert not (tmp_path / "draft" / "evaluation.json").exists()


def test_the_fingerprint_follows_the_embedding_alone(tmp_path: Path) -> None:
    arch, source, _ = opened("qwen2", tmp_path / "one")
    model = tiny("qwen2")
    model.model.layers[0].mlp.down_proj.weight.data.zero_()
    again, changed, _ = *open_model(locate(str(saved(model, tmp_path / "two")))), None
    assert fingerprint_of(arch, source) == fingerprint_of(replace(again, layers=2), changed)
    other, third, _ = opened("qwen2", tmp_path / "three", seed=3)
    assert fingerprint_of(other, third) != fingerprint_of(arch, source)
