"""The demonstration, on a tiny pair, and what it says of figures."""

from __future__ import annotations

import importlib.util
import io
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from rich.console import Console
from rich.table import Table

from specbranch import LLM, SamplingParams

SCRIPT = Path(__file__).parents[1] / "scripts" / "demo.py"


@pytest.fixture(scope="module")
def demo() -> ModuleType:
    spec = importlib.util.spec_from_file_location("demo", SCRIPT)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules["demo"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def row(demo: ModuleType, method: str, speedup: float, lossless: bool = True) -> Any:
    return demo.Row(method, 10 * speedup, speedup, 1.5, (1.0, 1.0, 1.0), lossless)


def figures(demo: ModuleType, copying: dict[str, float], free: dict[str, float]) -> dict[str, dict[str, Any]]:
    return {
        example: {name: row(demo, name, speedups.get(name, 1.0)) for name in demo.METHODS}
        for example, speedups in (("copying", copying), ("free", free))
    }


def printed(table: Table, width: int) -> str:
    out = io.StringIO()
    Console(width=width, file=out).print(table)
    return out.getvalue()


@pytest.mark.slow
def test_the_whole_demo_runs_on_a_tiny_pair(
    demo: ModuleType, pair: tuple[str, str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo, "TOKENS", 24)
    monkeypatch.setattr(demo, "SECONDS", 3600.0)  # every method, however slow this machine is
    demo.main(target=pair[0], draft=pair[1], device="cpu", dtype="float64", context_length=512)
    shown = capsys.readouterr()
    assert len(shown.out) > 10 and "[specbranch] " in shown.err
    assert "exactly the tokens of plain decoding" in shown.err and "specbranch chat" in shown.err
    assert shown.err.index("Measured on this machine") < shown.err.index("Modelled, not measured")
    assert all(name in shown.err for name in demo.METHODS)
    assert all(example.why in shown.err for example in demo.EXAMPLES)


@pytest.mark.slow
def test_a_slow_machine_leaves_methods_out_but_never_plain_decoding_and_ours(
    demo: ModuleType, pair: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo, "TOKENS", 8)
    with (
        LLM(*pair, "specbranch", device="cpu", options={"context_length": 512}) as llm,
        demo.progress(Console(quiet=True)) as bar,
    ):
        kept = demo.warm_up(llm, bar, seconds=0.0)
        answers = demo.measure(kept, bar, "", turns=3)
    assert list(kept) == ["autoregressive", "specbranch"]
    assert {len(turns) for found in answers.values() for turns in found.values()} == {3}
    found = demo.rows(answers)
    assert {name for name, rows in found.items() if rows.keys() == kept.keys()} == {"copying", "free"}
    assert "Left out, for this machine would take too long: lookup, tree," in demo.verdict(found, "")


def test_figures_are_medians_of_the_turns(demo: ModuleType) -> None:
    def turns(*seconds: float) -> list[Any]:
        stats = [{"decode_seconds": one, "tokens_per_forward": 2.0} for one in seconds]
        return [SimpleNamespace(token_ids=(5,) * 11, stats=one) for one in stats]

    answers = {"free": {demo.PLAIN: turns(2.0, 9.0, 1.0), "specbranch": turns(1.0, 1.0, 7.0)}}
    found = demo.rows(answers)["free"]
    assert found["specbranch"].tokens_per_second == 10.0 and found["specbranch"].speedup == 2.0
    assert found[demo.PLAIN].tokens_per_second == 5.0 and found[demo.PLAIN].seconds == (2.0, 9.0, 1.0)


def test_what_pays_on_an_edit_and_not_on_a_free_answer_is_said_with_the_reason(demo: ModuleType) -> None:
    here = figures(demo, {"specbranch": 1.5, "lookup": 1.6}, {"specbranch": 0.98, "pearl": 0.5})
    edit, free = demo.verdict(here, "").split("\n")
    assert "Against plain decoding: lookup 1.60 ×, specbranch 1.50 ×." in edit and "stands in the prompt" in edit
    assert "Nothing is faster than plain decoding here; specbranch 0.98 ×." in free and "as on a GPU" in free


def test_a_busy_machine_is_said_last(demo: ModuleType) -> None:
    here, rough = figures(demo, {}, {}), "This machine is busy, figures are rough."
    assert rough in demo.verdict(here, rough).split("\n")[-1] and "busy" not in demo.verdict(here, "")


def test_a_method_that_gave_other_tokens_is_not_hidden(demo: ModuleType) -> None:
    here, there = figures(demo, {}, {}), figures(demo, {}, {})
    assert demo.sameness(here, there) == "Every method gave exactly the tokens of plain decoding."
    here["free"]["pearl"] = replace(here["free"]["pearl"], lossless=False)
    assert "Not every method gave the same tokens" in demo.sameness(here, there)
    (line,) = (line for line in printed(demo.table(here), 100).split("\n") if "pearl" in line)
    assert "NO" in line


def test_the_tables_fit_a_narrow_terminal_and_name_the_pair_of_the_profile(demo: ModuleType) -> None:
    found = figures(demo, {"specbranch": 1.25}, {"specbranch": 0.96})
    measured, modelled = printed(demo.table(found), 80), printed(demo.modelled_table(found), 80)
    for text in (measured, modelled):
        assert "…" not in text and "autoregressive" in text and "1.25" in text and "0.96" in text
    assert "median of 3 turns after a warm-up" in measured and "Modelled" not in measured
    assert "1B (draft) and 8B (target)" in " ".join(modelled.split())


@pytest.mark.slow
@pytest.mark.default_model
def test_the_edit_copies_and_is_what_was_asked_for(demo: ModuleType, default_model: Path) -> None:
    with LLM(device="cpu", options={"context_length": 512, "keep_experience": False}, method="lookup") as llm:
        output = llm.chat(demo.asked(demo.COPYING.prompt), SamplingParams(max_tokens=demo.TOKENS))
    assert output.finish_reason == "stop" and output.stats["tokens_per_forward"] > 2
    for wrong, right in (("builded", "was built"), ("there boats", "their boats"), ("familys", "families")):
        assert wrong in demo.COPYING.prompt and wrong not in output.text and right in output.text
