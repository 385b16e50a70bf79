"""The documents: lines of at most 100 columns, a map that fits on few pages, and paths that exist."""

from __future__ import annotations

import ast
import re
import runpy
from pathlib import Path

import pytest

from test_names import constants

ROOT = Path(__file__).parents[1]
WIDE = 100  # columns
MAP_LINES = 150
PATH = re.compile(r"`((?:[\w-]+/)+[\w-]+\.(?:py|js|json|svg))`")
BARE = re.compile(r"`([\w-]+\.py)`")  # on the map a file of the package itself, elsewhere one of the folder at hand
FREE = ("docs/log.md",)  # what was written once stays as it is
CONSTANT_ROW = re.compile(r"^\| `(\w+)` \| `([A-Z_]+)` \| `(.+?)` \|", re.MULTILINE)  # module, name, value
# modules of core/ whose constants are in a table
PLANNING = (
    *("way_choice", "planner", "draft_gain", "lookup_gain", "learning", "drift"),
    *("goodput", "round_clock", "costs", "cost_curves", "experience", "market", "rehearsal"),
    "forest_plan",
)
PAGES = ("design", "planner", "gpu", "cpu", "lab")  # they name files


def documents() -> list[str]:
    """The project's markdown, without what builds and environments hold."""
    places = ("*.md", "docs/*.md", "drafts/*/*.md", "src/**/*.md", "examples/*.md", "plugins/*/*.md")
    found = [path for place in places for path in ROOT.glob(place)]
    return sorted({str(path.relative_to(ROOT)) for path in found} - {*FREE})


def too_wide(text: str) -> list[str]:
    """Return the lines over the limit that are no table, no code and no link that cannot be broken."""
    found, fenced = [], False
    for line in text.split("\n"):
        if line.lstrip().startswith("```"):
            fenced = not fenced
        free = fenced or line.startswith(("|", "    ")) or " " not in line.strip()
        image = re.fullmatch(r"!\[[^]]*\]\([^)]*\)", line.strip())
        if len(line) > WIDE and not free and not image:
            found.append(line)
    return found


@pytest.mark.parametrize("name", documents())
def test_prose_keeps_to_the_width(name: str) -> None:
    assert not too_wide((ROOT / name).read_text(encoding="utf-8"))


def test_a_wide_line_is_found_and_a_wide_table_is_not() -> None:
    words = "word " * 30
    assert too_wide(f"{words}\n| {words} |\n```\n{words}\n```\n") == [words]


def test_the_map_stays_a_map() -> None:
    assert len((ROOT / "docs" / "design.md").read_text(encoding="utf-8").splitlines()) <= MAP_LINES


@pytest.mark.parametrize("page", PAGES)
def test_files_that_a_page_names_exist(page: str) -> None:
    text = (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8")
    named = {*PATH.findall(text), *(BARE.findall(text) if page == "design" else ())}
    missing = [path for path in named if not any((base / path).exists() for base in (ROOT / "src/specbranch", ROOT))]
    assert named and not missing


@pytest.mark.parametrize("module", PLANNING)
def test_the_table_has_every_constant_of_the_planner_with_its_value(module: str) -> None:
    rows = CONSTANT_ROW.findall((ROOT / "docs" / "planner.md").read_text(encoding="utf-8"))
    listed = {name: value for where, name, value in rows if where == module}
    path = ROOT / "src" / "specbranch" / "core" / f"{module}.py"
    assert listed.keys() == set(constants(ast.parse(path.read_text(encoding="utf-8"))))
    defined = runpy.run_path(str(path))  # a fresh copy: tests change some constants of the modules
    assert {name: eval(value, defined) for name, value in listed.items()} == {name: defined[name] for name in listed}
