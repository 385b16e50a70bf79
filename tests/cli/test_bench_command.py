"""`bench run` and `bench compare` as a user has them: files, the last line, going on, and sentences for what is
wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from in_process import Command, Done

from tiers import tiered

LINES = (
    {"question_id": 1, "category": "writing", "turns": ["A branch is a guess"]},
    {"question_id": 2, "category": "coding", "turns": ["def", "go on"]},
)
PROMPTS = "".join(json.dumps(line) + "\n" for line in LINES)
WANTED = {
    "pair",
    "suite",
    "method",
    "temperature",
    "tokens_per_second",
    "speedup",
    "tokens_per_forward",
    "rollback_rate",
    "lossless",
}


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    file = tmp_path / "mine.jsonl"
    file.write_text(PROMPTS)
    return file


def bench(command: Command, pair: tuple[str, str], folder: Path, prompts: Path, *more: str) -> Done:
    models = ("--target", pair[0], "--draft", pair[1], "--records", str(folder / "records"))
    return command(
        "bench",
        "run",
        *models,
        "--prompts",
        str(prompts),
        "--max-tokens",
        "16",
        "--out",
        str(folder / "out"),
        "--no-tune",
        *more,
    )


def last(done: Done) -> list[dict[str, object]]:
    assert done.code == 0, done.err
    rows: list[dict[str, object]] = json.loads(done.out.rstrip("\n").split("\n")[-1])["rows"]
    return rows


@pytest.mark.parametrize("clock", tiered(((), ("--clock", "c5", "--clock", "h200-1b-8b")), bool))
def test_the_last_line_is_json_and_the_files_are_there(
    command: Command, pair: tuple[str, str], tmp_path: Path, prompts: Path, clock: tuple[str, ...]
) -> None:
    done = bench(command, pair, tmp_path, prompts, "--methods", "speculative,specbranch,lookup", *clock)
    rows = last(done)
    assert len(rows) == 4 * max(len(clock) // 2, 1) and all(row.keys() >= WANTED and row["lossless"] for row in rows)
    assert {row["method"] for row in rows} == {"autoregressive", "speculative", "specbranch", "lookup"}
    assert "Lossless: every run" in done.out
    for row in rows:
        devices = 2 if row["clock"] == "c5" and row["method"] not in ("autoregressive", "lookup") else 1
        assert row["devices"] == devices and row["tokens_per_second_per_device"] == row["tokens_per_second"] / devices  # type: ignore[operator]
    assert (tmp_path / "out" / "results.csv").read_text().count("\n") == len(rows) + 1
    assert (
        "<svg" in (tmp_path / "out" / "report.html").read_text()
        and json.loads((tmp_path / "out" / "results.json").read_text())["rows"]
    )
    assert str(tmp_path) not in (tmp_path / "out" / "report.html").read_text() or clock == ()


@pytest.mark.slow
def test_the_same_command_goes_on_and_a_further_method_is_added(
    command: Command, pair: tuple[str, str], tmp_path: Path, prompts: Path
) -> None:
    first = last(bench(command, pair, tmp_path, prompts, "--methods", "speculative"))
    runs = tmp_path / "out" / "runs.jsonl"
    before = runs.read_text()
    again = last(bench(command, pair, tmp_path, prompts, "--methods", "speculative"))
    assert runs.read_text() == before and [row["tokens_per_second"] for row in again] == [
        row["tokens_per_second"] for row in first
    ]
    more = last(bench(command, pair, tmp_path, prompts, "--methods", "speculative,lookup"))
    assert runs.read_text().startswith(before) and len(more) == 3
    other = bench(command, pair, tmp_path, prompts, "--methods", "speculative", "--seed", "4")
    assert other.code == 2 and "started with other settings" in other.err


@pytest.mark.slow
def test_two_results_are_compared(command: Command, pair: tuple[str, str], tmp_path: Path, prompts: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        assert bench(command, pair, tmp_path / name, prompts, "--methods", "pearl", "--clock", "c5").code == 0
    done = command("bench", "compare", str(tmp_path / "a" / "out"), str(tmp_path / "b" / "out" / "results.json"))
    assert done.code == 0 and "2 same" in done.out
    printed = command("bench", "compare", str(tmp_path / "a" / "out"), str(tmp_path / "b" / "out"), "--json")
    assert len(printed.answers()[0]["changes"]) == 2


@pytest.mark.slow
def test_a_setting_of_ones_own_is_run_beside(
    command: Command, pair: tuple[str, str], tmp_path: Path, prompts: Path
) -> None:
    given = ("--clock", "c5", "--methods", "pearl", "--config", '{"method": "pearl", "num_speculative_tokens": 2}')
    rows = last(bench(command, pair, tmp_path, prompts, *given))
    assert [row["setting"] for row in rows if row["method"] == "pearl"] == [
        {"num_speculative_tokens": 5},
        {"num_speculative_tokens": 2},
    ]


@pytest.mark.slow
def test_by_the_wall_clock_methods_are_tuned_by_a_profile_that_is_measured_first(
    command: Command, pair: tuple[str, str], tmp_path: Path, prompts: Path
) -> None:
    given = ("--tune", "--methods", "speculative")
    done = bench(command, pair, tmp_path, prompts, *given)
    (profile,) = (tmp_path / "out").glob("profile-*.json")
    measured = json.loads(profile.read_text())
    assert measured["target_identity"] and measured["overlap"] is False
    assert [row["method"] for row in last(done)] == ["autoregressive", "speculative"]
    assert len(list((tmp_path / "records" / "tuned").glob("*.json"))) == 1
    before = profile.read_text()
    assert bench(command, pair, tmp_path, prompts, *given).code == 0
    assert profile.read_text() == before, "a folder keeps to the profile it was begun with"


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (("--methods", "perl"), "Did you mean 'pearl'"),
        (("--suites", "humanevil"), "Unknown suite 'humanevil'"),
        (("--clock", "c7"), "Unknown cost profile 'c7'"),
        (("--clock", "c5", "--methods", "hf-generate"), "by the wall clock only"),
        (("--texts", "."), "which only a modelled clock can"),
        (("--texts", "no/such/folder", "--clock", "c5"), "holds no records"),
        (("--prompts", "gone.jsonl"), "cannot be read"),
        (("--config", '{"method": "pearl", "methud": 1}'), "methud"),
        (("--config", "{nonsense"), "--config is no JSON"),
        (("--config", "[1]"), "expected a JSON object with a method"),
        (("--suites", "humaneval", "--data", "no/such/folder"), "does not exist"),
    ],
)
def test_mistakes_are_sentences(
    more: tuple[str, ...], words: str, command: Command, pair: tuple[str, str], tmp_path: Path, prompts: Path
) -> None:
    done = bench(command, pair, tmp_path, prompts, *more)
    assert done.code == 2 and words in done.err and "Traceback" not in done.err


def test_a_damaged_line_of_prompts_is_named(
    command: Command, pair: tuple[str, str], tmp_path: Path, prompts: Path
) -> None:
    prompts.write_text(PROMPTS + '{"question_id": 3, "turns": ["x"]}\n')
    done = bench(command, pair, tmp_path, prompts)
    assert done.code == 2 and "line 3 lacks 'category'" in done.err
