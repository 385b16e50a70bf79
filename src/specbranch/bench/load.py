"""Methods under load: many requests at once, so many at a time, decoded from records by a profile.

Owns what is run and its rows. Invariant: every method decodes the same records, and each request emits its record.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from typing import Any

from specbranch.bench.clocks import Clock
from specbranch.bench.lab import Lab, Workload
from specbranch.bench.methods import default_setting
from specbranch.bench.results import BASELINE
from specbranch.charts import ChartLine, line_chart
from specbranch.core.experience import Experience
from specbranch.progress import StepsDone
from specbranch.replay.record import Record
from specbranch.replay.several import Load, SeveralRecords
from specbranch.suites.suite import Suite

TURNS = 2  # requests for each place: while the last ones end, fewer are at work
PERCENTILES = (50, 95, 99)


@dataclass(frozen=True, slots=True)
class LoadRow:
    """What a method did with so many requests at once."""

    pair: str
    clock: str
    method: str
    at_once: int
    requests: int
    tokens: int
    tokens_per_second: float  # of all requests together
    over_plain: float  # the same over that of plain decoding, as many at once
    ms_per_token: tuple[float, ...]  # of a request, percentiles 50, 95 and 99

    def to_dict(self) -> dict[str, Any]:
        """As plain values."""
        return asdict(self)


def run_load(
    lab: Lab,
    suites: Sequence[Suite],
    workload: Workload,
    methods: Sequence[str],
    clocks: Sequence[Clock],
    at_once: Sequence[int],
    progress: StepsDone,
) -> list[LoadRow]:
    """Decode the prompts' records by each method, on each clock, at each number of requests at once."""
    prompts = [(prompt, workload) for suite in suites for prompt in suite.prompts]
    records = lab.record(prompts, progress)
    rows, plain = list[LoadRow](), 0.0
    runs = [(clock, count, method) for clock in clocks for count in at_once for method in (BASELINE, *methods)]
    for done, (clock, count, method) in enumerate(runs):
        progress(f"{method}, {count} at once", done, len(runs))
        found = _decoded(lab, records, clock, method, count)
        plain = found.tokens_per_second if method == BASELINE else plain
        rows.append(_row(lab, clock, method, count, found, plain))
    progress("Done", len(runs), len(runs))
    return rows


def _decoded(lab: Lab, records: Sequence[Record], clock: Clock, method: str, count: int) -> Load:
    """Decode as many requests as keep all places busy; what is learned of a pair is known from a run before."""
    config, profile = default_setting(method).config, clock.profile
    assert config is not None and profile is not None
    many = list(records) * max(1, -(-TURNS * count // len(records)))
    experience = Experience(profile, lab.draft is not None)
    with closing(SeveralRecords(many, lab.draft)) as several:
        several.read_ahead()
        several.decode(config, profile, count, experience)
        return several.decode(config, profile, count, experience)


def _row(lab: Lab, clock: Clock, method: str, count: int, load: Load, plain: float) -> LoadRow:
    rate, times = load.tokens_per_second, load.seconds_per_token
    per_token = tuple(1000.0 * times[min(len(times) * part // 100, len(times) - 1)] for part in PERCENTILES)
    requests = len(load.requests)
    return LoadRow(lab.pair, clock.name, method, count, requests, load.tokens, rate, rate / plain, per_token)


def table(rows: Sequence[LoadRow]) -> list[str]:
    """The rows as lines for a terminal, a block for each clock."""
    lines: list[str] = []
    for clock in dict.fromkeys(row.clock for row in rows):
        lines += ["", f"{rows[0].pair}, time by profile {clock}, prompts not counted"]
        lines.append(f"{'method':23}{'at once':>8}{'tokens/s':>10}{'over plain':>12}   ms a token, p50 / p95 / p99")
        for row in (row for row in rows if row.clock == clock):
            times = " / ".join(f"{value:.1f}" for value in row.ms_per_token)
            figures = f"{row.at_once:8}{row.tokens_per_second:10.0f}{row.over_plain:11.2f}×"
            lines.append(f"{row.method:23}{figures}   {times}")
    return lines[1:]


def picture(rows: Sequence[LoadRow], clock: str) -> str:
    """How much faster than plain decoding each method is, over the number of requests at once."""
    here = [row for row in rows if row.clock == clock]
    lines = [
        ChartLine(name, [(float(row.at_once), row.over_plain) for row in here if row.method == name], marks=True)
        for name in dict.fromkeys(row.method for row in here)
    ]
    return line_chart(f"Requests at once, {clock}", lines, "requests at once", "× plain decoding")
