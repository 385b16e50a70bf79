"""The report is one page that stands alone, can be read without seeing, and says what its figures are."""

from __future__ import annotations

import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest
from made_runs import PROVENANCE, slowed, toy_runs

from specbranch.lab.bench.aggregate import rows_of
from specbranch.lab.bench.report import report_html, save_report
from specbranch.lab.bench.results import ResultRow, Results

VOID = {"meta", "br", "link", "img", "hr"}


class Page(HTMLParser):
    """Reads a page strictly: every element closed in turn; keeps texts, attributes and tags."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.feed(text)
        self.close()
        assert not self.open, f"left open: {self.open}"

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attributes)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attributes)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open.pop() == tag, f"</{tag}> closes something else"

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] != "style":
            self.words.append(data)


@pytest.fixture(scope="module")
def both() -> Results:
    wall = [slowed(one, 1.0 + at / 50, clock="wall", repeat=at) for one in toy_runs() for at in range(3)]
    return Results(rows_of([*toy_runs(), *wall]), PROVENANCE)


@pytest.mark.slow
def test_the_page_parses_and_shows_all_charts_for_each_clock(both: Results) -> None:
    text = report_html(both)
    page = Page(text)
    titles = re.findall(r"<svg[^>]*><title>([^<]*)</title>", text)
    wanted = [
        "Speedup by task and method",
        "Tokens per second",
        "Where drafted tokens were lost",
        "Accepted lengths",
        "Acceptance by position",
    ]
    assert all(titles.count(title) == 2 for title in wanted)
    assert [tag for tag, _ in page.tags].count("figcaption") == len(titles)


def test_it_stands_alone_without_scripts_or_anything_fetched(both: Results) -> None:
    text, page = report_html(both), Page(report_html(both))
    assert not {tag for tag, _ in page.tags} & {"script", "link", "iframe", "img", "object"}
    assert not any(name in attributes for _, attributes in page.tags for name in ("src", "href", "srcset", "onload"))
    assert not re.search(r"@import|url\(", text)
    assert set(re.findall(r"https?://[^\"' <]+", text)) <= {"http://www.w3.org/2000/svg"}


def test_every_picture_is_an_image_with_a_name_and_a_caption(both: Results) -> None:
    text = report_html(both)
    pictures = re.findall(r"<svg.*?</svg>", text, re.DOTALL)
    assert pictures and len(pictures) == text.count("<figure>")
    for picture in pictures:
        root = ElementTree.fromstring(picture)
        assert root.get("role") == "img" and root[0].tag.endswith("title") and root[0].text


def test_clocks_are_labelled_plainly(both: Results) -> None:
    words = " ".join(Page(report_html(both)).words)
    assert "Times: measured (wall clock)" in words and "Times: modelled (cost profile toy-profile)" in words
    assert "times AR, measured" in words and "times AR, modelled" in words


def test_provenance_is_shown_and_foreign_words_are_harmless(both: Results) -> None:
    provenance = replace(PROVENANCE, command='specbranch bench run --out "<script>alert(1)</script>"')
    text = report_html(Results(both.rows, provenance))
    words = " ".join(Page(text).words)
    for fact in (
        "0123456789ab",
        "torch 2.13.0",
        "Toy Processor & Sons",
        "law of 6 tokens",
        "max_tokens 48",
        "seed 7",
        "repeats 1",
        "<script>alert",
    ):
        assert fact in words
    assert "<script" not in text


def test_the_full_table_has_a_line_for_every_row_under_named_columns(both: Results) -> None:
    page = Page(report_html(both))
    assert [tag for tag, _ in page.tags].count("tr") == len(both.rows) + 1
    scopes = [attributes.get("scope") for tag, attributes in page.tags if tag == "th"]
    assert scopes.count("row") == len(both.rows) and scopes.count("col") >= 15


def test_lost_losslessness_cannot_be_overlooked(both: Results) -> None:
    bad = [replace(row, lossless=False, differing=1) if row.method == "pearl" else row for row in both.rows]
    text = report_html(Results(tuple(bad), PROVENANCE))
    assert 'class="verdict bad">NOT LOSSLESS' in text and "NO (1 runs differ)" in text
    assert 'class="verdict good">Lossless' in report_html(both)


def test_one_method_in_two_settings_gets_two_names(both: Results) -> None:
    first = next(row for row in both.rows if row.method == "pearl")
    text = report_html(Results((first, replace(first, setting={"num_speculative_tokens": 6})), PROVENANCE))
    assert "pearl (num_speculative_tokens=4)" in text and "pearl (num_speculative_tokens=6)" in text


EMPTY = ResultRow(
    pair="p",
    suite="s",
    method="m",
    temperature=0.0,
    tokens_per_second=None,
    speedup=None,
    tokens_per_forward=None,
    rollback_rate=None,
    lossless=None,
)


@pytest.mark.parametrize("rows", [(), (EMPTY,)])
def test_few_or_no_figures_still_make_a_page(rows: tuple[ResultRow, ...]) -> None:
    assert Page(report_html(Results(rows, PROVENANCE))).words


def test_it_is_written_where_asked(both: Results, tmp_path: Path) -> None:
    save_report(both, tmp_path / "deep" / "report.html")
    assert (tmp_path / "deep" / "report.html").read_text(encoding="utf-8") == report_html(both)
