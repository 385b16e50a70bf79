"""What a round costs: seconds by rows, known from a profile or learned from the spans of the rounds themselves.

Owns the estimates. Invariant: an estimate is made of times and of how many rows were fed, of all sessions together,
never of which tokens these were.
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

KEPT = 15  # of the latest times at a number of rows; their median is the estimate
SLOPE = 0.05  # until more is known: each further row of the target costs this share of one
LANE = 0.05  # likewise, each further lane of a draft step
APART = 3  # steps by which two rounds differ that tell a draft's setup from its steps
MOST_SETUP = 0.9  # share of a draft's time that may count as setup
SLOW = 4.0  # times what is expected: such a time is believed once it is met twice in a row, as something may be set up
MOST_UNCOMPUTED = 24  # tokens of one session; more is prefill, not a decode step
Timed = Literal["target", "step", "setup", "slow_down", "draft_slow_down", "host"]
CostPoints = list[tuple[int, float]]  # seconds by rows, ascending
Padded = Callable[[int], int]  # the rows of a forward to those it is computed with


class Costs(Protocol):
    """Seconds of a target forward by its rows, of a draft step by its width, and what overlap adds."""

    @property
    def overlap(self) -> bool:
        """Whether the draft can work while the target does."""
        ...

    @property
    def knows_target(self) -> bool:
        """Whether it can say what a target forward takes."""
        ...

    @property
    def knows_draft(self) -> bool:
        """Whether it can say what a draft step takes."""
        ...

    @property
    def prices_all(self) -> bool:
        """Whether a round takes no time but what it is priced at, so that nobody has to look what came of a plan."""
        ...

    @property
    def begins_ahead(self) -> bool:
        """Whether a round that follows from a verdict whatever it is can be begun with it."""
        ...

    @property
    def ahead_saves(self) -> float:
        """Seconds that this saves, about."""
        ...

    @property
    def draft_setup(self) -> float:
        """Seconds that a draft takes once for all the steps of a round."""
        ...

    @property
    def slow_down(self) -> float:
        """Seconds added to the target for each draft step run beside it."""
        ...

    @property
    def draft_slow_down(self) -> float:
        """Seconds added to each draft step run beside the target."""
        ...

    @property
    def host(self) -> float:
        """Seconds a round costs outside both models."""
        ...

    def target_seconds(self, tokens: int, context: float | None = None) -> float:
        """Seconds of one target forward over `tokens` rows, after so many others."""
        ...

    def draft_seconds(self, width: int, context: float | None = None) -> float:
        """Seconds of one draft forward over `width` rows."""
        ...


class LearnedCosts:
    """Costs as rounds have shown them: the latest times of each kind, by rows. What has no rows is filed under 0.

    Where the target's forwards are padded, all of one size share their times.
    """

    prices_all = False  # planning itself takes time

    def __init__(self, overlap: bool = True, padded: Padded | None = None, begins_ahead: bool = False) -> None:
        self.overlap, self.begins_ahead = overlap, begins_ahead
        self._padded = padded
        self.times: dict[Timed, dict[int, deque[float]]] = {kind: {} for kind in get_args(Timed)}
        # what was learned since it was last written down, where that is done
        self.news: list[tuple[Timed, int, float]] | None = None
        self._medians: dict[Timed, dict[int, float]] = {kind: {} for kind in get_args(Timed)}
        self._sorted: dict[Timed, CostPoints] = {}  # until another time comes in
        self._begun: set[tuple[Timed, int]] = set()
        self._doubted: set[tuple[Timed, int]] = set()
        self._ended: float | None = None
        self._drafts: dict[tuple[int, int], float] = {}  # the latest seconds of a round's draft, by steps and width

    @property
    def draft_setup(self) -> float:
        """Seconds that a draft takes once for all the steps of a round."""
        return _at(self._points("setup"), 0, 0.0)

    @property
    def slow_down(self) -> float:
        """Seconds added to the target for each draft step run beside it."""
        return max(_at(self._points("slow_down"), 0, 0.0), 0.0)

    @property
    def draft_slow_down(self) -> float:
        """Seconds added to each draft step run beside the target."""
        return max(_at(self._points("draft_slow_down"), 0, 0.0), 0.0)

    @property
    def host(self) -> float:
        """Seconds between two rounds."""
        return _at(self._points("host"), 0, 0.0)

    @property
    def ahead_saves(self) -> float:
        """What is begun with a verdict waits for nearly nothing, the others longer than rounds do on average."""
        return self.host

    @property
    def knows_target(self) -> bool:
        """Whether a step of the target has been timed."""
        return bool(self.times["target"])

    @property
    def knows_draft(self) -> bool:
        """Whether a draft step has been timed."""
        return bool(self.times["step"])

    def target_seconds(self, tokens: int, context: float | None = None) -> float:
        """Seconds of one target forward over `tokens` rows; times are of late, so the context is that of the text."""
        return _at(self._points("target"), self._size("target", tokens), SLOPE)

    def draft_seconds(self, width: int, context: float | None = None) -> float:
        """Seconds of one draft forward over `width` rows."""
        return _at(self._points("step"), width, LANE)

    def pause(self) -> None:
        """What comes next does not follow on the last round."""
        self._ended = None

    def add(self, kind: Timed, rows: int, seconds: float) -> None:
        """Take in what was measured. The first time of about so many rows is dropped: something may be set up."""
        begun = (kind, rows.bit_length())
        if begun in self._begun:
            self.count(kind, rows, seconds)
        self._begun.add(begun)

    def count(self, kind: Timed, rows: int, seconds: float) -> None:
        """Take in what was measured, and note it where news are wanted."""
        self.take(kind, rows, seconds)
        if self.news is not None:
            self.news.append((kind, rows, seconds))

    def take(self, kind: Timed, rows: int, seconds: float) -> None:
        """Take in a time, and nothing else."""
        rows = self._size(kind, rows)
        times = self.times[kind].setdefault(rows, deque(maxlen=KEPT))
        times.append(seconds)
        self._medians[kind][rows] = median(times)
        self._sorted.pop(kind, None)

    def observe(self, orders: Mapping[int, Orders], reports: Mapping[int, Reports]) -> None:
        """Learn from a round of all sessions."""
        drafting = next((report.drafting for report in reports.values() if report.drafting), None)
        verifying = next((report.verifying for report in reports.values() if report.verifying), None)
        steps = _steps(reports)
        overlaps = drafting is not None and verifying is not None and _overlap(drafting, verifying)
        if drafting is not None and steps and not any(_reads(order.draft) for order in orders.values()):
            self._drafted(drafting, steps, overlaps)
        if verifying is not None and not any(order.prefill or _reads(order.verify) for order in orders.values()):
            self._verified(verifying, len(steps) if overlaps else 0)
        self._between([span for span in (drafting, verifying) if span is not None])

    def _size(self, kind: Timed, rows: int) -> int:
        """Under how many rows a time is filed."""
        return self._padded(rows) if self._padded is not None and kind == "target" else rows

    def _points(self, kind: Timed) -> CostPoints:
        if kind not in self._sorted:
            self._sorted[kind] = sorted(self._medians[kind].items())
        return self._sorted[kind]

    def _drafted(self, span: Span, steps: list[int], overlaps: bool) -> None:
        """Learn from the draft's part of a round. Until a step was timed alone, its time with overlap stands in."""
        if overlaps and self.knows_draft:
            seconds = (span.seconds - self.draft_setup) / len(steps)
            self.add("draft_slow_down", 0, seconds - self.draft_seconds(_mean(steps)))
        elif not self._doubts("step", _mean(steps), span.seconds, self._draft_expected(steps)):
            self.drafted(steps, span.seconds, self.add)

    def _draft_expected(self, steps: Sequence[int]) -> float:
        return self.draft_setup + len(steps) * self.draft_seconds(_mean(steps))

    def _doubts(self, kind: Timed, rows: int, seconds: float, expected: float) -> bool:
        """Whether a time is left out: it is many times what is expected, where anything is, and the last was not."""
        at = kind, self._size(kind, rows)
        if 0.0 < SLOW * expected < seconds and at not in self._doubted:
            self._doubted.add(at)
            return True
        self._doubted.discard(at)
        return False

    def drafted(self, steps: Sequence[int], seconds: float, add: Callable[[Timed, int, float], None]) -> None:
        """Learn from a draft that worked alone: what its steps took, and what comes once for all of them."""
        width = _mean(steps)
        if (setup := self._setup_beside(len(steps), width, seconds)) is not None:
            add("setup", 0, setup)
        self._drafts[len(steps), width] = seconds
        add("step", width, max(seconds - self.draft_setup, (1.0 - MOST_SETUP) * seconds) / len(steps))

    def _setup_beside(self, steps: int, width: int, seconds: float) -> float | None:
        """What comes once for all steps, by a round of another length and about the same width; None: none was met."""
        others = [at for at in self._drafts if abs(at[0] - steps) >= APART and abs(at[1] - width) <= 1]
        if not others:
            return None
        other = max(others, key=lambda at: abs(at[0] - steps))
        step = (seconds - self._drafts[other]) / (steps - other[0])
        shorter, count = min((seconds, steps), (self._drafts[other], other[0]), key=itemgetter(1))
        return min(max(shorter - step * count, 0.0), MOST_SETUP * shorter)

    def _verified(self, span: Span, steps: int) -> None:
        """Learn from the target's part of a round, so many draft steps beside it."""
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


def _reads(order: DraftOrder | Verify | None) -> bool:
    """Whether an order begins with prefill."""
    return order is not None and (
        isinstance(order, Prefill) or order.on.base == 0 or len(order.on.tail) > MOST_UNCOMPUTED
    )


def _mean(steps: Sequence[int]) -> int:
    return round(sum(steps) / len(steps))


def _overlap(one: Span, other: Span) -> bool:
    return min(one.end, other.end) > max(one.start, other.start)


def _steps(reports: Mapping[int, Reports]) -> list[int]:
    """The rows of each draft step of a round: those of all sessions, which step together."""
    return [sum(widths) for widths in zip_longest(*(_steps_of(report) for report in reports.values()), fillvalue=0)]


def _steps_of(report: Reports) -> list[int]:
    if report.tree is not None:
        return list(report.tree.steps)
    longest = max((len(branch.confidence) for branch in report.branches), default=0)
    return [len(report.branches)] * longest


def _at(points: CostPoints, rows: int, slope: float) -> float:
    """Interpolate between the numbers of rows that were timed; beyond them go on by the slope between the ends."""
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
