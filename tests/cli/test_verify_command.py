"""`verify`: what it finds, and under which circumstances it decodes again."""

from __future__ import annotations

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
from in_process import Command

PROMPT = "A branch is a guess"


def saved(answer: dict[str, Any], folder: Path) -> str:
    file = folder / "answers.jsonl"
    file.write_text(json.dumps(answer, ensure_ascii=False), encoding="utf-8")
    return str(file)


def record(out: str) -> dict[str, Any]:
    """Read strictly: Infinity and NaN are no JSON."""

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    found: dict[str, Any] = json.loads(out, parse_constant=refuse)
    return found


ANSWERS: dict[tuple[str, ...], dict[str, Any]] = {}  # by models: decoded once


@pytest.fixture
def answer(models: list[str], command: Command) -> dict[str, Any]:
    if (key := tuple(models)) not in ANSWERS:
        (made,) = command("generate", PROMPT, *models, "--seed", "4", "--max-tokens", "20", "--json").answers()
        ANSWERS[key] = made
    return deepcopy(ANSWERS[key])


def test_a_changed_token_is_caught(answer: dict[str, Any], tmp_path: Path, command: Command) -> None:
    answer["token_ids"][7] = (answer["token_ids"][7] + 1) % 400
    done = command("verify", saved(answer, tmp_path), "--device", "cpu", "--json")
    result = record(done.out)
    assert done.code == 1
    assert result["verdict"] == "different" and result["position"] == 7 and result["margin"] > 1e-4


def test_a_margin_that_does_not_exist_is_null(answer: dict[str, Any], tmp_path: Path, command: Command) -> None:
    for tokens in (answer["token_ids"][:-1], [*answer["token_ids"][:-1], 10**6]):
        file = saved({**answer, "token_ids": tokens}, tmp_path)
        done = command("verify", file, "--device", "cpu", "--json")
        assert done.code == 1 and record(done.out)["margin"] is None
        assert "logits apart" not in command("verify", file, "--device", "cpu").out


def test_an_answer_is_verified_as_it_was_made(pair: tuple[str, str], tmp_path: Path, command: Command) -> None:
    made = ["--target", pair[0], "--device", "cpu", "--dtype", "float64", "--context-length", "40"]
    made += ["--runner", "transformers"]
    (answer,) = command("generate", PROMPT, *made, "--ignore-eos", "--json").answers()
    assert len(answer["prompt_token_ids"]) + len(answer["token_ids"]) == 40
    assert (answer["context_length"], answer["dtype"], answer["weights"]) == (40, "float64", "float64")
    assert answer["runner"] == "transformers"
    file = saved(answer, tmp_path)
    assert command("verify", file, "--device", "cpu", "--context-length", "40").code == 0
    for given in ((), ("--context-length", "60")):
        longer = command("verify", file, "--device", "cpu", *given, "--json")
        assert longer.code == 1 and record(longer.out)["position"] == len(answer["token_ids"])
        assert record(longer.out)["claimed_context_length"] == 40


@pytest.mark.slow
def test_an_answer_of_stored_weights_is_verified_with_these(
    models: list[str], tmp_path: Path, command: Command
) -> None:
    options = ("--weights", "int8", "--temperature", "1", "--seed", "4", "--max-tokens", "60", "--ignore-eos", "--json")
    (answer,) = command("generate", PROMPT, *models, *options).answers()
    assert (answer["dtype"], answer["weights"]) == ("float64", "int8")
    assert command("verify", saved(answer, tmp_path), "--device", "cpu").code == 0
    unsaid = command("verify", saved({**answer, "weights": None}, tmp_path), "--device", "cpu")
    assert unsaid.code == 1, "int8 is another model"
    assert command("verify", saved({**answer, "weights": 8}, tmp_path), "--device", "cpu").code == 2


def test_the_saved_circumstances_reach_the_model(
    answer: dict[str, Any], monkeypatch: pytest.MonkeyPatch, command: Command
) -> None:
    from specbranch import engine
    from specbranch.errors import ModelError

    asked: dict[str, Any] = {}

    def loaded(**given: Any) -> None:
        asked.update(given)
        raise ModelError("far enough")

    monkeypatch.setattr(engine, "LLM", loaded)
    command("verify", "-", "--runner", "transformers", stdin=json.dumps(answer))
    assert (asked["target"], asked["dtype"]) == (answer["target"], "float64")
    assert answer["context_length"] == 256 and asked["options"].context_length is None, (
        "a claim could cut the answer short"
    )
    assert asked["options"].runner == "transformers" and "draft" not in asked


def test_an_answer_notes_the_build_and_the_device_that_made_it(answer: dict[str, Any]) -> None:
    import torch

    from specbranch import __version__

    assert answer["build"]["specbranch"] == __version__ and answer["build"]["torch"] == torch.__version__
    assert answer["build"]["commit"] and answer["device"].startswith("CPU (")


def test_every_sample_is_verified_with_its_own_noise(models: list[str], command: Command) -> None:
    options = ["--temperature", "1", "--n", "3", "--max-tokens", "8", "--json"]
    done = command("generate", PROMPT, *models, *options)
    checked = command("verify", "-", "--device", "cpu", stdin=done.out)
    assert checked.code == 0 and checked.out.count("identical") == 3


def test_a_biased_answer_verifies(models: list[str], command: Command) -> None:
    done = command("generate", PROMPT, *models, "--logit-bias", "7:100", "--max-tokens", "5", "--json")
    assert command("verify", "-", "--device", "cpu", stdin=done.out).code == 0


def test_a_line_separator_inside_an_answer_ends_no_line(
    answer: dict[str, Any], tmp_path: Path, command: Command
) -> None:
    answer["note"] = "one\u2028two\x85three"
    assert command("verify", saved(answer, tmp_path), "--device", "cpu").code == 0


def test_an_answer_sampled_by_ratio_is_not_compared(answer: dict[str, Any], command: Command) -> None:
    answer |= {"rule": "ratio", "params": {**answer["params"], "temperature": 0.5}}
    done = command("verify", "-", stdin=json.dumps(answer))
    assert done.code == 2 and "promises the distribution" in done.err
