"""Small charts as SVG text: lines with points, bars side by side or stacked; no dependencies.

Owns how a chart looks: colours for light and dark, round ticks, legends. Other drawings use `svg`, `text`, `rect`,
`line`, `polyline` and `legend`, so that they look the same. Invariant: a chart is one `<svg>` element, valid XML
whatever names it holds, for a file or inside a page. Missing values and values that are not finite are left out.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Literal, NamedTuple
from xml.sax.saxutils import escape, quoteattr

CHART_WIDTH, CHART_HEIGHT = 680, 320  # of the area inside the axes and what stands around it; the legend comes on top
CHART_LEFT, CHART_RIGHT, CHART_TOP, CHART_BOTTOM = 56, 16, 60, 46
LETTER = 7.0  # pixels of an average letter at the size of the text
LEGEND_ROW = 20
LIGHT_COLOURS = ("#1f6fb4", "#d1620f", "#2c8a3f", "#b5302f", "#7a55b8", "#8a6a00", "#0b8a8f", "#c0408a")
DARK = ("#6cb2f0", "#f5a05a", "#74cf86", "#f08580", "#b9a0ee", "#dcbc4a", "#5cd0d4", "#f094c8")
ROUND = (1.0, 2.0, 2.5, 5.0, 10.0)  # steps between ticks, times a power of ten

Anchor = Literal["start", "middle", "end"]
Value = float | None


@dataclass(frozen=True, slots=True)
class ChartLine:
    """A line of a chart; without `drawn` its points alone. Without a name it is left out of the legend."""

    name: str
    points: Sequence[tuple[float, Value]]
    dashed: bool = False
    drawn: bool = True
    marks: bool = False
    colour: int | None = None  # a hue of the palette; None: by the line's number among the lines


class LegendKey(NamedTuple):
    """An entry of a legend: a name and a hue of the palette, shown the way it is drawn."""

    name: str
    colour: int
    kind: Literal["box", "line", "dashed", "mark"] = "box"


@dataclass(frozen=True, slots=True)
class BarSeries:
    """One value for each group of a bar chart; `spread` is a half-width drawn around each."""

    name: str
    values: Sequence[Value]
    spread: Sequence[Value] = ()


@dataclass(frozen=True, slots=True)
class Scale:
    """From values to pixels."""

    low: float
    high: float
    start: float
    end: float

    def at(self, value: float) -> float:
        """Return the pixel of a value."""
        return self.start + (value - self.low) / (self.high - self.low) * (self.end - self.start)


class RatioScale(Scale):
    """From values above 0 to pixels: equal ratios are equally wide."""

    __slots__ = ()

    def at(self, value: float) -> float:
        """Return the pixel of a value."""
        share = math.log(value / self.low) / math.log(self.high / self.low)
        return self.start + share * (self.end - self.start)


def line_chart(
    title: str,
    lines: Sequence[ChartLine],
    x_label: str = "",
    y_label: str = "",
    *,
    y_from_zero: bool = False,
    x_ratio: bool = False,
) -> str:
    """Draw lines and clouds of points over a common axis; `x_ratio`: equal ratios of x are equally wide."""
    points = [(x, y) for a_line in lines for x, y in _finite(a_line.points)]
    if not points:
        return _empty(title)
    hues = [number if a_line.colour is None else a_line.colour for number, a_line in enumerate(lines)]
    keys = [_key(a_line, hue) for a_line, hue in zip(lines, hues, strict=True)]
    top = CHART_TOP + _legend_height(keys)
    x_values = [x for x, _ in points]
    whole = all(x == math.floor(x) for x in x_values)
    x_ticks = ratio_ticks(*_ends(x_values)) if x_ratio else round_ticks(*_ends(x_values), whole=whole)
    y_ticks = round_ticks(*_ends((y for _, y in points), y_from_zero))
    scale = RatioScale if x_ratio else Scale
    across, up = scale(x_ticks[0], x_ticks[-1], CHART_LEFT, CHART_WIDTH - CHART_RIGHT), _upwards(y_ticks, top)
    body = _grid(y_ticks, up) + _x_ticks(x_ticks, across, top)
    drawn = "".join(_line(a_line, hue, across, up) for a_line, hue in zip(lines, hues, strict=True))
    return _framed(title, keys, body + _labels(x_label, y_label, top) + drawn, top + CHART_HEIGHT)


def bar_chart(
    title: str,
    groups: Sequence[str],
    bars: Sequence[BarSeries],
    x_label: str = "",
    y_label: str = "",
    *,
    stacked: bool = False,
) -> str:
    """Draw a group of bars for each name of `groups`, side by side or stacked."""
    if not groups or not any(_is_finite(value) for a_bar in bars for value in a_bar.values):
        return _empty(title)
    keys = [LegendKey(a_bar.name, number) for number, a_bar in enumerate(bars)]
    top = CHART_TOP + _legend_height(keys)
    ticks = round_ticks(*_ends(_heights(bars, len(groups), stacked), from_zero=True))
    up, slot = _upwards(ticks, top), (CHART_WIDTH - CHART_LEFT - CHART_RIGHT) / len(groups)
    names, more = _group_names(groups, slot, top + CHART_HEIGHT - CHART_BOTTOM)
    draw = _stack if stacked else _side_by_side
    drawn = "".join(draw(bars, number, CHART_LEFT + slot * number, slot, up) for number in range(len(groups)))
    body = _grid(ticks, up) + names + _labels(x_label, y_label, top, more)
    return _framed(title, keys, body + drawn, top + CHART_HEIGHT + more)


def round_ticks(low: float, high: float, about: int = 6, *, whole: bool = False) -> list[float]:
    """Return rising round numbers, about `about` of them, that enclose the range; with `whole` only whole numbers."""
    if not high - low > 1e-9:  # all alike, but for rounding
        low, high = (low - 1.0, low + 1.0) if low else (0.0, 1.0)
    power = 10.0 ** math.floor(math.log10((high - low) / about))
    steps = (power * r for r in (*ROUND, 20.0, 100.0))
    least = (high - low) * (1 - 1e-9) / about
    step = next(step for step in steps if step >= least and (not whole or step == math.floor(step)))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(number * step, 12) for number in range(first, last + 1)]


def ratio_ticks(low: float, high: float) -> list[float]:
    """Return rising numbers that enclose a range above 0: 1, 2 and 5 times powers of ten."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    steps = [round(digit * 10.0**power, 12) for power in range(first - 1, last + 1) for digit in (1, 2, 5)]
    below = max((step for step in steps if step <= low * (1 + 1e-9)), default=steps[0])
    above = next((step for step in steps if step >= high * (1 - 1e-9) and step > below), steps[-1])
    return [step for step in steps if below <= step <= above]


