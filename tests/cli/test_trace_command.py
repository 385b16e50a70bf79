"""`specbranch trace`: the drawing, its files, and what it refuses."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from in_process import Command

PROMPT = "A branch is a guess"


def test_a_request_is_drawn_within_the_width_asked_for(models: list[str], command: Command) -> None:
    for width in (40, 100):
        done = command("trace", PROMPT, *models, "--max-tokens", "12", "--width", str(width))
        assert done.code == 0, done.err
        assert max(map(len, done.out.splitlines())) <= width
        assert "[specbranch] on this machine's clock" in done.out and "Idle: target" in " ".join(done.out.split())
        assert "\x1b[" not in done.out


def test_colours_come_on_demand(models: list[str], command: Command) -> None:
    assert "\x1b[" in command("trace", PROMPT, *models, "--max-tokens", "6", "--colour").out


def test_the_summary_agrees_with_itself_on_both_kinds_of_clock(models: list[str], command: Command) -> None:
    for clock in ([], ["--clock", "c10"]):
        (printed,) = command("trace", PROMPT, *models, "--max-tokens", "16", "--json", *clock).answers()
        assert printed["modelled"] is bool(clock) and printed["clock"] == (clock[1] if clock else "wall")
        assert sum(one["emitted"] for one in printed["rounds"]) == printed["stats"]["tokens"] == 16
        times = printed["times"]
        kinds = [times[f"{kind}_seconds"] for kind in ("both_at_work", "target_alone", "draft_alone", "neither")]
        assert sum(kinds) == pytest.approx(times["decoding_seconds"]) and times["rounds"] == len(printed["rounds"]) - 1
        assert sum(sum(one["drafted"].values()) for one in printed["rounds"]) == printed["stats"]["drafted"]


def test_a_modelled_clock_gives_the_same_answer_and_the_same_times_every_time(
    models: list[str], command: Command
) -> None:
    asked = ["trace", PROMPT, *models, "--max-tokens", "16", "--clock", "c10"]
    first, second = (command(*asked).out for _ in range(2))
    assert first == second and "modelled, not measured" in " ".join(first.split())


def test_all_files_are_written(models: list[str], tmp_path: Path, command: Command) -> None:
    out = tmp_path / "new" / "folder"
    done = command("trace", PROMPT, *models, "--max-tokens", "12", "--clock", "c10", "--out", str(out))
    assert done.code == 0 and str(out) in done.err
    assert {file.name for file in out.iterdir()} == {"timeline.svg", "timeline.txt", "timeline.json", "timeline.jsonl"}
    ElementTree.parse(out / "timeline.svg")
    events = json.loads((out / "timeline.json").read_text())["traceEvents"]
    assert {event["cat"] for event in events if event["ph"] == "X"} == {"draft", "target"}
    assert len((out / "timeline.jsonl").read_text().splitlines()) == sum(event["ph"] == "X" for event in events)
    assert "modelled" in (out / "timeline.txt").read_text(encoding="utf-8")


@pytest.mark.slow
def test_parts_of_the_planner_can_be_left_out(models: list[str], command: Command) -> None:
    asked = ["trace", PROMPT, *models, "--max-tokens", "24", "--clock", "c10", "--json"]
    (whole,), (less,) = (command(*asked, *more).answers() for more in ([], ["--without", "overlap, trees"]))
    assert whole["times"]["both_at_work_seconds"] > 0 == less["times"]["both_at_work_seconds"]
    assert whole["text"] == less["text"]
    assert less["stats"]["rollback"]["tree_siblings"] == 0
    refused = command(*asked, "--without", "tree")
    assert refused.code == 2 and "Did you mean 'trees'" in refused.err


def test_the_answer_is_short_by_default(models: list[str], command: Command) -> None:
    (printed,) = command("trace", PROMPT, *models, "--json", "--ignore-eos").answers()
    assert printed["stats"]["tokens"] == 64


def test_plain_decoding_is_drawn_too(models: list[str], command: Command) -> None:
    done = command("trace", PROMPT, *models, "--max-tokens", "5", "--method", "autoregressive")
    assert done.code == 0 and "draft " not in done.out.split("Prompt read")[0]


def test_bad_input_is_a_sentence(models: list[str], tmp_path: Path, command: Command) -> None:
    (tmp_path / "file").write_text("")
    for arguments, said in (
        (["--clock", "c11"], "Unknown cost profile 'c11'. Did you mean"),
        (["--out", str(tmp_path / "file")], "cannot be made a folder"),
        (["--width", "39"], "39 is not in the range"),
    ):
        done = command("trace", PROMPT, *models, *arguments)
        assert done.code == 2 and said in done.err


def test_a_profile_of_another_pair_is_refused_unless_forced(
    models: list[str], tmp_path: Path, command: Command
) -> None:
    from specbranch.clock.profile import CostProfile

    file = tmp_path / "other.json"
    CostProfile(
        target=((1, 2.0),), draft=((1, 1.0),), pair="another one", target_identity="x", draft_identity="y"
    ).save(file)
    refused = command("trace", PROMPT, *models, "--clock", str(file), "--max-tokens", "4")
    assert refused.code == 2 and "measured with another one" in refused.err and "--force-profile" in refused.err
    assert command("trace", PROMPT, *models, "--clock", str(file), "--max-tokens", "4", "--force-profile").code == 0
