"""`specbranch serve` as a process: it tells where it is, serves, and ends as it should."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

STREAM = {"prompt": "Smile", "max_tokens": 300, "ignore_eos": True, "stream": True}


@pytest.mark.slow
def test_a_server_told_to_stop_finishes_its_answers(pair: tuple[str, str], tmp_path: Path) -> None:
    small = ["--device", "cpu", "--dtype", "float64", "--context-length", "400", "--port", "0", "--model-name", "tiny"]
    command = [sys.executable, "-m", "specbranch", "serve", "--target", pair[0], "--draft", pair[1], *small]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        lines = []
        for line in process.stderr:
            lines.append(line)
            if line.startswith("Serving at "):
                break
        url = line.removeprefix("Serving at ").strip()
        with httpx.stream("POST", f"{url}/v1/completions", json=STREAM, timeout=120) as response:
            heard = response.iter_lines()
            first = next(heard)
            process.send_signal(signal.SIGTERM)
            said = [first, *(one for one in heard if one)]
        rest = [json.loads(line) for line in process.stderr]
        process.wait(120)
    assert said[-1] == "data: [DONE]" and '"finish_reason":"length"' in said[-2]
    told = next(line for line in rest if line["message"] == "request")
    assert told["completion_tokens"] == 300 and told["status"] == 200
    assert process.returncode == -signal.SIGTERM and rest[-1]["message"].startswith("Finished server process")
