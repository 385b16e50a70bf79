"""The metrics of several replicas as one text for Prometheus.

Owns the label `replica` and the order of the metrics. Invariant: a metric is declared once, and all its lines follow
its declaration, as the format demands.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

REPLICA_LABEL = "replica"
_SAMPLE = re.compile(r"([A-Za-z_:][\w:]*)(\{)?(.*)", re.DOTALL)


@dataclass(slots=True)
class _Metric:
    """One metric: its declaration, and its lines of all replicas."""

    head: list[str] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)


def merged(texts: Mapping[str, str]) -> str:
    """Return the metrics of all replicas, each line with the label of its replica. `texts`: by that label."""
    metrics: dict[str, _Metric] = {}
    for replica, text in texts.items():
        _add(metrics, replica, text)
    lines = [line for metric in metrics.values() for line in (*metric.head, *metric.lines)]
    return "\n".join(lines) + "\n" if lines else ""


def _add(metrics: dict[str, _Metric], replica: str, text: str) -> None:
    name, known = "", set(metrics)
    for line in text.splitlines():
        if line.startswith(("# HELP ", "# TYPE ")):
            name = line.split(" ", 3)[2]
            metric = metrics.setdefault(name, _Metric())
            if name not in known:
                metric.head.append(line)
        elif line and not line.startswith("#"):
            metrics.setdefault(name, _Metric()).lines.append(_labelled(line, replica))


def _labelled(line: str, replica: str) -> str:
    """Return a sample with the label of its replica as the first one."""
    found = _SAMPLE.fullmatch(line)
    assert found is not None, line
    name, braced, rest = found.groups()
    label = f'{REPLICA_LABEL}="{replica}"'
    if not braced:
        return f"{name}{{{label}}}{rest}"
    return f"{name}{{{label}{'' if rest.startswith('}') else ','}{rest}"
