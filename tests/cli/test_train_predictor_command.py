"""`train-predictor` on a tiny pair: from nothing to a predictor that decodes, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from in_process import Command, Done

from specbranch.hrad.predictor import Predictor
from specbranch.training.distill.material import Material

pytestmark = pytest.mark.usefixtures("one_thread")
WRITING = ("--writing-rows", "8", "--writing-length", "96", "--tokens", "6000")
QUICK = ("--device", "cpu", "--layers", "2", "--longest", "6", "--epochs", "3", "--no-across-tasks")


def trained(command: Command, pair: tuple[str, str], out: Path, *more: str) -> Done:
    return command("train-predictor", "--target", pair[0], "--draft", pair[1], "--out", str(out), *more)


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("predictor")


@pytest.mark.slow
def test_a_pair_alone_gives_a_predictor_that_is_used(
    command: Command, pair: tuple[str, str], out: Path, models: list[str]
) -> None:
    printed = json.loads(trained(command, pair, out, *WRITING, *QUICK, "--json").out)
    assert (
        printed["rounds"] > 20
        and 0 <= printed["accuracy"] <= 1
        and set(printed["rivals"]) >= {"H-RAD", "confidence", "last length", "hybrid"}
    )
    about = Predictor.load(out).about
    assert (about.longest, about.layers, about.hidden, about.target) == (6, 2, 32, "target")
    assert about.provenance["rounds_learned"] > about.provenance["rounds_judged"] > 0
    assert "<svg" in (out / "report.svg").read_text() and str(out.parent) not in (out / "predictor.json").read_text()
    done = command(
        "generate", *models, "--policy", "paper", "--predictor", str(out), "--max-tokens", "20", "--json", "A branch"
    )
    plain = command("generate", *models, "--method", "autoregressive", "--max-tokens", "20", "--json", "A branch")
    assert "confidence alone" not in done.err
    assert done.answers()[0]["token_ids"] == plain.answers()[0]["token_ids"]


@pytest.mark.slow
def test_what_was_written_once_serves_again_and_gives_the_same(
    command: Command, pair: tuple[str, str], out: Path, tmp_path: Path
) -> None:
    material = out / "material.safetensors"
    if not material.exists():
        trained(command, pair, out, *WRITING, *QUICK)
    shown = [
        trained(command, pair, tmp_path / name, "--material", str(material), *QUICK).out for name in ("one", "two")
    ]
    weights = [(tmp_path / name / "predictor.safetensors").read_bytes() for name in ("one", "two")]
    assert weights[0] == weights[1]
    assert "predicted correctly" in shown[0] and "nats per round" in shown[0] and "training rounds" in shown[0]


@pytest.mark.slow
def test_a_text_that_was_written_is_what_the_target_says_greedily(
    command: Command, pair: tuple[str, str], out: Path
) -> None:
    from specbranch import LLM

    if not (out / "material.safetensors").exists():
        trained(command, pair, out, *WRITING, *QUICK)
    material = Material.load(out / "material.safetensors")
    with LLM(pair[0], device="cpu", method="autoregressive") as llm:
        for index in range(0, len(material), max(len(material) // 6, 1)):
            tokens, answer = material.sequence(index), int(material.answers[index])
            again = llm.generate([tokens[:answer]], {"max_tokens": len(tokens) - answer, "ignore_eos": True})[
                0
            ].token_ids
            assert list(again) == tokens[answer:]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--material", "gone.safetensors"), "There is no material at gone.safetensors"),
        (("--layers", "9", *WRITING), "the last 9"),
        (("--layers", "2", "--tokens", "200", "--writing-rows", "2", "--writing-length", "96"), "Write more"),
    ],
)
def test_what_cannot_be_done_is_a_sentence(
    command: Command, pair: tuple[str, str], tmp_path: Path, arguments: tuple[str, ...], words: str
) -> None:
    done = trained(command, pair, tmp_path / "out", "--device", "cpu", *arguments)
    assert done.code == 2 and words in done.err
    assert not (tmp_path / "out" / "predictor.json").exists()


@pytest.mark.slow
def test_material_with_sampled_answers_or_of_another_target_is_refused(
    command: Command, pair: tuple[str, str], tmp_path: Path
) -> None:
    writing = ("--device", "cpu", "--writing-rows", "8", "--writing-length", "96", "--tokens", "2000", "--only-write")
    command("distill", "--target", pair[0], "--layers", "1", "--out", str(tmp_path / "sampled"), *writing)
    sampled = trained(command, pair, tmp_path / "out", "--material", str(tmp_path / "sampled" / "training"), *QUICK)
    assert sampled.code == 2 and "labels need greedy texts" in sampled.err
    trained(command, pair, tmp_path / "theirs", *WRITING, *QUICK)
    other = trained(command, (pair[1], pair[0]), tmp_path / "out", "--material", str(tmp_path / "theirs"), *QUICK)
    assert other.code == 2 and "was written by target, not by" in other.err


def test_a_predictor_that_no_method_uses_is_reported(command: Command, models: list[str]) -> None:
    done = command("generate", *models, "--predictor", "somewhere", "--max-tokens", "3", "A branch")
    assert done.code == 0 and "only policy 'paper' heeds one" in done.err


def test_a_target_without_a_draft_is_refused(command: Command, pair: tuple[str, str], tmp_path: Path) -> None:
    done = command("train-predictor", "--target", pair[0], "--out", str(tmp_path))
    assert done.code == 2 and "foretells what becomes of a draft" in done.err
