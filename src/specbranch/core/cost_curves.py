"""Estimates of seconds: medians of the latest values, curves by rows, and what rounds of the forest take.

Owns the arithmetic. Does not own what is timed, or when (`costs.py`). Invariant: a single slow round moves no estimate.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from statistics import median

TIMES_KEPT = 15  # latest values that a median is taken of
LATEST = 31  # rounds of a size whose median counts, the time at load among them
AT_LOAD = 4  # rounds that the time at load counts as
FOREST_PRIOR = 3  # rounds of the forest that the times at load count as
LEAST_OF_LOAD, MOST_OF_LOAD = 0.5, 4.0  # bounds of a draft step's seconds in the forest, by those timed at load
MOST_BESIDE = 3.0  # bound of what such a round takes beside its forwards, by its verify
FOREST_SETTLED = (
    9  # rounds of the forest, with draft steps or without, after which later ones move the machine's factor
)
CostPoints = list[tuple[int, float]]  # seconds by rows, ascending


class Recent:
    """The median of the latest values."""

    def __init__(self, values: Sequence[float] = ()) -> None:
        self.values: deque[float] = deque(values, maxlen=TIMES_KEPT)

    def add(self, value: float) -> None:
        """Take in a value."""
        self.values.append(value)

    @property
    def median(self) -> float:
        """The median; 0 while there is no value."""
        return median(self.values) if self.values else 0.0


class Curve:
    """Seconds by rows: timed points, each corrected slowly by later rounds."""

    def __init__(self, slope: float) -> None:
        """`slope`: share of the seconds of one row that each further row adds, until more is timed."""
        self.points: dict[int, float] = {}
        self._slope = slope
        self._sorted: CostPoints = []
        self._latest: dict[int, deque[float]] = {}  # seconds of each size
        self._first: dict[int, float] = {}  # what the first forward of a size took, if it was not timed at load

    def set(self, rows: int, seconds: float) -> None:
        """Note a time that was measured at load."""
        self.points[rows] = seconds
        self._sorted = sorted(self.points.items())

    def seconds(self, rows: int) -> float:
        """Return the seconds for so many rows."""
        return seconds_at(self._sorted, rows, self._slope)

    def covers(self, rows: int) -> bool:
        """True if this size, or smaller and larger ones, have been timed."""
        return bool(self.points) and self._sorted[0][0] <= rows <= self._sorted[-1][0]

    def meet(self, rows: int, seconds: float) -> bool:
        """Note a time of a size beyond the timed ones; returns False for any other size.

        The first one may include a setup. So the shorter of the first two counts.
        """
        if self.covers(rows):
            return False
        if rows in self._first:
            self.set(rows, min(self._first.pop(rows), seconds))
        else:
            self._first[rows] = seconds
        return True

    def meets(self, rows: int) -> bool:
        """Note a round of a size; returns False for the very first: it may include a setup."""
        if rows in self._latest:
            return True
        self._latest[rows] = deque([self.seconds(rows)] * AT_LOAD, maxlen=LATEST)
        return False

    def correct(self, rows: int, seconds: float) -> None:
        """Take in the seconds of a round, on a machine as fast as at load: the median of the latest counts, the time at
        load among them."""
        self._latest[rows].append(seconds)
        self.set(rows, median(self._latest[rows]))


class ForestCosts:
    """What rounds of the forest take beyond the times of their forwards at load, on a machine as fast as then."""

    def __init__(self) -> None:
        self._beside = Recent([0.0] * FOREST_PRIOR)  # seconds of a round without draft steps
        self._drafts = Recent([1.0] * FOREST_PRIOR)  # seconds of draft steps, by those timed at load
        self._seen = {False: 0, True: 0}  # rounds without draft steps, and with some

    @property
    def beside(self) -> float:
        """Seconds of a round beside its verify and its draft steps."""
        return self._beside.median

    @property
    def drafting(self) -> float:
        """Seconds of draft steps in a round, by those timed at load."""
        return self._drafts.median

    def expected(self, verify: float, drafts: float) -> float | None:
        """Return the seconds of such a round; None: too few of its kind were seen."""
        known = self._seen[drafts > 0.0] >= FOREST_SETTLED
        return verify + self.beside + self.drafting * drafts if known else None

    def observe(self, whole: float, verify: float, drafts: float) -> None:
        """Take in a round; `verify` and `drafts`: what its forwards took at load."""
        self._seen[drafts > 0.0] += 1
        left, before = whole - verify, self.beside
        explained = left  # what is beside the verify, by these draft steps
        if drafts > 0.0:
            self._drafts.add(min(max((left - before) / drafts, LEAST_OF_LOAD), MOST_OF_LOAD))
            explained = min(max(before, left - MOST_OF_LOAD * drafts), left - LEAST_OF_LOAD * drafts)
        if drafts == 0.0 or explained != before:  # draft steps alone do not explain that
            self._beside.add(min(max(explained, 0.0), MOST_BESIDE * verify))


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
