"""A network on virtual time: what one end posts arrives at the other after half of the round trip.

Owns `Mailbox`, one direction, and `SimulatedLink`, the target's end with the protocol of `exec/link.py`. Does not know
what messages mean. Invariant: messages arrive in the order in which they were posted, whole, and none is lost.
"""

from __future__ import annotations

from collections import deque
from math import inf

from specbranch.exec.link import LinkLost
from specbranch.lab.scale.simulation import Signal, Simulation


class Mailbox:
    """One direction: messages on their way, and those that have arrived."""

    def __init__(self, simulation: Simulation, seconds: float) -> None:
        """`seconds`: what the way takes; infinite: nothing ever arrives."""
        self._simulation, self._seconds = simulation, seconds
        self._messages: deque[tuple[float, bytes]] = deque()  # (arrival, message)
        self._posted = Signal(simulation)

    def post(self, message: bytes) -> None:
        """Send a message on its way."""
        if self._seconds < inf:
            arrival = self._simulation.now() + self._seconds
            self._messages.append((arrival, message))
            self._posted.send(arrival)

    def first(self) -> bytes | None:
        """Return the first message if it has arrived, and keep it."""
        there = self._messages and self._messages[0][0] <= self._simulation.now()
        return self._messages[0][1] if there else None

    def drop(self) -> None:
        """Drop the first message."""
        self._messages.popleft()

    def wait(self, until: float = inf) -> None:
        """Wait until a message is there, at most until a moment."""
        while self.first() is None and self._simulation.now() < until:
            if self._messages:
                self._simulation.sleep_until(min(self._messages[0][0], until))
            else:
                self._simulation.wait(self._posted, until)


class SimulatedLink:
    """The target's end of both directions."""

    unsent = 0

    def __init__(self, simulation: Simulation, outgoing: Mailbox, incoming: Mailbox, round_trip: float) -> None:
        self.round_trip = round_trip if round_trip < inf else 0.0
        self._simulation, self._outgoing, self._incoming = simulation, outgoing, incoming
        self._closed = False

    def post(self, message: bytes) -> None:
        """Send a message on its way."""
        if not self._closed:
            self._outgoing.post(message)

    def pump(self, seconds: float | None = 0.0) -> None:
        """Wait at most `seconds` for a message."""
        if seconds is None or seconds > 0.0:
            self._incoming.wait(inf if seconds is None else self._simulation.now() + seconds)

    def peek(self) -> bytes | None:
        """Return the first message that has arrived."""
        if self._closed:
            raise LinkLost("it was closed")
        return self._incoming.first()

    def drop(self) -> None:
        """Drop the message that `peek` returned."""
        self._incoming.drop()

    def close(self) -> None:
        """Hang up."""
        self._closed = True
