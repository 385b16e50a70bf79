"""The documentation site: it builds, no link leads nowhere, and every public name is in the reference."""

from __future__ import annotations

import inspect
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

import specbranch

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "scripts"))

from build_docs import MOVED, build, moved, run_zensical  # noqa: E402
from check_site import problems  # noqa: E402
from draw_gain import drawn, speedups  # noqa: E402
from write_reference import PAGES, pages, signature, split  # noqa: E402

WHOLE = {
    "index.html": '<h1 id="top">A</h1><a href="#top">a</a><a href="b.html#part">b</a><img src="p.svg">'
    '<link rel="stylesheet" href="s.css"><a href="https://example.org/">far</a>',
    "b.html": '<h2 id="part">B</h2><a href="/index.html">a</a><script src="s.js"></script>',
    "p.svg": "",
    "s.css": "body { background: url(p.svg) }",
    "s.js": "",
}


def site(folder: Path, **changed: str) -> Path:
    """A small site on disk, with some pages changed."""
    for name, text in {**WHOLE, **{name.replace("_", "."): text for name, text in changed.items()}}.items():
        (folder / name).write_text(text)
    return folder


def named(entries: list[object]) -> Iterator[str]:
    """The pages of a navigation."""
    for entry in entries:
        assert isinstance(entry, dict)
        for value in entry.values():
            yield from named(value) if isinstance(value, list) else [value]


def test_a_whole_site_has_no_problems(tmp_path: Path) -> None:
    assert problems(site(tmp_path)) == []


@pytest.mark.parametrize(
    ("page", "said"),
    [
        ('<a href="c.html">c</a>', "'c.html' leads to no file"),
        ('<a href="b.html#parts">b</a>', "'b.html#parts' leads to no such part"),
        ('<a href="#nowhere">a</a>', "'#nowhere' leads to no such part"),
        ('<img src="none.svg">', "'none.svg' leads to no file"),
        ('<script src="https://cdn.example/x.js"></script>', "fetches https://cdn.example/x.js"),
        ('<link rel="stylesheet" href="//fonts.example/f.css">', "fetches //fonts.example/f.css"),
    ],
)
def test_what_leads_nowhere_or_is_fetched_from_elsewhere_is_found(tmp_path: Path, page: str, said: str) -> None:
    (found,) = problems(site(tmp_path, index_html=page))
    assert found.startswith("index.html: ") and said in found


def test_a_style_that_fetches_a_font_is_found(tmp_path: Path) -> None:
    (found,) = problems(site(tmp_path, s_css="@font-face { src: url('https://fonts.example/f.woff2') }"))
    assert "fetches https://fonts.example/f.woff2" in found


def test_a_folder_without_a_site_is_a_problem(tmp_path: Path) -> None:
    assert "holds no page" in problems(tmp_path)[0]


def test_links_between_documents_are_changed_to_pages() -> None:
    places = {"docs/many.md": "many.md", "docs/p.svg": "p.svg", **MOVED}
    text = "[a](docs/many.md#how-fast) ![p](docs/p.svg) [b](CONTRIBUTING.md) [c](https://x.org/README.md)"
    assert moved(text, "README.md", places) == (
        "[a](many.md#how-fast) ![p](p.svg) [b](contributing.md) [c](https://x.org/README.md)"
    )
    assert moved("[r](../README.md) [m](many.md)", "docs/many.md", places) == "[r](readme.md) [m](many.md)"
    assert moved("| `a\\|b` | x |", "README.md", places) == "| `a|b` | x |"


def test_every_document_is_in_the_navigation() -> None:
    with (ROOT / "zensical.toml").open("rb") as file:
        listed = set(named(tomllib.load(file)["project"]["nav"]))
    documents = {path.name for path in (ROOT / "docs").glob("*.md")}
    assert listed == documents | set(MOVED.values()) | {f"reference/{name}" for name in pages()}


def test_every_public_name_and_method_is_in_the_reference() -> None:
    written = "\n".join(pages().values())
    for name in set(specbranch.__all__) - {"__version__"}:
        assert f"\n## {name}\n" in written, f"{name} has no page: add it to PAGES in scripts/write_reference.py"
    for page in PAGES.values():
        for one in page.things:
            methods = [key for key, value in vars(one).items() if inspect.isfunction(value) and not key.startswith("_")]
            assert all(f"\n### {one.__name__}.{method}\n" in written for method in methods)


def test_every_argument_of_a_documented_signature_is_described() -> None:
    for one in (specbranch.LLM, specbranch.AsyncLLM):
        given = set(inspect.signature(one).parameters)
        assert given == set(split(inspect.getdoc(one.__init__) or "")[1])
    for one in (specbranch.SamplingParams, specbranch.SpeculativeConfig, specbranch.LoadOptions, specbranch.Output):
        fields = {name for name in inspect.signature(one).parameters if not name.startswith("_")}
        assert fields == set(split(inspect.getdoc(one) or "")[1]), one


def test_a_signature_is_written_as_in_the_source() -> None:
    def made(self: object, name: str, *rest: int, wide: bool = False, where: str | None = "x") -> list[str]:
        return []

    assert signature("made", made) == (
        "made(name: str, *rest: int, wide: bool = False, where: str | None = 'x') -> list[str]"
    )


def test_the_picture_of_the_first_page_shows_the_table_of_the_benchmarks() -> None:
    figures = speedups((ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8"))
    picture = (ROOT / "docs" / "gain.svg").read_text(encoding="utf-8")
    assert picture == drawn(figures)
    ours = [f"{by_method['specbranch']:.2f}" for by_method in figures.values()]
    described = re.search(r"!\[(.+?)\]\(gain\.svg\)", (ROOT / "docs" / "index.md").read_text(encoding="utf-8"))
    assert described and re.findall(r"\d\.\d\d", described[1]) == ours


@pytest.mark.slow
def test_the_site_builds_and_a_broken_link_ends_the_build(tmp_path: Path) -> None:
    built = build(ROOT, tmp_path)
    assert (built / "index.html").is_file() and (built / "reference" / "llm.html").is_file()
    with (tmp_path / "pages" / "index.md").open("a", encoding="utf-8") as page:
        page.write("\n[x](nothing.md) [y](many.md#no-such-part)\n")
    with pytest.raises(SystemExit, match=r"(?s)page does not exist.*anchor does not exist.*The site was not built"):
        run_zensical(ROOT / "zensical.toml", tmp_path)
