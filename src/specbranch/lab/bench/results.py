"""Rows of results, their files (versioned JSON, CSV), and the columns in which rows are shown.

Owns the shape of a result and `COLUMNS`: the name, meaning and format of each figure, for the terminal, the page and
its glossary. `aggregate` computes the figures, `provenance` says where they came from. Invariant: `Results.load` reads
back exactly what `Results.save` wrote, and refuses a file of another version.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Self

from specbranch.clock.shipped import WALL
from specbranch.core.fates import FATE_NAMES, THROWN_AWAY
from specbranch.core.methods import PLAIN
from specbranch.errors import BadParameter, unknown
from specbranch.files import write_whole
from specbranch.provenance import Provenance

RESULTS_FORMAT, RESULTS_VERSION = "specbranch-bench", 1
BASELINE = PLAIN
LISTS = ("accepted_lengths", "acceptance_by_position", "tested_by_position")
FORMER = ("peak_memory",)  # keys of rows and runs that earlier versions wrote, always empty

REASONS = {FATE_NAMES[fate].counted: FATE_NAMES[fate].reason for fate in THROWN_AWAY}  # of drafted tokens

RowKey = tuple[str, str, str, str, float, str]  # pair, suite, clock, method, temperature, setting


@dataclass(frozen=True, slots=True, kw_only=True)
class ResultRow:
    """The figures of one method on one suite, with one pair, temperature and clock; COLUMNS explains them."""

    pair: str
    suite: str
    method: str
    temperature: float
    tokens_per_second: float | None
    speedup: float | None
    tokens_per_forward: float | None
    rollback_rate: float | None
    lossless: bool | None
    clock: str = WALL
    setting: Mapping[str, Any] = field(default_factory=dict)
    rule: str = "match"
    prompts: int = 0
    repeats: int = 1
    tokens: int = 0  # emitted, each prompt counted once
    differing: int = 0  # runs that gave other tokens than autoregressive decoding
    prompt_set: str = ""  # names the prompts behind the row: suites.prompt_set
    spread: float | None = None  # unknown after a single repeat by the wall clock; 0 on a modelled one
    speedup_spread: float | None = None  # the same of speedup
    speedup_low: float | None = None
    speedup_high: float | None = None
    end_to_end_tokens_per_second: float | None = None
    ttft_seconds: float | None = None
    rollback: Mapping[str, float] = field(default_factory=dict)  # by reason: tokens thrown away per emitted token
    accepted_lengths: tuple[int, ...] = ()  # how many verifications of a chain accepted 0, 1, 2 … of its tokens
    acceptance_by_position: tuple[float | None, ...] = ()
    tested_by_position: tuple[int, ...] = ()  # how often each was put to the test
    branch_hit_rate: float | None = None
    draft_idle: float | None = None
    target_idle: float | None = None
    draft_overlapped: float | None = None
    host_share: float | None = None
    begun_with_tree: float | None = None
    begun_of_overlapped: float | None = None
    run_between_rejections: float | None = None  # decoded tokens per round with a rejected token (the paper's M)
    late_captures: int = 0  # CUDA graphs captured and kernels compiled in the runs that count
    devices: int = 1  # two where draft and target are on different ones
    tokens_per_second_per_device: float | None = None

    @property
    def key(self) -> RowKey:
        """The values that distinguish a row from all others of a run."""
        return (self.pair, self.suite, self.clock, self.method, self.temperature, setting_text(self.setting))

    @property
    def measured(self) -> bool:
        """True if time was measured, false if it was modelled."""
        return self.clock == WALL

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return {**asdict(self), **{name: list(getattr(self, name)) for name in LISTS}}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Build from plain values; refuse unknown keys and name missing ones."""
        names = [f.name for f in fields(cls)]
        values = {key: value for key, value in values.items() if key not in FORMER}
        for key in values:
            if key not in names:
                raise unknown("key of a row", key, names)
        lists = {name: tuple(values[name]) for name in LISTS if name in values}
        try:
            return cls(**{**values, **lists})
        except TypeError as error:
            raise BadParameter(f"A row is incomplete: {error}.") from None


