"""Draw docs/gain.svg, the picture of the first page: speedups over plain decoding, as docs/benchmarks.md has them.

python scripts/draw_gain.py

Every figure is read from the measured table of one H200. Run it again after that table has changed.
"""

from __future__ import annotations

import re
from pathlib import Path

from specbranch.charts import line, rect, svg, text

DOCS = Path(__file__).parents[1] / "docs"
TABLE = re.compile(r"<!-- gpu -->\n(.*?)<!-- /gpu -->", re.DOTALL)
PAIRS = {  # columns of the table, and what they are called here
    "weak-68m-7b": "shapes of 7B & 68M",
    "default-1b-8b": "shapes of 8B & 1B",
    "strong-1.3b-33b": "shapes of 33B & 1.3B",
}
OURS = "specbranch"
METHODS = {  # rows of the table, from the top down
    "autoregressive": "plain decoding",
    "speculative": "serial speculative decoding",
    "pearl": "PEARL",
    "specbranch:confidence": "SpecBranch as published, without H-RAD",
    "lookup": "prompt lookup",
    OURS: "this SpecBranch",
}
WIDTH, LEFT, TOP, ROW, PANEL_GAP, LONGEST = 820, 300, 58, 22, 34, 5.5  # pixels; the last one is a speedup
TITLE = "Tokens a second, as a multiple of plain decoding: measured on one H200, same texts"


def main() -> None:
    """Write the picture."""
    (DOCS / "gain.svg").write_text(
        drawn(speedups((DOCS / "benchmarks.md").read_text(encoding="utf-8"))), encoding="utf-8"
    )


def speedups(page: str) -> dict[str, dict[str, float]]:
    """Return the mean speedup by pair and method, read from the table of the page."""
    found = TABLE.search(page)
    assert found, "docs/benchmarks.md has no table between <!-- gpu --> and <!-- /gpu -->"
    head, _, *rows = ([cell.strip(" `*") for cell in row.split("|")[1:-1]] for row in found[1].splitlines())
    by_method = {row[0]: row for row in rows}
    return {pair: {method: float(by_method[method][head.index(pair)]) for method in METHODS} for pair in PAIRS}


def drawn(figures: dict[str, dict[str, float]]) -> str:
    """Return the picture: a panel for each pair, a bar for each method."""
    panels = [_panel(pair, figures[pair], TOP + number * _panel_height()) for number, pair in enumerate(PAIRS)]
    height = TOP + len(PAIRS) * _panel_height()
    return svg(WIDTH, height, text(12, 24, TITLE, kind="bold") + "".join(panels), TITLE)


def _panel(pair: str, figures: dict[str, float], y: float) -> str:
    rows = "".join(_bar(method, figures[method], y + ROW * number) for number, method in enumerate(METHODS))
    plain = _across(1.0)
    rule = line(plain, y - 4, plain, y + ROW * len(METHODS) - 4)
    return text(12, y + 11, PAIRS[pair], kind="bold") + rule + rows


def _bar(method: str, speedup: float, y: float) -> str:
    ours = method == OURS
    name = text(LEFT - 8, y + 11, METHODS[method], anchor="end", kind=_weight(ours))
    bar = rect(LEFT, y, _across(speedup) - LEFT, ROW - 7, 0, faint=not ours)
    return name + bar + text(_across(speedup) + 6, y + 11, f"{speedup:.2f}", kind=_weight(ours))


def _weight(ours: bool) -> str:
    return "bold" if ours else "small"


def _across(speedup: float) -> float:
    return LEFT + (WIDTH - LEFT - 60) * speedup / LONGEST


def _panel_height() -> float:
    return ROW * len(METHODS) + PANEL_GAP


if __name__ == "__main__":
    main()
