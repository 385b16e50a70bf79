"""Rows of results, their files (JSON of a stated version, CSV), and what each figure in a row means.

Owns the shape of a result; how figures come about is for `aggregate`, where they came from for `provenance`. Invariant:
what `Results.save` writes, `Results.load` reads back equal, and a file of another version is refused rather than
misread.

tokens_per_second   decoding only, end of sequence respected: decoded tokens over decode seconds, both summed over
                    prompts, each prompt's seconds being their median over repeats. The first token and both prefills
                    are apart, in ttft_seconds.
speedup             tokens_per_second over that of autoregressive decoding, over the prompts and repeats that both
                    finished in this run: where the texts are the same this is the ratio of total times. The one speedup
                    reported; long answers weigh more, as they do in the time somebody waits. speedup_low and
                    speedup_high: its 95 % interval, drawing prompts anew.
spread              half of the width of the middle 50 % over repeats, divided by the median: of tokens_per_second;
                    speedup_spread: of speedup. None after a single repeat by the wall clock; 0 on a modelled clock,
                    which gives the same figure every time.
rollback            drafted tokens thrown away per emitted token, by reason; rollback_rate is core.stats' own, as are
                    all rates here.
run_between_rejections   decoded tokens over the rounds in which a token of the main line was rejected (the paper's M).
devices             that the method takes: two where draft and target are on different ones;
                    tokens_per_second_per_device is its share.
accepted_lengths    how many verifications of a chain accepted 0, 1, 2 … of its tokens.
lossless            whether every run gave the same tokens as autoregressive decoding; None under the ratio rule, or
                    without such a run.
draft_idle, target_idle   the share of decode time in which the model had nothing to do: how long it waits.
draft_overlapped        the share of the draft's working time that lies inside the target's: what overlap hides. 0 where
                        they take turns.
host_share          the share of decode time in which neither model worked: the host's between and inside rounds.
begun_with_tree     the share of rounds (target forwards) that began with something the draft had read before, while the
                    target worked; None where nothing is drafted beside it. begun_of_overlapped: the same as a share of
                    the rounds in which a draft worked beside.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Self

from specbranch.errors import BadParameter, unknown
from specbranch.files import write_whole
from specbranch.provenance import Provenance

FORMAT, VERSION = "specbranch-bench", 1
BASELINE = "autoregressive"
WALL = "wall"
LISTS = ("accepted_lengths", "acceptance_by_position", "tested_by_position")

RowKey = tuple[str, str, str, str, float, str]  # pair, suite, clock, method, temperature, setting


@dataclass(frozen=True, slots=True, kw_only=True)
class ResultRow:
    """What one method did on one suite with one pair at one temperature by one clock."""

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
    tokens: int = 0  # emitted over the prompts, each once
    differing: int = 0  # runs that gave other tokens than autoregressive decoding
    prompt_set: str = ""  # names the prompts behind the row: suites.prompt_set
    spread: float | None = None
    speedup_spread: float | None = None
    speedup_low: float | None = None
    speedup_high: float | None = None
    end_to_end_tokens_per_second: float | None = None  # prefill included
    ttft_seconds: float | None = None
    rollback: Mapping[str, float] = field(
        default_factory=dict
    )  # rejected, tree_siblings, losing_branches, dropped_by_length
    accepted_lengths: tuple[int, ...] = ()
    acceptance_by_position: tuple[float | None, ...] = ()
    tested_by_position: tuple[int, ...] = ()  # how often each was put to the test
    branch_hit_rate: float | None = None
    draft_idle: float | None = None
    target_idle: float | None = None
    draft_overlapped: float | None = None
    host_share: float | None = None
    begun_with_tree: float | None = None
    begun_of_overlapped: float | None = None
    peak_memory: int | None = None  # bytes
    run_between_rejections: float | None = None
    devices: int = 1
    tokens_per_second_per_device: float | None = None

    @property
    def key(self) -> RowKey:
        """What tells a row from all others of a run."""
        return (self.pair, self.suite, self.clock, self.method, self.temperature, setting_text(self.setting))

    @property
    def measured(self) -> bool:
        """Whether time was measured rather than modelled."""
        return self.clock == WALL

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, as JSON holds them."""
        return {**asdict(self), **{name: list(getattr(self, name)) for name in LISTS}}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Build from plain values, refusing keys that do not exist and naming those that are missing."""
        names = [f.name for f in fields(cls)]
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
    """The rows of a run and where they came from."""

    rows: tuple[ResultRow, ...]
    provenance: Provenance

    def to_dict(self) -> dict[str, Any]:
        """Return what the JSON file holds."""
        rows = [row.to_dict() for row in self.rows]
        return {"format": FORMAT, "version": VERSION, "provenance": self.provenance.to_dict(), "rows": rows}

    def last_line(self) -> str:
        """Return the rows as one line of JSON, for the end of standard output."""
        return json.dumps({"rows": [row.to_dict() for row in self.rows]}, ensure_ascii=False, allow_nan=False)

    def save(self, path: Path) -> None:
        """Write as JSON; a file that was there is replaced as a whole or not at all."""
        write_whole(path, json.dumps(self.to_dict(), indent=1, ensure_ascii=False, allow_nan=False) + "\n")

    def save_csv(self, path: Path) -> None:
        """Write one line a row, nested values spread over columns of their own."""
        write_whole(path, rows_csv(self.rows))

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read a JSON file; one of another kind or version is refused."""
        values = _read(path)
        try:
            rows = tuple(ResultRow.from_dict(row) for row in values["rows"])
            return cls(rows, Provenance.from_dict(values["provenance"]))
        except KeyError as error:
            raise BadParameter(f"{path} lacks {error}; it is no whole results file. Run the bench again.") from None
        except BadParameter as error:
            raise BadParameter(f"{path}: {error}") from None


def rows_csv(rows: Sequence[ResultRow]) -> str:
    """Return rows as CSV with a header; empty cells where there is no figure."""
    flat = [_flat(row) for row in rows]
    out = io.StringIO()
    writer = csv.DictWriter(
        out, fieldnames=list(dict.fromkeys(name for one in flat for name in one)), lineterminator="\n"
    )
    writer.writeheader()
    writer.writerows(flat)
    return out.getvalue()


def setting_text(setting: Mapping[str, Any]) -> str:
    """Return a setting as short text, the same for equal settings: 'max_branches=6 stop_below=0.4'."""
    return " ".join(f"{name}={_plain(value)}" for name, value in sorted(setting.items()))


def clock_label(clock: str) -> str:
    """Say whether a clock's seconds were measured or modelled."""
    return (
        "measured (wall clock)"
        if clock == WALL
        else f"modelled (cost profile {clock}): real tokens, time charged by the profile"
    )


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _flat(row: ResultRow) -> dict[str, Any]:
    values = row.to_dict()
    split = {
        f"rollback_{name}": values["rollback"].get(name)
        for name in ("rejected", "tree_siblings", "losing_branches", "dropped_by_length")
    }
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
    if not isinstance(values, dict) or values.get("format") != FORMAT:
        raise BadParameter(f"{path} holds no bench results; expected a JSON file written by 'specbranch bench run'.")
    if values.get("version") != VERSION:
        raise BadParameter(
            f"{path} has version {values.get('version')!r} of the results format; this specbranch reads version "
            f"{VERSION}. "
            "Run the bench again, or read it with the specbranch that wrote it."
        )
    return values
