"""The chart of a training run: loss and agreement over the steps, as SVG."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from specbranch.charts import Scale, line, polyline, svg, text

PANEL_WIDTH, PANEL_HEIGHT, PANEL_LEFT, PANEL_TOP = 640, 180, 64, 28  # of one panel, and the room around it
PANEL_RIGHT, PANEL_ROW = PANEL_LEFT + PANEL_WIDTH, PANEL_HEIGHT + 60
PANELS = (("loss (KL, nats a token)", "loss", 1), ("top-1 agreement on held-out text", "top1", 0))


def picture(records: Sequence[Mapping[str, Any]]) -> str:
    """Draw both panels; they are empty without records."""
    drawn = "".join(
        _panel([(r["step"], r[key]) for r in records if key in r], title, hue, PANEL_TOP + number * PANEL_ROW)
        for number, (title, key, hue) in enumerate(PANELS)
    )
    return svg(PANEL_RIGHT + 16, len(PANELS) * PANEL_ROW, drawn, "Loss and agreement over the steps")


def _panel(points: Sequence[tuple[float, float]], title: str, hue: int, top: int) -> str:
    foot = top + PANEL_HEIGHT
    frame = text(PANEL_LEFT, top - 8, title)
    frame += "".join(line(PANEL_LEFT, y, PANEL_RIGHT, y, "axis") for y in (top, foot))
    frame += "".join(line(x, top, x, foot, "axis") for x in (PANEL_LEFT, PANEL_RIGHT))
    if not points:
        return frame
    steps, values = [step for step, _ in points], [value for _, value in points]
    low, high, last = min(values), max(values), max(max(steps), 1)
    across, up = Scale(0, last, PANEL_LEFT, PANEL_RIGHT), Scale(low, high if high > low else low + 1, foot, top)
    marks = text(PANEL_LEFT - 6, top + 10, f"{high:.3f}", anchor="end")
    marks += text(PANEL_LEFT - 6, foot, f"{low:.3f}", anchor="end")
    marks += text(PANEL_RIGHT, foot + 16, f"step {last:,.0f}, now {values[-1]:.3f}", anchor="end")
    return frame + marks + polyline([(across.at(step), up.at(value)) for step, value in points], hue)
