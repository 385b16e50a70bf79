"""When a stream came to a point in its work, in the host's seconds.

Owns the tie between a device's events and the host's clock: it is tied anew whenever a moment is noted while the stream
rests, since then both clocks are at it; so neither drift nor the coarse count of an old tie matters. Invariant: noting
a moment waits for nothing, nor does asking for it.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

DeviceMoment = Callable[[], float]  # in the seconds of time.perf_counter; asked too early it says: now


class StreamClock:
    """Notes moments of one stream."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        """Tie the clocks; the stream is new, so it rests."""
        self._stream = stream
        self._tie = self._recorded(), time.perf_counter()

    def note(self) -> DeviceMoment:
        """Note the moment at which the stream has done all it was given so far."""
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
