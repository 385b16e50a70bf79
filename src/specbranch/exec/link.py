"""A link carries whole messages between a target and a draft worker, and never blocks unless its user asks to wait.

Owns the protocol `Link`, and `StreamLink`, which frames messages on a byte stream: a socket pair, TCP or TLS
(`exec/dialling.py` has a link that is still being made). A frame is 8 bytes of length, then the bytes. Does not know
what messages mean. Invariants: a message is delivered whole or not at all, and memory is only taken for received bytes.
An interrupt at any line leaves a link that works, or one that reports it is lost.
"""

from __future__ import annotations

import math
import select
from struct import Struct
from typing import Protocol

HEADER = Struct(">Q")
LINK_BYTES = 1 << 18  # bytes moved at once


class LinkLost(Exception):
    """Nothing more can come over this link."""


class Link(Protocol):
    """One end of a stream of messages."""

    @property
    def unsent(self) -> int:
        """How many bytes wait to be written."""
        ...

    @property
    def round_trip(self) -> float:
        """Seconds to the other end and back, as measured when the link was made; 0: not measured."""
        ...

    def post(self, message: bytes) -> None:
        """Queue a message; `pump` writes it. It is dropped if the link has ended."""
        ...

    def pump(self, seconds: float | None = 0.0) -> None:
        """Wait at most `seconds` until bytes can be moved (None: without limit), then move what can be.

        It does not wait while a whole message is there: the last call may have received it.
        """
        ...

    def peek(self) -> bytes | None:
        """Return the first whole message, and keep it until `drop`; raises LinkLost if none can come."""
        ...

    def drop(self) -> None:
        """Drop the message that `peek` returned."""
        ...

    def close(self) -> None:
        """Hang up."""
        ...


class Stream(Protocol):
    """A byte stream that does not block: `send` and `recv` raise BlockingIOError if they would have to wait."""

    def fileno(self) -> int:
        """Return the descriptor to poll."""
        ...

    def setblocking(self, flag: bool, /) -> None:
        """Set whether it blocks."""
        ...

    def send(self, data: bytearray, /) -> int:
        """Write what can be written; returns how many bytes that was."""
        ...

    def recv(self, count: int, /) -> bytes:
        """Read at least one byte, or nothing at the end; what is read leaves no bytes that `poll` does not see."""
        ...

    def close(self) -> None:
        """Close it."""
        ...


class StreamLink:
    """Framed messages on a byte stream."""

    def __init__(self, stream: Stream, most: float = math.inf, round_trip: float = 0.0) -> None:
        """`most`: the largest message that the other end may send, in bytes."""
        stream.setblocking(False)
        self.round_trip = round_trip
        self._stream = stream
        self._most = most
        self._poll = select.poll()
        self._poll.register(stream)
        self._outgoing = bytearray()
        self._incoming = bytearray()
        self._ended: str | None = None  # why nothing more comes
        self._torn = False  # bytes were moved, and that is not noted yet

    @property
    def unsent(self) -> int:
        """How many bytes wait to be written."""
        return len(self._outgoing)

    def fileno(self) -> int:
        """Return the descriptor to poll."""
        return self._stream.fileno()

    def post(self, message: bytes) -> None:
        """Queue a message; `pump` writes it. It is dropped if the link has ended."""
        if self._ended is None:
            self._outgoing += HEADER.pack(len(message)) + message

    def pump(self, seconds: float | None = 0.0) -> None:
        """Wait at most `seconds` until bytes can be moved (None: without limit), then move what can be.

        It does not wait while a whole message is there: the last call may have received it.
        """
        if self._torn:
            self._end("an interrupt left a message half moved")
        if self._ended is None and self._wait(seconds if self._first_end() is None else 0.0):
            self._torn = True
            self._write()
            if self._first_end() is None or len(self._incoming) < LINK_BYTES:  # otherwise the other end has to wait
                self._read()
            self._torn = False

    def peek(self) -> bytes | None:
        """Return the first whole message, and keep it until `drop`; raises LinkLost if none can come."""
        if (length := self._announced()) > self._most:
            raise LinkLost(f"a message of {length:,} bytes was announced; at most {self._most:,} are expected")
        if (end := self._first_end()) is not None:
            return bytes(self._incoming[HEADER.size : end])
        if self._ended is not None:
            raise LinkLost(self._ended)
        return None

    def drop(self) -> None:
        """Drop the message that `peek` returned."""
        del self._incoming[: self._first_end()]

    def take(self) -> bytes | None:
        """Return the first whole message and drop it."""
        message = self.peek()
        if message is not None:
            self.drop()
        return message

    def close(self) -> None:
        """Hang up."""
        self._end("it was closed")
        self._stream.close()

    def _end(self, why: str) -> None:
        self._ended = self._ended or why
        self._outgoing.clear()

    def _announced(self) -> int:
        """Return the length of the first message, 0 while it is unknown."""
        return int(HEADER.unpack_from(self._incoming)[0]) if len(self._incoming) >= HEADER.size else 0

    def _first_end(self) -> int | None:
        """Return where the first message ends in the received bytes, None while it is not whole."""
        end = HEADER.size + self._announced()
        return end if len(self._incoming) >= end else None

    def _wait(self, seconds: float | None) -> bool:
        self._poll.modify(self._stream, select.POLLIN | (select.POLLOUT if self._outgoing else 0))
        # rounded up: a wait that ends early would be a loop that spins
        return bool(self._poll.poll(None if seconds is None else math.ceil(max(seconds, 0.0) * 1000)))

    def _write(self) -> None:
        if not self._outgoing:
            return
        try:
            del self._outgoing[: self._stream.send(self._outgoing[:LINK_BYTES])]
        except BlockingIOError:
            pass
        except OSError:
            self._outgoing.clear()  # what the other end said before it hung up can still be read

    def _read(self) -> None:
        try:
            came = self._stream.recv(LINK_BYTES)
        except BlockingIOError:
            return
        except OSError as error:
            self._end(f"the other end is gone: {error}")
            return
        self._incoming += came
        if not came:
            self._end("the other end hung up")
