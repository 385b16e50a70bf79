"""A TCP relay between a target and a draft worker that behaves as a bad network does.

Owns delays, holds, cuts and single bytes; it never changes a byte. Delayed bytes overtake nobody: what is behind a held
chunk waits, too, as on a connection that lost a packet.
"""

from __future__ import annotations

import random
import socket
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from queue import SimpleQueue
from types import TracebackType

CHUNK = 1 << 16


@dataclass(frozen=True)
class Weather:
    """What the network does to each direction."""

    delay: float = 0.0  # seconds each way
    held: float = 0.0  # share of the chunks …
    hold: float = 0.2  # … that come so many seconds later
    cut_every: int = 0  # chunks of a connection, about, after which it is cut; 0: never
    single_bytes: bool = False  # one byte at a time


class Relay:
    """Listens on a port of its own; `with` closes it."""

    def __init__(self, port: int, weather: Weather, seed: int = 1) -> None:
        self.weather, self.cuts, self._to = weather, 0, port
        self._rng, self._closed = random.Random(seed), False
        self._open: set[socket.socket] = set()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def __enter__(self) -> Relay:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._closed = True
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.cut()

    def cut(self) -> None:
        """Cut all connections."""
        for one in list(self._open):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        while not self._closed:
            try:
                near, _ = self._listener.accept()
                far = socket.create_connection(("127.0.0.1", self._to))
            except OSError:  # it was closed, or no worker is there
                with suppress(OSError, UnboundLocalError):
                    near.close()
                continue
            for one in (near, far):
                one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._open |= {near, far}
            for pair in ((near, far), (far, near)):
                queue: SimpleQueue[tuple[float, bytes]] = SimpleQueue()
                threading.Thread(target=self._take, args=(*pair, queue), daemon=True).start()
                threading.Thread(target=self._hand_on, args=(*pair, queue), daemon=True).start()

    def _take(self, source: socket.socket, sink: socket.socket, queue: SimpleQueue[tuple[float, bytes]]) -> None:
        data = b"-"
        while data:
            try:
                data = source.recv(CHUNK)
            except OSError:
                data = b""
            weather = self.weather
            held = weather.hold if self._rng.random() < weather.held else 0.0
            if weather.cut_every and self._rng.random() < 1 / weather.cut_every:
                self.cuts += 1
                queue.put((0.0, data[: len(data) // 2]))  # in the middle of a message
                data = b""
            queue.put((time.monotonic() + weather.delay + held, data))

    def _hand_on(self, source: socket.socket, sink: socket.socket, queue: SimpleQueue[tuple[float, bytes]]) -> None:
        data = b"-"
        with suppress(OSError):
            while data:
                due, data = queue.get()
                time.sleep(max(due - time.monotonic(), 0.0))
                for part in (data[at : at + 1] for at in range(len(data))) if self.weather.single_bytes else (data,):
                    sink.sendall(part)
        for one in (source, sink):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()
            self._open.discard(one)
