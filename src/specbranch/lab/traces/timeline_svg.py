"""The timeline of draft and target as a picture: time to the right, the target above the draft, wrapped into rows.

Owns the layout; `charts` has shapes and letters, `spans` the colours. Invariant: one scale for the whole picture, so
that lengths can be compared. Only the prefill is drawn shorter than it was, and is labelled so.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from specbranch.charts import LegendKey, legend, line, rect, svg, text
from specbranch.core.fates import Fates
from specbranch.core.trace import Event
from specbranch.lab.traces.rounds import TracedRound, times, usual_seconds
from specbranch.lab.traces.spans import SPAN_LOOKS, kinds_in, shares
from specbranch.lab.traces.timeline import seconds_text

PICTURE_WIDTH, LEFT_MARGIN, RIGHT_MARGIN, HEAD = 1080.0, 64.0, 16.0, 100.0
TARGET_HEIGHT, DRAFT_HEIGHT, BAR_GAP, ROW_HEIGHT = 22.0, 26.0, 3.0, 86.0  # heights
ROUND_PIXELS = 56.0  # pixels of a usual round
PREFILL_PIXELS = 74.0
LEGIBLE = 20.0  # pixels a label needs


@dataclass(frozen=True, slots=True)
class DrawnLane:
    """Where rounds are drawn: the start time, the position, and pixels per second."""

    begin: float
    x: float
    y: float
    scale: float

    def at(self, moment: float) -> float:
        """Return the position of a moment."""
        return self.x + (moment - self.begin) * self.scale

    def extent(self, event: Event) -> tuple[float, float]:
        """Return the position and width of a model's work."""
        return self.at(event.start), max(event.seconds * self.scale - 1.0, 0.5)


def draw_svg(rounds: Sequence[TracedRound], title: str, subtitle: str = "") -> str:
    """Draw one request, wrapped into rows."""
    scale = _scale(rounds)
    rows = _rows(rounds, scale)
    body = [
        text(12, 20, title, kind="bold"),
        text(12, 38, subtitle, kind="small"),
        legend(_keys(rounds), 12, 58, PICTURE_WIDTH),
    ]
    for number, row in enumerate(rows):
        y = HEAD + number * ROW_HEIGHT
        first = number == 0
        lane = DrawnLane(row[0].start if row else 0.0, LEFT_MARGIN + (PREFILL_PIXELS if first else 0.0), y, scale)
        body.append(_names(y, row, rounds))
        body += [_prefill(rounds[0], y)] if first and rounds else []
        body += [draw_round(one, lane) for one in row]
    return svg(PICTURE_WIDTH, HEAD + len(rows) * ROW_HEIGHT + 8, "".join(body), title)


def draw_comparison(runs: Mapping[str, Sequence[TracedRound]], title: str, unit: str = "s") -> str:
    """Draw the same request with several methods, one below the other at one scale; the prefill has its true length."""
    left, height = 220.0, 78.0
    longest = max(rounds[-1].end for rounds in runs.values())
    scale = (PICTURE_WIDTH - left - RIGHT_MARGIN) / longest
    body = [
        text(12, 20, title, kind="bold"),
        legend(_keys([one for rounds in runs.values() for one in rounds]), 12, 46, PICTURE_WIDTH),
    ]
    for number, (name, rounds) in enumerate(runs.items()):
        y = HEAD + number * height
        body += [text(12, y + 18, name), text(12, y + 36, f"{rounds[-1].end:.0f} {unit}", kind="small")]
        body += [draw_round(one, DrawnLane(0.0, left, y, scale)) for one in rounds]
    return svg(PICTURE_WIDTH, HEAD + len(runs) * height, "".join(body), title)


def draw_round(one: TracedRound, lane: DrawnLane) -> str:
    """Draw one round: a bar for the target, and one for each branch of the draft, divided by the fates of its
    tokens."""
    parts = []
    if one.target:
        x, wide = lane.extent(one.target)
        parts.append(rect(x, lane.y, wide, TARGET_HEIGHT, SPAN_LOOKS["target"].hue, tip=_target_tip(one, one.target)))
        if wide >= LEGIBLE:
            parts.append(text(x + wide / 2, lane.y + 15, f"+{one.emitted}", anchor="middle", kind="light"))
    if one.draft:
        parts += _branches(one, one.draft, lane)
    return "".join(parts)


