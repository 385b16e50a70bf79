"""A distilled draft at work: beside its target, in this process and in one of its own, and never beside another."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from specbranch import LLM, SamplingParams
from specbranch.cli.main import run
from specbranch.core.runner import Feed
from specbranch.core.slots import ROOT
from specbranch.distill.draft_folder import read_draft
from specbranch.distill.load import load_draft
from specbranch.errors import ModelError
from specbranch.models.native import load_native
from specbranch.models.rows import collate
from tiny_pair import make_pair

OPTIONS = ["--device", "cpu", "--writing-rows", "8", "--writing-length", "96", "--rows", "4", "--length", "128", "--tokens", "6000"]
PROMPT = "A branch is a guess"


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def drafts(pair: tuple[str, str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("drafts")
    made = {"whole": [], "reduced": ["--head-tokens", "200"], "int8": ["--storage", "int8", "--layers", "2"]}
    for name, more in made.items():
        layers = [] if "--layers" in more else ["--layers", "1"]
        assert run(["distill", "--target", pair[0], "--out", str(folder / name), *layers, *OPTIONS, "--steps", "60", *more]) == 0
    return {name: str(folder / name) for name in made}


@pytest.mark.parametrize("executor", ["serial", "process"])
@pytest.mark.parametrize("name", ["whole", "reduced", "int8"])
def test_a_distilled_draft_drafts_and_changes_nothing(name: str, executor: str, drafts: dict[str, str], pair: tuple[str, str]) -> None:
    params = SamplingParams(temperature=0.7, seed=5, max_tokens=40, ignore_eos=True)
    plain = LLM(pair[0], method="autoregressive", device="cpu", dtype="float64", context_length=128).generate(PROMPT, params)
    with LLM(pair[0], drafts[name], executor=executor, device="cpu", dtype="float64", context_length=128) as llm:  # type: ignore[arg-type]
        output = llm.generate(PROMPT, params)
    assert output.token_ids == plain.token_ids
    assert output.stats["accepted"] > 0


def test_the_draft_takes_embedding_and_head_from_the_target_beside_it(drafts: dict[str, str], pair: tuple[str, str]) -> None:
    target = load_native(pair[0], context_length=64)
    draft = load_draft(drafts["whole"], pair[0], beside=target, context_length=64)
    assert draft.decoder.embedding.data_ptr() == target.decoder.embedding.data_ptr()
    assert draft.decoder.head_weight.data_ptr() == target.decoder.head_weight.data_ptr()


def rows(runner, tokens: tuple[int, ...]) -> torch.Tensor:  # type: ignore[no-untyped-def]
    runner.open(1)
    found = runner.feed([Feed(1, tokens, tuple(range(ROOT, len(tokens) - 1)))])[0]
    runner.close(1)
    return collate(found)


def test_a_reduced_head_scores_its_tokens_as_the_whole_head_would(drafts: dict[str, str], pair: tuple[str, str]) -> None:
    reduced = load_draft(drafts["reduced"], pair[0], context_length=64, dtype=torch.float64)
    ids = read_draft(drafts["reduced"]).head_ids
    assert ids is not None and len(ids) == 200
    scores = rows(reduced, (5, 6, 7))
    left_out = torch.ones(scores.shape[1], dtype=torch.bool).index_fill(0, ids, False)
    assert scores[:, left_out].eq(float("-inf")).all()
    reduced.decoder.head = lambda x: x @ reduced.decoder.head_weight.T
    assert torch.allclose(rows(reduced, (5, 6, 7))[:, ids], scores[:, ids])


def test_a_draft_of_another_target_is_refused(drafts: dict[str, str], tmp_path: Path) -> None:
    torch.manual_seed(9)
    _, other = make_pair(tmp_path)
    with pytest.raises(ModelError, match="was made for target"):
        LLM(other, drafts["whole"], device="cpu")
