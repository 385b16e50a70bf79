"""Results as one HTML file: what was found, drawn and in figures, and where it came from.

Owns the page. Invariant: the file stands alone (no scripts, nothing fetched), every picture says in words what it
shows, and each figure is labelled as measured or modelled.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from html import escape
from itertools import zip_longest
from pathlib import Path
from typing import Any

from specbranch.bench.results import BASELINE, ResultRow, Results, clock_label, setting_text
from specbranch.bench.table import losslessness, rate_text
from specbranch.charts import BarSeries, ChartLine, bar_chart, line_chart
from specbranch.files import write_whole

Scene = tuple[str, str, float]  # pair, clock, temperature: what can stand in one chart
IDLE = {"draft idle": "draft_idle", "target idle": "target_idle"}
SPLIT = {
    "rejected": "rejected by the target",
    "tree_siblings": "alternatives verified beside",
    "losing_branches": "on losing branches",
    "dropped_by_length": "dropped by the length rule",
}


def save_report(results: Results, path: Path, pictures: Mapping[str, str] | None = None) -> None:
    """Write the page."""
    write_whole(path, report_html(results, pictures=pictures))


def report_html(results: Results, title: str = "SpecBranch bench", pictures: Mapping[str, str] | None = None) -> str:
    """Return the page; `pictures` of timelines, as SVG, by what they show."""
    scenes = list(dict.fromkeys(_scene(row) for row in results.rows))
    body = [
        _header(results, title),
        *(_scene_section(scene, [row for row in results.rows if _scene(row) == scene]) for scene in scenes),
        _timelines(pictures or {}),
        _table_section(results.rows),
        _provenance_section(results),
        _glossary(),
    ]
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1"><title>{escape(title)}</title>'
    page = f"<head>{head}<style>{STYLE}</style></head>\n<body>\n<main>\n{''.join(body)}</main>\n</body>"
    return f'<!DOCTYPE html>\n<html lang="en">\n{page}\n</html>\n'


def _scene(row: ResultRow) -> Scene:
    return (row.pair, row.clock, row.temperature)


def _header(results: Results, title: str) -> str:
    bad = any(row.lossless is False for row in results.rows)
    kind = "bad" if bad else "good" if any(row.lossless for row in results.rows) else "plain"
    told = results.provenance
    machine = told.hardware.get("gpus", [told.hardware.get("processor", "")])
    facts = [
        f"{len(results.rows)} rows",
        ", ".join(dict.fromkeys(row.pair for row in results.rows)),
        ", ".join(machine),
        told.made,
    ]
    clocks = "".join(
        f'<p class="clock">Times: {escape(clock_label(clock))}</p>'
        for clock in dict.fromkeys(r.clock for r in results.rows)
    )
    return (
        f"<header><h1>{escape(title)}</h1><p>{escape(' · '.join(fact for fact in facts if fact))}</p>{clocks}"
        f'<p class="verdict {kind}">{escape(losslessness(results.rows))}</p></header>\n'
    )


def _scene_section(scene: Scene, rows: list[ResultRow]) -> str:
    pair, clock, temperature = scene
    kind = "measured" if rows[0].measured else "modelled"
    names = _labels(rows)
    charts = [
        _figure(
            _by_suite("Speedup by task and method", rows, names, _speedup, f"times AR, {kind}"), _best(rows, names)
        ),
        _figure(
            _by_suite("Tokens per second", rows, names, _rate, f"tokens/s, {kind}"),
            "Decoding only; the first token is apart.",
        ),
        _figure(
            _rollback(rows, names),
            "Drafted tokens thrown away for each token of the answer, by reason, over all suites.",
        ),
        _figure(
            _lengths(rows, names),
            "How many tokens of a drafted chain the target accepted at once, as shares of all chains checked.",
        ),
        _figure(
            _positions(rows, names),
            "The chance that a drafted token is accepted, given that those before it in its chain were.",
        ),
        _figure(_idle(rows, names), "The share of decode time in which a model had nothing to do, over all suites."),
    ]
    heading = f"{pair}, temperature {temperature:g}: {clock_label(clock)}"
    return f'<section><h2>{escape(heading)}</h2>\n<div class="charts">{"".join(charts)}</div></section>\n'


def _timelines(pictures: Mapping[str, str]) -> str:
    caption = "The beginning of one answer, as it was measured."
    figures = "".join(_figure(picture, f"{name}. {caption}") for name, picture in pictures.items())
    return f"<section><h2>What draft and target did</h2>{figures}</section>\n" if figures else ""


def _figure(svg: str, caption: str) -> str:
    return f"<figure>{svg}<figcaption>{escape(caption)}</figcaption></figure>\n"


def _labels(rows: list[ResultRow]) -> dict[tuple[str, str], str]:
    """Name each (method, setting): by its method, unless that came in several settings."""
    kinds = list(dict.fromkeys(_kind(row) for row in rows))
    methods = [method for method, _ in kinds]
    return {kind: kind[0] if methods.count(kind[0]) == 1 or not kind[1] else f"{kind[0]} ({kind[1]})" for kind in kinds}


def _kind(row: ResultRow) -> tuple[str, str]:
    return (row.method, setting_text(row.setting))


Figure = tuple[float | None, float | None]  # a value and the half-width drawn around it


def _speedup(row: ResultRow) -> Figure:
    return row.speedup, _times(row.speedup, row.speedup_spread)


def _rate(row: ResultRow) -> Figure:
    return row.tokens_per_second, _times(row.tokens_per_second, row.spread)


def _times(value: float | None, share: float | None) -> float | None:
    return value * share if value is not None and share is not None else None


def _by_suite(
    title: str,
    rows: list[ResultRow],
    names: Mapping[tuple[str, str], str],
    figure: Callable[[ResultRow], Figure],
    label: str,
) -> str:
    """Draw a group of bars for each suite, a bar for each method."""
    suites = list(dict.fromkeys(row.suite for row in rows))
    bars = []
    for kind, name in names.items():
        found = {row.suite: figure(row) for row in rows if _kind(row) == kind}
        values, spreads = zip(*(found.get(suite, (None, None)) for suite in suites), strict=True)
        bars.append(BarSeries(name, values, spreads))
    return bar_chart(title, suites, bars, "", label)


def _rollback(rows: list[ResultRow], names: Mapping[tuple[str, str], str]) -> str:
    shown = {
        name: [row for row in rows if _kind(row) == kind and row.rollback and row.tokens]
        for kind, name in names.items()
    }
    shown = {name: found for name, found in shown.items() if found}
    bars = [BarSeries(words, [_mean(found, reason) for found in shown.values()]) for reason, words in SPLIT.items()]
    return bar_chart("Where drafted tokens were lost", list(shown), bars, "", "per emitted token", stacked=True)


def _mean(rows: list[ResultRow], reason: str) -> float:
    """Average over suites, each weighing as much as its tokens."""
    return sum(row.rollback.get(reason, 0.0) * row.tokens for row in rows) / sum(row.tokens for row in rows)


def _lengths(rows: list[ResultRow], names: Mapping[tuple[str, str], str]) -> str:
    counts = {name: _added(row.accepted_lengths for row in rows if _kind(row) == kind) for kind, name in names.items()}
    longest = max(map(len, counts.values()), default=0)
    # a method without chains keeps its place but not its name, so that every method has the same colour in every chart
    bars = [BarSeries(name if sum(found) else "", _shares(found, longest)) for name, found in counts.items()]
    while bars and not bars[-1].name:
        bars.pop()
    groups = [str(length) for length in range(longest)]
    return bar_chart("Accepted lengths", groups, bars, "tokens accepted of a chain", "share of chains")


def _shares(counts: Sequence[float], length: int) -> list[float | None]:
    return [count / sum(counts) if sum(counts) else None for count in counts] + [None] * (length - len(counts))


def _positions(rows: list[ResultRow], names: Mapping[tuple[str, str], str]) -> str:
    lines = []
    for hue, (kind, name) in enumerate(names.items()):
        mine = [row for row in rows if _kind(row) == kind]
        tested = _added(row.tested_by_position for row in mine)
        good = _added([(rate or 0.0) * count for rate, count in _rates(row)] for row in mine)
        if tested:
            points = [(at, a / t if t else None) for at, (a, t) in enumerate(zip(good, tested, strict=True), 1)]
            lines.append(ChartLine(name, points, marks=True, colour=hue))
    return line_chart("Acceptance by position", lines, "position in the chain", "accepted", y_from_zero=True)


def _idle(rows: list[ResultRow], names: Mapping[tuple[str, str], str]) -> str:
    shown = {name: [row for row in rows if _kind(row) == kind] for kind, name in names.items()}
    bars = [BarSeries(what, [_weighted(found, field) for found in shown.values()]) for what, field in IDLE.items()]
    return bar_chart("Waiting", list(shown), bars, "", "share of decode time")


def _weighted(rows: list[ResultRow], field: str) -> float | None:
    """Average a figure over suites, each weighing as much as its tokens; None where nobody has it."""
    found = [(getattr(row, field), row.tokens) for row in rows if getattr(row, field) is not None and row.tokens]
    return sum(value * weight for value, weight in found) / sum(weight for _, weight in found) if found else None


def _rates(row: ResultRow) -> zip[tuple[float | None, int]]:
    return zip(row.acceptance_by_position, row.tested_by_position, strict=True)


def _added(columns: Any) -> list[float]:
    return [sum(values) for values in zip_longest(*columns, fillvalue=0)]


def _best(rows: list[ResultRow], names: Mapping[tuple[str, str], str]) -> str:
    """Say in words what the chart of speedups shows."""
    told = []
    for suite in dict.fromkeys(row.suite for row in rows):
        found = [row for row in rows if row.suite == suite and row.speedup is not None and row.method != BASELINE]
        if found:
            best = max(found, key=lambda row: row.speedup or 0.0)
            told.append(f"{suite}: {names[_kind(best)]} {best.speedup:.2f}×")
    noise = "Whiskers: the spread of repeats. " if any(row.speedup_spread for row in rows) else ""
    return f"Over autoregressive decoding (AR) on the same prompts in the same run. {noise}" + (
        f"Fastest on {'; '.join(told)}." if told else ""
    )


COLUMNS: tuple[tuple[str, Callable[[ResultRow], str]], ...] = (
    ("pair", lambda row: row.pair),
    ("suite", lambda row: row.suite),
    ("method", lambda row: row.method),
    ("setting", lambda row: setting_text(row.setting)),
    ("temperature", lambda row: f"{row.temperature:g}"),
    ("clock", lambda row: "measured" if row.measured else f"modelled: {row.clock}"),
    ("tokens/s", lambda row: rate_text(row.tokens_per_second)),
    ("spread", lambda row: _number(row.spread, ".1%")),
    ("speedup", lambda row: _number(row.speedup, ".2f", "×")),
    ("95 % interval", lambda row: _interval(row)),
    ("tokens/forward", lambda row: _number(row.tokens_per_forward, ".2f")),
    ("rollback rate", lambda row: _number(row.rollback_rate, ".1%")),
    ("branch hits", lambda row: _number(row.branch_hit_rate, ".0%")),
    ("draft idle", lambda row: _number(row.draft_idle, ".0%")),
    ("target idle", lambda row: _number(row.target_idle, ".0%")),
    ("beside", lambda row: _number(row.draft_overlapped, ".0%")),
    ("host", lambda row: _number(row.host_share, ".1%")),
    ("begun", lambda row: _number(row.begun_with_tree, ".0%")),
    ("begun of beside", lambda row: _number(row.begun_of_overlapped, ".0%")),
    ("first token", lambda row: _number(row.ttft_seconds, ".3f", " s")),
    ("end-to-end tokens/s", lambda row: rate_text(row.end_to_end_tokens_per_second)),
    ("peak memory", lambda row: _number(None if row.peak_memory is None else row.peak_memory / 2**20, ".0f", " MiB")),
    ("prompts", lambda row: f"{row.prompts} × {row.repeats}"),
    ("tokens", lambda row: f"{row.tokens}"),
    ("lossless", lambda row: {True: "yes", False: f"NO ({row.differing} runs differ)", None: "–"}[row.lossless]),
)
NAMES, LEFT = ("pair", "suite", "method", "setting", "clock"), ' class="name"'


def _table_section(rows: Sequence[ResultRow]) -> str:
    columns = [(head, cell) for head, cell in COLUMNS if any(cell(row) not in ("", "–") for row in rows)]
    head = "".join(f'<th scope="col"{LEFT if name in NAMES else ""}>{escape(name)}</th>' for name, _ in columns)
    lines = "".join(f"<tr>{''.join(_cell(name, cell(row), row) for name, cell in columns)}</tr>\n" for row in rows)
    caption = "Every row. A dash: not measured, or it does not apply."
    table = f"<table><caption>{caption}</caption><thead><tr>{head}</tr></thead><tbody>\n{lines}</tbody></table>"
    return f'<section><h2>All figures</h2><div class="wide" role="region" aria-label="All figures" tabindex="0">{table}</div></section>\n'


def _cell(name: str, words: str, row: ResultRow) -> str:
    if name == "method":
        return f'<th scope="row">{escape(words)}</th>'
    kind = "name" if name in NAMES else "bad" if name == "lossless" and row.lossless is False else ""
    return f'<td class="{kind}">{escape(words)}</td>' if kind else f"<td>{escape(words)}</td>"


def _provenance_section(results: Results) -> str:
    told = results.provenance
    facts = {
        "Made": told.made,
        "Commit": told.commit or "not from a checkout",
        "Python": told.python,
        "Versions": _listed(told.versions),
        "Hardware": _listed(told.hardware),
        **{f"Pair {name}": _listed(models) for name, models in told.pairs.items()},
        "Suites": _listed(told.suites),
        "Asked for": _listed(told.workload),
        "Settings": _listed(told.settings),
        "Clocks": "; ".join(clock_label(clock) for clock in dict.fromkeys(row.clock for row in results.rows)),
        "Command": told.command or "",
    }
    entries = "".join(f"<dt>{escape(name)}</dt><dd>{escape(words)}</dd>" for name, words in facts.items() if words)
    return f'<section><h2>Where this came from</h2><dl class="facts">{entries}</dl></section>\n'


def _listed(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {_plain(value)}" for name, value in values.items() if value is not None)


def _plain(value: Any) -> str:
    if isinstance(value, list):
        return " + ".join(map(_plain, value))
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


GLOSSARY = {
    "tokens/s": "decoded tokens over decode time, summed over prompts, each time the median over repeats; first tokens "
    "are left out.",
    "speedup": "tokens/s over that of autoregressive decoding (AR): same engine, run, prompts. Its interval: drawing "
    "prompts anew.",
    "spread": "half of the width of the middle 50 % over repeats, relative to the median.",
    "tokens/forward": "tokens emitted for each forward of the target, the prefill left out.",
    "rollback rate": "drafted tokens thrown away over drafted tokens, on the "
    "surviving line: losing branches are counted apart.",
    "branch hits": "the share of branch points that the target reached at which "
    "one of the branches went on as the target did.",
    "idle": "the share of decode time in which a model had nothing to do.",
    "beside": "the share of the draft's working time that lies inside the target's.",
    "host": "the share of decode time in which neither model worked.",
    "begun": "the share of rounds that began with something the draft had read while the target worked; of beside: of "
    "rounds with both.",
    "lossless": "every run gave the same tokens as AR. A dash where the ratio rule keeps the distribution instead of the "
    "text.",
    "modelled": "tokens and decisions are real, the time is charged by a cost profile instead of being measured.",
}


def _glossary() -> str:
    entries = "".join(f"<dt>{escape(name)}</dt><dd>{escape(words)}</dd>" for name, words in GLOSSARY.items())
    return f'<section><h2>What the figures mean</h2><dl class="facts">{entries}</dl></section>\n'


def _number(value: float | None, form: str, unit: str = "") -> str:
    return "–" if value is None else f"{value:{form}}{unit}"


def _interval(row: ResultRow) -> str:
    if row.speedup_low is None or row.speedup_high is None or row.method == BASELINE:
        return "–"
    return f"{row.speedup_low:.2f}–{row.speedup_high:.2f}"


STYLE = """
:root { color-scheme: light dark; }
:root { --ink: #1d2430; --soft: #5b6675; --page: #f6f7f9; --sheet: #fff; --rule: #d8dee4; --good: #1b7a35; --bad: #b3261e; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e4e8ee; --soft: #9aa6b5; --page: #151b23; --sheet: #0d1117; --rule: #30363d; --good: #74cf86; --bad: #ff8a80; }
}
body { margin: 0; background: var(--page); color: var(--ink); font: 15px/1.5 system-ui, "Segoe UI", "DejaVu Sans", sans-serif; }
main { max-width: 1440px; margin: 0 auto; padding: 24px 20px 60px; }
h1 { margin: 0 0 4px; font-size: 26px; } h2 { margin: 34px 0 12px; font-size: 18px; } header p { margin: 2px 0; color: var(--soft); }
header .clock { color: var(--ink); font-weight: 600; }
header .verdict { display: inline-block; margin-top: 10px; padding: 4px 12px; border: 1px solid; border-radius: 6px; }
header .good { color: var(--good); } header .bad, td.bad { color: var(--bad); font-weight: 700; }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 520px), 1fr)); gap: 16px; }
figure { margin: 0; padding: 12px; background: var(--sheet); border: 1px solid var(--rule); border-radius: 8px; }
figure svg { display: block; width: 100%; height: auto; } figcaption { margin-top: 6px; color: var(--soft); font-size: 13px; }
.wide { overflow-x: auto; background: var(--sheet); border: 1px solid var(--rule); border-radius: 8px; }
table { border-collapse: collapse; width: 100%; font-size: 13px; font-variant-numeric: tabular-nums; }
caption { padding: 8px 10px; text-align: left; color: var(--soft); }
th, td { padding: 5px 10px; text-align: right; white-space: nowrap; border-top: 1px solid var(--rule); }
thead th { color: var(--soft); font-weight: 600; } tbody th, .name { text-align: left; }
tbody th { font-weight: 500; } td.name { color: var(--soft); }
tbody tr:hover { background: var(--page); }
dl.facts { display: grid; grid-template-columns: max-content 1fr; gap: 4px 18px; margin: 0; }
dt { color: var(--soft); } dd { margin: 0; overflow-wrap: anywhere; }
@media (max-width: 600px) { dl.facts { grid-template-columns: 1fr; } dd { margin-bottom: 6px; } }
@media print { body { background: none; } figure, .wide { break-inside: avoid; } }
"""
