"""Times at which a CUDA stream reached points of its work, in the host's seconds.

Owns the relation between device events and the host's clock. It is renewed whenever a moment is noted while the stream
is idle, as then both clocks show the same moment; so drift does not matter. Invariant: neither noting a moment nor
reading it waits for the device.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

DeviceMoment = Callable[[], float]  # in seconds of time.perf_counter; before the moment has come it returns now


class StreamClock:
    """The clock of one stream."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        """Relate both clocks; the stream is new, so it is idle."""
        self._stream = stream
        self._tie = self._recorded(), time.perf_counter()

    def note(self) -> DeviceMoment:
        """Note the moment at which the stream has done all work given to it so far."""
        resting = self._stream.query()
        event = self._recorded()
        if resting:
            self._tie = event, time.perf_counter()
        begun, seconds = self._tie
        return lambda: (
            seconds + begun.elapsed_time(event) / 1000 if _is_past(begun) and _is_past(event) else time.perf_counter()
        )

    def _recorded(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(self._stream)
        return event


def _is_past(event: torch.cuda.Event) -> bool:
    return bool(event.query())  # type: ignore[no-untyped-call]
