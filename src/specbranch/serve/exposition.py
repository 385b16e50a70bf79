"""Counters, gauges and histograms in the text format of Prometheus.

Owns that format (version 0.0.4), but not which metrics there are. Invariant: a counter only increases, and a name is
declared once.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Literal

Labels = tuple[tuple[str, str], ...]


class Series:
    """A metric with its labels: a counter that increases, or a gauge that is set."""

    def __init__(self, kind: Literal["counter", "gauge"], name: str, about: str) -> None:
        self.kind, self.name, self.about = kind, name, about
        self._values: dict[Labels, float] = {}

    def add(self, value: float, **labels: str) -> None:
        """Add to a counter."""
        key = tuple(labels.items())
        self._values[key] = self._values.get(key, 0.0) + value

    def set(self, value: float, **labels: str) -> None:
        """Set the value; also of a counter that is counted elsewhere."""
        self._values[tuple(labels.items())] = value

    def lines(self, common: Labels) -> Iterator[str]:
        """Yield its lines. A metric without labels that was never counted is 0."""
        for labels, value in (self._values or {(): 0.0}).items():
            yield f"{self.name}{_braced((*common, *labels))} {_number(value)}"


class Histogram:
    """Counts observations by their size."""

    kind = "histogram"

    def __init__(self, name: str, about: str, bounds: Sequence[float]) -> None:
        self.name, self.about, self._bounds = name, about, tuple(bounds)
        self._counts, self._sum = [0] * (len(bounds) + 1), 0.0

    def observe(self, value: float) -> None:
        """Count one observation."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def lines(self, common: Labels) -> Iterator[str]:
        """Yield its lines: how many observations were at most as large as each bound."""
        for bound, count in zip((*self._bounds, float("inf")), accumulate(self._counts), strict=True):
            yield f"{self.name}_bucket{_braced((*common, ('le', _number(bound))))} {count}"
        yield f"{self.name}_sum{_braced(common)} {_number(self._sum)}"
        yield f"{self.name}_count{_braced(common)} {sum(self._counts)}"


def exposed(metrics: Sequence[Series | Histogram], common: Mapping[str, str]) -> str:
    """Return all metrics as text, each with the common labels."""
    lines: list[str] = []
    for metric in metrics:
        lines += [f"# HELP {metric.name} {metric.about}", f"# TYPE {metric.name} {metric.kind}"]
        lines += metric.lines(tuple(common.items()))
    return "\n".join(lines) + "\n"


def _braced(labels: Labels) -> str:
    return "{" + ",".join(f'{name}="{_escaped(value)}"' for name, value in labels) + "}" if labels else ""


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _number(value: float) -> str:
    return "+Inf" if value == float("inf") else repr(int(value)) if value == int(value) else repr(value)
