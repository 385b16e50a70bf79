"""Draw the pictures of docs/method.md: a branch stage as published, and the tree that draft and target share in ours.

    python scripts/draw_method.py [--ablation DIR]

With the results of `specbranch bench run --preset ablation --out DIR` it also draws speed over the confidence threshold
ε.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from specbranch.charts import ChartLine, line, line_chart, rect, svg, text
from specbranch.lab.bench.results import Results

DOCS = Path(__file__).parents[1] / "docs"
BOX, GAP, HIGH = 78, 14, 26
BLUE, ORANGE, GREEN, GREY = 0, 1, 2, 7


@dataclass(frozen=True, slots=True)
class Box:
    """A token: where it stands, what it is, in which colour, and from which other it comes."""

    column: float
    row: float
    word: str
    colour: int
    parent: int | None = None
    faint: bool = False


def main() -> None:
    """Draw all."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--ablation", type=Path, help="folder of the ablation's results")
    given = options.parse_args()
    (DOCS / "method-round.svg").write_text(_round(), encoding="utf-8")
    (DOCS / "method-tree.svg").write_text(_tree(), encoding="utf-8")
    if given.ablation:
        picture = _threshold(Results.load(given.ablation / "results.json"))
        (DOCS / "method-threshold.svg").write_text(picture, encoding="utf-8")


def _round() -> str:
    """A pending chain under verification, and the branches drafted meanwhile."""
    chain = [Box(at, 1, word, BLUE, at - 1 if at else None) for at, word in enumerate(("The", "heron", "waits"))]
    heads = [Box(3, row, word, ORANGE if row == 1 else GREEN, 2) for row, word in enumerate(("for", "in", "near"))]
    boxes = [*chain, *heads]
    boxes += [Box(4, 0, "fish", GREEN, 3, True), Box(5, 0, "to", GREEN, 6, True)]
    boxes += [Box(4, 1, "the", ORANGE, 4, True), Box(5, 1, "reeds", ORANGE, 8, True)]
    boxes += [Box(4, 2, "the", GREEN, 5, True), Box(5, 2, "bank", GREEN, 10, True)]
    notes = [
        text(GAP, 20, "the target verifies this chain", kind="bold"),
        text(GAP + 3 * (BOX + GAP), 20, "meanwhile the draft goes on from several candidates", kind="bold"),
        text(GAP + 3 * (BOX + GAP), 180, "x_b: the first token the draft is unsure of", kind="small"),
    ]
    return svg(720, 192, _drawn(boxes, 36) + "".join(notes), "A branch stage: chain, branch point, three branches")


def _tree() -> str:
    """A tree of drafted and looked-up tokens: what the target reads now, and what the draft adds meanwhile."""
    sent = [Box(0, 1, "The", BLUE), Box(1, 1, "heron", BLUE, 0), Box(1, 2, "bird", BLUE, 0)]
    sent += [Box(2, 1, "waits", BLUE, 1), Box(2, 2, "stands", BLUE, 1), Box(3, 1, "in", BLUE, 3)]
    looked = [Box(0, 0, "Herons", ORANGE), Box(1, 0, "wade", ORANGE, 6), Box(2, 0, "in", ORANGE, 7)]
    grown = [Box(2, 3, "waits", GREEN, 2), Box(3, 2, "in", GREEN, 4), Box(4, 1, "the", GREEN, 5)]
    grown += [Box(5, 1, "reeds", GREEN, 11), Box(4, 2, "the", GREEN, 10), Box(5, 2, "mud", GREEN, 13)]
    keys = [
        ("sent to the target: one forward judges all of it", BLUE),
        ("met earlier in the text", ORANGE),
        ("drafted meanwhile", GREEN),
    ]
    legend = "".join(
        rect(GAP + at, 8, 12, 12, colour) + text(GAP + at + 18, 18, words)
        for at, (words, colour) in zip((0, 330, 510), keys, strict=True)
    )
    return svg(720, 216, legend + _drawn([*sent, *looked, *grown], 36), "The tree that draft and target share")


def _drawn(boxes: list[Box], top: float) -> str:
    corners = [(GAP + box.column * (BOX + GAP), top + box.row * (HIGH + GAP + 6)) for box in boxes]
    lines = drawn = ""
    for (x, y), box in zip(corners, boxes, strict=True):
        if box.parent is not None:
            before, above = corners[box.parent]
            lines += line(before + BOX, above + HIGH / 2, x, y + HIGH / 2)
        drawn += rect(x, y, BOX, HIGH, box.colour, faint=box.faint)
        drawn += text(x + BOX / 2, y + HIGH / 2 + 4, box.word, anchor="middle", kind="" if box.faint else "light")
    return lines + drawn


def _threshold(results: Results) -> str:
    """Speed over ε with H-RAD and with confidence alone, mean over the suites."""
    lines = []
    pairs = list(dict.fromkeys(row.pair for row in results.rows))
    for pair in pairs:
        for policy, name in (("paper", "with H-RAD"), ("confidence", "confidence alone")):
            found: dict[float, list[float]] = {}
            for row in results.rows:
                if row.pair == pair and row.method.startswith(f"specbranch:{policy}@stop_below="):
                    found.setdefault(float(row.method.rpartition("=")[2]), []).append(row.speedup or 0.0)
            points = [(value, fmean(speeds)) for value, speeds in sorted(found.items())]
            title = f"{pair.removeprefix('smollm2-')}, {name}"
            lines.append(ChartLine(title, points, marks=True, dashed=policy == "confidence"))
    title, speed = "Two-stage SpecBranch over the confidence threshold", "speedup over plain decoding, c = 10"
    return line_chart(title, lines, "ε", speed, y_from_zero=True)


if __name__ == "__main__":
    main()
