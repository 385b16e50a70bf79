"""Work in several processes: one function over many values.

Owns the processes. Invariant: Ctrl-C reaches the process that started them, which ends the others.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import get_context
from multiprocessing.pool import Pool
from typing import TypeVar

Given = TypeVar("Given")
Found = TypeVar("Found")


def in_processes(work: Callable[[Given], Found], values: Sequence[Given], jobs: int) -> Iterator[Found]:
    """Yield what a function returns for each value, whichever is there first; one job needs no process."""
    if (jobs := min(jobs, len(values))) <= 1:
        yield from map(work, values)
        return
    with _pool(jobs) as pool:  # leaving it ends the processes
        yield from pool.imap_unordered(work, values)


def _pool(jobs: int) -> Pool:
    """Start processes that leave Ctrl-C to this one; they inherit that, so it holds while they still import."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        return get_context("spawn").Pool(jobs)
    finally:
        signal.signal(signal.SIGINT, before)
