"""`bench load`: methods with many requests at once."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from in_process import Command, Done

from specbranch.core.orders import Orders, Reports
from specbranch.lab.bench.under_load import Arrivals
from specbranch.pairs import Pair

LINES = ("one bird is a guess", "a second bird is a branch", "three birds are a tree")


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    lines = [{"question_id": at, "category": "writing", "turns": [words]} for at, words in enumerate(LINES)]
    (tmp_path / "birds.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return tmp_path


def loaded(command: Command, prompts: Path, *more: str) -> Done:
    given = ("--prompts", str(prompts / "birds.jsonl"), "--records", str(prompts / "records"), "--max-tokens", "12")
    return command("bench", "load", "--pair", "tiny", *given, *more)


@pytest.mark.slow
def test_every_method_runs_at_every_number_of_requests(command: Command, tiny: Pair, prompts: Path) -> None:
    options = (
        "--clock",
        "c10",
        "--methods",
        "specbranch,speculative",
        "--at-once",
        "1,4",
        "--out",
        str(prompts / "out"),
    )
    done = loaded(command, prompts, *options, "--json")
    assert done.code == 0, done.err
    rows = json.loads(done.out)["rows"]
    assert [(row["at_once"], row["method"]) for row in rows] == [
        (count, method) for count in (1, 4) for method in ("autoregressive", "specbranch", "speculative")
    ]
    plain = {row["at_once"]: row for row in rows if row["method"] == "autoregressive"}
    for row in rows:
        assert row["requests"] >= 2 * row["at_once"] and len(row["ms_per_token"]) == 3
        assert row["over_plain"] == pytest.approx(row["tokens_per_second"] / plain[row["at_once"]]["tokens_per_second"])
    assert plain[4]["tokens_per_second"] > plain[1]["tokens_per_second"]
    assert json.loads((prompts / "out" / "load.json").read_text())["rows"] == rows
    assert (prompts / "out" / "load-c10.svg").read_text().startswith("<svg")
    again = loaded(command, prompts, *options)
    assert "over plain" in again.out and "specbranch" in again.out


@pytest.mark.slow
def test_by_the_wall_clock_methods_take_turns_and_every_text_is_compared(
    command: Command, tiny: Pair, prompts: Path
) -> None:
    options = ("--methods", "specbranch,lookup", "--at-once", "1,3", "--repeats", "2", "--out", str(prompts / "out"))
    done = loaded(command, prompts, *options, "--json")
    assert done.code == 0, done.err
    rows = json.loads(done.out)["rows"]
    assert [(row["at_once"], row["method"]) for row in rows] == [
        (count, method) for count in (1, 3) for method in ("autoregressive", "specbranch", "lookup")
    ]
    for row in rows:
        assert row["clock"] == "wall" and row["differing"] == 0 and row["repeats"] == 2
        assert row["requests"] >= 2 * row["at_once"] and row["tokens"] > 0 and row["tokens_per_second"] > 0
        assert len(row["ms_to_first"]) == len(row["ms_per_token"]) == 3 and min(row["ms_to_first"]) > 0
        assert (
            row["ms_between"] == sorted(row["ms_between"]) and len(row["ms_between"]) == 3 and row["ms_between"][0] > 0
        )
        assert row["over_plain"] == 1.0 or row["method"] != "autoregressive"
    assert (prompts / "out" / "load-wall.svg").read_text().startswith("<svg")
    again = loaded(command, prompts, "--at-once", "2", "--repeats", "1")
    assert (
        "ms to the first" in again.out
        and "ms between rounds" in again.out
        and "measured, median of 1 turns" in again.out
    )


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            ("--clock", "c10", "--at-once", "1,many"),
            "--at-once is '1,many'; expected numbers of requests such as 1,4,16",
        ),
        (("--clock", "c10", "--at-once", "0"), "--at-once is '0'"),
        (("--clock", "c11"), "c10"),
        (("--clock", "c10", "--methods", "hf-generate"), "is no method of this engine"),
        (("--repeats", "0"), "--repeats"),
    ],
)
def test_mistakes_are_sentences(
    options: tuple[str, ...], words: str, command: Command, tiny: Pair, prompts: Path
) -> None:
    done = loaded(command, prompts, *options)
    assert done.code == 2 and words in done.err and "Traceback" not in done.err


@pytest.mark.slow
def test_models_may_have_the_shape_of_larger_ones(command: Command, tiny: Pair, prompts: Path) -> None:
    shapes = ("--target-shape", "hidden=96", "--draft-shape", "layers=3")
    done = loaded(command, prompts, *shapes, "--at-once", "2", "--repeats", "1", "--json")
    assert done.code == 0, done.err
    rows = json.loads(done.out)["rows"]
    assert {row["differing"] for row in rows} == {0} and all("tiny-" in row["pair"] for row in rows)


@pytest.mark.slow
def test_a_target_alone_can_be_loaded(command: Command, tiny: Pair, prompts: Path) -> None:
    given = ("--prompts", str(prompts / "birds.jsonl"), "--records", str(prompts / "records"), "--max-tokens", "12")
    asked = ("bench", "load", "--target", tiny.target, *given, "--at-once", "2", "--repeats", "1", "--json")
    done = command(*asked, "--methods", "lookup")
    assert done.code == 0, done.err
    assert [row["method"] for row in json.loads(done.out)["rows"]] == ["autoregressive", "lookup"]
    refused = command(*asked, "--methods", "specbranch")
    assert refused.code == 2 and "needs a draft model" in refused.err


def test_a_gap_lies_between_two_rounds_that_added_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    arrived, times = Arrivals(), iter((1.0, 1.5, 3.5))
    monkeypatch.setattr("specbranch.lab.bench.under_load.time.perf_counter", lambda: next(times))
    for added in (1, 0, 4, 0, 0, 2):  # rounds of others, and of a draft alone, add nothing
        arrived.note(Orders(), Reports(), added)
    assert arrived.gaps() == [0.5, 2.0]
