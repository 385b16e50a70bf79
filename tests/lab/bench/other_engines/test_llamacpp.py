"""llama.cpp beside our methods: the same file and prompts, its own clock and text, and nothing claimed of that text."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from specbranch.cli.main import run
from specbranch.lab.bench.other_engines.llamacpp import LlamaCpp, built_with, turn_stats
from specbranch.lab.bench.recorded_pair import RecordedPair, Workload
from specbranch.lab.suites.suite import Prompt

PROMPT = Prompt("count", "", ("Repeat after me: one two three one two three one two three one two three.",))


def test_what_llamacpp_tells_is_turned_into_what_the_bench_reads() -> None:
    timings = {"prompt_n": 7, "prompt_ms": 250.0, "predicted_n": 21, "predicted_ms": 500.0}
    plain = turn_stats(timings)
    assert plain == {
        "tokens": 21,
        "ttft_seconds": 0.25,
        "decode_seconds": 0.5,
        "tokens_per_second": 40.0,
        "target_forwards": 20,
        "tokens_per_forward": 1.0,
    }
    assert turn_stats({**timings, "draft_n": 12, "draft_n_accepted": 10})["tokens_per_forward"] == 2.0
    assert turn_stats({**timings, "predicted_n": 1, "predicted_ms": 0.0})["tokens_per_second"] is None


def test_its_features_are_reported() -> None:
    assert built_with().startswith("llama.cpp of xllamacpp ") and "CPU" in built_with()


def test_a_folder_is_refused_before_anything_runs(
    pair: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["--target", pair[0], "--methods", "llamacpp", "--no-tune", "--out", str(tmp_path / "out")]
    assert run(["bench", "run", *asked]) == 2
    err = capsys.readouterr().err
    assert "llama.cpp runs only GGUF files" in err and "out of --methods" in err


@pytest.mark.slow
@pytest.mark.default_model
def test_llamacpp_answers_within_the_task_and_much_as_we_do(default_model: Path, tmp_path: Path) -> None:
    with RecordedPair(target=str(default_model), folder=tmp_path) as recorded:
        record = recorded.records(PROMPT, Workload(max_tokens=24))[0]
        theirs = LlamaCpp(recorded)
        for method in ("llamacpp", "llamacpp-ngram"):
            tokens, found = theirs.answer(method, record)
            assert 0 < found["tokens"] <= 24 and found["decode_seconds"] > 0 and found["ttft_seconds"] > 0
            assert tokens[:3] == record.tokens[:3], "another prompt, or a special token before it"
            assert 0 < found["target_forwards"] <= found["tokens"] - 1


@pytest.mark.slow
@pytest.mark.default_model
def test_a_bench_with_llamacpp_claims_nothing_of_its_text(
    default_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "p.jsonl").write_text(json.dumps({"question_id": "a", "category": "", "turns": ["Say hello."]}) + "\n")
    asked = ["--target", str(default_model), "--prompts", str(tmp_path / "p.jsonl"), "--max-tokens", "8", "--no-tune"]
    assert run(["bench", "run", *asked, "--methods", "llamacpp", "--out", str(tmp_path / "out")]) == 0
    assert "llama.cpp of xllamacpp" in capsys.readouterr().err
    rows = {row["method"]: row for row in json.loads((tmp_path / "out" / "results.json").read_text())["rows"]}
    assert rows["llamacpp"]["rule"] == "other" and rows["llamacpp"]["lossless"] is None
    assert rows["llamacpp"]["speedup"] > 0
