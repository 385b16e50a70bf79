"""The demonstration, on a tiny pair, and what it says of figures."""

from __future__ import annotations

import importlib.util
import io
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from rich.console import Console
from rich.table import Table

from specbranch import LLM

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
    return demo.Row(method, 10 * speedup, speedup, 1.5, None if method == demo.PLAIN else 0.4, lossless)


def figures(demo: ModuleType, **speedups: float) -> dict[str, Any]:
    return {name: row(demo, name, speedups.get(name, 1.0)) for name in demo.METHODS}


def printed(table: Table, width: int) -> str:
    out = io.StringIO()
    Console(width=width, file=out).print(table)
    return out.getvalue()


@pytest.mark.slow
def test_the_whole_demo_runs_on_a_tiny_pair(
    demo: ModuleType, pair: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    demo.main(target=pair[0], draft=pair[1], device="cpu", dtype="float64", context_length=512)
    shown = capsys.readouterr()
    assert len(shown.out) > 10 and "[specbranch] " in shown.err
    assert "exactly the tokens of plain decoding" in shown.err and "Modelled, not measured" in shown.err
    assert all(name in shown.err for name in demo.METHODS) and "specbranch chat" in shown.err


def test_time_that_runs_out_leaves_prompts_out_for_every_method(demo: ModuleType, pair: tuple[str, str]) -> None:
    with LLM(*pair, "specbranch", device="cpu", context_length=512) as llm, demo.progress(Console(quiet=True)) as bar:
        answers = demo.measure(llm, demo.PROMPTS, bar, "", seconds=0.0)
    assert {name: len(found) for name, found in answers.items()} == dict.fromkeys(demo.METHODS, 1)


def test_slow_speculation_is_said_plainly(demo: ModuleType) -> None:
    slow = figures(demo, lookup=0.9, speculative=0.8, pearl=0.5, specbranch=0.6)
    said = demo.verdict(slow, figures(demo, specbranch=1.6))
    assert "Plain decoding is the faster choice on this machine" in said and "specbranch does not pay here" in said
    assert "On the modelled GPU: specbranch 1.60 ×" in said


def test_the_fastest_method_is_named(demo: ModuleType) -> None:
    said = demo.verdict(figures(demo, speculative=1.4, specbranch=1.2), figures(demo, pearl=1.3))
    assert said.startswith("Fastest here: speculative, 1.40 × plain decoding.") and "does not pay" not in said


def test_a_gain_that_cannot_be_is_put_down_to_a_busy_machine(demo: ModuleType) -> None:
    # at 1.5 tokens a forward
    assert "kept this machine busy" in demo.verdict(figures(demo, speculative=1.8), figures(demo))
    assert "kept this machine busy" not in demo.verdict(figures(demo, speculative=1.5), figures(demo, pearl=3.0))


def test_a_method_that_gave_other_tokens_is_not_hidden(demo: ModuleType) -> None:
    here, there = figures(demo), figures(demo)
    there["pearl"] = replace(there["pearl"], lossless=False)
    assert "Not every method gave the same tokens" in demo.verdict(here, there)
    (line,) = (line for line in printed(demo.table(here, there, 3), 100).split("\n") if "pearl" in line)
    assert "NO" in line


def test_the_table_fits_a_narrow_terminal_and_names_the_pair_of_the_profile(demo: ModuleType) -> None:
    text = printed(demo.table(figures(demo, specbranch=1.25), figures(demo, specbranch=1.61), 3), 80)
    assert "…" not in text and "autoregressive" in text and "1.25" in text and "1.61" in text
    assert "1B (draft) and 8B (target)" in " ".join(text.split())