def number_text(value: float) -> str:
    """Return a number as short text."""
    return f"{value:,.6g}".replace("-", "−")


def svg(width: float, height: float, body: str, title: str) -> str:
    """Return a whole drawing with our style; `title` is read out by screen readers."""
    size = f'viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}"'
    head = f"<title>{escape(title)}</title><style>{CHART_STYLE}</style>"
    ground = '<rect class="sheet" width="100%" height="100%"/>'
    return f'<svg xmlns="http://www.w3.org/2000/svg" class="sb" {size} role="img">{head}{ground}{body}</svg>\n'


def text(x: float, y: float, words: str, *, anchor: Anchor = "start", kind: str = "", turn: float = 0.0) -> str:
    """Return a text; `kind` is "bold", "small" or "light" (on a coloured ground)."""
    if not words:
        return ""
    turned = f' transform="rotate({turn:.0f} {x:.1f} {y:.1f})"' if turn else ""
    called = f" class={quoteattr(kind)}" if kind else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{called}{turned}>{escape(words)}</text>'


def rect(x: float, y: float, width: float, height: float, colour: int, *, tip: str = "", faint: bool = False) -> str:
    """Return a filled rectangle in a hue of the palette; `tip` is shown under the pointer."""
    tooltip = f"<title>{escape(tip)}</title>" if tip else ""
    shade = f"f{colour % len(LIGHT_COLOURS)}{' faint' if faint else ''}"
    size = f'width="{max(width, 0):.1f}" height="{max(height, 0):.1f}"'
    return f'<rect x="{x:.1f}" y="{y:.1f}" {size} class="{shade}">{tooltip}</rect>'


def line(x0: float, y0: float, x1: float, y1: float, kind: str = "rule") -> str:
    """Return a straight line: "rule" (thin, grey) or "axis"."""
    return f'<line x1="{x0:.1f}" y1="{y0:.1f}" x2="{x1:.1f}" y2="{y1:.1f}" class={quoteattr(kind)}/>'


def polyline(points: Iterable[tuple[float, float]], colour: int, *, dashed: bool = False) -> str:
    """Return a line through points, in a hue of the palette."""
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return f'<polyline points="{path}" class="s{colour % len(LIGHT_COLOURS)}{" dashed" if dashed else ""}"/>'


