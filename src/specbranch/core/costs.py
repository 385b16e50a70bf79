"""What a round costs: seconds by rows, from a cost profile or learned from the spans of earlier rounds.

Owns the estimates; what they are used for is the planner's. Invariant: an estimate depends on measured times and on the
number of rows of all sessions together, never on which tokens these are.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from itertools import zip_longest
from operator import itemgetter
from statistics import median
from typing import Literal, Protocol, get_args

from specbranch.core.orders import DraftOrder, Orders, Prefill, Reports, Span, Verify

TIMES_KEPT = 15  # times that are kept for a number of rows; their median is the estimate
SLOPE = 0.05  # share of the seconds of one row that each further row of a target forward adds, until more is timed
LANE = 0.05  # the same for each further row of a draft step
APART = 3  # steps by which two rounds have to differ to separate the draft's setup from its steps
MOST_SETUP = 0.9  # share of a draft's seconds that may count as setup
SLOW = 4.0  # a time over this many times the expected one counts only if the next is as slow: it may be a setup
MOST_UNCOMPUTED = 24  # tokens of one session; more is prefill, not a decode step
Timed = Literal["target", "step", "setup", "slow_down", "draft_slow_down", "host"]
CostPoints = list[tuple[int, float]]  # seconds by rows, ascending
Padded = Callable[[int], int]  # the rows of a forward to those it is computed with


class Costs(Protocol):
    """Seconds of a target forward by its rows, of a draft step by its width, and what overlap adds."""

    @property
    def overlap(self) -> bool:
        """True if draft and target can work at the same time."""
        ...

    @property
    def knows_target(self) -> bool:
        """True if the seconds of a target forward are known."""
        ...

    @property
    def knows_draft(self) -> bool:
        """True if the seconds of a draft step are known."""
        ...

    @property
    def prices_all(self) -> bool:
        """True if the cost model covers the whole round; then no comparison with plain decoding is needed."""
        ...

    @property
    def launches_ahead(self) -> bool:
        """True if a device can launch the next round right after a verdict, before the host has seen it."""
        ...

    @property
    def ahead_saves(self) -> float:
        """Seconds that launching ahead saves in a round, about."""
        ...

    @property
    def draft_setup(self) -> float:
        """Seconds that the draft needs once in a round, beside its steps."""
        ...

    @property
    def slow_down(self) -> float:
        """Seconds that each draft step adds to a target forward at the same time."""
        ...

    @property
    def draft_slow_down(self) -> float:
        """Seconds that a target forward adds to each draft step at the same time."""
        ...

    @property
    def host(self) -> float:
        """Seconds of a round outside both models."""
        ...

    def target_seconds(self, tokens: int, context: float | None = None) -> float:
        """Return the seconds of one target forward over `tokens` rows, behind `context` tokens."""
        ...

    def draft_seconds(self, width: int, context: float | None = None) -> float:
        """Return the seconds of one draft forward over `width` rows."""
        ...


class LearnedCosts:
    """Costs learned from rounds: the latest times of each kind, by rows. What has no rows is filed under 0.

    If target forwards are padded, all forwards of one padded size share their times.
    """

    prices_all = False  # planning itself takes time

    def __init__(self, overlap: bool = True, padded: Padded | None = None, launches_ahead: bool = False) -> None:
        self.overlap, self.launches_ahead = overlap, launches_ahead
        self._padded = padded
        self.times: dict[Timed, dict[int, deque[float]]] = {kind: {} for kind in get_args(Timed)}
        # what was learned since the last save; None: nothing is saved
        self.news: list[tuple[Timed, int, float]] | None = None
        self._medians: dict[Timed, dict[int, float]] = {kind: {} for kind in get_args(Timed)}
        self._sorted: dict[Timed, CostPoints] = {}  # a cache, until the next time is added
        self._first_dropped: set[tuple[Timed, int]] = set()
        self._doubted: set[tuple[Timed, int]] = set()
        self._ended: float | None = None
        self._drafts: dict[tuple[int, int], float] = {}  # the latest seconds of drafting in a round, by steps and width

    @property
    def draft_setup(self) -> float:
        """Seconds that the draft needs once in a round, beside its steps."""
        return seconds_at(self._points("setup"), 0, 0.0)

    @property
    def slow_down(self) -> float:
        """Seconds that each draft step adds to a target forward at the same time."""
        return max(seconds_at(self._points("slow_down"), 0, 0.0), 0.0)

    @property
    def draft_slow_down(self) -> float:
        """Seconds that a target forward adds to each draft step at the same time."""
        return max(seconds_at(self._points("draft_slow_down"), 0, 0.0), 0.0)

    @property
    def host(self) -> float:
        """Seconds between the end of a round and the start of the next."""
        return seconds_at(self._points("host"), 0, 0.0)

    @property
    def ahead_saves(self) -> float:
        """Seconds that launching ahead saves: the host's part of a round.

        A round launched ahead waits for almost nothing; the others wait longer than the average.
        """
        return self.host

    @property
    def knows_target(self) -> bool:
        """True if a target forward has been timed."""
        return bool(self.times["target"])

    @property
    def knows_draft(self) -> bool:
        """True if a draft step has been timed."""
        return bool(self.times["step"])

    def target_seconds(self, tokens: int, context: float | None = None) -> float:
        """Return the seconds of one target forward over `tokens` rows.

        `context` is ignored: the latest times are those at the present context length.
        """
        return seconds_at(self._points("target"), self._size("target", tokens), SLOPE)

    def covers(self, rows: int) -> bool:
        """True if target forwards of this size, or of smaller and larger ones, have been timed."""
        sizes = self.times["target"]
        return bool(sizes) and min(sizes) <= self._size("target", rows) <= max(sizes)

    def draft_seconds(self, width: int, context: float | None = None) -> float:
        """Return the seconds of one draft forward over `width` rows."""
        return seconds_at(self._points("step"), width, LANE)

    def pause(self) -> None:
        """Note an idle pause: the time to the next round is no host time."""
        self._ended = None

    def add(self, kind: Timed, rows: int, seconds: float) -> None:
        """Learn a measured time. The first one at about this number of rows is dropped: it may include setup."""
        size = (kind, rows.bit_length())
        if size in self._first_dropped:
            self.count(kind, rows, seconds)
        self._first_dropped.add(size)

    def count(self, kind: Timed, rows: int, seconds: float) -> None:
        """Learn a measured time, and note it as news for the next save."""
        self.take(kind, rows, seconds)
        if self.news is not None:
            self.news.append((kind, rows, seconds))

    def take(self, kind: Timed, rows: int, seconds: float) -> None:
        """Learn a time without noting it as news."""
        rows = self._size(kind, rows)
        times = self.times[kind].setdefault(rows, deque(maxlen=TIMES_KEPT))
        times.append(seconds)
        self._medians[kind][rows] = median(times)
        self._sorted.pop(kind, None)

    def observe(self, orders: Mapping[int, Orders], reports: Mapping[int, Reports], prefilled: bool = False) -> None:
        """Learn from a round of all sessions together; `prefilled`: its forward had prompt tokens of the round before.

        A forward with prompt tokens says nothing about decode rows.
        """
        drafting = next((report.drafting for report in reports.values() if report.drafting), None)
        verifying = next((report.verifying for report in reports.values() if report.verifying), None)
        steps = _steps(reports)
        overlaps = drafting is not None and verifying is not None and _overlap(drafting, verifying)
        if drafting is not None and steps and not any(_prefills(order.draft) for order in orders.values()):
            self._drafted(drafting, steps, overlaps)
        prefilled = prefilled or any(order.prefill or _prefills(order.verify) for order in orders.values())
        if verifying is not None and not prefilled:
            self._verified(verifying, len(steps) if overlaps else 0)
        self._between([span for span in (drafting, verifying) if span is not None])

    def _size(self, kind: Timed, rows: int) -> int:
        """Return the number of rows under which a time is filed."""
        return self._padded(rows) if self._padded is not None and kind == "target" else rows

    def _points(self, kind: Timed) -> CostPoints:
        if kind not in self._sorted:
            self._sorted[kind] = sorted(self._medians[kind].items())
        return self._sorted[kind]

    def _drafted(self, span: Span, steps: list[int], overlaps: bool) -> None:
        """Learn from the draft's part of a round.

        Until a step has been timed alone, an overlapped one counts instead.
        """
        if overlaps and self.knows_draft:
            seconds = (span.seconds - self.draft_setup) / len(steps)
            self.add("draft_slow_down", 0, seconds - self.draft_seconds(_mean(steps)))
        elif not self._doubts("step", _mean(steps), span.seconds, self._draft_expected(steps)):
            self.drafted(steps, span.seconds, self.add)

    def _draft_expected(self, steps: Sequence[int]) -> float:
        return self.draft_setup + len(steps) * self.draft_seconds(_mean(steps))

    def _doubts(self, kind: Timed, rows: int, seconds: float, expected: float) -> bool:
        """True if a time is dropped as an outlier: SLOW times the expected one, and the time before it was not."""
        at = kind, self._size(kind, rows)
        if 0.0 < SLOW * expected < seconds and at not in self._doubted:
            self._doubted.add(at)
            return True
        self._doubted.discard(at)
        return False

    def drafted(self, steps: Sequence[int], seconds: float, add: Callable[[Timed, int, float], None]) -> None:
        """Learn from a draft that worked alone: the seconds of its steps, and those of its setup."""
        width = _mean(steps)
        if (setup := self._setup_beside(len(steps), width, seconds)) is not None:
            add("setup", 0, setup)
        self._drafts[len(steps), width] = seconds
        add("step", width, max(seconds - self.draft_setup, (1.0 - MOST_SETUP) * seconds) / len(steps))

    def _setup_beside(self, steps: int, width: int, seconds: float) -> float | None:
        """Return the setup's seconds, by an earlier round with other steps and about the same width; None: there is
        none."""
        others = [at for at in self._drafts if abs(at[0] - steps) >= APART and abs(at[1] - width) <= 1]
        if not others:
            return None
        other = max(others, key=lambda at: abs(at[0] - steps))
        step = (seconds - self._drafts[other]) / (steps - other[0])
        shorter, count = min((seconds, steps), (self._drafts[other], other[0]), key=itemgetter(1))
        return min(max(shorter - step * count, 0.0), MOST_SETUP * shorter)

    def _verified(self, span: Span, steps: int) -> None:
        """Learn from the target's part of a round; `steps`: draft steps at the same time."""
        if not steps:
            if not self._doubts("target", span.tokens, span.seconds, self.target_seconds(span.tokens)):
                self.add("target", span.tokens, span.seconds)
        elif self.knows_target:
            self.add("slow_down", 0, (span.seconds - self.target_seconds(span.tokens)) / steps)

    def _between(self, spans: list[Span]) -> None:
        if not spans:
            return
        if self._ended is not None:
            self.add("host", 0, max(min(span.start for span in spans) - self._ended, 0.0))
        self._ended = max(span.end for span in spans)


