"""Drafts beside inflated targets, and inflated themselves: they draft what they drafted, at the size they have
there."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from specbranch import LLM, SamplingParams
from specbranch.cli.main import run
from specbranch.core.request import Request
from specbranch.core.runner import Ask, Feed
from specbranch.core.slots import ROOT
from specbranch.errors import BadParameter, ModelError
from specbranch.lab.bench.other_engines.transformers_weights import as_transformers, refuse_other_families
from specbranch.models.drafts.evaluation_file import check_folder, read_evaluation
from specbranch.models.drafts.load import load_draft
from specbranch.models.gpu.runner import GpuRunner
from specbranch.models.loading import load_native
from specbranch.models.runners.native import NativeRunner
from specbranch.models.sampling.logit_rows import scored
from tiers import each_value, tiered
from tiny_models import GREEDY

pytestmark = pytest.mark.usefixtures("one_thread")
WRITING = ["--device", "cpu", "--writing-rows", "32", "--writing-length", "96", "--tokens", "1000"]
TRAINING = ["--layers", "1", "--rows", "4", "--length", "128", "--steps", "10"]
GROWN = [
    "--hidden",
    "80",
    "--layers",
    "3",
    "--heads",
    "8",
    "--kv-heads",
    "4",
    "--head-dim",
    "16",
    "--intermediate",
    "96",
]
PROMPT = "A branch is a guess"
KEPT = 150  # tokens of a reduced head


@pytest.fixture(scope="module")
def folders(pair: tuple[str, str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The target and two drafts for it, and all of them inflated."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("inflated")
    found = {"target": pair[0], "whole": str(folder / "whole"), "reduced": str(folder / "reduced")}
    for name, more in {"whole": [], "reduced": ["--head-tokens", str(KEPT)]}.items():
        assert run(["distill", "--target", pair[0], "--out", found[name], *WRITING, *TRAINING, *more]) == 0
    for name in ("target", "whole", "reduced"):
        beside = [] if name == "target" else ["--target", pair[0]]
        out = found[f"large {name}"] = str(folder / f"large-{name}")
        assert (
            run(["inflate", found[name], "--out", out, *GROWN, "--vocabulary", "500", "--device", "cpu", *beside]) == 0
        )
    return found


def logits(runner: NativeRunner) -> torch.Tensor:
    runner.open(1, GREEDY)
    rows = runner.score([Feed(1, (5, 6, 7, 8), (ROOT, 0, 1, 2))])[0]
    runner.close(1)
    block, columns = scored(rows)
    return block[:, : runner.sampler.width(columns)]


@each_value
@pytest.mark.parametrize("target", ["target", "large target"])
@pytest.mark.parametrize("name", ["whole", "reduced"])
def test_an_inflated_draft_has_the_drafts_logits_beside_either_target(
    name: str, target: str, folders: dict[str, str]
) -> None:
    asked: dict[str, Any] = {"context_length": 64, "dtype": torch.float64}
    small = load_draft(folders[name], folders["target"], **asked)
    large = load_draft(folders[f"large {name}"], folders[target], **asked)
    assert large.decoder.embedding.shape == (small.vocabulary, 80) and large.architecture.layers == 3
    found, expected = logits(large), logits(small)
    assert found.shape == expected.shape == (4, KEPT if name == "reduced" else small.vocabulary)
    assert (found - expected).abs().max() < 1e-9 * expected.abs().max()


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("on_graphs", [False, True])
def test_a_reduced_draft_is_charged_with_the_shapes_head_and_proposes_the_same(
    on_graphs: bool, temperature: float, folders: dict[str, str]
) -> None:
    asked: dict[str, Any] = {"context_length": 64, "dtype": torch.float64}
    names = ("reduced", "large reduced")
    runners: list[Any] = [load_draft(folders[name], folders["target"], **asked) for name in names]
    head: Any = runners[1].decoder.head
    assert head.weight.shape == (500, 80)
    head.weight[KEPT:] *= 1000  # what nobody looks at may not win
    said = []
    for runner in [GpuRunner(runner.decoder, 64) for runner in runners] if on_graphs else runners:
        runner.open(1, Request(SamplingParams(temperature=temperature), 3, 0))
        (proposal,) = runner.propose([Feed(1, (5, 6, 7), (ROOT, 0, 1))], [Ask(1, 2, 4)])
        said.append(list(proposal.tokens))
    assert said[0] == said[1] and len(said[0]) >= 4


@pytest.mark.parametrize("name", ["target", "whole", "reduced"])
def test_transformers_scores_alike_on_the_weights_of_an_inflated_model(name: str, folders: dict[str, str]) -> None:
    asked: dict[str, Any] = {"context_length": 64, "dtype": torch.float64}
    large = folders[f"large {name}"]
    runner = load_native(large, **asked) if name == "target" else load_draft(large, folders["large target"], **asked)
    model: Any = as_transformers(runner.decoder)
    with torch.inference_mode():
        theirs = model(torch.tensor([[5, 6, 7, 8]])).logits[0]
    ours, scored = logits(runner), theirs > -torch.inf
    assert (
        theirs.shape == (4, runner.vocabulary)
        and scored.sum(-1).tolist() == [KEPT if name == "reduced" else runner.vocabulary] * 4
    )
    assert (
        theirs[scored].view(4, -1) - ours[:, : runner.vocabulary]
    ).abs().max() < 1e-5 * ours.abs().max()  # its norms are in float32
    shared = {
        tensor.untyped_storage().data_ptr()
        for tensor in (runner.decoder.embedding, runner.decoder.layers[0].qkv.weight)
    }
    assert shared <= {tensor.untyped_storage().data_ptr() for tensor in model.parameters()}


def test_stored_weights_and_other_families_cannot_be_shared_with_transformers(folders: dict[str, str]) -> None:
    small = load_native(folders["target"], context_length=64, weights="int8")
    with pytest.raises(BadParameter, match="cannot be shared with transformers"):
        as_transformers(small.decoder)
    with pytest.raises(BadParameter, match="is of the family qwen2"):
        refuse_other_families(replace(small.decoder.arch, family="qwen2"))
    with pytest.raises(BadParameter, match="transformers expects a multiple"):
        refuse_other_families(replace(small.decoder.arch, heads=6))


def test_an_inflated_draft_carries_its_sources_evaluation(folders: dict[str, str]) -> None:
    assert read_evaluation(folders["large whole"]) == read_evaluation(folders["whole"]) is not None
    with pytest.raises(BadParameter, match=r"is inflated from .*whole"):
        check_folder(folders["large whole"])


def test_a_draft_beside_an_inflated_target_keeps_its_size(folders: dict[str, str]) -> None:
    target = load_native(folders["large target"], context_length=64)
    draft = load_draft(folders["whole"], folders["large target"], target_runner=target, context_length=64)
    assert draft.decoder.embedding.shape[1] == draft.architecture.hidden == 32


@pytest.mark.slow
@pytest.mark.parametrize("executor", tiered(("serial", "process"), "serial".__eq__))
@pytest.mark.parametrize("draft", tiered(("reduced", "large whole", "large reduced"), "large reduced".__eq__))
def test_a_pair_with_inflated_models_says_what_the_source_says(
    draft: str, executor: Any, folders: dict[str, str]
) -> None:
    params = SamplingParams(temperature=0.7, seed=5, max_tokens=40, ignore_eos=True)
    asked: dict[str, Any] = {"device": "cpu", "dtype": "float64", "options": {"context_length": 128}}
    plain = LLM(folders["target"], method="autoregressive", **asked).generate(PROMPT, params)
    settings: dict[str, Any] = {"executor": executor, "speculative": {"policy": "confidence"}}
    with LLM(folders["large target"], folders[draft], **settings, **asked) as llm:
        output = llm.generate(PROMPT, params)
    assert output.token_ids == plain.token_ids
    assert output.stats["accepted"] > 0


def test_an_inflated_draft_is_no_target_and_no_other_targets(
    folders: dict[str, str], pair: tuple[str, str], tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match="is a draft, which runs only with its target"):
        load_native(folders["large whole"])
    with pytest.raises(ModelError, match="is a draft, which runs only with"):
        LLM(folders["large whole"], method="autoregressive", device="cpu")
    with pytest.raises(ModelError, match="was made for"):
        load_draft(folders["large whole"], pair[1])


def test_the_recipe_tells_which_head_is_charged(folders: dict[str, str]) -> None:
    recipe = json.loads((Path(folders["large reduced"]) / "inflation.json").read_text())
    assert (recipe["kind"], recipe["head_rows"], recipe["head_scored"]) == ("draft", 500, KEPT)