def _branches(one: TracedRound, draft: Event, lane: DrawnLane) -> list[str]:
    x, wide = lane.extent(draft)
    top, high = lane.y + TARGET_HEIGHT + BAR_GAP, DRAFT_HEIGHT / max(len(one.fates), 1)
    longest = max((fate.total for fate in one.fates), default=0)
    if not longest:  # it read, and drafted nothing
        nothing = f"round {one.number}: drafted nothing"
        return [rect(x, top, wide, high - 1, SPAN_LOOKS["unused"].hue, faint=True, tip=nothing)]
    parts = []
    for number, fate in enumerate(one.fates):
        parts += _cells(one, fate, x, top + number * high, wide / longest, max(high - 1, 1.0))
    return parts


def _cells(one: TracedRound, fate: Fates, x: float, y: float, cell: float, high: float) -> list[str]:
    cells, at = [], 0
    for kind, count in shares(fate):
        tip = f"round {one.number}: {count} {SPAN_LOOKS[kind].meaning}"
        cells.append(rect(x + at * cell, y, count * cell - 0.8, high, SPAN_LOOKS[kind].hue, tip=tip))
        at += count
    return cells


def _target_tip(one: TracedRound, event: Event) -> str:
    judged = event.accepted is not None and event.pending > 0
    did = f"{event.accepted} of {event.pending} accepted" if judged else f"{event.rows} rows"
    return f"round {one.number}, {seconds_text(event.seconds)}: {did}, {one.emitted} emitted"


def _prefill(one: TracedRound, y: float) -> str:
    bars, labels = "", ""
    for event in one.events:
        look, top = (
            (SPAN_LOOKS["target"], y) if event.who == "target" else (SPAN_LOOKS["unused"], y + TARGET_HEIGHT + BAR_GAP)
        )
        bars += rect(LEFT_MARGIN, top, PREFILL_PIXELS - 8, TARGET_HEIGHT, look.hue, faint=True, tip="not to scale")
        labels += text(LEFT_MARGIN + 4, top + 15, f"▸ {seconds_text(event.seconds)}", kind="small")
    return bars + labels + text(LEFT_MARGIN, y - 4, "prompt", kind="small")


def _names(y: float, row: Sequence[TracedRound], rounds: Sequence[TracedRound]) -> str:
    """Draw the models' names before a row, and its start time and rounds below it."""
    draft, foot = y + TARGET_HEIGHT + BAR_GAP, y + TARGET_HEIGHT + BAR_GAP + DRAFT_HEIGHT + 3
    parts = [_margin(y + 15, "target")]
    if any(one.draft for one in rounds):
        parts.append(_margin(draft + 17, "draft"))
    if row:
        parts.append(_margin(y + 64, seconds_text(row[0].start - rounds[1].start)))
        parts.append(text(LEFT_MARGIN, y + 64, f"rounds {row[0].number} to {row[-1].number}", kind="small"))
    return "".join(parts) + line(LEFT_MARGIN, foot, PICTURE_WIDTH - RIGHT_MARGIN, foot)


def _margin(y: float, words: str) -> str:
    return text(LEFT_MARGIN - 8, y, words, anchor="end", kind="small")


def _scale(rounds: Sequence[TracedRound]) -> float:
    """Return pixels per second: usual rounds have space for a label, and the longest fits into a row."""
    room = PICTURE_WIDTH - LEFT_MARGIN - RIGHT_MARGIN - PREFILL_PIXELS
    longest, usual = max((one.seconds for one in rounds[1:]), default=0.0), usual_seconds(rounds)
    wanted = ROUND_PIXELS / usual if usual > 0 else 1.0
    return min(wanted, room / longest) if longest > 0 else wanted


def _rows(rounds: Sequence[TracedRound], scale: float) -> list[list[TracedRound]]:
    """Wrap between rounds."""
    rows: list[list[TracedRound]] = [[]]
    for one in rounds[1:]:
        room = PICTURE_WIDTH - LEFT_MARGIN - RIGHT_MARGIN - (PREFILL_PIXELS if len(rows) == 1 else 0.0)
        if rows[-1] and (one.end - rows[-1][0].start) * scale > room:
            rows.append([])
        rows[-1].append(one)
    return rows


def _keys(rounds: Sequence[TracedRound]) -> list[LegendKey]:
    keys = [LegendKey(SPAN_LOOKS[kind].meaning, SPAN_LOOKS[kind].hue) for kind in kinds_in(rounds)]
    return [keys[0]._replace(name="target: one forward, +n tokens"), *keys[1:]]


def subtitle(rounds: Sequence[TracedRound], tokens: int, modelled: bool) -> str:
    """Return the subtitle."""
    spent, clock = times(rounds), "modelled" if modelled else "measured"
    decoding = f"{tokens} tokens in {spent.rounds} rounds and {seconds_text(spent.decoding)} after the prompt"
    return f"{decoding}; {clock} time, to the right"
