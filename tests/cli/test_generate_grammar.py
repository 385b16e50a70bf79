"""`specbranch generate` with a schema, a regular expression, choices or a grammar."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from schema_check import matches
from schemas import SCHEMAS
from specbranch.cli.main import run

pytest.importorskip("llguidance")


def written(folder: Path, name: str, text: str) -> str:
    file = folder / name
    file.write_text(text, encoding="utf-8")
    return str(file)


def generated(pair: tuple[str, str], capsys: pytest.CaptureFixture[str], *options: str) -> str:
    models = ["--target", pair[0], "--draft", pair[1], "--device", "cpu", "--dtype", "float64"]
    assert run(["generate", "A branch is", *models, "--max-tokens", "200", "--context-length", "300", *options]) == 0
    return capsys.readouterr().out


def test_each_option_decides_what_is_written(
    pair: tuple[str, str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    schema = written(tmp_path, "schema.json", json.dumps(SCHEMAS["record"]))
    assert matches(json.loads(generated(pair, capsys, "--json-schema", schema)), SCHEMAS["record"])
    assert re.fullmatch("[a-c]{4}\n", generated(pair, capsys, "--regex", "[a-c]{4}"))
    assert generated(pair, capsys, "--choice", "red", "--choice", "blue") in ("red\n", "blue\n")
    grammar = written(tmp_path, "grammar.gbnf", 'root ::= "x" [0-9] [0-9]')
    assert re.fullmatch("x[0-9]{2}\n", generated(pair, capsys, "--grammar", grammar))


def test_a_saved_answer_has_its_grammar_and_is_verified_with_it(
    pair: tuple[str, str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    schema = written(tmp_path, "schema.json", json.dumps(SCHEMAS["record"]))
    saved = generated(pair, capsys, "--json-schema", schema, "--json", "--temperature", "0.8", "--seed", "3")
    assert json.loads(json.loads(saved)["params"]["json_schema"]) == SCHEMAS["record"]
    file = written(tmp_path, "answers.jsonl", saved)
    assert run(["verify", file]) == 0


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--json-schema", "absent.json"], "cannot be read"),
        (["--regex", "a", "--choice", "b"], "both given"),
    ],
)
def test_mistakes_are_refused_before_a_model_is_loaded(
    options: list[str], said: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(["generate", "A branch is", "--target", "no such model", *options]) == 2
    assert said in capsys.readouterr().err
