"""`specbranch doctor`: plain words, an exit code, and JSON."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from in_process import Command


@pytest.mark.slow
def test_a_sound_pair_ends_with_0_and_a_recommendation(pair: tuple[str, str], command: Command) -> None:
    done = command("doctor", "--target", pair[0], "--draft", pair[1], "--device", "cpu")
    assert done.code == 0, done.out + done.err
    assert all(
        line.split()[0] in ("ok", "note") for line in done.out.split("\n\n")[0].splitlines() if not line.startswith(" ")
    )
    assert "Predicted speed-up over plain decoding" in done.out and "--method " in done.out and "\x1b[" not in done.out


def test_a_problem_ends_with_1_and_says_what_to_do(
    tiny_draft: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Command
) -> None:
    monkeypatch.setenv("SPECBRANCH_CACHE", str(tmp_path))
    arguments = ("doctor", "--target", "smollm2-135m", "--draft", str(tiny_draft))
    done = command(*arguments)
    said = " ".join(done.out.split())
    assert done.code == 1 and "problem Target: smollm2-135m is not here" in said and "specbranch models pull" in said
    again = command(*arguments, "--json")
    printed = json.loads(again.out)
    assert again.code == 1 and printed["well"] is False and printed["best"] is None
    assert {"level", "about", "said", "advice"} == printed["findings"][0].keys()


def test_colours_come_on_demand(
    tiny_draft: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Command
) -> None:
    monkeypatch.setenv("SPECBRANCH_CACHE", str(tmp_path))
    assert "\x1b[" in command("doctor", "--target", "smollm2-135m", "--draft", str(tiny_draft), "--colour").out


def test_a_target_alone_is_refused(pair: tuple[str, str], command: Command) -> None:
    done = command("doctor", "--target", pair[0])
    assert done.code == 2 and "a pair is needed" in done.err
