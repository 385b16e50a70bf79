"""Transformers' own methods beside ours: the same weights, the same tasks, and a clock and counts that can be
trusted."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from specbranch.cli.main import run
from specbranch.core.runner import Feed
from specbranch.core.slots import ROOT
from specbranch.errors import BadParameter
from specbranch.lab.bench.methods import TRANSFORMERS
from specbranch.lab.bench.other_engines.transformers_methods import Transformers, assistant_of
from specbranch.lab.bench.pair_setup import Running
from specbranch.lab.bench.recorded_pair import RecordedPair, Workload
from specbranch.lab.replay.record import Record
from specbranch.lab.suites.suite import Prompt
from specbranch.models.drafts.draft_folder import read_draft
from specbranch.models.drafts.load import load_draft
from specbranch.models.sampling.logit_rows import collate
from specbranch.training.distill import agreement
from tiers import tiered
from tiny_pair import make_pair

pytestmark = pytest.mark.usefixtures("one_thread")

PROMPTS = tuple(
    Prompt(str(at), "", (words,))
    for at, words in enumerate(("A branch is a guess", "Smile, and smile again", "1 2 3 1 2 3"))
)
GREEDY = Workload(max_tokens=24)


@pytest.fixture(scope="module")
def recorded(pair: tuple[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[RecordedPair]:
    with RecordedPair(target=pair[0], draft=pair[1], folder=tmp_path_factory.mktemp("lab")) as made:
        yield made


@pytest.fixture(scope="module")
def outside(recorded: RecordedPair) -> Transformers:
    return Transformers(recorded)


def records(recorded: RecordedPair, workload: Workload = GREEDY) -> list[Record]:
    return [record for prompt in PROMPTS for record in recorded.records(prompt, workload)]


@pytest.mark.parametrize("method", tiered(TRANSFORMERS, "hf-assisted".__eq__))
def test_greedy_answers_are_those_of_our_engine(method: str, recorded: RecordedPair, outside: Transformers) -> None:
    for record in records(recorded):
        tokens, _ = outside.answer(method, record)
        assert tokens == record.tokens


@pytest.mark.slow
def test_the_figures_of_a_turn_add_up(recorded: RecordedPair, outside: Transformers) -> None:
    for method in TRANSFORMERS:
        for record in records(recorded):
            tokens, reported = outside.answer(method, record)
            assert reported["tokens"] == len(tokens) and reported["ttft_seconds"] > 0 and reported["decode_seconds"] > 0
            assert reported["tokens_per_second"] == pytest.approx((len(tokens) - 1) / reported["decode_seconds"])
            if method == "hf-generate":
                assert reported["target_forwards"] == len(tokens) - 1, "one token a forward, the prompt's own left out"
            else:
                assert 0 < reported["target_forwards"] <= len(tokens) - 1
    assert sum(outside.answer("hf-assisted", record)[1]["target_forwards"] for record in records(recorded)) < 3 * 20, (
        "nothing was accepted"
    )


def test_an_answer_ends_with_the_task_not_with_the_model(recorded: RecordedPair, outside: Transformers) -> None:
    record = records(recorded)[0]
    end = record.tokens[5]
    cut = record.tokens[: record.tokens.index(end) + 1]
    ended = replace(record, task=replace(record.task, eos_ids=(end,)))
    for method in TRANSFORMERS:
        assert outside.answer(method, ended)[0] == cut
    short = replace(record, task=replace(record.task, params=replace(record.task.params, max_tokens=7)))
    assert outside.answer("hf-lookup", short)[0] == record.tokens[:7]


def test_the_models_own_generation_settings_are_not_used(
    pair: tuple[str, str], recorded: RecordedPair, tmp_path: Path
) -> None:
    folder = tmp_path / "opinionated"
    shutil.copytree(pair[0], folder)
    own = json.loads((folder / "generation_config.json").read_text())
    (folder / "generation_config.json").write_text(
        json.dumps({**own, "repetition_penalty": 9.0, "do_sample": True, "top_k": 2})
    )
    with RecordedPair(target=str(folder), folder=tmp_path / "lab") as other:
        record = records(recorded)[0]
        assert Transformers(other).answer("hf-generate", record)[0] == record.tokens


@pytest.mark.slow
def test_drawing_repeats_with_its_seed_and_leaves_other_noise_alone(
    recorded: RecordedPair, outside: Transformers
) -> None:
    record = records(recorded, Workload(temperature=1.0, max_tokens=24))[0]
    torch.manual_seed(5)
    state = torch.random.get_rng_state()
    first = outside.answer("hf-generate", record)[0]
    assert torch.equal(torch.random.get_rng_state(), state)
    assert outside.answer("hf-generate", record)[0] == first
    assert (
        outside.answer("hf-generate", replace(record, task=replace(record.task, seed=record.task.seed + 1)))[0] != first
    )


@pytest.fixture(scope="module")
def reduced(pair: tuple[str, str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("distilled") / "reduced"
    writing = [
        "--writing-rows",
        "4",
        "--writing-length",
        "64",
        "--rows",
        "2",
        "--length",
        "64",
        "--steps",
        "10",
        "--tokens",
        "2000",
    ]
    options = ["--layers", "1", "--head-tokens", "200", "--storage", "int8"]
    assert run(["distill", "--device", "cpu", "--target", pair[0], "--out", str(folder), *options, *writing]) == 0
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["whole", "reduced"])
def test_a_distilled_assistant_says_what_the_draft_says_in_our_engine(
    kind: str, pair: tuple[str, str], outside: Transformers, tiny_draft: Path, reduced: Path
) -> None:
    folder, tokens = tiny_draft if kind == "whole" else reduced, (5, 80, 3, 200, 7)
    ours = load_draft(folder, pair[0], device="cpu", dtype=torch.float64)
    ours.open(0, agreement.GREEDY)
    expected = collate(ours.score([Feed(0, tokens, tuple(range(ROOT, len(tokens) - 1)))])[0])
    with torch.inference_mode():
        found = assistant_of(outside.target, read_draft(folder))(torch.tensor([tokens])).logits[0]
    assert torch.equal(found == -torch.inf, expected == -torch.inf)
    assert int((expected == -torch.inf).sum()) == (0 if kind == "whole" else (421 - 200) * len(tokens))
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_a_distilled_draft_assists(
    pair: tuple[str, str], reduced: Path, recorded: RecordedPair, tmp_path: Path
) -> None:
    with RecordedPair(target=pair[0], draft=str(reduced), folder=tmp_path) as other:
        theirs = Transformers(other)
        for record in records(recorded):
            tokens, reported = theirs.answer("hf-assisted", record)
            assert tokens == record.tokens and reported["tokens_per_forward"] >= 1.0
        assert theirs.assistant.get_input_embeddings() is theirs.target.get_input_embeddings()


def test_mistakes_are_sentences(
    pair: tuple[str, str], recorded: RecordedPair, outside: Transformers, tmp_path: Path
) -> None:
    record = records(recorded)[0]
    with pytest.raises(BadParameter, match="Did you mean 'hf-lookup'"):
        outside.answer("hf-lokup", record)
    with (
        RecordedPair(target=pair[0], folder=tmp_path / "alone") as alone,
        pytest.raises(BadParameter, match="needs a draft model"),
    ):
        Transformers(alone).answer("hf-assisted", record)
    outside_other = Transformers(recorded)
    outside_other._models = recorded.models[0], make_pair(tmp_path / "other", vocabulary=430)[0]
    with pytest.raises(BadParameter, match="421 tokens and the draft 430"):
        outside_other.answer("hf-assisted", record)


def test_loading_and_answering_print_nothing(recorded: RecordedPair, capfd: pytest.CaptureFixture[str]) -> None:
    record = records(recorded)[0]
    capfd.readouterr()
    Transformers(recorded).answer("hf-assisted", record)
    assert capfd.readouterr() == ("", "")


@pytest.mark.default_model
@pytest.mark.slow
def test_the_default_pair_answers_alike_but_for_near_ties(default_model: Path, tmp_path: Path) -> None:
    """Our kernels and transformers' round differently, so only where two tokens nearly tie may the texts part."""
    prompt = Prompt("0", "", ("Write a Python function that adds two numbers.",))
    with RecordedPair("smollm2-default", folder=tmp_path, running=Running(weights="float32")) as recorded:
        (record,) = recorded.records(prompt, Workload(max_tokens=16))
        theirs = Transformers(recorded)
        for method in TRANSFORMERS:
            tokens, _ = theirs.answer(method, record)
            parted = next((at for at, (a, b) in enumerate(zip(tokens, record.tokens, strict=True)) if a != b), None)
            if parted is not None:
                (_, first), (_, second), *_ = record.rows[parted]
                assert first - second < 0.02, f"{method} parted at {parted}, where the target was sure"
