"""Results as one HTML file: charts, tables, timelines and provenance.

Owns the page, and the timelines of single answers (`timeline-PAIR-METHOD.svg`, and `.json` for ui.perfetto.dev).
Invariants: the page stands alone, without scripts or anything to fetch. A caption says in words what each picture
shows, and each figure is labelled as measured or modelled. Timelines are drawn last, because recording a trace costs
time.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from html import escape
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specbranch.charts import BarSeries, ChartLine, bar_chart, line_chart
from specbranch.core.trace import Trace
from specbranch.files import write_whole
from specbranch.lab.bench.methods import Setting
from specbranch.lab.bench.results import (
    BASELINE,
    COLUMNS,
    REASONS,
    Column,
    ResultRow,
    Results,
    clock_label,
    filled_columns,
    setting_text,
)
from specbranch.lab.bench.table import losslessness
from specbranch.lab.recheck.repeat import repeat
from specbranch.lab.replay.record import Record
from specbranch.lab.traces.rounds import Times, read_rounds, times
from specbranch.lab.traces.timeline_svg import draw_svg, subtitle

if TYPE_CHECKING:
    from specbranch.lab.bench.recorded_pair import RecordedPair

Scene = tuple[str, str, float]  # pair, clock, temperature: what can stand in one chart
ByMethod = Mapping[str, list[ResultRow]]  # rows of one scene
LEFT = ' class="name"'
TIMELINE_TOKENS = 48  # length of the answer that a timeline shows
TIMELINE_STEM = "timeline-"


def save_report(results: Results, path: Path, pictures: Mapping[str, str] | None = None) -> None:
    """Write the page."""
    write_whole(path, report_html(results, pictures=pictures))


def report_html(results: Results, title: str = "SpecBranch bench", pictures: Mapping[str, str] | None = None) -> str:
    """Return the page. `pictures` holds timelines as SVG, by title."""
    scenes = list(dict.fromkeys(_scene(row) for row in results.rows))
    body = [
        _header(results, title),
        *(_scene_section(scene, [row for row in results.rows if _scene(row) == scene]) for scene in scenes),
        _timelines(pictures or {}),
        _table_section(results.rows),
        _provenance_section(results),
        _glossary(),
    ]
    viewport = '<meta name="viewport" content="width=device-width, initial-scale=1">'
    head = f'<meta charset="utf-8">{viewport}<title>{escape(title)}</title>'
    page = f"<head>{head}<style>{STYLE}</style></head>\n<body>\n<main>\n{''.join(body)}</main>\n</body>"
    return f'<!DOCTYPE html>\n<html lang="en">\n{page}\n</html>\n'


def _scene(row: ResultRow) -> Scene:
    return (row.pair, row.clock, row.temperature)


def _header(results: Results, title: str) -> str:
    bad = any(row.lossless is False for row in results.rows)
    kind = "bad" if bad else "good" if any(row.lossless for row in results.rows) else "plain"
    provenance = results.provenance
    machine = provenance.hardware.get("gpus", [provenance.hardware.get("processor", "")])
    facts = [
        f"{len(results.rows)} rows",
        ", ".join(dict.fromkeys(row.pair for row in results.rows)),
        ", ".join(machine),
        provenance.made,
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
    methods = _by_method(rows)
    speedups = _by_suite("Speedup by task and method", methods, "speedup", "speedup_spread", f"times AR, {kind}")
    rates = _by_suite("Tokens per second", methods, "tokens_per_second", "spread", f"tokens/s, {kind}")
    charts = (
        (speedups, _best(methods)),
        (rates, "Decoding only; the first token is apart."),
        (_rollback(methods), "Drafted tokens thrown away for each token of the answer, by reason, over all suites."),
        (
            _lengths(methods),
            "How many tokens of a drafted chain the target accepted at once, as shares of all chains checked.",
        ),
        (
            _positions(methods),
            "The chance that a drafted token is accepted, given that those before it in its chain were.",
        ),
        (_idle(methods), "The share of decode time in which a model had nothing to do, over all suites."),
    )
    figures = "".join(_figure(chart, caption) for chart, caption in charts)
    heading = f"{pair}, temperature {temperature:g}: {clock_label(clock)}"
    return f'<section><h2>{escape(heading)}</h2>\n<div class="charts">{figures}</div></section>\n'


def _timelines(pictures: Mapping[str, str]) -> str:
    caption = "The beginning of one answer, as it was measured."
    figures = "".join(_figure(picture, f"{name}. {caption}") for name, picture in pictures.items())
    return f"<section><h2>What draft and target did</h2>{figures}</section>\n" if figures else ""


def _figure(svg: str, caption: str) -> str:
    return f"<figure>{svg}<figcaption>{escape(caption)}</figcaption></figure>\n"


def _by_method(rows: list[ResultRow]) -> ByMethod:
    """Group rows by method; the setting is added to the name if a method has several."""
    kinds = {(row.method, setting_text(row.setting)): "" for row in rows}
    methods = [method for method, _ in kinds]
    for method, setting in kinds:
        alone = methods.count(method) == 1 or not setting
        kinds[method, setting] = method if alone else f"{method} ({setting})"
    found: dict[str, list[ResultRow]] = {name: [] for name in kinds.values()}
    for row in rows:
        found[kinds[row.method, setting_text(row.setting)]].append(row)
    return found


def _suites(methods: ByMethod) -> list[str]:
    return list(dict.fromkeys(row.suite for rows in methods.values() for row in rows))


def _by_suite(title: str, methods: ByMethod, figure: str, spread: str, label: str) -> str:
    """Draw a group of bars for each suite, a bar for each method, and its spread as a whisker."""
    suites, bars = _suites(methods), []
    for name, rows in methods.items():
        values = {row.suite: getattr(row, figure) for row in rows}
        spreads = {row.suite: _times(getattr(row, figure), getattr(row, spread)) for row in rows}
        bars.append(BarSeries(name, [values.get(suite) for suite in suites], [spreads.get(suite) for suite in suites]))
    return bar_chart(title, suites, bars, "", label)


def _times(value: float | None, share: float | None) -> float | None:
    return value * share if value is not None and share is not None else None


def _rollback(methods: ByMethod) -> str:
    shown = {name: rows for name, rows in methods.items() if any(row.rollback and row.tokens for row in rows)}
    bars = [
        BarSeries(words, [_mean((row.rollback.get(reason), row.tokens) for row in rows) for rows in shown.values()])
        for reason, words in REASONS.items()
    ]
    return bar_chart("Where drafted tokens were lost", list(shown), bars, "", "per emitted token", stacked=True)


def _idle(methods: ByMethod) -> str:
    draft = [_mean((row.draft_idle, row.tokens) for row in rows) for rows in methods.values()]
    target = [_mean((row.target_idle, row.tokens) for row in rows) for rows in methods.values()]
    bars = [BarSeries("draft idle", draft), BarSeries("target idle", target)]
    return bar_chart("Waiting", list(methods), bars, "", "share of decode time")


def _mean(figures: Iterable[tuple[float | None, int]]) -> float | None:
    """Average figures over suites, weighted by tokens; None if there is no figure."""
    found = [(value, tokens) for value, tokens in figures if value is not None and tokens]
    return sum(value * tokens for value, tokens in found) / sum(tokens for _, tokens in found) if found else None


def _lengths(methods: ByMethod) -> str:
    counts = {name: _added(row.accepted_lengths for row in rows) for name, rows in methods.items()}
    longest = max(map(len, counts.values()), default=0)
    # A method without chains keeps its colour but has no name: so each method has one colour in all charts.
    bars = [BarSeries(name if sum(found) else "", _shares(found, longest)) for name, found in counts.items()]
    while bars and not bars[-1].name:
        bars.pop()
    groups = [str(length) for length in range(longest)]
    return bar_chart("Accepted lengths", groups, bars, "tokens accepted of a chain", "share of chains")


def _shares(counts: Sequence[float], length: int) -> list[float | None]:
    return [count / sum(counts) if sum(counts) else None for count in counts] + [None] * (length - len(counts))


def _positions(methods: ByMethod) -> str:
    lines = []
    for hue, (name, rows) in enumerate(methods.items()):
        tested = _added(row.tested_by_position for row in rows)
        lengths = _added(row.accepted_lengths for row in rows)  # longer chains passed the position
        if tested:
            points = [(at, sum(lengths[at:]) / count if count else None) for at, count in enumerate(tested, 1)]
            lines.append(ChartLine(name, points, marks=True, colour=hue))
    return line_chart("Acceptance by position", lines, "position in the chain", "accepted", y_from_zero=True)


def _added(columns: Any) -> list[float]:
    return [sum(values) for values in zip_longest(*columns, fillvalue=0)]


def _best(methods: ByMethod) -> str:
    """Describe the chart of speedups in words."""
    others = {name: rows for name, rows in methods.items() if rows[0].method != BASELINE}
    winners = []
    for suite in _suites(methods):
        found = {
            name: row.speedup for name, rows in others.items() for row in rows if row.suite == suite and row.speedup
        }
        if found:
            best = max(found, key=found.__getitem__)
            winners.append(f"{suite}: {best} {found[best]:.2f}×")
    spread = any(row.speedup_spread for rows in methods.values() for row in rows)
    noise = "Whiskers: the spread of repeats. " if spread else ""
    fastest = f"Fastest on {'; '.join(winners)}." if winners else ""
    return f"Over autoregressive decoding (AR) on the same prompts in the same run. {noise}{fastest}"


def _table_section(rows: Sequence[ResultRow]) -> str:
    columns = filled_columns(rows)
    head = "".join(f'<th scope="col"{LEFT if one.left else ""}>{escape(one.name)}</th>' for one in columns)
    lines = "".join(f"<tr>{''.join(_cell(column, row) for column in columns)}</tr>\n" for row in rows)
    caption = "Every row. A dash: not measured, or it does not apply."
    table = f"<table><caption>{caption}</caption><thead><tr>{head}</tr></thead><tbody>\n{lines}</tbody></table>"
    region = '<div class="wide" role="region" aria-label="All figures" tabindex="0">'
    return f"<section><h2>All figures</h2>{region}{table}</div></section>\n"


def _cell(column: Column, row: ResultRow) -> str:
    words = escape(column.on_page(row))
    if column.name == "method":
        return f'<th scope="row">{words}</th>'
    if column.name == "lossless" and row.lossless is False:
        return f'<td class="bad">{words}</td>'
    return f"<td{LEFT if column.left else ''}>{words}</td>"


def _provenance_section(results: Results) -> str:
    provenance = results.provenance
    facts = {
        "Made": provenance.made,
        "Commit": provenance.commit or "not from a checkout",
        "Python": provenance.python,
        "Versions": _listed(provenance.versions),
        "Hardware": _listed(provenance.hardware),
        **{f"Pair {name}": _listed(models) for name, models in provenance.pairs.items()},
        "Suites": _listed(provenance.suites),
        "Asked for": _listed(provenance.workload),
        "Settings": _listed(provenance.settings),
        "Clocks": "; ".join(clock_label(clock) for clock in dict.fromkeys(row.clock for row in results.rows)),
        "Command": provenance.command or "",
    }
    return _facts("Where this came from", facts)


def _listed(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {_plain(value)}" for name, value in values.items() if value is not None)


def _plain(value: Any) -> str:
    if isinstance(value, list):
        return " + ".join(map(_plain, value))
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _glossary() -> str:
    return _facts("What the figures mean", {column.name: column.meaning for column in COLUMNS})


def _facts(title: str, facts: Mapping[str, str]) -> str:
    """List the facts that are not empty."""
    entries = "".join(f"<dt>{escape(name)}</dt><dd>{escape(words)}</dd>" for name, words in facts.items() if words)
    return f'<section><h2>{escape(title)}</h2><dl class="facts">{entries}</dl></section>\n'


def draw_timeline(recorded: RecordedPair, setting: Setting, record: Record, folder: Path) -> Times:
    """Answer a record's prompt once more, draw the timeline, and return where the time went."""
    task = record.task
    params = replace(task.params, max_tokens=min(task.params.max_tokens, TIMELINE_TOKENS))
    trace = recorded.llm.core.loop.trace = Trace()
    output = repeat(recorded.llm.using(speculative=setting.config), task.prompt, params, task.seed)
    rounds = read_rounds(trace.events, len(output.token_ids), [piece.origin for piece in output.pieces])
    spent = times(rounds)
    draft = spent.together + spent.draft_alone
    inside = f"; {spent.together / draft:.0%} of the draft's work inside the target's" if draft else ""
    head = f"{recorded.pair}, {setting.method}"
    stem = folder / f"{TIMELINE_STEM}{recorded.pair}-{setting.method.replace(':', '-')}"
    write_whole(
        stem.with_name(f"{stem.name}.svg"),
        draw_svg(rounds, head, subtitle(rounds, len(output.token_ids), False) + inside),
    )
    trace.write_chrome(stem.with_name(f"{stem.name}.json"))
    return spent


