"""The metrics of several replicas are one valid text."""

from __future__ import annotations

import re

from specbranch.cluster.merging import merged
from specbranch.serve.exposition import Histogram, Series, exposed

LINE = re.compile(r'[a-z_:]+\{([a-z_]+="(\\.|[^"\\])*",?)*\} \S+')


def text(count: float, *, more: bool = False) -> str:
    plain, labelled = Series("counter", "sb:a_total", "All."), Series("gauge", "sb:b", "Some.")
    plain.add(count)
    labelled.set(1, state='a "quoted", {braced}')
    times = Histogram("sb:seconds", "Times.", (0.5, 1))
    times.observe(count)
    return exposed([plain, labelled, times, *([Series("gauge", "sb:new", "New.")] if more else ())], {})


def test_each_metric_is_declared_once_and_has_the_lines_of_all_replicas() -> None:
    lines = merged({"one": text(1), "two": text(2, more=True)}).splitlines()
    declared = [line.split()[2] for line in lines if line.startswith("# TYPE")]
    assert declared == ["sb:a_total", "sb:b", "sb:seconds", "sb:new"]
    assert 'sb:a_total{replica="one"} 1' in lines and 'sb:a_total{replica="two"} 2' in lines
    assert 'sb:seconds_bucket{replica="two",le="+Inf"} 1' in lines
    assert all(LINE.fullmatch(line) for line in lines if not line.startswith("#"))


def test_the_lines_of_a_metric_follow_its_declaration() -> None:
    current = ""
    for line in merged({"one": text(1), "two": text(2)}).splitlines():
        if line.startswith("# TYPE"):
            current = line.split()[2]
        assert line.startswith(("#", current))


def test_no_replica_gives_no_lines() -> None:
    assert merged({}) == ""
