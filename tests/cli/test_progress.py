"""Bars on standard error: one at a time, and none where nobody looks."""

from __future__ import annotations

import pytest

from specbranch.cli.progress import counted, narrated
from specbranch.models.loading import load_native


def test_a_bar_is_drawn_where_somebody_looks_and_lines_stay(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "120")
    with counted() as bars:
        for done in range(3):
            bars("Measuring the target", done, 2)
        bars("Writing", 512, None, "512 tokens")
        bars.say("step 20: top-1 0.5")
    shown = capsys.readouterr()
    assert "Writing" in shown.err and "512 tokens" in shown.err and "step 20: top-1 0.5" in shown.err
    assert shown.out == ""


def test_without_a_terminal_only_lines_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with counted() as bars:
        bars("Measuring the target", 1, 2)
        bars("Checking against the clock", 1, 3)
        bars.say("step 20: top-1 0.5")
    assert capsys.readouterr() == ("", "step 20: top-1 0.5\n")


def test_loading_shows_how_many_layers_were_read(
    pair: tuple[str, str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "200")
    with narrated("Loading the models"):
        layers = load_native(pair[0]).architecture.layers
    shown = capsys.readouterr()
    assert "Loading the models: layer" in shown.err and f"{layers}/{layers}" in shown.err and shown.out == ""
    monkeypatch.delenv("FORCE_COLOR")
    capsys.readouterr()
    with narrated("Loading the models"):
        load_native(pair[0])
    assert capsys.readouterr().err == ""
