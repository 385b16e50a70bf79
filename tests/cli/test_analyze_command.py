"""`specbranch analyze`: tables, charts and JSON from one run."""

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
