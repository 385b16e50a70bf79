"""The tables of docs/benchmarks.md: rows of several folders and settings become one figure a method."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from specbranch.lab.bench.results import ResultRow

SCRIPT = Path(__file__).parents[1] / "scripts" / "write_benchmarks.py"
SPEC = importlib.util.spec_from_file_location("write_benchmarks", SCRIPT)
assert SPEC and SPEC.loader
written = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(written)


def rows(method: str, speedup: float, rate: float = 100.0, **more: Any) -> list[ResultRow]:
    """What a method did on all suites, behind text."""
    usual: dict[str, Any] = {"pair": "smollm2-weak+float32-target", "clock": "h200-68m-7b", "prompts": 8}
    reported = {"tokens_per_second": rate, "tokens_per_forward": 2.0, "speedup": speedup}
    made = {**usual, **reported, **more, "method": method, "temperature": 0.0, "rollback_rate": 0.0, "lossless": True}
    return [ResultRow(suite=f"{suite}@1024", **made) for suite in written.SUITES]


def test_of_several_settings_the_best_counts() -> None:
    found = written._best([*rows("pearl", 1.5, setting={"n": 1}), *rows("pearl", 1.7, setting={"n": 2})])
    assert [(row.pair, row.suite, row.speedup) for row in found] == [
        ("smollm2-weak", suite, 1.7) for suite in written.SUITES
    ]


def test_what_was_predicted_stands_beside_what_was_measured() -> None:
    there = {"pair": "smollm2-weak-68m-7b+streams", "clock": "wall"}
    predicted = [*rows("tree", 2.2), *rows("pearl", 1.5), *rows("lookup", 9.0)]
    measured = [*rows("tree", 2.0, 80.0, **there), *rows("pearl", 1.5, **there), *rows("lookahead", 1.0, **there)]
    *table, empty, last = written._beside_the_measured(predicted, measured)
    assert table[2:] == [
        "| `tree` | 2.20 ÷ 2.00 = 1.10 | 20.00 ÷ 25.00 = 0.80 |",
        "| `pearl` | 1.50 ÷ 1.50 = 1.00 | 20.00 ÷ 20.00 = 1.00 |",
    ], "what one of them lacks is left out"
    assert not empty and last.startswith("1 of 2 speedups are within 8%") and "`tree` with weak-68m-7b (10%)" in last


def test_one_device_stands_beside_two() -> None:
    runs = [
        *rows("specbranch", 2.0, begun_with_tree=0.5),
        *rows("specbranch-overlap", 2.0),
        *rows("specbranch", 2.2, clock="h200x2-68m-7b"),
        *rows("specbranch-overlap", 2.0, clock="h200x2-68m-7b"),
    ]
    assert [line.split(" | ")[2:6] for line in written._two_devices(written._best(runs))[2:]] == [
        ["one", "2.00", "2.00", "+0.0 %"],
        ["two", "2.20", "2.00", "+10.0 %"],
    ]


def test_prose_is_wrapped_and_tables_are_not() -> None:
    row = f"| {'x' * 120} |"
    text = written._filled("<!-- told -->old<!-- /told -->", "told", [row, "", "some words " * 20])
    begin, first, empty, *prose, end = text.split("\n")
    assert (begin, first, empty, end) == ("<!-- told -->", row, "", "<!-- /told -->")
    assert len(prose) > 1 and all(len(line) <= written.WIDE for line in prose)
