"""The timeline of draft and target as text for a terminal; `timeline_svg` draws the picture.

Owns the wording and the layout in columns. Invariants: no line exceeds the given width, and nothing is shown by colour
alone.
"""

from __future__ import annotations

import statistics
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from specbranch.core.arms import arm_sentence
from specbranch.core.fates import FATE_NAMES, THROWN_AWAY, Fates
from specbranch.core.trace import Event
from specbranch.lab.traces.rounds import Times, TracedRound, times
from specbranch.lab.traces.spans import SPAN_LOOKS, SpanKind, kinds_in, shares

NARROWEST_TIMELINE = 40
MARGIN = 11  # columns before a bar: the round's number and the model
LONGEST_BAR = 3.0  # times the usual round: longer bars are cut off
Spell = Callable[[Sequence[int]], str]  # token ids to text
Paint = Callable[[str, SpanKind], str]


def plain(text: str, kind: SpanKind) -> str:
    """Return the text without colours."""
    return text


@dataclass(frozen=True, slots=True)
class Style:
    """The look of a timeline on a terminal."""

    width: int = 80
    unicode: bool = True
    paint: Paint = plain
    spell: Spell | None = None

    def character(self, kind: SpanKind) -> str:
        """Return the character for a kind of time."""
        return SPAN_LOOKS[kind].glyph if self.unicode else SPAN_LOOKS[kind].ascii

    def glyph(self, kind: SpanKind) -> str:
        """Return the same, coloured."""
        return self.paint(self.character(kind), kind)

    @property
    def bar(self) -> int:
        """The number of columns of the longest bar."""
        return max(min((max(self.width, NARROWEST_TIMELINE) - MARGIN) // 3, 40), 12)

    def bound(self) -> int:
        """The maximum length of a line."""
        return max(self.width, NARROWEST_TIMELINE)


def draw_text(rounds: Sequence[TracedRound], stats: Mapping[str, Any], style: Style, modelled: bool = False) -> str:
    """Return the whole timeline: legend, rounds, totals. `stats` are those of the request (core.stats)."""
    spent = times(rounds)
    scale = _scale(rounds, style)
    body = [line for one in rounds for line in _round(one, scale, style)]
    return "\n".join([*_legend(rounds, style), "", *body, "", *totals(spent, stats, style, modelled)])


def seconds_text(seconds: float) -> str:
    """Format a time as short as possible."""
    if seconds >= 1:
        return f"{seconds:.2f} s"
    return f"{seconds * 1e3:.1f} ms" if seconds >= 1e-3 or seconds == 0 else f"{seconds * 1e6:.0f} µs"


def totals(spent: Times, stats: Mapping[str, Any], style: Style, modelled: bool = False) -> list[str]:
    """Return where the time and the drafted tokens went."""
    clock = "modelled, not measured" if modelled else "measured"
    lines = [
        f"Prompt read in {seconds_text(spent.prefill)}, then {stats['tokens']} tokens in {spent.rounds} rounds, "
        f"{seconds_text(spent.decoding)} ({clock})."
    ]
    lines += _shares(spent)
    lines += _tokens(stats)
    lines += _arms(stats)
    return [piece for line in lines for piece in _wrapped(line, style.bound(), 2)]


def _shares(spent: Times) -> list[str]:
    kinds = {"target alone": spent.target_alone, "outside both": spent.neither}
    if spent.has_draft:
        kinds = {"both at work": spent.together, **kinds, "draft alone": spent.draft_alone}
    listed = ", ".join(f"{name} {_share(value, spent.decoding)}" for name, value in kinds.items())
    idle = f"target {_share(spent.target_idle, spent.decoding)}"
    if spent.has_draft:
        idle += f", draft {_share(spent.draft_idle, spent.decoding)}"
    return [f"Time: {listed}.", f"Idle: {idle}."]


def _share(value: float, whole: float) -> str:
    return f"{value / whole if whole else 0.0:.0%} ({seconds_text(value)})"


def _tokens(stats: Mapping[str, Any]) -> list[str]:
    counts = {**stats, **stats["rollback"]}
    names = [FATE_NAMES[fate] for fate in ("accepted", *THROWN_AWAY, "unused")]
    listed = ", ".join(f"{counts[name.counted]} {name.phrase}" for name in names if counts[name.counted])
    forward = stats["tokens_per_forward"]
    return [
        f"Drafted tokens: {stats['drafted']}" + (f", of these {listed}." if listed else "."),
        f"Tokens a target forward: {forward:.2f}." if forward is not None else "Only the first token was needed.",
    ]


def _arms(stats: Mapping[str, Any]) -> list[str]:
    listed = "; ".join(arm_sentence(name, arm) for name, arm in stats.get("arms", {}).items())
    return [f"Tokens a second by arm: {listed}."] if listed else []


def _legend(rounds: Sequence[TracedRound], style: Style) -> list[str]:
    present = kinds_in(rounds)
    present += ["reading"] if any(one.draft and not one.fate.total for one in rounds[1:]) else []
    present += ["waiting"] if any(one.draft and one.target for one in rounds[1:]) else []
    entries = {kind: f"{style.character(kind)} {SPAN_LOOKS[kind].meaning}" for kind in present}
    whole = "   ".join(entry.replace(" ", "\0") for entry in entries.values())  # so that no entry is torn apart
    lines = "\n".join(_wrapped(whole, style.bound(), 0)).replace("\0", " ")
    for kind, entry in entries.items():
        lines = lines.replace(entry, style.glyph(kind) + entry[1:])
    return lines.split("\n")


def _scale(rounds: Sequence[TracedRound], style: Style) -> float:
    """Return columns per second: the longest round fills a bar, unless it is far longer than usual."""
    lengths = [one.seconds for one in rounds[1:] if one.seconds > 0]
    if not lengths:
        return 0.0
    return style.bar / min(max(lengths), LONGEST_BAR * statistics.median(lengths))


def _round(one: TracedRound, scale: float, style: Style) -> Iterator[str]:
    for event in one.events:
        label = f"{one.number:>3} " if event is one.events[0] else "    "
        bar = [] if one.number == 0 else _bar(one, event, scale, style)
        note = f"{seconds_text(event.seconds)}  {_note(one, event, style)}"
        yield from _line(f"{label}{event.who:<6} ", bar, note, style)


def _line(head: str, bar: list[SpanKind], note: str, style: Style) -> Iterator[str]:
    """Put the note after the bar if it fits there, else below it."""
    painted = "".join(map(style.glyph, bar))
    column = MARGIN + (style.bar + 2 if bar else 0)
    room = style.bound() - column
    if len(note) <= room:
        yield f"{head}{painted}{' ' * (column - MARGIN - len(bar))}{note}"
        return
    if bar:
        yield f"{head}{painted}"
    first = " " * 4 if bar else head
    yield from textwrap.wrap(note, style.bound(), initial_indent=first, subsequent_indent=" " * 6)


def _bar(one: TracedRound, event: Event, scale: float, style: Style) -> list[SpanKind]:
    """Return one kind per column: waiting before and after the work, and the fates of the draft's tokens within it."""
    before, after = round((event.start - one.start) * scale), round((one.end - event.end) * scale)
    busy = max(round(event.seconds * scale), 1)
    work: list[SpanKind] = ["target"] * busy if event.who == "target" else _cut(one.fate, busy)
    wait: list[SpanKind] = ["waiting"]
    bar = wait * before + work + wait * after
    return bar if len(bar) <= style.bar else [*bar[: style.bar - 1], "cut"]


def _cut(fate: Fates, columns: int) -> list[SpanKind]:
    """Distribute columns among the fates, by tokens; each fate gets one while there are enough."""
    kinds = shares(fate)
    if not kinds:
        return ["reading"] * columns
    ends, seen = [], 0
    for _, count in kinds:
        seen += count
        ends.append(round(columns * seen / fate.total))
    return [kinds[next(at for at, end in enumerate(ends) if column < end)][0] for column in range(columns)]


def _note(one: TracedRound, event: Event, style: Style) -> str:
    if one.number == 0:
        return f"reads the prompt, {event.rows} tokens" + (_said(one, event, style) if event.who == "target" else "")
    return _verification(one, event, style) if event.who == "target" else _drafting(one, event)


def _verification(one: TracedRound, event: Event, style: Style) -> str:
    if event.accepted is None:
        return f"verifies {event.pending}, no verdict"
    taken = "all" if event.accepted == event.pending else event.accepted
    judged = f"{taken} of {event.pending} accepted, " if event.pending else ""
    return f"{judged}+{one.emitted}{_said(one, event, style)}"


def _said(one: TracedRound, event: Event, style: Style) -> str:
    """Return the emitted text, cut to what a line can hold."""
    if style.spell is None or not one.emitted:
        return ""
    break_, more = ("␣", "…") if style.unicode else (" ", "...")
    text = style.spell(event.tokens[: one.emitted]).replace("\n", break_)
    text = "".join(c if c.isprintable() else " " for c in text)
    text = text if style.unicode else text.encode("ascii", "replace").decode()
    most = max(style.bound() // 3, 16)
    return f": '{text if len(text) <= most else text[: most - len(more)] + more}'"


def _drafting(one: TracedRound, event: Event) -> str:
    if one.is_tree:
        return f"tree: {_became(one.fate)}" if one.fate.total else "drafts nothing"
    if not event.branches:
        return "drafts nothing"
    lengths = set(event.branches)
    many = len(event.branches)
    of = f"{min(lengths)}" if len(lengths) == 1 else f"{min(lengths)} to {max(lengths)}"
    what = f"{many} branches of {of}" if many > 1 else f"{'branch' if one.target else 'chain'} of {of}"
    return f"{what}: {_outcome(one, event)}"


def _outcome(one: TracedRound, event: Event) -> str:
    if one.target is not None and event.kept is None and not one.fate.unused:
        return "none kept" if len(event.branches) > 1 else "rolled back"
    listed = f"number {event.kept + 1} kept" if event.kept is not None and len(event.branches) > 1 else ""
    return ", ".join(part for part in (listed, _became(replace(one.fate, losing=0))) if part) or "nothing came of it"


def _became(fate: Fates) -> str:
    return ", ".join(f"{count} {SPAN_LOOKS[kind].outcome}" for kind, count in shares(fate))


def _wrapped(line: str, width: int, indent: int) -> list[str]:
    return textwrap.wrap(line, width, subsequent_indent=" " * indent, break_on_hyphens=False) or [""]
