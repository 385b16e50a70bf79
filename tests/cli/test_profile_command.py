"""`specbranch profile`: a file that a clock takes, a table, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from in_process import Command

from specbranch.cli.profile import _verdict
from specbranch.lab.measure import check_profile, profile_pair
from specbranch.lab.measure.check_profile import CHECKED, Compared
from specbranch.lab.measure.probes import Effort


@pytest.fixture(autouse=True)
def brief(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure little: what is tested is what becomes of it."""
    little = Effort(repeats=1, least=1, seconds=1.0, host_tokens=4, check_tokens=4, check_repeats=1)
    for module in (profile_pair, check_profile):
        monkeypatch.setattr(module, "Effort", lambda: little)


@pytest.fixture
def chosen(pair: tuple[str, str]) -> list[str]:
    return ["--target", pair[0], "--draft", pair[1], "--device", "cpu"]


def test_the_file_is_a_profile_that_a_clock_takes(chosen: list[str], tmp_path: Path, command: Command) -> None:
    file = tmp_path / "mine.json"
    done = command("profile", *chosen, "--out", str(file))
    assert done.code == 0, done.err
    assert "draft & target on" in done.out and "overlap: false" in done.out and "How well it predicts" in done.out
    assert all(f"{method} " in done.out for method in CHECKED) and "at worst" in done.out
    traced = command("trace", "A branch", *chosen, "--clock", str(file), "--max-tokens", "6")
    assert traced.code == 0 and "modelled, not measured" in " ".join(traced.out.split())


@pytest.mark.slow
def test_the_json_holds_profile_and_check(chosen: list[str], tmp_path: Path, command: Command) -> None:
    (printed,) = command("profile", *chosen, "--out", str(tmp_path / "mine.json"), "--json").answers()
    assert printed["profile"] == json.loads((tmp_path / "mine.json").read_text())
    assert [one["method"] for one in printed["check"]] == list(CHECKED)
    assert printed["profile"]["overlap"] is False and len(printed["profile"]["target"]) == 7


@pytest.mark.slow
def test_a_profile_says_how_both_models_are_stored(chosen: list[str], tmp_path: Path, command: Command) -> None:
    file, weights = tmp_path / "mine.json", ("--weights", "int8", "--draft-weights", "int8", "--no-check")
    done = command("profile", *chosen, *weights, "--out", str(file))
    printed = json.loads(file.read_text())["provenance"]
    assert printed["weights"] == printed["draft_weights"] == "int8"
    assert f"{printed['dtype']}, target in int8, draft in int8" in done.out


@pytest.mark.slow
def test_side_by_side_says_how_much_they_slow_each_other_down(
    chosen: list[str], tmp_path: Path, command: Command
) -> None:
    done = command("profile", *chosen, "--out", str(tmp_path / "both.json"), "--executor", "process", "--no-check")
    assert done.code == 0 and "a parallel draft step adds" in done.out and "How well" not in done.out
    assert "overlap" not in json.loads((tmp_path / "both.json").read_text())  # which is the default


def test_bad_input_is_a_sentence(chosen: list[str], tmp_path: Path, command: Command) -> None:
    for arguments, said in (
        ([*chosen, "--out", str(tmp_path / "mine.txt")], "ends in .json"),
        ([*chosen, "--out", str(tmp_path / "none" / "mine.json")], "there is no folder"),
        ([*chosen[:2], "--out", str(tmp_path / "mine.json")], "a pair is needed"),
        ([*chosen, "--executor", "streams", "--out", str(tmp_path / "mine.json")], "this target is run on the CPU"),
        (["--pair", "smollm2-strnog", "--out", str(tmp_path / "mine.json")], "Did you mean 'smollm2-strong'"),
    ):
        done = command("profile", *arguments)
        assert done.code == 2 and said in done.err


def test_the_verdict_tells_seconds_and_speed_ups_apart() -> None:
    lines = _verdict(
        [
            Compared("autoregressive", 4.0, 5.0, None),
            Compared("pearl", 2.0, 2.5, 0.1),
            Compared("adaptive", 2.0, 2.0, 0.0),
        ]
    )
    assert "+25.0%" in lines[2] and "once" in lines[2]
    assert "2.00       2.00   +0.0%   spread 10%" in lines[3]  # both a quarter too slow, so the gain is right
    assert lines[-1].strip() == "at worst +25% in seconds, for autoregressive, and +25% in speed-up, for adaptive"
