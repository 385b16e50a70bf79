"""`--pair` in every command that takes models, and the list of pairs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from in_process import Command

from specbranch import pairs

PROMPT = "A branch is a guess"
DRAFTING = ("--policy", "confidence")  # whether it pays or not
SMALL = ("--device", "cpu", "--dtype", "float64", "--context-length", "128", "--max-tokens", "12")


pytestmark = pytest.mark.usefixtures("tiny")


def test_generate_takes_a_pair_and_the_answer_verifies(command: Command, tmp_path: Path, pair: tuple[str, str]) -> None:
    done = command(
        "generate", PROMPT, "--pair", "tiny", *SMALL, *DRAFTING, "--temperature", "0.7", "--seed", "2", "--json"
    )
    (answer,) = done.answers()
    assert answer["target"] == pair[0] and answer["stats"]["drafted"] > 0 and answer["method"] == "specbranch"
    (tmp_path / "answer.jsonl").write_text(done.out)
    for option in ((), ("--pair", "tiny")):
        checked = command("verify", str(tmp_path / "answer.jsonl"), "--device", "cpu", *option)
        assert checked.code == 0 and "identical" in checked.out


def test_without_names_generate_and_chat_use_the_default_pair(command: Command) -> None:
    (answer,) = command("generate", PROMPT, *SMALL, *DRAFTING, "--json").answers()
    assert answer["stats"]["drafted"] > 0
    assert "[specbranch]" in command("chat", *SMALL, stdin="Hello\n").err


def test_chat_takes_a_pair(command: Command) -> None:
    done = command("chat", "--pair", "tiny", "--method", "specbranch", *SMALL, stdin="Hello\n")
    assert done.code == 0 and "[specbranch]" in done.err


def test_a_pairs_idle_draft_is_left_out_in_silence(command: Command) -> None:
    for options in ((), ("--pair", "tiny")):
        done = command("generate", PROMPT, *options, "--method", "autoregressive", *SMALL)
        assert done.code == 0 and "not used" not in done.err


def test_draft_eval_takes_a_pair(command: Command, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text(f"{PROMPT}\nSmile\n")
    given = ("draft-eval", "--prompts", str(prompts), *SMALL, "--json")
    printed = json.loads(command(*given, "--pair", "tiny").out)
    assert {"top1", "top3", "expected_length", "c"} <= printed.keys() and len(printed["expected_length"]) == 10
    assert json.loads(command(*given).out)["top1"] == printed["top1"]


@pytest.mark.parametrize("name", ["generate", "chat", "draft-eval", "verify"])
def test_mistakes_with_a_pair_are_sentences(name: str, command: Command, tmp_path: Path) -> None:
    file = tmp_path / "file.jsonl"
    file.write_text(command("generate", PROMPT, *SMALL, *DRAFTING, "--json").out)
    what = {"generate": [PROMPT], "chat": [], "draft-eval": ["--prompts", str(file)], "verify": [str(file)]}[name]
    unknown = command(name, *what, "--pair", "tinny")
    assert unknown.code == 2 and "Did you mean 'tiny'" in unknown.err and "smollm2-weak" in unknown.err
    both = command(name, *what, "--pair", "tiny", "--target", "other")
    assert both.code == 2 and "'tiny' was given together with target 'other'" in both.err


def test_a_missing_draft_is_reported_before_the_target_is_fetched(
    command: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(pairs, "IN_CHECKOUT", tmp_path)
    monkeypatch.setattr("specbranch.models.files.store.pull", None)
    done = command("generate", PROMPT, "--pair", "smollm2-strong")
    assert done.code == 2 and "scripts/train_drafts.py" in done.err


def test_models_lists_pairs_with_their_figures(
    command: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(pairs, "IN_CHECKOUT", tmp_path)
    rows = {row["name"]: row for row in json.loads(command("models", "list", "--json").out)}
    assert rows["smollm2-135m"]["kind"] == "model" and rows["smollm2-default"]["kind"] == "pair"
    assert rows["smollm2-default"]["top1"] is not None, "the shipped draft's provenance.json has no figures"
    assert (
        rows["smollm2-default"]["layers"] >= 2
        and 0 < rows["smollm2-default"]["top1"] < rows["smollm2-default"]["top3"] < 1
    )
    assert rows["smollm2-weak"]["path"] is None and "checkout" in rows["smollm2-weak"]["problem"]
    listed = command("models").out
    assert listed == command("models", "list").out
    assert f"{rows['smollm2-default']['layers']} layers" in listed and "smollm2-weak" in listed


def test_help_lists_the_pairs(command: Command) -> None:
    for name in ("generate", "chat", "draft-eval"):
        text = command(name, "--help").out
        assert "--pair NAME" in text and all(
            f"  {pair}" in text for pair in ("smollm2-weak", "smollm2-default", "smollm2-strong")
        )


def test_pull_takes_the_name_of_a_pair(command: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from specbranch import assembly

    asked: list[str] = []

    def fetched(choice: assembly.ModelChoice, progress: object = None) -> str:
        asked.append(choice.name)
        return str(tmp_path)

    monkeypatch.setattr(assembly, "fetched", fetched)
    assert command("models", "pull", "smollm2-weak").code == 0 and command("models", "pull").code == 0
    assert asked == ["smollm2-135m", "smollm2-135m"]
    assert "Did you mean 'smollm2-weak'" in command("models", "pull", "smollm2-week").err
