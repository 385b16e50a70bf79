"""scripts/measure_host.py: it runs, and its figures fit together."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "scripts" / "measure_host.py"


@pytest.mark.slow
@pytest.mark.parametrize("options", [[], ["--temperature", "0.8"], ["--forest"]])
def test_a_short_measurement_has_all_its_parts(options: list[str]) -> None:
    asked = ["--sessions", "3", "--rounds", "48", "--json", *options]
    said = subprocess.run(
        [sys.executable, str(SCRIPT), *asked], capture_output=True, text=True, timeout=300, check=True
    )
    found = json.loads(said.stdout)
    tokens, whole = (
        found.pop(name) for name in ("tokens of a session and round", "all, without a clock for each part")
    )
    assert whole > 0.0 and all(value > 0.0 for value in found.values()), found
    assert {"queue, deadlines", "which rows", "launch", "read", "tokens, statistics"} <= found.keys()
    assert tokens > 1.0 if "--forest" in options else tokens == 1.0
