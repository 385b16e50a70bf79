"""A draft learns on from what a server kept, and the server takes it: from requests to a better draft, with the same
texts; killed at any moment, the old draft is as it was."""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from specbranch import LLM, SamplingParams
from specbranch.cli.main import run
from specbranch.kept_text import KeptHead, KeptText, kept_name
from specbranch.models.drafts.draft_folder import read_draft

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.slow]
PARAMS = SamplingParams(max_tokens=40, ignore_eos=True)
SHORT = ("--device", "cpu", "--steps", "30", "--rows", "4", "--length", "128", "--learning-rate", "0.002")


def report_of(number: int) -> str:
    """A prompt of a kind that the target has not written by itself."""
    rng = random.Random(number)
    fields = [f"{name}: {rng.randint(10, 99)}" for name in ("pressure", "heat", "flow", "level")]
    return f"## Report {number}\n" + "\n".join(rng.sample(fields, 4)) + "\nSummary:"


def answered(target: str, folder: Path, count: int = 60) -> Path:
    """Texts as a server keeps them."""
    with LLM(target, method="autoregressive", dtype="float64", device="cpu", options={"context_length": 256}) as llm:
        prompts = [llm.tokenizer.encode(report_of(number)) for number in range(count)]
        texts = [KeptText(tuple(p), o.token_ids) for p, o in zip(prompts, llm.generate(prompts, PARAMS), strict=True)]
        head = KeptHead("target", llm.tokenizer.fingerprint, llm.vocabulary)
    folder.mkdir()
    (folder / kept_name(1)).write_bytes(head.line() + b"".join(text.line() for text in texts))
    return folder


def files_of(folder: Path) -> dict[str, str]:
    return {
        str(file.relative_to(folder)): hashlib.sha256(file.read_bytes()).hexdigest()
        for file in sorted(folder.rglob("*"))
        if file.is_file() and file.suffix != ".lock"
    }


def arguments(kept: Path, draft: Path, target: str, out: Path, *more: str) -> list[str]:
    named = ["--from-served", str(kept), "--resume", str(draft), "--target", target, "--out", str(out)]
    return ["distill", *named, *SHORT, *more]


def test_a_draft_that_learned_on_agrees_more_with_its_target_on_texts_it_has_not_seen(
    pair: tuple[str, str], tiny_draft: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept, before = answered(pair[0], tmp_path / "kept"), files_of(tiny_draft)
    capsys.readouterr()
    assert run(arguments(kept, tiny_draft, pair[0], tmp_path / "new", "--steps", "150", "--json")) == 0
    record = json.loads(capsys.readouterr().out)
    kinds = {one["kind"]: one for one in record["agreement"]}
    served = kinds.pop("served")
    assert served["tokens"] == 40 * record["served_held_out"] and record["served_texts"] == 60
    assert served["after"]["top1"] > served["before"]["top1"] + 0.02
    assert served["after"]["tokens_per_forward"] > served["before"]["tokens_per_forward"]
    assert kinds and all(one["before"]["top1"] <= one["before"]["top3"] for one in kinds.values())
    assert files_of(tiny_draft) == before
    old, new = read_draft(tiny_draft), read_draft(tmp_path / "new")
    assert new.info == old.info and (tmp_path / "new" / "evaluation.json").exists()
    again = arguments(kept, tmp_path / "new", pair[0], tmp_path / "newer")  # and on, from its own run
    assert run(again) == 0
    said = capsys.readouterr().out
    assert "tokens a forward" in said and "served" in said and "held out" in said


def test_killed_at_any_moment_the_old_draft_is_intact_and_the_run_goes_on(
    pair: tuple[str, str], tiny_draft: Path, tmp_path: Path
) -> None:
    kept, before = answered(pair[0], tmp_path / "kept", 20), files_of(tiny_draft)
    out, more = tmp_path / "new", ("--checkpoint-seconds", "0.05", "--steps", "300")
    command = [sys.executable, "-m", "specbranch.cli.main", *arguments(kept, tiny_draft, pair[0], out, *more)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    moments = ("training/run.json", "training/mixed.safetensors", "training/metrics.jsonl", "model.safetensors")
    for moment in moments:
        process = subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        until = time.monotonic() + 120
        while not (out / moment).exists() and process.poll() is None and time.monotonic() < until:
            time.sleep(0.002)
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert (out / moment).exists() and files_of(tiny_draft) == before, moment
    if not (out / "config.json").exists():  # the last kill may have come too late
        assert run(command[3:]) == 0
    assert files_of(tiny_draft) == before
    read_draft(out)


def test_what_makes_no_sense_is_a_sentence_and_leaves_nothing(
    pair: tuple[str, str], tiny_draft: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = answered(pair[0], tmp_path / "kept", 8)
    out = tmp_path / "new"
    for line, words in (
        (arguments(kept, tmp_path / "none", pair[0], out), "holds no finished draft"),
        (arguments(tmp_path / "none", tiny_draft, pair[0], out), "There is no folder"),
        (arguments(kept, tiny_draft, pair[0], tiny_draft), "holds a model already"),
        (arguments(kept, tiny_draft, pair[0], Path(pair[0])), "holds a model already"),
        (arguments(kept, tiny_draft, pair[1], out), "was made for target"),
        (arguments(kept, tiny_draft, pair[0], out, "--layers", "2"), "--layers is for new drafts"),
        (arguments(kept, tiny_draft, pair[0], out, "--material", "gone"), "There is no material at"),
    ):
        assert run(line) == 2 and words in capsys.readouterr().err, line
        assert not out.exists()
