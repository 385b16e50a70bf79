"""The presets for GPUs, on a CPU with tiny shapes: a pair in larger shapes, its results, and sentences for what
cannot be run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from in_process import Command, Done

from specbranch.lab.bench.job import DRAWN
from specbranch.lab.bench.presets import GPU_BRIEF, PRESET_HELP, PRESETS
from specbranch.lab.inflation.shapes import SHAPES
from specbranch.pairs import PAIRS, Pair

SHAPED = (
    "--target-shape",
    "hidden=64,layers=3,heads=8,kv_heads=8,head_dim=16",
    "--draft-shape",
    "hidden=64,head_dim=16,vocabulary=600",
)
ON_GPU = [name for name in PRESETS if name.startswith("gpu-")]
OVERLAPPING = {"pearl", "specbranch:confidence", "specbranch", "specbranch-trees", "specbranch-lookup", "auto"}


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    """Two suites, as long as their names."""
    for name in ("one", "two"):
        lines = [
            {"question_id": at, "category": "writing", "turns": [f"{name} {at}: a branch is a guess"]}
            for at in range(3)
        ]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return tmp_path


@pytest.fixture
def no_public_suites(monkeypatch: pytest.MonkeyPatch) -> None:
    """Presets run the prompts that are given; public ones may not be here."""
    for name in ON_GPU:
        monkeypatch.setitem(PRESETS[name], "suites", ())


def bench(command: Command, prompts: Path, *more: str, suites: tuple[str, ...] = ("one", "two")) -> Done:
    given = [option for name in suites for option in ("--prompts", str(prompts / f"{name}.jsonl"))]
    where = ("--records", str(prompts / "records"), "--out", str(prompts / "out"))
    named = () if "--pair" in more or "--target" in more else ("--pair", "tiny")
    length = () if "--context" in more else ("--context", "160")
    # streams want a GPU; a preset that has an executor of its own keeps it
    streams = any(one.startswith("gpu-") and one != "gpu-cpu-draft" for one in more)
    where_run = ("--device", "cpu", *(("--executor", "serial") if streams and "--executor" not in more else ()))
    return command("bench", "run", *named, *given, *where_run, "--max-tokens", "8", *length, *where, *more)


def rows_of(done: Done) -> list[dict[str, Any]]:
    assert done.code == 0, done.err
    rows: list[dict[str, Any]] = json.loads(done.out.rstrip("\n").split("\n")[-1])["rows"]
    return rows


@pytest.mark.slow
def test_gpu_core_runs_every_method_on_an_inflated_pair(
    command: Command, tiny: Pair, prompts: Path, no_public_suites: None
) -> None:
    options = ("--preset", "gpu-core", *SHAPED, "--limit", "1", "--no-tune")
    rows = rows_of(bench(command, prompts, *options))
    methods = PRESETS["gpu-core"]["methods"].split(",")
    assert {row["method"] for row in rows} == set(methods) and len(rows) == 2 * len(methods)
    assert all(row["lossless"] for row in rows), "transformers runs on the same weights, so it says the same"
    assert {row["suite"] for row in rows} == {"one@160", "two@160"} and {row["clock"] for row in rows} == {"wall"}
    (title,) = {row["pair"] for row in rows}
    assert title == "tiny-64hidden-16head_dim-600vocabulary-64hidden-3layers-8heads-8kv_heads-16head_dim"
    for row in rows:
        if not row["method"].startswith("hf-"):
            assert 0 <= row["host_share"] <= 1 and 0 <= row["target_idle"] <= 1
        assert (row["begun_with_tree"] is not None) <= (row["method"] in OVERLAPPING)
    about = json.loads((prompts / "out" / "results.json").read_text())["provenance"]["pairs"][title]
    assert (
        about["draft_head"] == "600 rows, 421 of them tokens" and about["target_head"] == "421 rows, 421 of them tokens"
    )
    assert about["target_shape"].startswith("hidden 64") and str(prompts) not in json.dumps({**about, "draft": ""})
    for method in DRAWN:
        assert (prompts / "out" / f"timeline-{title}-{method}.svg").read_text().startswith("<svg")
    assert "What draft and target did" in (prompts / "out" / "report.html").read_text()


@pytest.mark.slow
def test_commands_add_pairs_prompts_and_contexts_to_one_folder(command: Command, tiny: Pair, prompts: Path) -> None:
    brief = ("--methods", "speculative", "--no-tune")
    first = rows_of(bench(command, prompts, *brief, *SHAPED, "--limit", "3", suites=("one",)))
    second = rows_of(bench(command, prompts, *brief, "--limit", "2"))
    assert second[: len(first)] == first and {row["pair"] for row in second} == {first[0]["pair"], "tiny"}
    assert [(row["suite"], row["prompts"]) for row in second] == [("one@160", 3)] * 2 + [("one@160", 2)] * 2 + [
        ("two@160", 2)
    ] * 2
    about = json.loads((prompts / "out" / "results.json").read_text())["provenance"]
    assert set(about["pairs"]) == {row["pair"] for row in second} and len(about["suites"]) == 2
    lines = (prompts / "one.jsonl").read_text()
    (prompts / "one.jsonl").write_text(lines.replace("guess", "guess or two"))
    other = bench(command, prompts, *brief)
    assert other.code == 2 and "started with other settings (suites was" in other.err
    (prompts / "one.jsonl").write_text(lines)
    (prompts / "two.jsonl").write_text((prompts / "two.jsonl").read_text().replace("guess", "guess or two"))
    other = bench(command, prompts, *brief)
    assert other.code == 2 and "holds runs of other prompts under the name two@160" in other.err


@pytest.mark.slow
def test_of_several_contexts_the_first_is_drawn(
    command: Command, tiny: Pair, prompts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[int] = []
    monkeypatch.setattr(
        "specbranch.lab.bench.job.draw_timeline",
        lambda lab, setting, record, folder: drawn.append(len(record.task.prompt)),
    )
    contexts = ("--context", "160", "--context", "256")
    brief = ("--methods", "pearl", "--no-tune", "--limit", "1", "--timeline")
    rows = rows_of(bench(command, prompts, *brief, *contexts, suites=("one",)))
    assert {row["suite"] for row in rows} == {"one@160", "one@256"}
    assert len(drawn) == 1 and drawn[0] < 160


@pytest.mark.slow
def test_an_inflated_pair_is_tuned_as_it_is_by_its_own_costs(
    command: Command, tiny: Pair, prompts: Path, no_public_suites: None
) -> None:
    given = (
        "--preset",
        "gpu-core",
        *SHAPED,
        "--methods",
        "speculative,lookup,specbranch",
        "--trials",
        "3",
        "--context",
        "256",
    )
    rows = rows_of(bench(command, prompts, *given))
    (profile,) = (prompts / "out").glob("profile-*.json")
    measured = json.loads(profile.read_text())
    assert measured["target_identity"] and measured["target_per_context"]
    assert {row["method"] for row in rows} == {"autoregressive", "speculative", "lookup", "specbranch"}
    assert len(list((prompts / "records" / "tuned").glob("*.json"))) == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("preset", "more", "title"),
    [
        ("gpu-cpu-draft", (*SHAPED[:2], "--draft-shape", "own"), "+cpu-draft+process"),
        ("gpu-int8", SHAPED, "+int8"),
        ("gpu-real", (), "tiny"),
        ("gpu-temperature", SHAPED, ""),
        ("gpu-context", SHAPED, ""),
    ],
)
def test_the_other_presets_run(
    preset: str, more: tuple[str, ...], title: str, command: Command, tiny: Pair, prompts: Path, no_public_suites: None
) -> None:
    rows = rows_of(
        bench(
            command, prompts, "--preset", preset, *more, "--methods", ",".join(GPU_BRIEF), "--limit", "1", "--no-tune"
        )
    )
    assert all(row["lossless"] for row in rows) and {row["method"] for row in rows} == set(GPU_BRIEF)
    assert all(row["pair"].endswith(title) for row in rows)
    assert {row["temperature"] for row in rows} == {1.0 if preset == "gpu-temperature" else 0.0}
    if preset == "gpu-cpu-draft":
        assert all(row["begun_with_tree"] is not None for row in rows if row["method"] == "pearl"), (
            "the draft worked beside the target"
        )


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            ("--preset", "gpu-core", "--pair", "smollm2-weak", "--device", "cuda"),
            "torch sees no GPU here. Use --device cpu",
        ),
        (
            ("--preset", "gpu-core"),
            "has shapes for the pairs smollm2-weak, smollm2-default, smollm2-strong, not for tiny",
        ),
        (("--target-shape", "7x"), "Unknown shape '7x'. Did you mean '7b'"),
        (("--target-shape", "7b,laiers=3"), "has the part 'laiers=3'; expected a name such as 7b"),
        (
            ("--target-shape", "hidden=16"),
            "the shape is smaller than the model: hidden 16 of at least 32. Choose a larger shape, or add hidden=32.",
        ),
        (("--executor", "proces"), "Did you mean 'process'"),
        (("--executor", "process", "--clock", "c5"), "by the wall clock only"),
        (("--draft-weights", "int9"), "Unknown storage of weights 'int9'"),
        (("--draft-device", "gpu"), "Unknown device 'gpu'"),
        (("--context", "4096"), "supports contexts of up to 512 tokens"),
    ],
)
def test_mistakes_are_sentences(
    options: tuple[str, ...], words: str, command: Command, tiny: Pair, prompts: Path
) -> None:
    if "cuda" in options and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    done = bench(command, prompts, *options, "--no-tune")
    assert done.code == 2 and words in done.err and "Traceback" not in done.err
    assert not (prompts / "out" / "runs.jsonl").exists()


@pytest.mark.slow
def test_a_target_alone_has_no_draft_to_shape_and_no_methods_that_need_one(
    command: Command, pair: tuple[str, str], prompts: Path
) -> None:
    alone = ("--target", pair[0], "--no-tune")
    done = bench(command, prompts, *alone, *SHAPED, "--methods", "lookup")
    assert done.code == 2 and "was given without a draft. Give one with --draft" in done.err
    done = bench(command, prompts, *alone, "--preset", "gpu-core", *SHAPED)
    assert done.code == 2 and "needs a draft model, and none was given" in done.err
    rows = rows_of(bench(command, prompts, *alone, *SHAPED[:2], "--methods", "lookup", "--limit", "1"))
    assert {row["method"] for row in rows} == {"autoregressive", "lookup"}


def test_presets_name_what_there_is() -> None:
    assert [name for name, _ in PRESET_HELP] == list(PRESETS)
    for name in ON_GPU:
        for pair, given in PRESETS[name].get("of_pair", {}).items():
            assert pair in PAIRS and {given["target_shape"], given["draft_shape"]} <= {*SHAPES, "own"}
