"""Who says that a machine is busy: other programs are counted, this process and its children are not."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest

from specbranch import machine_load
from specbranch.machine_load import LoadMeter, is_busy, roughness

HOUR = 3600.0  # seconds that a counter is set forward by: whatever really happens meanwhile is nothing beside them
WAIT = 60.0
TICK = 0.01  # seconds by which the system counts
COUNTERS = pytest.mark.skipif(not Path("/proc/stat").exists(), reason="this system has no counters of its cores")


def burn(seconds: float) -> None:
    """Use a core for some CPU time."""
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass


@contextmanager
def burning() -> Iterator[subprocess.Popen[bytes]]:
    """A child that uses a core until the end."""
    made = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        yield made
    finally:
        made.kill()
        made.wait()


def until(true: Callable[[], bool]) -> None:
    end = time.monotonic() + WAIT
    while not true():
        assert time.monotonic() < end
        time.sleep(0.01)


@COUNTERS
def test_the_cores_work_and_this_process_too_are_counted() -> None:
    busy, own = machine_load._busy_seconds(), machine_load._own_seconds()
    burn(0.2)
    assert machine_load._own_seconds() - own >= 0.15
    assert busy is not None and (machine_load._busy_seconds() or 0.0) - busy >= 0.1  # ticks are coarse


@COUNTERS
def test_a_child_at_work_is_ours_while_it_runs_and_after_its_end() -> None:
    own = machine_load._own_seconds()
    with burning() as child:
        until(lambda: machine_load._child_seconds(child.pid) > 0.1)
        assert child.pid in machine_load._children()
        assert (running := machine_load._own_seconds()) - own > 0.1
    assert machine_load._own_seconds() >= running - TICK  # two sums of the same ticks may round differently


@COUNTERS
def test_a_program_that_is_not_ours_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_load, "_children", list)  # nobody's child: what it does is other programs' work
    with burning() as stranger:
        meter = LoadMeter()
        start = machine_load._child_seconds(stranger.pid)
        until(lambda: machine_load._child_seconds(stranger.pid) - start > 0.3)
        taken, since = machine_load._child_seconds(stranger.pid) - start, time.monotonic() - meter._since
        assert meter.other_cores() >= 0.6 * taken / since


def test_own_work_is_taken_from_what_the_cores_did(monkeypatch: pytest.MonkeyPatch) -> None:
    meter = LoadMeter()
    busy = meter._busy or 0.0
    monkeypatch.setattr(meter, "_busy", busy)
    monkeypatch.setattr(meter, "_since", time.monotonic() - HOUR)
    monkeypatch.setattr(machine_load, "_busy_seconds", lambda: busy + 2 * HOUR)
    monkeypatch.setattr(machine_load, "_own_seconds", lambda: meter._own + 1.5 * HOUR)
    assert meter.other_cores() == pytest.approx(0.5, abs=0.01)
    monkeypatch.setattr(machine_load, "_own_seconds", lambda: meter._own + 3 * HOUR)
    assert meter.other_cores() == 0.0


@pytest.mark.parametrize("text", [None, "", "cpu 1 2\n", "cpu0 x y\n"])
def test_where_there_are_no_counters_the_load_before_is_taken(
    text: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if text is not None:
        (tmp_path / "stat").write_text(text)
    monkeypatch.setattr(machine_load, "_STAT", tmp_path / "stat")
    monkeypatch.setattr(os, "getloadavg", lambda: (1.75, 0.0, 0.0), raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0}, raising=False)
    assert LoadMeter().other_cores() == 1.75


def test_figures_are_rough_where_others_work_or_turns_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_load, "usable_cores", lambda: 2)
    assert roughness(0.0, [(1.0, 1.1, 1.2), (2.0, 2.0, 2.1)]) == "" == roughness(0.1, [])
    busy = "This machine is busy, figures are rough"
    assert roughness(1.5, []) == f"{busy}: other programs used 1.5 of its 2 cores meanwhile."
    assert "differ by up to 50%" in roughness(0.0, [(1.0, 1.0, 1.0), (1.0, 1.0, 1.5)])


def test_a_machine_of_many_cores_may_do_more_beside(monkeypatch: pytest.MonkeyPatch) -> None:
    for cores, busy in ((2, True), (64, False)):
        monkeypatch.setattr(machine_load, "usable_cores", partial(int, cores))
        assert is_busy(0.5) == busy
