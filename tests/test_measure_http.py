"""scripts/measure_http.py: it runs, and its figures fit together."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "scripts" / "measure_http.py"


@pytest.mark.slow
@pytest.mark.default_model
@pytest.mark.parametrize("options", [[], ["--chat", "--ahead", "--logprobs", "1"]])
def test_a_short_measurement_has_all_its_figures(default_model: Path, options: list[str]) -> None:
    asked = ["--clients", "3", "--tokens", "20", "--seconds", "0.5", "--round", "0.002", "--json", *options]
    said = subprocess.run(
        [sys.executable, str(SCRIPT), *asked], capture_output=True, text=True, timeout=120, check=True
    )
    found = json.loads(said.stdout)
    assert all(value > 0.0 for value in found.values()), found
    assert found["engine_us"] >= found["engine_step_us"] and found["process_us"] >= found["loop_us"]
    assert found["events_per_token"] < 2.0 and found["own_round_ms"] >= 2.0
