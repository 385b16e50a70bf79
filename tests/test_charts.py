"""Charts are valid SVG whatever they are given, with round ticks and everything where it belongs."""

from __future__ import annotations

import math
from itertools import pairwise
from xml.etree import ElementTree

import pytest

from specbranch import charts
from specbranch.charts import (
    BarSeries,
    ChartLine,
    LegendKey,
    bar_chart,
    legend,
    line_chart,
    number_text,
    ratio_ticks,
    round_ticks,
)

SVG = "{http://www.w3.org/2000/svg}"


def parsed(chart: str) -> ElementTree.Element:
    root = ElementTree.fromstring(chart)
    assert root.tag == f"{SVG}svg"
    return root


def words(chart: str) -> list[str]:
    return [element.text or "" for element in parsed(chart).iter(f"{SVG}text")]


def bars_of(chart: str) -> list[ElementTree.Element]:
    return [element for element in parsed(chart).iter(f"{SVG}rect") if element.find(f"{SVG}title") is not None]


@pytest.mark.parametrize(
    ("low", "high"), [(0, 1), (0.3, 0.31), (-5, 7), (0, 12345), (1e-6, 3e-6), (2, 2), (0, 0), (-3, -3), (0, 1e-16)]
)
def test_ticks_are_round_rising_and_enclose_the_range(low: float, high: float) -> None:
    ticks = round_ticks(low, high)
    assert ticks[0] <= low and high <= ticks[-1] and 2 <= len(ticks) <= 8
    steps = {round(b - a, 12) for a, b in pairwise(ticks)}
    mantissas = {float(f"{step:.4e}".split("e")[0]) for step in steps}
    assert len(mantissas) == 1 and mantissas <= {1.0, 2.0, 2.5, 5.0}


def test_ticks_of_whole_numbers_are_whole() -> None:
    assert round_ticks(1, 15, whole=True) == [0, 5, 10, 15]
    assert round_ticks(1, 3, whole=True) == [1, 2, 3]
    chart = line_chart("t", [ChartLine("a", [(g, 100.0 * g) for g in range(1, 16)])])
    assert "2.5" not in words(chart)


def test_equal_ratios_are_equally_wide() -> None:
    assert ratio_ticks(0.1, 12) == [0.1, 0.2, 0.5, 1, 2, 5, 10, 20]
    assert ratio_ticks(3, 3) == [2, 5] and ratio_ticks(1, 1) == [1, 2]
    chart = line_chart("t", [ChartLine("a", [(1, 1.0), (10, 2.0), (100, 3.0)])], x_ratio=True)
    drawn = [line for line in parsed(chart).iter(f"{SVG}polyline") if len((line.get("points") or "").split()) == 3]
    near, middle, far = (float(point.split(",")[0]) for point in (drawn[-1].get("points") or "").split())
    assert middle - near == pytest.approx(far - middle, abs=0.2) and middle > near


def test_names_are_escaped() -> None:
    name = '<b>&"x"</b>'
    assert name in words(line_chart(name, [ChartLine(name, [(0, 1.0), (1, 2.0)])], name, name))
    assert words(bar_chart(name, [name], [BarSeries(name, [1.0])], name, name)).count(name) == 5


def test_a_higher_value_lies_higher() -> None:
    chart = line_chart("t", [ChartLine("a", [(0, 1.0), (1, 3.0)])])
    drawn = [line for line in parsed(chart).iter(f"{SVG}polyline") if len((line.get("points") or "").split()) == 2]
    (x0, y0), (x1, y1) = (map(float, point.split(",")) for point in (drawn[-1].get("points") or "").split())
    assert x1 > x0 and y1 < y0


def test_a_missing_value_is_a_gap_in_the_line() -> None:
    whole = line_chart("t", [ChartLine("", [(x, 1.0 + x) for x in range(5)])])
    holed = line_chart("t", [ChartLine("", [(x, None if x == 2 else 1.0 + x) for x in range(5)])])
    assert (whole.count("<polyline"), holed.count("<polyline")) == (1, 2)


def test_values_that_are_not_finite_are_left_out() -> None:
    chart = line_chart("t", [ChartLine("a", [(0, 1.0), (1, math.inf), (2, math.nan), (3, 2.0)], marks=True)])
    assert chart.count("<circle") == 2 and "nan" not in chart and "inf" not in chart


def test_bars_stand_beside_one_another_in_proportion() -> None:
    first, second = bars_of(bar_chart("t", ["g"], [BarSeries("a", [1.0]), BarSeries("b", [2.0])]))
    assert float(second.get("height") or 0) == pytest.approx(2 * float(first.get("height") or 0), rel=0.01)
    assert float(second.get("x") or 0) >= float(first.get("x") or 0) + float(first.get("width") or 0)


def test_stacked_bars_stand_on_one_another() -> None:
    low, high = bars_of(bar_chart("t", ["g"], [BarSeries("a", [1.0]), BarSeries("b", [2.0])], stacked=True))
    assert low.get("x") == high.get("x")
    foot = float(high.get("y") or 0) + float(high.get("height") or 0)
    assert foot == pytest.approx(float(low.get("y") or 0), abs=0.11)


@pytest.mark.parametrize(
    "chart",
    [line_chart("t", []), bar_chart("t", [], []), bar_chart("t", ["a"], [BarSeries("x", [None])])],
)
def test_a_chart_of_nothing_says_so(chart: str) -> None:
    assert "nothing to show" in words(chart)


def test_a_chart_is_readable_in_light_and_dark() -> None:
    chart = line_chart("t", [ChartLine("a", [(0, 1.0), (1, 2.0)])])
    assert "prefers-color-scheme:dark" in chart and 'class="sheet"' in chart


def test_long_group_names_slant_and_get_room() -> None:
    names, series = ("a", "a name too long for its place"), [BarSeries("a", [1.0] * 6)]
    short, long = (bar_chart("t", [name] * 6, series) for name in names)
    assert "rotate" in long and "rotate" not in short
    low, high = (float((parsed(chart).get("viewBox") or "").split()[3]) for chart in (short, long))
    assert high > low


def test_a_legend_wraps_into_rows() -> None:
    one, two = (legend([LegendKey("a name of some length", 0)] * count, 0, 20) for count in (1, 8))
    rows = {word.get("y") for word in parsed(charts.svg(100, 100, two, "t")).iter(f"{SVG}text")}
    assert len(rows) > 1 and 'y="20.0"' in one


def test_numbers_are_short() -> None:
    assert [number_text(x) for x in (0.30000000000000004, 1200.0, -2.0, 5.0)] == ["0.3", "1,200", "−2", "5"]
