"""The script that times families on a GPU, tried out on a CPU with few numbers of each shape."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

SCRIPTS = Path(__file__).parents[1] / "scripts"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    monkeypatch.setenv("SPECBRANCH_LINEAR", "torch")
    return importlib.import_module("measure_families")


@pytest.mark.slow
def test_each_family_is_measured_and_an_error_is_a_line_of_the_table(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cases = ["tiny-30b-a3b@90", "tiny-gpt-oss-20b@90", "tiny-gemma3-12b@300", "unheard-of"]
    given = ["measure_families.py", *cases, "--here", "--device", "cpu", "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", given)
    script.main()
    found = json.loads((tmp_path / "families.json").read_text())
    assert [entry["case"] for entry in found] == cases
    for entry in found[:3]:
        assert "error" not in entry, entry["error"]
        assert min(entry["ms_1"], entry["ms_16"], entry["share_1"]) > 0 and entry["plain_error"] < 0.05
        assert entry["gb_16"] > entry["gb_1"] * 0.99 and not entry["kernels"]
    assert "unheard-of" in found[3]["error"]
    table = capsys.readouterr().out.splitlines()[-5:]
    assert table[0].split()[0] == "case" and "KeyError" in table[4]


def test_a_case_is_a_shape_its_weights_and_a_context(script: ModuleType) -> None:
    case = script.Case.of("30b-a3b:int8@4000")
    assert (case.shape, case.stored, case.context) == ("30b-a3b", "int8", 4000)
    assert script.Case.of("8b").context == 1000 and script.file_name("8b:int4@90") == "8b-int4-90"


def test_a_case_that_breaks_off_keeps_what_it_has_measured(script: ModuleType, tmp_path: Path) -> None:
    path = script.path_so_far(tmp_path, script.Case.of("8b@90"))
    assert script.kept(path) == {}
    path.write_text(json.dumps({"ms_1": 2.5}))
    assert script.kept(path) == {"ms_1": 2.5} and not path.exists()


def test_what_misses_a_bar_or_has_other_bits_is_said(script: ModuleType) -> None:
    entry = {"case": "30b-a3b", "share_1": 0.4, "batch_bits": False, "plain_error": 0.2, "error": "none\nleft"}
    assert script.verdict(entry) == "MISSES 45% batch_bits DIFFER plain DIFFERS none left"
    assert script.verdict({"case": "30b-a3b", "share_1": 0.5, "batch_bits": True}) == "meets 45%"