def legend(keys: Sequence[LegendKey], x: float, y: float, width: float = CHART_WIDTH) -> str:
    """Return the names with their colours, in as many rows as they need. Empty names are left out."""
    named = [key for key in keys if key.name]
    positions = zip(named, _legend_positions(named, width), strict=True)
    return "".join(_entry(key, x + offset, y + row * LEGEND_ROW) for key, (row, offset) in positions)


def _entry(key: LegendKey, x: float, y: float) -> str:
    words = text(x + 22, y, key.name)
    if key.kind == "box":
        return rect(x + 3, y - 9, 11, 11, key.colour) + words
    if key.kind == "mark":
        return _mark(x + 9, y - 4, key.colour, key.name) + words
    return polyline([(x, y - 4), (x + 17, y - 4)], key.colour, dashed=key.kind == "dashed") + words


def _legend_positions(keys: Sequence[LegendKey], width: float) -> list[tuple[int, float]]:
    """Return the position of each entry of a legend: its row, and its distance from the left."""
    row, offset, positions = 0, 0.0, []
    for key in keys:
        wide = 36 + LETTER * len(key.name)
        if offset and offset + wide > width - CHART_LEFT:
            row, offset = row + 1, 0.0
        positions.append((row, offset))
        offset += wide
    return positions


def _legend_height(keys: Sequence[LegendKey]) -> float:
    named = [key for key in keys if key.name]
    return LEGEND_ROW * (_legend_positions(named, CHART_WIDTH)[-1][0] + 1) if named else 0.0


def _key(a_line: ChartLine, hue: int) -> LegendKey:
    if not a_line.drawn:
        return LegendKey(a_line.name, hue, "mark")
    return LegendKey(a_line.name, hue, "dashed" if a_line.dashed else "line")


def _is_finite(value: Value) -> bool:
    return value is not None and math.isfinite(value)


def _finite(points: Iterable[tuple[float, Value]]) -> list[tuple[float, float]]:
    return [(x, y) for x, y in points if y is not None and math.isfinite(x) and math.isfinite(y)]


def _ends(values: Iterable[float], from_zero: bool = False) -> tuple[float, float]:
    bounds = [*values, *([0.0] if from_zero else [])]
    return min(bounds), max(bounds)


def _upwards(ticks: Sequence[float], top: float) -> Scale:
    return Scale(ticks[0], ticks[-1], top + CHART_HEIGHT - CHART_BOTTOM, top)


def _framed(title: str, keys: Sequence[LegendKey], body: str, height: float) -> str:
    """Return a whole chart: its title and legend, then what is drawn."""
    return svg(
        CHART_WIDTH, height, text(12, 20, title, kind="bold") + legend(keys, CHART_LEFT, CHART_TOP - 22) + body, title
    )


def _labels(x_label: str, y_label: str, top: float, more: float = 0.0) -> str:
    below = text(
        (CHART_LEFT + CHART_WIDTH - CHART_RIGHT) / 2,
        top + CHART_HEIGHT + more - 8,
        x_label,
        anchor="middle",
        kind="small",
    )
    return below + text(12, top - 10, y_label, kind="small")


def _grid(ticks: Sequence[float], up: Scale) -> str:
    grid = ""
    for tick in ticks:
        y = up.at(tick)
        grid += line(CHART_LEFT, y, CHART_WIDTH - CHART_RIGHT, y, "axis" if tick == ticks[0] else "rule")
        grid += text(CHART_LEFT - 7, y + 4, number_text(tick), anchor="end", kind="small")
    return grid


def _x_ticks(ticks: Sequence[float], across: Scale, top: float) -> str:
    foot, drawn = top + CHART_HEIGHT - CHART_BOTTOM, ""
    for tick in ticks:
        x = across.at(tick)
        drawn += line(x, foot, x, foot + 4, "axis")
        drawn += text(x, foot + 18, number_text(tick), anchor="middle", kind="small")
    return drawn


def _line(a_line: ChartLine, hue: int, across: Scale, up: Scale) -> str:
    parts = []
    if a_line.drawn:
        for finite, run in groupby(a_line.points, key=lambda point: _is_finite(point[1])):
            if finite:  # a gap in the values is a gap in the line
                points = [(across.at(x), up.at(y)) for x, y in _finite(run)]
                parts.append(polyline(points, hue, dashed=a_line.dashed))
    if a_line.marks or not a_line.drawn:
        for x, y in _finite(a_line.points):
            parts.append(_mark(across.at(x), up.at(y), hue, f"{a_line.name}: {number_text(y)}"))
    return "".join(parts)


