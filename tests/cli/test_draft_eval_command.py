"""`draft-eval` on a tiny pair, and what it refuses."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from in_process import Command, Done


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> str:
    file = tmp_path_factory.mktemp("prompts") / "prompts.txt"
    file.write_text("A branch is a guess\nSmile\nIf the guess was right\n")
    return str(file)


def evaluated(command: Command, target: str, draft: str, prompts: str, *more: str) -> Done:
    options = ("--device", "cpu", "--dtype", "float64", "--context-length", "128", "--max-tokens", "20")
    return command("draft-eval", "--target", target, "--draft", draft, "--prompts", prompts, *options, *more)


def test_a_target_agrees_with_itself_and_a_disturbed_copy_less(
    command: Command, pair: tuple[str, str], prompts: str
) -> None:
    itself = json.loads(evaluated(command, pair[0], pair[0], prompts, "--json").out)
    other = json.loads(evaluated(command, *pair, prompts, "--json").out)
    assert itself["top1"] == itself["top3"] == 1.0
    assert itself["expected_length"] == list(range(1, 11))
    assert 0 < other["top1"] < 1 and other["top1"] <= other["top3"]
    assert other["expected_length"] == sorted(other["expected_length"])
    assert other["c"] > 0 and other["prompts"] == 3


@pytest.mark.slow
def test_the_table_says_the_same_as_the_json(command: Command, pair: tuple[str, str], prompts: str) -> None:
    shown, printed = (
        evaluated(command, *pair, prompts, "--limit", "2").out,
        json.loads(evaluated(command, *pair, prompts, "--limit", "2", "--json").out),
    )
    assert f"top-1 agreement {printed['top1']:.3f}, top-3 {printed['top3']:.3f}" in shown
    assert "2 prompts" in shown and "draft of 10:" in shown


def test_kinds_are_told_apart_and_speed_follows_from_tokens_and_cost(
    command: Command, pair: tuple[str, str], prompts: str, tmp_path: Path
) -> None:
    suite = tmp_path / "suite.jsonl"
    suite.write_text('{"category": "edits", "turns": ["Smile"]}\n{"prompt": "Rain"}\n')
    printed = json.loads(evaluated(command, *pair, prompts, "--prompts", str(suite), "--json").out)
    kinds = printed["kinds"]
    assert list(kinds) == ["all", "prompts", "edits", "suite"] and printed["prompts"] == 5
    assert sum(one["tokens"] for name, one in kinds.items() if name != "all") == kinds["all"]["tokens"]
    assert kinds["all"]["tokens_a_forward"] == [1 + length for length in printed["expected_length"]]
    best = kinds["all"]["best_length"]
    speed = kinds["all"]["tokens_a_forward"][best - 1] / (1 + best * printed["step"])
    assert kinds["all"]["expected_speed"] == pytest.approx(speed) and printed["step"] == 1 / printed["c"]
    assert kinds["all"]["top1_by_depth"][0] <= 1


def test_the_json_has_the_counts(command: Command, pair: tuple[str, str], prompts: str) -> None:
    printed = json.loads(evaluated(command, *pair, prompts, "--json").out)
    counts = printed["evaluation"]
    assert counts["positions"] == printed["tokens"] == sum(counts["first_met"])
    assert counts["hits"] / printed["tokens"] == pytest.approx(printed["top1"]) and counts["covered"] >= counts["hits"]
    assert counts["text"] == "greedy answers to 3 prompts of prompts.txt"


@pytest.mark.slow
def test_a_drafts_folder_keeps_the_counts_if_asked_to(
    command: Command, pair: tuple[str, str], tiny_draft: Path, prompts: str, tmp_path: Path
) -> None:
    draft = shutil.copytree(tiny_draft, tmp_path / "draft", ignore=shutil.ignore_patterns("training"))
    before = (draft / "evaluation.json").read_text()
    assert evaluated(command, pair[0], str(draft), prompts).code == 0
    assert (draft / "evaluation.json").read_text() == before
    done = evaluated(command, pair[0], str(draft), prompts, "--save", "--json")
    assert json.loads((draft / "evaluation.json").read_text()) == json.loads(done.out)["evaluation"]
    assert f"The counts are in {draft / 'evaluation.json'}" in done.err


def test_only_a_drafts_folder_keeps_the_counts(
    command: Command, pair: tuple[str, str], prompts: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("specbranch.cli.options.load_llm", lambda given: pytest.fail("the target was loaded"))
    done = evaluated(command, *pair, prompts, "--save")
    assert done.code == 2 and "is no folder of a draft made by" in done.err
    assert not (Path(pair[1]) / "evaluation.json").exists()


def test_a_missing_draft_or_file_is_a_sentence(
    command: Command, pair: tuple[str, str], prompts: str, tmp_path: Path
) -> None:
    none = command("draft-eval", "--target", pair[0], "--prompts", prompts)
    assert none.code == 2 and "needs a draft" in none.err
    gone = evaluated(command, *pair, str(tmp_path / "gone.txt"))
    assert gone.code == 2 and "cannot be read" in gone.err
