"""scripts/measure_grammar.py: its schemas are two hundred bounded ones, and it finds what is invalid or differs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPTS = Path(__file__).parents[1] / "scripts"
SCRIPT = SCRIPTS / "measure_grammar.py"


@pytest.fixture
def cases(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    monkeypatch.syspath_prepend(SCRIPTS)
    from grammar_schemas import schema_cases

    return list(schema_cases())


def parts(schema: Any) -> list[dict[str, Any]]:
    """Return all objects within a schema."""
    if isinstance(schema, list):
        return [part for one in schema for part in parts(one)]
    return [schema, *(part for one in schema.values() for part in parts(one))] if isinstance(schema, dict) else []


def test_two_hundred_schemas_bound_every_text_and_list(cases: list[Any]) -> None:
    assert len({case.name for case in cases}) == 200 == len({json.dumps(case.schema) for case in cases})
    for case in cases:
        for part in parts(case.schema):
            if part.get("type") == "string" or "string" in part.get("type", ()):
                assert part.keys() & {"maxLength", "pattern", "format"}, case.name
            if part.get("type") == "array":
                assert "maxItems" in part or part.get("items") is False, case.name


def test_an_answer_that_its_schema_does_not_accept_is_counted(tmp_path: Path) -> None:
    pytest.importorskip("jsonschema")
    kept = tmp_path / "answers.jsonl"
    same = {"schema": "city, flat", "method": "lookup", "temperature": 0.0, "tokens": [1]}
    good = {"city": "Ulm", "inhabitants": 126_000, "coast": False, "founded": 854}
    said = [(good, True), ({**good, "coast": "no"}, True), ({}, False)]
    lines = [json.dumps({**same, "text": json.dumps(text), "finished": finished}) for text, finished in said]
    kept.write_text("\n".join(lines) + "\n")
    found = subprocess.run(
        [sys.executable, str(SCRIPT), "--validate", str(kept)], capture_output=True, text=True, timeout=60, check=True
    )
    assert json.loads(found.stdout.splitlines()[-1]) == {"valid": 0.5}


@pytest.mark.slow
@pytest.mark.default_model
def test_a_short_measurement_has_all_its_figures(default_model: Path) -> None:
    pytest.importorskip("llguidance")
    asked = "--device cpu --schemas 8 --tokens 60 --free-tokens 20 --cost-prompts 1 --methods lookup --temperatures 0"
    said = subprocess.run(
        [sys.executable, str(SCRIPT), *asked.split()], capture_output=True, text=True, timeout=300, check=True
    )
    found = json.loads(said.stdout.splitlines()[-1])
    assert found["identical"] == found["identical to alone"] == 1.0 and 0.0 < found["finished"] <= 1.0
    assert found["plain masked ÷ plain free"] > 0.0 and found["specbranch masked ÷ plain masked"] > 0.0
    assert found["plain beside a schema ÷ plain beside free text"] > 0.0
