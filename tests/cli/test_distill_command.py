"""`distill` from a tiny random target to a finished draft, killed and resumed, and what it refuses."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from filelock import FileLock
from in_process import Command, Done

from specbranch import LLM, SamplingParams
from specbranch.errors import ModelError
from specbranch.models.drafts.draft_folder import read_draft
from specbranch.models.drafts.evaluation_file import read_evaluation
from specbranch.training.distill.material import Material
from specbranch.training.making import draft as draft_job

pytestmark = pytest.mark.usefixtures("one_thread")
SMALL = (
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
    "--learning-rate",
    "0.003",
)
SHORT = (*SMALL, "--tokens", "4000", "--steps", "12")


def distilled(command: Command, target: str, out: Path, *more: str, layers: int = 1) -> Done:
    return command("distill", "--target", target, "--layers", str(layers), "--out", str(out), *more)


def weights(out: Path) -> bytes:
    return (out / "model.safetensors").read_bytes()


@pytest.mark.slow
def test_a_target_alone_gives_a_draft_that_is_nearer_to_it_the_longer_it_learns(
    command: Command, pair: tuple[str, str], tmp_path: Path
) -> None:
    short, long = (
        distilled(
            command, pair[0], tmp_path / steps, *SMALL, "--tokens", "12000", "--steps", steps, "--json"
        ).answers()[0]
        for steps in ("1", "80")
    )
    assert long["divergence"] < 0.9 * short["divergence"]
    assert long["steps"] == 80 and long["tokens_written"] > 1000 and long["layers"] == [0]
    draft = read_draft(tmp_path / "80")
    assert draft.info.target == "target" and draft.tensor("model.layers.0.self_attn.q_proj.weight").shape == (32, 32)
    assert (
        str(tmp_path)
        not in (tmp_path / "80" / "README.md").read_text() + (tmp_path / "80" / "provenance.json").read_text()
    )
    for name in ("metrics.jsonl", "training.svg", "material-0.safetensors"):
        assert (tmp_path / "80" / "training" / name).stat().st_size > 0


@pytest.mark.slow
def test_a_run_killed_while_training_and_resumed_ends_as_one_that_was_not(
    command: Command, pair: tuple[str, str], tmp_path: Path
) -> None:
    options = (*SMALL, "--tokens", "4000", "--steps", "400", "--checkpoint-seconds", "0.2")
    killed_in_training(pair[0], tmp_path / "killed", options)
    again = distilled(command, pair[0], tmp_path / "killed", *options, "--resume", "--json").answers()[0]
    whole = distilled(command, pair[0], tmp_path / "whole", *options, "--json").answers()[0]
    assert weights(tmp_path / "killed") == weights(tmp_path / "whole")
    assert again["top1"] == whole["top1"] and again["tokens"] == whole["tokens"]


def killed_in_training(target: str, out: Path, options: tuple[str, ...]) -> None:
    arguments = ["distill", "--target", target, "--layers", "1", "--out", str(out), *options]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [sys.executable, "-m", "specbranch.cli.main", *arguments], env=environment, stderr=subprocess.DEVNULL
    )
    until = time.monotonic() + 60
    while not (out / "training" / "checkpoint.safetensors").exists() and time.monotonic() < until:
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert (out / "training" / "checkpoint.safetensors").exists() and not (out / "config.json").exists(), (
        "it was not killed in the middle"
    )


@pytest.mark.slow
def test_what_was_written_is_not_written_again(command: Command, pair: tuple[str, str], tmp_path: Path) -> None:
    first = distilled(command, pair[0], tmp_path / "one", *SHORT, "--json").answers()[0]
    file = tmp_path / "one" / "training" / "material-0.safetensors"
    before = file.stat().st_mtime_ns
    assert distilled(command, pair[0], tmp_path / "one", *SHORT, "--resume").code == 0
    assert file.stat().st_mtime_ns == before
    other = distilled(command, pair[0], tmp_path / "two", *SHORT, "--material", str(file), "--json").answers()[0]
    assert other["tokens_written"] == first["tokens_written"] and weights(tmp_path / "one") == weights(tmp_path / "two")


@pytest.mark.slow
def test_what_was_only_written_is_trained_on_later_by_its_folder(
    command: Command, pair: tuple[str, str], tmp_path: Path
) -> None:
    written = distilled(command, pair[0], tmp_path / "text", *SHORT, "--only-write", "--json").answers()[0]
    assert not (tmp_path / "text" / "config.json").exists()
    again = (*SHORT, "--material", written["material"], "--start", "1", "--json")
    trained = distilled(command, pair[0], tmp_path / "draft", *again).answers()[0]
    assert trained["tokens_written"] == written["tokens_written"] and trained["layers"] == [1]


@pytest.mark.slow
def test_a_smaller_head_and_int8_and_own_prompts_are_taken(
    command: Command, pair: tuple[str, str], tmp_path: Path
) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("A branch is a guess\nSmile\n")
    more = ("--head-tokens", "50", "--storage", "int8", "--data", str(prompts))
    done = distilled(command, pair[0], tmp_path / "out", *SHORT, *more, layers=2)
    assert done.code == 0 and "2 layers" in done.out and "outside the head" in done.out
    draft = read_draft(tmp_path / "out")
    assert draft.info.head_tokens == 50 and draft.info.storage == "int8" and draft.info.layers == (0, 1)
    assert draft.head_ids is not None and len(draft.head_ids) == 50


@pytest.mark.slow
def test_a_feature_draft_says_what_it_reads_and_how_well_it_drafts_alone(
    command: Command, pair: tuple[str, str], tmp_path: Path
) -> None:
    more = ("--kind", "features", "--unroll", "3", "--head-tokens", "50")
    done = command("distill", "--target", pair[0], "--out", str(tmp_path / "out"), *SHORT, *more)
    assert done.code == 0 and "1 layer, taps [0, 1, 2]" in done.out and "Top-1 after 0, 1, 2 … own states" in done.out
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["features"] == {"taps": [0, 1, 2], "norm_before_residual": False, "norm_output": False}
    draft = read_draft(tmp_path / "out")
    assert draft.info.layers == (1,) and draft.info.head_tokens == 50
    assert draft.tensor("layers.0.self_attn.q_proj.weight").shape == (32, 64)
    assert draft.tensor("fc.weight").shape == (32, 96) and draft.tensor("d2t").shape == (50,)
    assert "hidden states after 0, 1, 2 layers" in (tmp_path / "out" / "README.md").read_text()
    assert read_evaluation(str(tmp_path / "out")) is not None
    exported = tmp_path / "exported"
    form = ("--format", "speculators", "--target", pair[0])
    assert command("export", str(tmp_path / "out"), *form, "--out", str(exported)).code == 0
    drafted = [drafted_beside(pair[0], folder) for folder in (tmp_path / "out", exported)]
    assert drafted[0] == drafted[1] and drafted[0][0] > 0


def drafted_beside(target: str, draft: Path) -> tuple[int, int]:
    """The tokens that a draft has proposed and those that were accepted; the text is that of plain decoding."""
    params = SamplingParams(max_tokens=60, temperature=0.7, seed=3, ignore_eos=True)
    with LLM(target, str(draft), "speculative", device="cpu", options={"keep_experience": False}) as llm:
        found = llm.generate("A branch is a guess.", params)
        assert found.token_ids == llm.using(method="autoregressive").generate("A branch is a guess.", params).token_ids
    return found.stats["drafted"], found.stats["accepted"]


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (("--taps", "0,1,2"), "--taps was given for a plain draft"),
        (("--unroll", "4"), "--unroll was given for a plain draft"),
        (("--kind", "features", "--taps", "1,2"), "expected 3 ascending numbers"),
        (("--kind", "features", "--taps", "a"), "expected numbers of layers"),
        (("--layers", "3"), "expected 1 to 2"),
        (("--layers", "0"), "expected 1 to 2"),
        (("--start", "one"), "expected numbers of layers"),
        (("--start", "0,1"), "names 2 layers and --layers says 1"),
        (("--start", "7"), "the target has 2"),
        (("--head-tokens", "421"), "expected 1 to 420"),
        (("--steps", "5", "--seconds-training", "9"), "exactly one"),
        (("--steps", "0"), "above 0"),
        (("--data", "gone.txt"), "cannot be read"),
        (("--material", "gone.safetensors"), "no material at"),
        (("--material", "any.safetensors", "--only-write"), "--only-write and --material"),
        (("--seconds-writing", "inf"), "seconds is inf; expected a finite number"),
        (("--seconds-training", "inf"), "seconds is inf; expected a finite number"),
        (("--seed", str(10**17)), "--seed is 100000000000000000; expected"),
        (("--rows", "0"), "rows is 0"),
        (("--writing-rows", "0"), "rows is 0"),
        (("--checkpoint-seconds", "nan"), "checkpoint_seconds is nan"),
    ],
)
def test_impossible_wishes_are_sentences(
    more: tuple[str, ...], words: str, command: Command, pair: tuple[str, str], tmp_path: Path
) -> None:
    done = distilled(command, pair[0], tmp_path / "out", *SMALL, *more)
    assert done.code == 2 and words in done.err
    assert not (tmp_path / "out").exists()  # the next attempt is not taken for one that goes on


@pytest.mark.slow
def test_a_folder_of_another_run_or_target_is_refused(command: Command, pair: tuple[str, str], tmp_path: Path) -> None:
    assert distilled(command, pair[0], tmp_path, *SHORT).code == 0
    kept = weights(tmp_path)
    refusals: dict[str, Any] = {
        "already holds a run": distilled(command, pair[0], tmp_path, *SHORT),
        "was made for target": distilled(command, pair[1], tmp_path, *SHORT, "--resume"),
        "other settings: tokens was 4000, now 5000": distilled(
            command, pair[0], tmp_path, *SMALL, "--tokens", "5000", "--resume"
        ),
        "steps was 12, now 13": distilled(
            command, pair[0], tmp_path, *SMALL, "--tokens", "4000", "--steps", "13", "--resume"
        ),
    }
    for words, done in refusals.items():
        assert done.code == 2 and words in done.err, done.err
    (tmp_path / "config.json").unlink()
    assert "holds a run for target" in distilled(command, pair[1], tmp_path, *SHORT, "--resume").err
    assert weights(tmp_path) == kept


def test_a_models_own_folder_is_not_written_into(command: Command, pair: tuple[str, str]) -> None:
    done = distilled(command, pair[0], Path(pair[0]), *SHORT)
    assert done.code == 2 and "no draft made by" in done.err and not (Path(pair[0]) / "training").exists()


@pytest.mark.slow
def test_a_damaged_checkpoint_is_a_sentence(command: Command, pair: tuple[str, str], tmp_path: Path) -> None:
    assert distilled(command, pair[0], tmp_path, *SHORT).code == 0
    (tmp_path / "training" / "checkpoint.safetensors").write_bytes(b"damaged")
    done = distilled(command, pair[0], tmp_path, *SHORT, "--resume")
    assert done.code == 2 and "checkpoint" in done.err and "is damaged" in done.err
    (tmp_path / "training" / "run.json").write_text("[")
    assert "run.json is damaged" in distilled(command, pair[0], tmp_path, *SHORT, "--resume").err


@pytest.fixture
def unread(monkeypatch: pytest.MonkeyPatch) -> None:
    """A target whose weights must not be read."""

    def read(*given: object) -> None:
        pytest.fail("the target was read")

    monkeypatch.setattr(draft_job, "load_target", read)


@pytest.mark.usefixtures("unread")
def test_a_folder_that_cannot_be_written_is_reported_before_the_target_is_loaded(
    command: Command, pair: tuple[str, str], tmp_path: Path
) -> None:
    (tmp_path / "training").mkdir()
    (tmp_path / "training" / "run.json").write_text("[")
    assert "run.json is damaged" in distilled(command, pair[0], tmp_path, *SHORT).err
    (tmp_path / "training" / "run.json").unlink()
    with FileLock(tmp_path / "training" / "run.lock"):
        done = distilled(command, pair[0], tmp_path, *SHORT, "--resume")
    assert done.code == 2 and "Another distill is at work in" in done.err


@pytest.mark.slow
def test_a_target_that_cannot_be_read_leaves_no_run_behind(
    command: Command, pair: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def damaged(*given: object) -> None:
        raise ModelError("It is damaged.")

    with monkeypatch.context() as patched:
        patched.setattr(draft_job, "load_target", damaged)
        assert distilled(command, pair[0], tmp_path, *SHORT).code == 2
    assert distilled(command, pair[0], tmp_path, *SHORT, "--only-write").code == 0


def test_empty_material_is_refused_and_that_of_another_target_reported(
    command: Command, pair: tuple[str, str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    none, file = torch.zeros(0, dtype=torch.int64), tmp_path / "material-0.safetensors"
    Material(none.int(), torch.zeros(1, dtype=torch.int64), none).save(file)
    done = distilled(command, pair[0], tmp_path / "out", *SHORT, "--material", str(file))
    assert done.code == 2 and "holds no conversations" in done.err
    tokens = torch.arange(240, dtype=torch.int32)
    Material(tokens, torch.arange(0, 241, 12), torch.full((20,), 4), {"target": "elsewhere"}).save(file)
    assert distilled(command, pair[0], tmp_path / "two", *SHORT, "--material", str(file)).code == 0
    assert "was written by elsewhere, not by target" in caplog.text


@pytest.mark.slow
def test_material_given_once_leaves_the_notes_of_the_writing(
    command: Command, pair: tuple[str, str], tmp_path: Path
) -> None:
    written = distilled(command, pair[0], tmp_path, *SHORT, "--only-write", "--json").answers()[0]
    given = ("--material", written["material"], "--resume")
    assert distilled(command, pair[0], tmp_path, *SMALL, "--steps", "12", *given).code == 0
    assert distilled(command, pair[0], tmp_path, *SHORT, "--resume").code == 0


def test_a_folder_that_cannot_be_made_is_a_sentence(command: Command, pair: tuple[str, str], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    done = distilled(command, pair[0], tmp_path / "file" / "out", *SHORT)
    assert done.code == 2 and "Cannot write" in done.err


@pytest.mark.slow
def test_the_json_is_one_object_on_standard_output(command: Command, pair: tuple[str, str], tmp_path: Path) -> None:
    done = distilled(command, pair[0], tmp_path / "out", *SHORT, "--json")
    assert {"top1", "top3", "divergence", "outside", "steps", "tokens", "seconds", "out"} <= json.loads(done.out).keys()
