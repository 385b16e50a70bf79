"""A distilled draft at work: beside its target, in this process and in one of its own, and never beside another."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from specbranch import LLM, SamplingParams
from specbranch.assembly import ModelChoice, drafter_recipe, fitted_to_target, make_drafter_by
from specbranch.cli.main import run
from specbranch.config import WeightsName
from specbranch.core.runner import Feed
from specbranch.core.slots import ROOT
from specbranch.errors import BadParameter, ModelError
from specbranch.exec.messages import Hello
from specbranch.exec.wire import from_bytes, to_bytes
from specbranch.models.cpu.block_kernels import BlockLinear
from specbranch.models.cpu.kernels import load_kernel
from specbranch.models.cpu.linear import KernelLinear, PlainLinear
from specbranch.models.drafts.draft_folder import read_draft
from specbranch.models.drafts.load import _own_storage, load_draft
from specbranch.models.files.architecture import Architecture
from specbranch.models.files.weights import read_layers
from specbranch.models.forward.stored_linear import StoredLinear
from specbranch.models.loading import load_native
from specbranch.models.sampling.logit_rows import collate
from tiers import tiered
from tiny_models import GREEDY
from tiny_pair import make_pair

pytestmark = pytest.mark.usefixtures("one_thread")
OPTIONS = [
    "--device",
    "cpu",
    "--writing-rows",
    "32",
    "--writing-length",
    "96",
    "--rows",
    "4",
    "--length",
    "128",
    "--tokens",
    "1000",
]
PROMPT = "A branch is a guess"
needs_kernel = pytest.mark.skipif(load_kernel("int8") is None, reason="no compiled kernels on this machine")


@pytest.fixture(scope="module")
def drafts(pair: tuple[str, str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("drafts")
    made = {
        "whole": [],
        "reduced": ["--head-tokens", "200"],
        "int8": ["--storage", "int8", "--layers", "2", "--head-tokens", "200"],
    }
    for name, more in made.items():
        layers = [] if "--layers" in more else ["--layers", "1"]
        assert (
            run(
                ["distill", "--target", pair[0], "--out", str(folder / name), *layers, *OPTIONS, "--steps", "10", *more]
            )
            == 0
        )
    return {name: str(folder / name) for name in made}


@pytest.mark.parametrize("executor", tiered(("serial", "process"), "serial".__eq__))
@pytest.mark.parametrize("name", tiered(["whole", "reduced", "int8"], "reduced".__ne__))
def test_a_distilled_draft_drafts_and_changes_nothing(
    name: str, executor: str, drafts: dict[str, str], pair: tuple[str, str]
) -> None:
    params = SamplingParams(temperature=0.7, seed=5, max_tokens=40, ignore_eos=True)
    plain = LLM(
        pair[0], method="autoregressive", device="cpu", dtype="float64", options={"context_length": 128}
    ).generate(PROMPT, params)
    settings: dict[str, Any] = {"executor": executor, "speculative": {"policy": "confidence"}}
    with LLM(pair[0], drafts[name], **settings, device="cpu", dtype="float64", options={"context_length": 128}) as llm:
        output = llm.generate(PROMPT, params)
    assert output.token_ids == plain.token_ids
    assert output.stats["accepted"] > 0


@pytest.mark.parametrize("executor", tiered(("serial", "process"), "serial".__eq__))
@pytest.mark.parametrize(("weights", "draft_weights"), [("int8", None), (None, "int8"), ("int8", "bfloat16")])
def test_stored_weights_change_the_model_and_nothing_else(
    weights: WeightsName | None,
    draft_weights: WeightsName | None,
    executor: Any,
    drafts: dict[str, str],
    pair: tuple[str, str],
) -> None:
    params = SamplingParams(temperature=0.7, seed=5, max_tokens=40, ignore_eos=True)
    options: dict[str, Any] = {"context_length": 128, "weights": weights}
    plain = LLM(pair[0], method="autoregressive", device="cpu", options=options).generate(PROMPT, params)
    settings: dict[str, Any] = {"executor": executor, "speculative": {"policy": "confidence"}, "device": "cpu"}
    with LLM(pair[0], drafts["reduced"], **settings, options={**options, "draft_weights": draft_weights}) as llm:
        output = llm.generate(PROMPT, params)
        assert llm.weights == (weights or "float32") and llm.dtype == "float32"
    assert output.token_ids == plain.token_ids
    assert output.stats["accepted"] > 0


def test_the_draft_takes_embedding_and_head_from_the_target_beside_it(
    drafts: dict[str, str], pair: tuple[str, str]
) -> None:
    target = load_native(pair[0], context_length=64)
    draft = load_draft(drafts["whole"], pair[0], target_runner=target, context_length=64)
    assert draft.decoder.embedding.data_ptr() == target.decoder.embedding.data_ptr()
    assert draft.decoder.head_matrix is not None and target.decoder.head_matrix is not None
    assert draft.decoder.head_matrix.weight.data_ptr() == target.decoder.head_matrix.weight.data_ptr()


def rows(runner, tokens: tuple[int, ...]) -> torch.Tensor:  # type: ignore[no-untyped-def]
    runner.open(1, GREEDY)
    found = runner.score([Feed(1, tokens, tuple(range(ROOT, len(tokens) - 1)))])[0]
    runner.close(1)
    return collate(found)


def test_a_reduced_head_scores_its_tokens_as_the_whole_head_would(
    drafts: dict[str, str], pair: tuple[str, str]
) -> None:
    reduced = load_draft(drafts["reduced"], pair[0], context_length=64, dtype=torch.float64)
    ids = read_draft(drafts["reduced"]).head_ids
    assert ids is not None and len(ids) == 200
    scores = rows(reduced, (5, 6, 7))
    left_out = torch.ones(scores.shape[1], dtype=torch.bool).index_fill(0, ids, False)
    assert scores[:, left_out].eq(float("-inf")).all()
    assert reduced.decoder.head_matrix is None, "a head that is not used is not held"
    whole = load_native(pair[0], context_length=64, dtype=torch.float64).decoder.head
    reduced.decoder.head, reduced.decoder.columns = whole, None
    assert torch.allclose(rows(reduced, (5, 6, 7))[:, ids], scores[:, ids])


@needs_kernel
def test_an_int8_draft_stays_in_int8_and_says_what_it_says_in_float32(
    drafts: dict[str, str], pair: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPECBRANCH_LINEAR", "llvm")
    compact = load_draft(drafts["int8"], pair[0], context_length=64, weights="int8")
    layer, stored = compact.decoder.layers[0].down, read_draft(drafts["int8"])
    assert compact._fused is not None and isinstance(layer, KernelLinear) and layer.scale is not None
    dense = stored.tensor("model.layers.0.mlp.down_proj.weight")
    torch.testing.assert_close(layer.weight * layer.scale.unsqueeze(-1), dense, rtol=1e-6, atol=0)
    monkeypatch.setenv("SPECBRANCH_LINEAR", "torch")
    plain = load_draft(drafts["int8"], pair[0], context_length=64)
    expected = rows(plain, (5, 6, 7))
    found = rows(compact, (5, 6, 7))
    kept = compact.decoder.columns.ids
    # Scores are those of a head in int8 too: 1/254 of each output's greatest weight is its largest error.
    assert torch.equal(found.isinf(), expected.isinf())
    assert (found - expected)[:, kept].abs().max() < 0.02 * expected[:, kept].abs().max()
    monkeypatch.setattr(plain.decoder, "head", compact.decoder.head)
    torch.testing.assert_close(rows(plain, (5, 6, 7))[:, kept], found[:, kept], rtol=1e-4, atol=1e-4)


@needs_kernel
def test_an_int8_draft_is_multiplied_as_it_is_stored_and_says_nearly_what_it_says_in_int8(
    drafts: dict[str, str], pair: tuple[str, str]
) -> None:
    whole = load_draft(drafts["int8"], pair[0], context_length=64)
    layer, narrow = whole.decoder.layers[0].gate_up, whole.decoder.layers[0].down
    assert whole.compiled and whole.weights == "stored" and isinstance(layer, BlockLinear)
    assert isinstance(narrow, KernelLinear)  # 48 inputs are no whole blocks
    held = read_draft(drafts["int8"])
    dense = torch.cat([held.tensor(f"model.layers.0.mlp.{part}_proj.weight") for part in ("gate", "up")])
    torch.testing.assert_close(layer.matrix.widened(torch.float32), dense, rtol=1e-6, atol=0)
    expected = rows(load_draft(drafts["int8"], pair[0], context_length=64, weights="int8"), (5, 6, 7))
    found, kept = rows(whole, (5, 6, 7)), whole.decoder.columns.ids
    assert (found - expected)[:, kept].abs().max() < 0.05 * expected[:, kept].abs().max()
    with pytest.raises(BadParameter, match="stores floats; expected int8"):
        load_draft(drafts["whole"], pair[0], context_length=64, weights="stored")


def test_an_int8_draft_is_written_out_on_a_cpu_without_a_kernel_for_its_precision(
    drafts: dict[str, str], pair: tuple[str, str]
) -> None:
    draft = load_draft(drafts["int8"], pair[0], context_length=64, dtype=torch.float64)
    assert (
        isinstance(draft.decoder.layers[0].down, PlainLinear)
        and draft.decoder.layers[0].down.weight.dtype is torch.float64
    )


@needs_kernel
@pytest.mark.parametrize("weights", ["int8", "bfloat16"])
@pytest.mark.parametrize("name", ["reduced", "whole"])
def test_a_draft_beside_a_target_in_int8_takes_the_head_that_it_has(
    name: str, weights: WeightsName, drafts: dict[str, str], pair: tuple[str, str]
) -> None:
    target = load_native(pair[0], context_length=64, weights="int8")
    beside = load_draft(drafts[name], pair[0], target_runner=target, context_length=64, weights=weights)
    alone = load_draft(drafts[name], pair[0], context_length=64, weights=weights)
    assert beside.decoder.embedding.data_ptr() == target.decoder.embedding.data_ptr()
    assert beside.weights == alone.weights == weights
    if name == "whole":
        assert beside.decoder.head_matrix is not None and target.decoder.head_matrix is not None
        assert beside.decoder.head_matrix.weight.data_ptr() == target.decoder.head_matrix.weight.data_ptr()
    kept = slice(None) if alone.decoder.columns is None else alone.decoder.columns.ids
    found, expected = (rows(runner, (5, 6, 7))[:, kept] for runner in (beside, alone))
    assert (found - expected).abs().max() < (1e-4 if weights == "int8" else 0.05) * expected.abs().max()


@needs_kernel
def test_an_int8_draft_is_written_out_where_that_is_asked_for(drafts: dict[str, str], pair: tuple[str, str]) -> None:
    asked: dict[str, Any] = {"context_length": 64, "dtype": torch.float64}
    stored = read_draft(drafts["int8"]).tensor("model.layers.0.mlp.down_proj.weight")
    small, wide = (load_draft(drafts["int8"], pair[0], weights=weights, **asked) for weights in ("int8", None))
    down = small.decoder.layers[0].down
    assert isinstance(down, StoredLinear) and (small.weights, wide.weights) == ("int8", "float64")
    torch.testing.assert_close(down.weight * down.scale.unsqueeze(-1), stored, rtol=1e-6, atol=0)
    half = load_draft(drafts["int8"], pair[0], context_length=64, weights="bfloat16").decoder.layers[0].down
    assert isinstance(half, KernelLinear) and torch.equal(half.weight, stored.bfloat16())


def test_off_the_cpu_an_int8_draft_stays_so_by_default(drafts: dict[str, str], pair: tuple[str, str]) -> None:
    draft = read_draft(drafts["int8"])
    for dtype in (torch.bfloat16, torch.float32):
        assert _own_storage(draft, torch.device("cuda"), dtype, None) == "int8"  # is only named here
        built = read_layers(Architecture.from_config(draft.config), draft, torch.device("cpu"), dtype, "int8")[0][
            0
        ].down
        stored = draft.tensor("model.layers.0.mlp.down_proj.weight")
        torch.testing.assert_close(built.widened(torch.float32), stored, rtol=1e-6, atol=0)
    assert _own_storage(read_draft(drafts["whole"]), torch.device("cuda"), torch.bfloat16, None) is None


def test_the_draft_process_stores_as_it_is_configured(drafts: dict[str, str], pair: tuple[str, str]) -> None:
    choice = fitted_to_target(
        ModelChoice(drafts["reduced"], device="cpu", context_length=64, dtype="float64", weights="int8"), pair[0]
    )
    sent = from_bytes(to_bytes(Hello((), drafter_recipe(choice, 400))))
    assert isinstance(sent, Hello)
    made = make_drafter_by(**sent.recipe.given)
    assert made.runner.weights == "int8" and made.runner.dtype is torch.float64  # type: ignore[attr-defined]


def test_a_draft_of_another_target_is_refused(drafts: dict[str, str], tmp_path: Path) -> None:
    torch.manual_seed(9)
    _, other = make_pair(tmp_path)
    with pytest.raises(ModelError, match="was made for target"):
        LLM(other, drafts["whole"], device="cpu")


def test_a_draft_whose_tensors_do_not_fit_is_a_sentence(
    drafts: dict[str, str], pair: tuple[str, str], tmp_path: Path
) -> None:
    shutil.copytree(drafts["reduced"], tmp_path, dirs_exist_ok=True)
    file, config = tmp_path / "model.safetensors", json.loads((tmp_path / "config.json").read_text())
    sound = load_file(file)
    wrong = {
        "has shape": {"model.layers.0.mlp.down_proj.weight": torch.ones(3, 5)},
        "not ascending ids below": {"draft.head_ids": torch.tensor([5, 100_000], dtype=torch.int32)},
    }
    for words, tensors in wrong.items():
        save_file({**sound, **tensors}, file)
        with pytest.raises(ModelError, match=words):
            load_draft(tmp_path, pair[0], context_length=64)
    (tmp_path / "config.json").write_text(json.dumps({**config, "hidden_size": 64}))
    with pytest.raises(ModelError, match=r"by its config\.json the embedding is 64"):
        load_draft(tmp_path, pair[0], context_length=64)
