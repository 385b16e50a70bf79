"""The rounds of a loop: how many there were, and how long the latest ones took.

Owns the count by which a batch tells its rounds apart, and the seconds from the end of one round to that of the next.
Does not own what follows from them (`goodput.py`). Invariant: a round with prompt tokens has no time here, because it
says nothing about decoding.
"""

from __future__ import annotations

from collections import deque

ROUNDS_TIMED = 64  # latest rounds whose seconds are known


class RoundClock:
    """Counts and times the rounds in which sessions decode."""

    def __init__(self) -> None:
        self.rounds = 0
        self._times: deque[tuple[int, float]] = deque(maxlen=ROUNDS_TIMED)  # seconds by the number of the round

    def end_round(self, seconds: float | None) -> None:
        """Note that a round has ended; `seconds`: on a machine as fast as at load, None: its time says nothing."""
        self.rounds += 1
        if seconds is not None:
            self._times.append((self.rounds, seconds))

    def seconds_behind(self, first: int, last: int) -> list[float]:
        """Return the seconds of the timed rounds behind round `first`, up to `last`."""
        return [seconds for number, seconds in self._times if first < number <= last]
