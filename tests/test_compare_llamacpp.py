"""The comparison with llama.cpp: a run of it from end to end, whose last line holds every figure."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "scripts" / "compare_llamacpp.py"


@pytest.mark.slow
@pytest.mark.default_model
def test_the_last_line_of_a_run_holds_every_figure(default_model: Path) -> None:
    sizes = ["--suites", "own-code", "--limit", "1", "--tokens", "6", "--rounds", "1", "--threads", "1"]
    done = subprocess.run([sys.executable, str(SCRIPT), *sizes], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    *lines, last = done.stdout.splitlines()
    found = json.loads(last)
    kinds = ("ours autoregressive", "ours specbranch", "wheel plain", "wheel ngram")
    timed = [*(f"own-code {kind}" for kind in kinds), "reading ours", "reading wheel", "rows 1", "rows 4", "rows 8"]
    assert all(found["ms"][name] > 0 for name in timed)
    assert found["loads"].keys() == found["memory"].keys() == {"ours", "wheel"}
    assert any("times as fast" in line for line in lines) and any("llama.cpp of xllamacpp" in line for line in lines)