def pictures(folder: Path) -> dict[str, str]:
    """Return the timelines in a folder by name, including those of earlier commands."""
    return {
        file.stem.removeprefix(TIMELINE_STEM): file.read_text(encoding="utf-8")
        for file in sorted(folder.glob(f"{TIMELINE_STEM}*.svg"))
    }


STYLE = """
:root { color-scheme: light dark; }
:root {
  --ink: #1d2430; --soft: #5b6675; --page: #f6f7f9; --sheet: #fff; --rule: #d8dee4; --good: #1b7a35; --bad: #b3261e;
}
@media (prefers-color-scheme: dark) {
  :root {
    --ink: #e4e8ee; --soft: #9aa6b5; --page: #151b23; --sheet: #0d1117; --rule: #30363d; --good: #74cf86;
    --bad: #ff8a80;
  }
}
body { margin: 0; background: var(--page); color: var(--ink); }
body { font: 15px/1.5 system-ui, "Segoe UI", "DejaVu Sans", sans-serif; }
main { max-width: 1440px; margin: 0 auto; padding: 24px 20px 60px; }
h1 { margin: 0 0 4px; font-size: 26px; } h2 { margin: 34px 0 12px; font-size: 18px; }
header p { margin: 2px 0; color: var(--soft); }
header .clock { color: var(--ink); font-weight: 600; }
header .verdict { display: inline-block; margin-top: 10px; padding: 4px 12px; border: 1px solid; border-radius: 6px; }
header .good { color: var(--good); } header .bad, td.bad { color: var(--bad); font-weight: 700; }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 520px), 1fr)); gap: 16px; }
figure { margin: 0; padding: 12px; background: var(--sheet); border: 1px solid var(--rule); border-radius: 8px; }
figure svg { display: block; width: 100%; height: auto; }
figcaption { margin-top: 6px; color: var(--soft); font-size: 13px; }
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
