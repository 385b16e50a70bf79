"""Results as a table on a terminal: one block per suite, one line per method, as many columns as fit.

Owns the lines of the table and the choice of columns; `results` defines the columns. Invariant: no line is wider than
the given width, even at 40 columns. Without a terminal the table is plain text with all columns and no colours.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import IO

from rich.cells import cell_len, set_cell_size
from rich.console import Console
from rich.text import Text

from specbranch.lab.bench.results import BASELINE, Column, ResultRow, Results, clock_label, filled_columns

GAP = 2
NARROWEST = 20


def show(
    results: Results, file: IO[str] | None = None, *, width: int | None = None, colour: bool | None = None
) -> None:
    """Print the table; by default width and colours are those of the terminal."""
    console = Console(
        file=file, width=width, force_terminal=colour, no_color=colour is False, highlight=False, soft_wrap=True
    )
    room = width if width is not None else console.width if console.is_terminal else None
    for text in table_lines(results.rows, room):
        console.print(text if console.is_terminal and not console.no_color else text.plain)


def table_text(rows: Sequence[ResultRow], width: int | None = None) -> str:
    """Return the table as plain text; without a width, with every column."""
    return "\n".join(line.plain for line in table_lines(rows, width))


def table_lines(rows: Sequence[ResultRow], width: int | None = None) -> list[Text]:
    """Return the lines of the table with blank lines between blocks, and the finding on losslessness at the end."""
    room = None if width is None else max(width, NARROWEST)
    lines: list[Text] = []
    for key, block in groupby(sorted(rows, key=_block), key=_block):
        lines += [*_heading(key, room), *_block_lines(list(block), room), Text("")]
    notes = [losslessness(rows), *([late_note(late)] if (late := sum(row.late_captures for row in rows)) else [])]
    return lines + [line for note in notes for line in _wrapped(note, room)]


def losslessness(rows: Sequence[ResultRow]) -> str:
    """Say in words whether every run gave the text of autoregressive decoding."""
    checked, bad = [row for row in rows if row.lossless is not None], [row for row in rows if row.lossless is False]
    if bad:
        named = "; ".join(
            f"{row.method} on {row.suite} ({row.differing} of {row.prompts * row.repeats} runs)" for row in bad
        )
        return f"NOT LOSSLESS: other text than autoregressive decoding from {named}."
    if not checked:
        return "Losslessness was not checked: no row had autoregressive decoding to compare with under the match rule."
    left = len(rows) - len(checked)
    return f"Lossless: every run of {len(checked)} rows gave the text of autoregressive decoding." + (
        f" {left} not checked." if left else ""
    )


def late_note(captures: int) -> str:
    """Say that some measured runs contain the time of captures."""
    return (
        f"{captures} CUDA graphs or kernels were captured or compiled in measured runs, which lengthens these. "
        "Use --warm-up full."
    )


TableBlock = tuple[str, str, float, str]


def _block(row: ResultRow) -> TableBlock:
    return (row.pair, row.clock, row.temperature, row.suite)


def _heading(key: TableBlock, room: int | None) -> list[Text]:
    pair, clock, temperature, suite = key
    return _wrapped(
        f"{pair} · {suite} · temperature {temperature:g} · {clock_label(clock).partition(':')[0]}", room, "bold"
    )


def _block_lines(rows: list[ResultRow], room: int | None) -> list[Text]:
    columns = _fitting(rows, room)
    widths = {column.head: _width(column, rows) for column in columns}
    beyond = 0 if room is None else sum(widths.values()) + GAP * (len(columns) - 1) - room
    if beyond > 0:  # even the least is too much: the name gives way
        widths[columns[0].head] -= beyond
    head = Text((" " * GAP).join(_fit(column.head, column, widths) for column in columns).rstrip(), style="dim")
    return [head, *(_line(row, columns, widths) for row in rows)]


def _fitting(rows: list[ResultRow], room: int | None) -> list[Column]:
    """Drop empty columns, and then the least important ones until the rest fits."""
    columns = [column for column in filled_columns(rows) if column.rank is not None]
    while room is not None and len(columns) > 2 and sum(_width(c, rows) + GAP for c in columns) - GAP > room:
        columns.remove(max(columns, key=lambda column: column.rank or 0))
    return columns


def _width(column: Column, rows: Sequence[ResultRow]) -> int:
    return max(cell_len(column.head), *(cell_len(column.cell(row)) for row in rows))


def _line(row: ResultRow, columns: Sequence[Column], widths: dict[str, int]) -> Text:
    parts = [Text(_fit(column.cell(row), column, widths), style=_style(column, row)) for column in columns]
    line = Text(" " * GAP).join(parts)
    line.rstrip()
    return line


def _fit(cell: str, column: Column, widths: dict[str, int]) -> str:
    width, long = widths[column.head], cell_len(cell)
    if long > width:
        return set_cell_size(cell, max(width - 1, 0)) + "…"
    return cell + " " * (width - long) if column.left else " " * (width - long) + cell


def _style(column: Column, row: ResultRow) -> str:
    if column.head == "lossless":
        return {True: "green", False: "bold red", None: ""}[row.lossless]
    if column.head == "speedup" and row.speedup is not None and row.method != BASELINE:
        change, noise = row.speedup - 1.0, row.speedup_spread or 0.0
        return "green" if change > noise else "red" if change < -noise else ""
    return ""


def _wrapped(words: str, room: int | None, style: str = "") -> list[Text]:
    text = Text(words, style=style)
    return [text] if room is None else list(text.wrap(Console(width=room), room))
