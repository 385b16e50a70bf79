"""The picture of a training: loss and agreement over the steps, as SVG."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

WIDTH, HEIGHT, LEFT, TOP = 640, 180, 64, 28  # of one panel, and the room around it


def picture(records: Sequence[Mapping[str, Any]]) -> str:
    """Draw both panels; of no records, empty ones."""
    panels = (("loss (KL, nats a token)", "loss", "#c2410c"), ("top-1 agreement on held-out text", "top1", "#1d4ed8"))
    drawn = "".join(
        _panel([(r["step"], r[key]) for r in records if key in r], title, colour, number * (HEIGHT + 60) + TOP)
        for number, (title, key, colour) in enumerate(panels)
    )
    width, height = LEFT + WIDTH + 16, 2 * (HEIGHT + 60)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="12">'
        f'<rect width="{width}" height="{height}" fill="white"/>{drawn}</svg>\n'
    )


def _panel(points: Sequence[tuple[float, float]], title: str, colour: str, top: int) -> str:
    frame = f'<text x="{LEFT}" y="{top - 8}">{title}</text>'
    frame += f'<rect x="{LEFT}" y="{top}" width="{WIDTH}" height="{HEIGHT}" fill="none" stroke="#999"/>'
    if not points:
        return frame
    steps, values = [step for step, _ in points], [value for _, value in points]
    low, high, last = min(values), max(values), max(max(steps), 1)
    span = (high - low) or 1.0
    line = " ".join(
        f"{LEFT + WIDTH * step / last:.1f},{top + HEIGHT * (1 - (value - low) / span):.1f}" for step, value in points
    )
    marks = f'<text x="{LEFT - 6}" y="{top + 10}" text-anchor="end">{high:.3f}</text>'
    marks += f'<text x="{LEFT - 6}" y="{top + HEIGHT}" text-anchor="end">{low:.3f}</text>'
    marks += f'<text x="{LEFT + WIDTH}" y="{top + HEIGHT + 16}" text-anchor="end">step {last:,.0f}, now {values[-1]:.3f}</text>'
    return f'{frame}{marks}<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="1.5"/>'
