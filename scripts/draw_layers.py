"""Draw docs/layers.svg: which part of the package may import which, from the very list that tests hold it to.

python scripts/draw_layers.py
"""

from __future__ import annotations

import sys
from pathlib import Path

from specbranch.charts import LETTER, rect, svg, text

ROOT = Path(__file__).parents[1]
HIGH, GAP, LEFT, WIDTH = 26, 8, 14, 860
WORDS = {  # what a row of the picture is about; rows without words speak for themselves
    "cli": "the command line",
    "lab.bench": "methods held against one another",
    "lab.doctor": "jobs on a whole pair",
    "lab.measure": "what a pair costs here",
    "lab.replay": "decoding from records, theory",
    "lab.suites": "tools of the lab",
    "training.making": "jobs that write a folder",
    "training.hrad": "the paper's predictor",
    "training.distill": "drafts for a target",
    "serve": "the server and its page",
    "engine": "LLM",
    "hrad": "a predictor at work",
    "assembly": "from names to running parts",
    "pairs": "pairs by name",
    "models": "torch, kernels, tokenizers",
    "clock": "cost profiles, a virtual clock",
    "exec": "workers and executors",
    "core": "methods, orders, the planner",
    "config": "what users set; files, charts",
    "errors": "sentences for people",
}


def main() -> None:
    """Draw it."""
    (ROOT / "docs" / "layers.svg").write_text(drawn(layers()), encoding="utf-8")


def layers() -> tuple[set[str], ...]:
    """The layers from the bottom up, without those that nobody has built yet."""
    sys.path.insert(0, str(ROOT / "tests"))
    from test_layers import LAYERS, files, layer

    here = {layer(path) for path in files()}
    return tuple(names & here for names in LAYERS)


def drawn(rows: tuple[set[str], ...]) -> str:
    """One row a layer, the topmost first."""
    parts: list[str] = []
    for at, names in enumerate(reversed(rows)):
        y, x = GAP + at * (HIGH + GAP), float(LEFT)
        for name in sorted(names):
            wide = LETTER * len(name) + 20
            parts += [rect(x, y, wide, HIGH, at % 8, faint=True), text(x + wide / 2, y + 17, name, anchor="middle")]
            x += wide + GAP
        words = next((WORDS[name] for name in WORDS if name in names), "")
        parts.append(text(WIDTH - LEFT, y + 17, words, anchor="end", kind="small"))
    title = "Who may import whom: each row only the rows below it"
    return svg(WIDTH, GAP + len(rows) * (HIGH + GAP), "".join(parts), title)


if __name__ == "__main__":
    main()
