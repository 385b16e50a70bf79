"""How busy other programs keep this machine, so that measurements can say when their figures are rough.

Owns the system's counters, the limits, and the sentence. Invariant: the time of this process and of its children is
never counted as other programs'.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

CORES = 0.25  # of other programs' work, on average: more than a desktop at rest has
BUSY_SHARE = 0.02  # of all cores, where that is more
SPREAD = 0.3  # between a method's quickest and slowest turn, in medians
_STAT = Path("/proc/stat")
_IDLE = (3, 4)  # idle and waiting for a disk, among a core's counters
_COUNTED = 8  # counters of a core; those behind them are part of the first two


class LoadMeter:
    """Measures what other programs do between its creation and a reading."""

    def __init__(self) -> None:
        self._at_start = _average_load()
        self._since = time.monotonic()
        self._busy, self._own = _busy_seconds(), _own_seconds()

    def other_cores(self) -> float:
        """Return how many cores other programs used on average; without counters, the load before."""
        busy, seconds = _busy_seconds(), time.monotonic() - self._since
        if busy is None or self._busy is None or seconds <= 0:
            return self._at_start
        return max(busy - self._busy - (_own_seconds() - self._own), 0.0) / seconds


def usable_cores() -> int:
    """Return the number of cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def is_busy(other_cores: float) -> bool:
    """Return True if other programs use enough cores to disturb timings."""
    return other_cores > max(CORES, BUSY_SHARE * usable_cores())


def roughness(other_cores: float, turns: Iterable[Sequence[float]]) -> str:
    """Return why figures are rough, or "" if they are not. `turns`: the seconds of equal work, method by method."""
    if is_busy(other_cores):
        cores = usable_cores()
        return (
            f"This machine is busy, figures are rough: other programs used {other_cores:.1f} of its {cores} "
            f"core{'s' if cores > 1 else ''} meanwhile."
        )
    widest = max(map(_spread, turns), default=0.0)
    if widest > SPREAD:
        return f"This machine is busy, figures are rough: turns of the same work differ by up to {widest:.0%}."
    return ""


def _spread(seconds: Sequence[float]) -> float:
    return (max(seconds) - min(seconds)) / statistics.median(seconds) if len(seconds) > 1 else 0.0


def _busy_seconds() -> float | None:
    """Return the seconds that the usable cores have worked since boot, for any program; None without counters."""
    try:
        lines = _STAT.read_text(encoding="ascii").splitlines()
        ours = {f"cpu{core}" for core in os.sched_getaffinity(0)}
        cores = [list(map(int, line.split()[1:])) for line in lines if line.split()[0] in ours]
        worked = sum(sum(core[:_COUNTED]) - sum(core[at] for at in _IDLE) for core in cores)
        return worked / os.sysconf("SC_CLK_TCK") if cores else None
    except (OSError, ValueError, IndexError, AttributeError):
        return None


def _own_seconds() -> float:
    """Return the CPU seconds of this process and its children: ended ones, and on Linux running ones."""
    times = os.times()
    ended = times.user + times.system + times.children_user + times.children_system
    return ended + sum(map(_child_seconds, _children()))


def _children() -> list[int]:
    found: list[int] = []
    for file in Path("/proc/self/task").glob("*/children"):
        try:
            found += map(int, file.read_text(encoding="ascii").split())
        except (OSError, ValueError):  # the thread has just ended
            continue
    return found


def _child_seconds(process: int) -> float:
    try:  # the name, in brackets, may hold anything
        fields = Path(f"/proc/{process}/stat").read_text(errors="replace").rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):  # it has just ended
        return 0.0


def _average_load() -> float:
    """Return the mean number of running programs in the last minute; 0 if the system does not say."""
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
