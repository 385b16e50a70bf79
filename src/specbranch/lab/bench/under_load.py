"""Methods under load: many requests in flight, replayed from records by a profile, or measured by the wall clock.

Owns the runs of `bench load` and their rows. Invariants: every method decodes the same prompts. A replayed request
emits its record; by the wall clock each text is compared with that of plain decoding.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from statistics import median
from typing import Any

from specbranch.answer import Output
from specbranch.charts import ChartLine, line_chart
from specbranch.clock.shipped import WALL
from specbranch.core.experience import Experience
from specbranch.core.orders import Orders, Reports
from specbranch.engine_core import raise_failure
from specbranch.lab.bench.clocks import Clock
from specbranch.lab.bench.methods import default_setting
from specbranch.lab.bench.recorded_pair import RecordedPair, Workload
from specbranch.lab.bench.results import BASELINE
from specbranch.lab.bench.table import late_note
from specbranch.lab.replay.bound import bound, named_tokens
from specbranch.lab.replay.record import Record
from specbranch.lab.replay.several import Load, SeveralRecords
from specbranch.lab.suites.suite import Suite, conversation
from specbranch.progress import StepsDone

TURNS = 2  # requests per slot of the batch: fewer are in flight while the last ones end
LEARNING = 2  # runs before the one that counts, for methods that learn
PERCENTILES = (50, 95, 99)


@dataclass(frozen=True, slots=True)
class LoadRow:
    """The figures of one method at one number of requests in flight."""

    pair: str
    clock: str
    method: str
    at_once: int
    requests: int
    tokens: int
    tokens_per_second: float  # of all requests together
    over_plain: float  # the same over that of plain decoding, as many at once
    ms_per_token: tuple[float, ...]  # of a request, percentiles 50, 95 and 99
    ms_to_first: tuple[float, ...] = ()  # TTFT, likewise; by a profile prefill takes no time
    repeats: int = 1
    differing: int = 0  # texts that differ from plain decoding's
    bound: float | None = None  # by a profile: the most that any choice of rows could gain over plain decoding
    # by the wall clock: time between two rounds that added tokens to the same request, over all gaps of all requests
    ms_between: tuple[float, ...] = ()
    late_captures: int = 0  # CUDA graphs captured and kernels compiled in the turns that count

    def to_dict(self) -> dict[str, Any]:
        """Return plain values."""
        return asdict(self)


def run_load(
    recorded: RecordedPair,
    suites: Sequence[Suite],
    workload: Workload,
    methods: Sequence[str],
    clocks: Sequence[Clock],
    at_once: Sequence[int],
    progress: StepsDone,
) -> list[LoadRow]:
    """Decode the prompts' records with each method, on each clock, at each number of requests in flight."""
    prompts = [(prompt, workload) for suite in suites for prompt in suite.prompts]
    records = recorded.record(prompts, progress)
    rows, plain, named = list[LoadRow](), 0.0, named_tokens(records, recorded.draft)
    runs = [(clock, count, method) for clock in clocks for count in at_once for method in (BASELINE, *methods)]
    for done, (clock, count, method) in enumerate(runs):
        progress(f"{method}, {count} at once", done, len(runs))
        found = _decoded(recorded, records, clock, method, count)
        plain = found.tokens_per_second if method == BASELINE else plain
        assert clock.profile is not None
        rows.append(_row(recorded, clock, method, count, found, plain, bound(clock.profile, count, named)))
    progress("Done", len(runs), len(runs))
    return rows


def _decoded(recorded: RecordedPair, records: Sequence[Record], clock: Clock, method: str, count: int) -> Load:
    """Decode enough requests to keep the batch full; the experience comes from earlier runs."""
    config, profile = default_setting(method).config, clock.profile
    assert config is not None and profile is not None
    many = list(records) * _rounds(count, len(records))
    experience = Experience(profile, recorded.draft is not None, recorded.prior)
    with closing(SeveralRecords(many, recorded.draft)) as several:
        several.read_ahead()
        for _ in range(LEARNING):
            several.decode(config, profile, count, experience)
        return several.decode(config, profile, count, experience)


def run_by_wall(
    recorded: RecordedPair,
    suites: Sequence[Suite],
    workload: Workload,
    methods: Sequence[str],
    at_once: Sequence[int],
    repeats: int,
    progress: StepsDone,
) -> list[LoadRow]:
    """Answer the prompts with each method at each number of requests in flight. Methods take turns; the first turn does
    not count."""
    tokenizer = recorded.llm.tokenizer
    prompts = [tokenizer.chat(conversation(prompt.turns[:1])) for suite in suites for prompt in suite.prompts]
    rows, names = list[LoadRow](), (BASELINE, *methods)
    steps = [(count, turn, method) for count in at_once for turn in range(repeats + 1) for method in names]
    runs: dict[str, list[_Answered]] = {}
    for done, (count, turn, method) in enumerate(steps):
        progress(f"{method}, {count} at once", done, len(steps))
        if turn == 0 and method == BASELINE:
            runs = {name: [] for name in names}
        found = _answered(recorded, prompts, workload, method, count)
        runs[method] += [found] if turn else []
        if turn == repeats and method == names[-1]:
            rows += [_wall_row(recorded, name, count, runs[name], runs[BASELINE]) for name in names]
    progress("Done", len(steps), len(steps))
    return rows


@dataclass(frozen=True, slots=True)
class _Answered:
    """The outputs of one batch of requests, and the time they took."""

    seconds: float
    outputs: tuple[Output, ...]
    gaps: tuple[float, ...]  # seconds between two rounds that added tokens to the same request
    late_captures: int

    @property
    def tokens_per_second(self) -> float:
        return sum(len(output.token_ids) for output in self.outputs) / self.seconds

    def of_each(self, name: str) -> list[float]:
        """Return a statistic of each request with more than one token."""
        return [output.stats[name] for output in self.outputs if len(output.token_ids) > 1]


