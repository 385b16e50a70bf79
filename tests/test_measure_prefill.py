"""The measurement of prefill: it runs from end to end on a tiny pair, and judges its figures by their bars."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

SCRIPTS = Path(__file__).parents[1] / "scripts"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    import measure_prefill

    return measure_prefill


def run(script: ModuleType, monkeypatch: pytest.MonkeyPatch, *given: str) -> int:
    monkeypatch.setattr(sys, "argv", ["measure_prefill", *given])
    with pytest.raises(SystemExit) as ended:
        script.main()
    if isinstance(ended.value.code, str):
        raise ended.value
    return int(ended.value.code or 0)


def small(pair: tuple[str, str], out: Path) -> list[str]:
    models = ["--target", pair[0], "--draft", pair[1], "--target-shape", "own", "--draft-shape", "own"]
    return ["--device", "cpu", "--small", *models, "--out", str(out)]


def test_short_prompts_and_an_arrival_are_measured_on_a_tiny_pair(
    script: ModuleType,
    pair: tuple[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = tmp_path / "found.json"
    assert run(script, monkeypatch, "arrival", "prompts", "decode", *small(pair, out)) == 0
    found = json.loads(out.read_text())
    cases = ("prompts", "decode", "arrival")
    by_case = {case: [one for one in found["figures"] if one["case"] == case] for case in cases}
    assert [one["unit"] for one in by_case["decode"]] == ["tokens/s", "%", *["of greedy"] * 3]
    assert [one["unit"] for one in by_case["prompts"]] == ["ms"] * 4
    assert [one["bar"] for one in by_case["prompts"]] == [130.0, 8.0, None, None]
    assert all(one["value"] > 0 for one in by_case["prompts"] + by_case["arrival"][:6])
    assert found["arguments"]["cases"] == [*cases] and found["commit"]
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["case", "figure", "measured", "bar", "ok"] and "bars are missed" in lines[-1]
    assert len(lines) == 2 + len(found["figures"])


@pytest.mark.slow
def test_every_case_runs_on_a_tiny_pair(
    script: ModuleType, pair: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "found.json"
    assert run(script, monkeypatch, *small(pair, out)) == 0
    found = json.loads(out.read_text())["figures"]
    assert {one["case"] for one in found} == {*script.CASES, "late captures"}
    judged = [one for one in found if one["ok"] is not None]
    assert {one["case"] for one in judged} >= {"prompts", "transformers", "load", "arrival", *script.FRESH}
    assert all(one["value"] == 0 for one in found if one["unit"] == "texts")


@pytest.mark.slow
def test_a_target_alone_is_measured_with_plain_decoding(
    script: ModuleType, pair: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "found.json"
    alone = ["--device", "cpu", "--small", "--target", pair[0], "--target-shape", "own", "--out", str(out)]
    assert run(script, monkeypatch, "fresh-tree", "prompts", "load", *alone) == 0
    found = [one["what"] for one in json.loads(out.read_text())["figures"]]
    assert any("autoregressive" in what for what in found) and not any("specbranch" in what for what in found)


def test_a_case_that_fails_is_named_and_the_next_one_runs(
    script: ModuleType, pair: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*given: object) -> list[object]:
        raise RuntimeError("no such kernel")

    out = tmp_path / "found.json"
    monkeypatch.setitem(script.ON_PAIR, "prompts", broken)
    monkeypatch.setitem(script.ON_PAIR, "load", lambda *given: iter([script.Figure("load", "one", 1.0, "ms")]))
    assert run(script, monkeypatch, "prompts", "load", *small(pair, out)) == 1
    failed, after, _ = json.loads(out.read_text())["figures"]
    assert failed["what"] == script.FAILED and "no such kernel" in failed["note"]
    assert (after["case"], after["value"]) == ("load", 1.0)


def test_a_figure_is_judged_by_its_bar(script: ModuleType) -> None:
    made = script.Figure
    assert made("c", "w", 7.9, "ms", 8.0).ok and not made("c", "w", 8.1, "ms", 8.0).ok
    assert made("c", "w", 0.96, "times", 0.95, at_least=True).ok
    assert made("c", "w", 0.94, "times", 0.95, at_least=True).ok is False
    assert made("c", "w", None, "ms", 8.0).ok is None and made("c", "w", 1.0, "ms").ok is None
    table = script.table([made("c", "fast", 9.0, "ms", 8.0), made("c", "late", None, "captures", 0.0)])
    assert "NO" in table and "unknown" in table and table.endswith("1 bars are missed, 1 are not known.")


@pytest.mark.parametrize(
    ("given", "words"),
    [(("--device", "cuda"), "No GPU is here"), (("promts",), "unknown case 'promts'; expected some of")],
)
def test_mistakes_are_sentences(
    given: tuple[str, ...],
    words: str,
    script: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["measure_prefill", *given])
    with pytest.raises(SystemExit) as ended:
        script.main()
    assert words in f"{ended.value.code} {capsys.readouterr().err}"
