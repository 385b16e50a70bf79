"""`specbranch analyze` and `analyze scale`: tables, charts and JSON from one run."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest
from in_process import Command

from specbranch.clock.profile import CostProfile
from specbranch.lab.study import study
from specbranch.lab.study.strategies import STRATEGIES, StrategyName


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """A grid of a few cases: the whole one takes a minute."""
    monkeypatch.setattr(study, "RATIOS", (10,))
    monkeypatch.setattr(study, "MEASURED", (4,))
    few: tuple[StrategyName, ...] = ("serial SD", "PEARL", "serial tree")
    monkeypatch.setattr(study, "STRATEGIES", {name: STRATEGIES[name] for name in few})


@pytest.mark.usefixtures("small")
def test_analyze_prints_tables_and_writes_charts_and_json(command: Command, tmp_path: Path) -> None:
    done = command("analyze", "--profile", "c10", "--tokens", "300", "--out", str(tmp_path / "new" / "folder"))
    assert done.code == 0, done.err
    assert "| 10 | 0.5 | 0.50 (γ=10) | 1.46 (γ=2) | 1.33 (γ=10) | 1.50 (γ=2) " in " ".join(done.out.split())
    assert "| c10 " in done.out and "Charts and analysis.json are in" in done.err
    written = sorted(path.name for path in (tmp_path / "new" / "folder").iterdir())
    assert written == [
        "analysis-map-default.svg",
        "analysis-map-strong.svg",
        "analysis-map-weak.svg",
        "analysis-methods-c10.svg",
        "analysis-theorem-c10.svg",
        "analysis.json",
    ]
    for path in (tmp_path / "new" / "folder").glob("*.svg"):
        ElementTree.parse(path)


@pytest.mark.slow
@pytest.mark.usefixtures("small")
def test_analyze_json_holds_what_was_predicted_charged_and_mapped(command: Command, tmp_path: Path) -> None:
    mine = tmp_path / "mine.json"
    CostProfile(target=((1, 8.0), (16, 9.0)), draft=((1, 1.0),), pair="a & b", hardware="a desk", note="guessed").save(
        mine
    )
    (printed,) = command("analyze", "--profile", str(mine), "--tokens", "500", "--json").answers()
    assert len(printed["latency"]) == 9 and len(printed["map"]) == 9
    assert printed["farthest_off"] == max(abs(row["off"]) for row in printed["latency"]) < 0.15
    assert all(row["speedup"] > 1 for row in printed["map"]) and {row["pair"] for row in printed["map"]} == {
        "weak",
        "default",
        "strong",
    }
    json.dumps(printed, allow_nan=False)


def test_an_unknown_profile_is_refused_before_anything_runs(command: Command) -> None:
    done = command("analyze", "--profile", "c50")
    assert done.code == 2 and "Unknown cost profile 'c50'" in done.err and "c5" in done.err


@pytest.mark.usefixtures("small")
def test_a_folder_that_cannot_be_written_is_named(command: Command, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    done = command("analyze", "--profile", "c10", "--tokens", "100", "--out", str(tmp_path / "file" / "below"))
    assert done.code == 2 and "Cannot write to" in done.err and "--out" in done.err


SMALL_FLEETS = ("--batch", "1", "--speed", "1", "--replicas", "1", "--workers", "1", "--requests", "1", "--jobs", "1")


def test_scale_prints_sentences_and_tables_and_writes_charts_and_json(command: Command, tmp_path: Path) -> None:
    usual = ("--profile", "c10", "--method", "speculative", *SMALL_FLEETS, "--round-trip", "0.5")
    done = command("analyze", "scale", *usual, "--round-trip", "100", "--out", str(tmp_path))
    assert done.code == 0, done.err
    assert "c10, batch 1: a remote draft stops paying at a round trip of " in done.out
    assert "What overlap brings" in done.out and "Replicas that share draft workers, batch 1" in done.out
    names = ("latency", "replicas", "round-trip", "speed")
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        *(f"scale-{one}-c10.svg" for one in names),
        "scale.json",
    ]
    written = json.loads((tmp_path / "scale.json").read_text())
    (limit,) = written["stops_paying"]
    assert 0.0005 < limit["over_none"] < 0.1 and {one["draft"] for one in written["fleets"]} == {
        "none",
        "local",
        "remote",
    }


@pytest.mark.slow
def test_scale_reads_a_profile_of_the_user_in_several_processes(command: Command, tmp_path: Path) -> None:
    mine = tmp_path / "mine.json"
    CostProfile(target=((1, 0.008), (16, 0.009)), draft=((1, 0.001),), pair="a & b").save(mine)
    usual = ("--profile", str(mine), *SMALL_FLEETS[:-2], "--jobs", "2", "--round-trip", "0.5")
    (printed,) = command("analyze", "scale", *usual, "--json").answers()
    assert printed["sentences"][0] == (
        "mine, batch 1: a remote draft still pays at a round trip of 0.5 ms, the longest tried."
    )
    assert {one["profile"] for one in printed["fleets"]} == {"mine"} and printed["measured"] == []


def test_scale_refuses_what_it_does_not_know_before_anything_runs(command: Command) -> None:
    done = command("analyze", "scale", "--profile", "c50")
    assert done.code == 2 and "Unknown cost profile 'c50'" in done.err
    done = command("analyze", "scale", "--method", "lookup")
    assert done.code == 2 and "lookup" in done.err and "specbranch" in done.err