def _prefills(order: DraftOrder | Verify | None) -> bool:
    """True if an order begins with prefill."""
    return order is not None and (
        isinstance(order, Prefill) or order.on.base == 0 or len(order.on.tail) > MOST_UNCOMPUTED
    )


def _mean(steps: Sequence[int]) -> int:
    return round(sum(steps) / len(steps))


def _overlap(one: Span, other: Span) -> bool:
    return min(one.end, other.end) > max(one.start, other.start)


def _steps(reports: Mapping[int, Reports]) -> list[int]:
    """Return the rows of each draft step of a round; all sessions step together."""
    return [sum(widths) for widths in zip_longest(*(_steps_of(report) for report in reports.values()), fillvalue=0)]


def _steps_of(report: Reports) -> list[int]:
    if report.tree is not None:
        return list(report.tree.steps)
    longest = max((len(branch.confidence) for branch in report.branches), default=0)
    return [len(report.branches)] * longest


def seconds_at(points: CostPoints, rows: int, slope: float) -> float:
    """Interpolate between the timed numbers of rows; beyond them extrapolate by the slope between the ends."""
    if not points:
        return 0.0
    at = bisect_left(points, (rows,))
    if at < len(points) and points[at][0] == rows:
        return points[at][1]
    if 0 < at < len(points):
        (x0, y0), (x1, y1) = points[at - 1], points[at]
        return y0 + (y1 - y0) * (rows - x0) / (x1 - x0)
    (x0, y0), (x1, y1) = points[0], points[-1]
    rise = max((y1 - y0) / (x1 - x0), 0.0) if x1 > x0 else slope * y0
    near = points[-1] if at else points[0]
    return max(near[1] + rise * (rows - near[0]), 0.25 * near[1])
