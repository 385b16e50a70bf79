"""What a round costs: seconds by rows, known from a profile or learned from the spans of the rounds themselves.

Owns the estimates. Invariant: an estimate is made of times and of how many rows were fed, never of which tokens these were.
"""

from __future__ import annotations

from collections import deque
from statistics import median
from typing import Protocol

from specbranch.core.orders import Orders, Reports, Span

KEPT = 15  # of the latest times at a number of rows; their median is the estimate
SLOPE = 0.05  # until more is known: each further row of the target costs this share of one
LANE = 0.05  # likewise, each further lane of a draft step
MOST_ROWS = 24  # more is reading a text, not a round


class Costs(Protocol):
    """Seconds of a target forward by its rows, of a draft step by its width, and what overlap adds; a cost profile is one."""

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


class Running:
    """The median of the latest values; the first one is dropped, it may have had something to set up."""

    def __init__(self) -> None:
        self._values: deque[float] = deque(maxlen=KEPT)
        self._first = True

    def add(self, value: float) -> None:
        """Take a value in."""
        if not self._first:
            self._values.append(value)
        self._first = False

    @property
    def value(self) -> float | None:
        """The estimate, None before the second value."""
        return median(self._values) if self._values else None


class LearnedCosts:
    """Costs as the rounds so far have shown them."""

    draft_slow_down = 0.0  # part of the steps' own times where they are beside the target

    def __init__(self, overlap: bool = True) -> None:
        self.overlap = overlap
        self._target: dict[int, Running] = {}
        self._step: dict[int, Running] = {}
        self._slow_down = Running()
        self._host = Running()
        self._ended: float | None = None

    @property
    def slow_down(self) -> float:
        """Seconds added to the target for each draft step run beside it."""
        return max(self._slow_down.value or 0.0, 0.0)

    @property
    def host(self) -> float:
        """Seconds between two rounds."""
        return self._host.value or 0.0

    @property
    def knows_target(self) -> bool:
        """Whether a plain step has been timed."""
        return 1 in self._target and self._target[1].value is not None

    @property
    def knows_draft(self) -> bool:
        """Whether a draft step has been timed."""
        return 1 in self._step and self._step[1].value is not None

    def target_seconds(self, tokens: int, context: float | None = None) -> float:
        """Seconds of one target forward over `tokens` rows; times are of late, so the context is that of the text."""
        return _at(self._target, tokens, SLOPE)

    def draft_seconds(self, width: int, context: float | None = None) -> float:
        """Seconds of one draft forward over `width` rows."""
        return _at(self._step, width, LANE)

    def pause(self) -> None:
        """What comes next does not follow on the last round."""
        self._ended = None

    def observe(self, orders: Orders, reports: Reports) -> None:
        """Learn from a round."""
        drafting, verifying = reports.drafting, reports.verifying
        beside = drafting is not None and verifying is not None and min(drafting.end, verifying.end) > max(drafting.start, verifying.start)
        if drafting is not None and orders.draft is not None and len(orders.draft.on.tail) <= MOST_ROWS and _steps(reports):
            self._drafted(reports, drafting)
        if verifying is not None and orders.verify is not None:
            self._verified(orders, reports, verifying, beside)
        self._between([span for span in (drafting, verifying) if span is not None])

    def _drafted(self, reports: Reports, span: Span) -> None:
        steps = _steps(reports)
        width = round(sum(steps) / len(steps))
        self._step.setdefault(width, Running()).add(span.seconds / len(steps))

    def _verified(self, orders: Orders, reports: Reports, span: Span, beside: bool) -> None:
        assert orders.verify is not None
        rows = len(orders.verify.on.tail) + len(orders.verify.tokens)
        if rows > MOST_ROWS:
            return
        if not beside:
            self._target.setdefault(rows, Running()).add(span.seconds)
        elif self._target and (steps := _steps(reports)):
            self._slow_down.add((span.seconds - self.target_seconds(rows)) / len(steps))

    def _between(self, spans: list[Span]) -> None:
        if not spans:
            return
        if self._ended is not None:
            self._host.add(max(min(span.start for span in spans) - self._ended, 0.0))
        self._ended = max(span.end for span in spans)


def _steps(reports: Reports) -> list[int]:
    """The rows of each draft step of a round."""
    if reports.tree is not None:
        return list(reports.tree.steps)
    longest = max((len(branch.confidence) for branch in reports.branches), default=0)
    return [len(reports.branches)] * longest


def _at(known: dict[int, Running], rows: int, slope: float) -> float:
    """Interpolate between the numbers of rows that were timed; beyond them go on by the slope between the ends, at least flat."""
    points = sorted((n, value) for n, running in known.items() if (value := running.value) is not None)
    if not points:
        return 0.0
    below = [p for p in points if p[0] <= rows]
    above = [p for p in points if p[0] >= rows]
    if below and above:
        (x0, y0), (x1, y1) = below[-1], above[0]
        return y0 if x0 == x1 else y0 + (y1 - y0) * (rows - x0) / (x1 - x0)
    (x0, y0), (x1, y1) = points[0], points[-1]
    rise = max((y1 - y0) / (x1 - x0), 0.0) if x1 > x0 else slope * y0
    near = points[-1] if below else points[0]
    return max(near[1] + rise * (rows - near[0]), 0.25 * near[1])