def _mark(x: float, y: float, hue: int, tip: str) -> str:
    tooltip = f"<title>{escape(tip)}</title>"
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.6" class="f{hue % len(LIGHT_COLOURS)} mark">{tooltip}</circle>'


def _heights(bars: Sequence[BarSeries], groups: int, stacked: bool) -> list[float]:
    """Return the heights of the bars, their spread included."""
    if stacked:
        return [sum(_value(a_bar.values, group) for a_bar in bars) for group in range(groups)]
    return [_value(a_bar.values, group) + _value(a_bar.spread, group) for a_bar in bars for group in range(groups)]


def _value(values: Sequence[Value], at: int) -> float:
    value = values[at] if at < len(values) else None
    return value if value is not None and math.isfinite(value) else 0.0


def _side_by_side(bars: Sequence[BarSeries], group: int, x: float, slot: float, up: Scale) -> str:
    wide = slot * 0.8 / len(bars)
    return "".join(_bar(a_bar, hue, group, x + slot * 0.1 + wide * hue, wide, up) for hue, a_bar in enumerate(bars))


def _bar(a_bar: BarSeries, hue: int, group: int, x: float, wide: float, up: Scale) -> str:
    value, around = _value(a_bar.values, group), _value(a_bar.spread, group)
    if not value:
        return ""
    low, high = sorted((up.at(value), up.at(0.0)))
    drawn = rect(x, low, wide - min(1.0, wide / 4), high - low, hue, tip=f"{a_bar.name}: {number_text(value)}")
    middle = x + wide / 2
    return drawn + (line(middle, up.at(value - around), middle, up.at(value + around), "axis") if around else "")


def _stack(bars: Sequence[BarSeries], group: int, x: float, slot: float, up: Scale) -> str:
    foot, parts = 0.0, []
    for hue, a_bar in enumerate(bars):
        value = _value(a_bar.values, group)
        if value > 0:
            y, tip = up.at(foot + value), f"{a_bar.name}: {number_text(value)}"
            parts.append(rect(x + slot * 0.15, y, slot * 0.7, up.at(foot) - y, hue, tip=tip))
            foot += value
    return "".join(parts)


def _group_names(groups: Sequence[str], slot: float, foot: float) -> tuple[str, float]:
    """Write the groups' names below them, slanted if they are too long. Return them, and the extra height they need."""
    longest = max(len(name) for name in groups) * LETTER
    slanting = longest > slot
    names = []
    for number, name in enumerate(groups):
        x = CHART_LEFT + slot * (number + 0.5)
        if slanting:
            names.append(text(x + 4, foot + 16, name, anchor="end", kind="small", turn=-35))
        else:
            names.append(text(x, foot + 18, name, anchor="middle", kind="small"))
    return "".join(names), max(longest * 0.58 - 20, 0.0) if slanting else 0.0


def _empty(title: str) -> str:
    return _framed(
        title,
        (),
        text(CHART_WIDTH / 2, CHART_TOP + 20, "nothing to show", anchor="middle", kind="small"),
        CHART_TOP + 50,
    )


def _style() -> str:
    """Return the style. All names are under .sb, because a style inside a page holds for the whole page. It has no
    variables, which some viewers lack."""
    dark = _colours(DARK, sheet="#0d1117", ink="#e6edf3", soft="#9aa4af", rule="#30363d")
    return (
        ".sb{max-width:100%;height:auto;font:12px system-ui,sans-serif}.sb .bold{font-weight:600;font-size:14px}"
        ".sb .small,.sb .light{font-size:11px}.sb .faint{opacity:.4}.sb .dashed{stroke-dasharray:6 4}.sb "
        ".mark{stroke-width:1}"
        ".sb polyline{fill:none;stroke-width:2}"
        + _colours(LIGHT_COLOURS, sheet="#ffffff", ink="#1c2128", soft="#59636e", rule="#d8dee4")
        + f"@media(prefers-color-scheme:dark){{{dark}}}"
    )


def _colours(palette: Sequence[str], *, sheet: str, ink: str, soft: str, rule: str) -> str:
    hues = "".join(f".sb .f{number}{{fill:{hue}}}.sb .s{number}{{stroke:{hue}}}" for number, hue in enumerate(palette))
    return (
        f".sb text{{fill:{ink}}}.sb text.small{{fill:{soft}}}.sb .sheet,.sb text.light{{fill:{sheet}}}"
        f".sb .rule{{stroke:{rule}}}.sb .axis{{stroke:{soft}}}.sb .mark{{stroke:{sheet}}}{hues}"
    )


CHART_STYLE = _style()