@dataclass(frozen=True, slots=True)
class Results:
    """The rows of a run and their provenance."""

    rows: tuple[ResultRow, ...]
    provenance: Provenance

    def to_dict(self) -> dict[str, Any]:
        """Return the contents of the JSON file."""
        rows = [row.to_dict() for row in self.rows]
        return {
            "format": RESULTS_FORMAT,
            "version": RESULTS_VERSION,
            "provenance": self.provenance.to_dict(),
            "rows": rows,
        }

    def last_line(self) -> str:
        """Return the rows as one line of JSON, for the end of standard output."""
        return json.dumps({"rows": [row.to_dict() for row in self.rows]}, ensure_ascii=False, allow_nan=False)

    def save(self, path: Path) -> None:
        """Write as JSON; an existing file is replaced as a whole or not at all."""
        write_whole(path, json.dumps(self.to_dict(), indent=1, ensure_ascii=False, allow_nan=False) + "\n")

    def save_csv(self, path: Path) -> None:
        """Write one line per row; nested values get columns of their own."""
        write_whole(path, rows_csv(self.rows))

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read a JSON file; refuse another kind or version."""
        values = _read(path)
        try:
            rows = tuple(ResultRow.from_dict(row) for row in values["rows"])
            return cls(rows, Provenance.from_dict(values["provenance"]))
        except KeyError as error:
            raise BadParameter(
                f"{path} lacks {error}; it is not a complete results file. Run the bench again."
            ) from None
        except BadParameter as error:
            raise BadParameter(f"{path}: {error}") from None


def rows_csv(rows: Sequence[ResultRow]) -> str:
    """Return rows as CSV with a header; a missing figure is an empty cell."""
    flat = [_flat(row) for row in rows]
    out, names = io.StringIO(), dict.fromkeys(name for one in flat for name in one)
    writer = csv.DictWriter(out, fieldnames=list(names), lineterminator="\n")
    writer.writeheader()
    writer.writerows(flat)
    return out.getvalue()


def setting_text(setting: Mapping[str, Any]) -> str:
    """Return a setting as short text, the same for equal settings: 'max_branches=6 stop_below=0.4'."""
    return " ".join(f"{name}={_plain(value)}" for name, value in sorted(setting.items()))


def figure_text(value: float | None, form: str, unit: str = "") -> str:
    """Format a figure; a dash stands for a missing one."""
    return "–" if value is None else f"{value:{form}}{unit}"


def rate_text(value: float | None) -> str:
    """Format tokens per second: one decimal, or three digits below 10."""
    return figure_text(value, ".1f" if value is not None and value >= 10 else ".3g")


def clock_label(clock: str) -> str:
    """Say whether a clock measures or models time."""
    if clock == WALL:
        return "measured (wall clock)"
    return f"modelled (cost profile {clock}): real tokens, time charged by the profile"


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _flat(row: ResultRow) -> dict[str, Any]:
    values = row.to_dict()
    split = {f"rollback_{name}": values["rollback"].get(name) for name in REASONS}
    lists = {name: json.dumps(values[name]) for name in LISTS}
    values.pop("rollback")
    return {**values, **lists, "setting": setting_text(row.setting), **split}


def _read(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise BadParameter(
            f"The results in {path} cannot be read ({error}); expected a file written by 'specbranch bench run'."
        ) from error
    if not isinstance(values, dict) or values.get("format") != RESULTS_FORMAT:
        raise BadParameter(f"{path} holds no bench results; expected a JSON file written by 'specbranch bench run'.")
    if values.get("version") != RESULTS_VERSION:
        raise BadParameter(
            f"{path} has version {values.get('version')!r} of the results format; this specbranch reads version "
            f"{RESULTS_VERSION}. Run the bench again, or read it with the specbranch that wrote it."
        )
    return values


@dataclass(frozen=True, slots=True)
class Column:
    """A figure of a row, as readers see it."""

    name: str
    cell: Callable[[ResultRow], str]
    meaning: str = ""
    rank: int | None = None  # a narrow terminal drops the highest first; None: never on a terminal
    short: str = ""  # its heading on a terminal, if not its name
    left: bool = False  # aligned to the left
    page_cell: Callable[[ResultRow], str] | None = None  # a longer form for the page

    @property
    def head(self) -> str:
        """The heading on a terminal."""
        return self.short or self.name

    def on_page(self, row: ResultRow) -> str:
        """Format it for the page."""
        return (self.page_cell or self.cell)(row)


def _figure(field: str, form: str, unit: str = "") -> Callable[[ResultRow], str]:
    return lambda row: figure_text(getattr(row, field), form, unit)


def _interval(row: ResultRow) -> str:
    if row.speedup_low is None or row.speedup_high is None or row.method == BASELINE:
        return "–"
    return f"{row.speedup_low:.2f}–{row.speedup_high:.2f}"


def _lossless(row: ResultRow) -> str:
    return {True: "yes", False: "NO", None: "–"}[row.lossless]


def _lossless_at_length(row: ResultRow) -> str:
    return f"NO ({row.differing} runs differ)" if row.lossless is False else _lossless(row)


COLUMNS = (
    Column("pair", _figure("pair", ""), left=True),
    Column("suite", _figure("suite", ""), left=True),
    Column("method", _figure("method", ""), rank=0, left=True),
    Column("temperature", _figure("temperature", "g")),
    Column(
        "clock",
        lambda row: "measured" if row.measured else f"modelled: {row.clock}",
        "modelled: tokens and decisions are real, and a cost profile charges the time.",
        left=True,
    ),
    Column(
        "tokens/s",
        lambda row: rate_text(row.tokens_per_second),
        "decoded tokens over decode time, summed over prompts, each time the median over repeats; first tokens are "
        "left out.",
        rank=1,
        short="tok/s",
    ),
    Column(
        "spread",
        _figure("spread", ".1%"),
        "half of the width of the middle 50 % over repeats, relative to the median.",
        rank=6,
        short="±",
    ),
    Column(
        "speedup",
        _figure("speedup", ".2f", "×"),
        "tokens/s over that of autoregressive decoding (AR): same engine, run, prompts, repeats. Long answers weigh "
        "more, as they do in waiting time.",
        rank=0,
    ),
    Column("95 % interval", _interval, "of the speedup, by bootstrap over prompts.", rank=8, short="95 %"),
    Column(
        "tokens/forward",
        _figure("tokens_per_forward", ".2f"),
        "tokens emitted for each forward of the target, the prefill left out.",
        rank=3,
        short="tok/fwd",
    ),
    Column(
        "rollback rate",
        _figure("rollback_rate", ".0%"),
        "drafted tokens thrown away over drafted tokens, on the surviving path; losing branches are counted apart.",
        rank=4,
        short="rollback",
        page_cell=_figure("rollback_rate", ".1%"),
    ),
    Column(
        "branch hits",
        _figure("branch_hit_rate", ".0%"),
        "the share of branch points reached by the target at which one branch matched the target's token.",
        rank=7,
        short="hits",
    ),
    Column(
        "begun",
        _figure("begun_with_tree", ".0%"),
        "the share of rounds that started with tokens the draft had processed while the target worked.",
        rank=11,
    ),
    Column(
        "begun of beside",
        _figure("begun_of_overlapped", ".0%"),
        "the same, among rounds in which both models worked at once.",
    ),
    Column(
        "beside",
        _figure("draft_overlapped", ".0%"),
        "the share of the draft's busy time that overlaps the target's.",
        rank=12,
    ),
    Column(
        "target idle",
        _figure("target_idle", ".0%"),
        "the share of decode time in which the target was idle.",
        rank=13,
    ),
    Column("draft idle", _figure("draft_idle", ".0%"), "the same of the draft.", rank=14),
    Column("host", _figure("host_share", ".1%"), "the share of decode time in which both models were idle.", rank=15),
    Column(
        "first token",
        _figure("ttft_seconds", ".2f", " s"),
        "the time to the first token (TTFT), with both prefills.",
        rank=9,
        short="first tok",
        page_cell=_figure("ttft_seconds", ".3f", " s"),
    ),
    Column(
        "end-to-end tokens/s",
        lambda row: rate_text(row.end_to_end_tokens_per_second),
        "all tokens over all time, the prefills included.",
    ),
    Column("prompts", lambda row: f"{row.prompts} × {row.repeats}"),
    Column("tokens", _figure("tokens", "")),
    Column(
        "lossless",
        _lossless,
        "every run gave the same tokens as AR. A dash where the ratio rule keeps the distribution instead of the text.",
        rank=2,
        page_cell=_lossless_at_length,
    ),
    Column("setting", lambda row: setting_text(row.setting), rank=10, left=True),
)


def filled_columns(rows: Sequence[ResultRow]) -> list[Column]:
    """Return the columns in which at least one row has a figure."""
    return [column for column in COLUMNS if any(column.cell(row) not in ("", "–") for row in rows)]