class Arrivals:
    """When a request's rounds added tokens to it."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def note(self, orders: Orders, reports: Reports, added: int) -> None:
        """Note a round, as a session's `on_round`."""
        if added:
            self.times.append(time.perf_counter())

    def gaps(self) -> list[float]:
        """Return the time between each two of them."""
        return [later - earlier for earlier, later in pairwise(self.times)]


def _answered(
    recorded: RecordedPair, prompts: Sequence[list[int]], workload: Workload, method: str, count: int
) -> _Answered:
    config = default_setting(method).config
    assert config is not None
    llm, many = recorded.llm.using(speculative=config), list(prompts) * _rounds(count, len(prompts))
    params = replace(workload.params(), seed=workload.seed)
    answers = [answer for prompt in many for answer in llm.core.make_samples(prompt, params, llm.decoding)]
    arrivals = [Arrivals() for _ in answers]
    for answer, arrived in zip(answers, arrivals, strict=True):
        answer.session.on_round = arrived.note
    late, started = llm.core.late_captures, time.perf_counter()
    outputs = tuple(answer.output() for answer in llm.core.run_all(answers, count))
    seconds = time.perf_counter() - started
    for output in outputs:
        raise_failure(output)
    gaps = tuple(gap for arrived in arrivals for gap in arrived.gaps())
    return _Answered(seconds, outputs, gaps, llm.core.late_captures - late)


def _rounds(count: int, prompts: int) -> int:
    """Return how often the prompts are repeated, so that the batch is full most of the time."""
    return max(1, -(-TURNS * count // prompts))


def _wall_row(
    recorded: RecordedPair, method: str, count: int, runs: Sequence[_Answered], plain: Sequence[_Answered]
) -> LoadRow:
    """Combine a method's turns in one row: the median rate, and the median ratio to plain decoding in the same turn."""
    rates = [run.tokens_per_second for run in runs]
    ratios = [rate / other.tokens_per_second for rate, other in zip(rates, plain, strict=True)]
    outputs = [output for run in runs for output in run.outputs]
    texts = [output.token_ids for run in plain for output in run.outputs]
    rate_of_each = [rate for run in runs for rate in run.of_each("tokens_per_second")]
    return LoadRow(
        recorded.pair,
        WALL,
        method,
        count,
        len(runs[0].outputs),
        sum(len(output.token_ids) for output in runs[0].outputs),
        median(rates),
        median(ratios),
        _percentiles([1.0 / rate for rate in rate_of_each]),
        _percentiles([seconds for run in runs for seconds in run.of_each("ttft_seconds")]),
        len(runs),
        sum(output.token_ids != text for output, text in zip(outputs, texts, strict=True)),
        ms_between=_percentiles([gap for run in runs for gap in run.gaps]),
        late_captures=sum(run.late_captures for run in runs),
    )


def _percentiles(seconds: Sequence[float]) -> tuple[float, ...]:
    ordered = sorted(seconds) or [0.0]
    return tuple(1000.0 * ordered[min(len(ordered) * part // 100, len(ordered) - 1)] for part in PERCENTILES)


def _row(
    recorded: RecordedPair, clock: Clock, method: str, count: int, load: Load, plain: float, most: float
) -> LoadRow:
    rate, per_token = load.tokens_per_second, _percentiles(load.seconds_per_token)
    values = (recorded.pair, clock.name, method, count, len(load.requests), load.tokens, rate, rate / plain, per_token)
    return LoadRow(*values, bound=most)


def table(rows: Sequence[LoadRow]) -> list[str]:
    """Return the rows as lines for a terminal, one block per clock."""
    lines: list[str] = []
    for clock in dict.fromkeys(row.clock for row in rows):
        here = [row for row in rows if row.clock == clock]
        by_wall = clock == WALL
        said = (
            f"measured, median of {here[0].repeats} turns"
            if by_wall
            else f"time by profile {clock}, prompts not counted"
        )
        lines += ["", f"{rows[0].pair}, {said}"]
        first = f"   {'ms between rounds, p50 / p95 / p99':34}   ms to the first, p50 / p95 / p99" if by_wall else ""
        most = "" if by_wall else f"{'at most':>10}"
        head = f"{'method':23}{'at once':>8}{'tokens/s':>10}{'over plain':>12}{most}"
        head += f"   {'ms a token, p50 / p95 / p99':27}"
        lines.append((head + first).rstrip())
        for row in here:
            shown = row.ms_per_token, row.ms_between, row.ms_to_first
            times, between, before = (" / ".join(f"{ms:.1f}" for ms in one) for one in shown)
            figures = f"{row.at_once:8}{row.tokens_per_second:10.0f}{row.over_plain:11.2f}×"
            figures += f"{row.bound:9.2f}×" if row.bound is not None else ""
            lines.append(f"{row.method:23}{figures}   {times:27}   {between:34}   {before}".rstrip())
        if differing := sum(row.differing for row in here):
            lines.append(f"{differing} texts differ from plain decoding's.")
        if late := sum(row.late_captures for row in here):
            lines.append(late_note(late))
    return lines[1:]


def picture(rows: Sequence[LoadRow], clock: str) -> str:
    """Draw the speedup over plain decoding against the number of requests in flight."""
    here = [row for row in rows if row.clock == clock]
    lines = [
        ChartLine(name, [(float(row.at_once), row.over_plain) for row in here if row.method == name], marks=True)
        for name in dict.fromkeys(row.method for row in here)
    ]
    return line_chart(f"Requests at once, {clock}", lines, "requests at once", "× plain decoding")
