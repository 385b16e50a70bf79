"""The command `llm` itself, in a process of its own, with the default model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

LEGS = {
    "type": "object",
    "properties": {"legs": {"type": "integer", "maximum": 99}},
    "required": ["legs"],
    "additionalProperties": False,
}


def run(folder: Path, *given: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "LLM_USER_PATH": str(folder), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "llm", *given]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=300)


def said(folder: Path, *given: str) -> str:
    done = run(folder, *given)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_llm_finds_the_plugin_and_starts_without_torch(folder: Path) -> None:
    code = "import llm, sys; llm.get_model('specbranch'); sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, f"llm does not find the plugin, or loads torch at once; try make setup. {done.stderr}"


@pytest.mark.slow
def test_a_conversation_on_the_command_line(default_model: Path, folder: Path) -> None:
    first = said(folder, "Name a colour.", "-m", "specbranch", "-o", "max_tokens", "12")
    second = json.loads(said(folder, "-c", "How many legs has a spider?", "--schema", json.dumps(LEGS)))
    assert first.strip() and isinstance(second["legs"], int)
    entries = json.loads(said(folder, "logs", "--json"))
    assert entries[0]["response"] == first.strip() and json.loads(entries[1]["response"]) == second
    assert {entry["model"] for entry in entries} == {"specbranch"}
    assert entries[0]["output_tokens"] == 12
    assert entries[1]["input_tokens"] > entries[0]["input_tokens"] + 12


@pytest.mark.slow
def test_a_mistake_on_the_command_line_is_a_sentence(folder: Path) -> None:
    done = run(folder, "Hello", "-m", "specbranch", "-o", "pair", "smollm3")
    assert done.returncode == 1 and done.stderr.startswith("Error: Unknown pair 'smollm3'. Did you mean 'smollm2-")
    assert "Traceback" not in done.stderr
