"""The entrance of a draft worker on a network: takes connections, and lets in whoever has the secret.

Owns the listening socket and the threads that greet. A greeting may wait, so it never runs in the worker's own thread.
Does not own what is said afterwards. Invariants: a stranger costs a thread for twice `GREETING_SECONDS` at most, and
there are never more than `MOST_GREETINGS` of them; nothing that strangers send is logged.
"""

from __future__ import annotations

import logging
import socket
import ssl
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress

from specbranch.errors import BadParameter
from specbranch.exec.address import LinkAddress, is_loopback
from specbranch.exec.greeting import GREETING_SECONDS, Refused, admit, tuned

log = logging.getLogger("specbranch.draft_worker")

MOST_GREETINGS = 64  # at a time; further connections are closed at once
MOST_FROM_ONE = 16  # of these, from one address of a network: one that says nothing does not shut out the others
WAITING_CONNECTIONS = 64  # that the system keeps until they are taken
REFUSALS_EVERY = 1.0  # seconds between two lines in the log about refused connections
LetIn = Callable[[socket.socket, str], None]


def bound(address: LinkAddress) -> socket.socket:
    """Return a socket with an address; who connects is refused until there is a `Door`."""
    try:
        found = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, where = found[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise _unbound(address, error) from None
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(where)
    except OSError as error:
        listener.close()
        raise _unbound(address, error) from None
    return listener


def _unbound(address: LinkAddress, error: OSError) -> BadParameter:
    where = f"{address.host}:{address.port}"
    return BadParameter(f"--listen is {where}, where nobody can listen: {error.strerror or error}. Choose another.")


class Door:
    """Greets connections; `let_in` gets those that have the secret, from another thread."""

    def __init__(self, listener: socket.socket, key: bytes, context: ssl.SSLContext | None, let_in: LetIn) -> None:
        self._listener, self._key, self._context, self._let_in = listener, key, context, let_in
        self._places = threading.BoundedSemaphore(MOST_GREETINGS)
        self._greeted: Counter[str] = Counter()  # by address
        self._lock = threading.Lock()
        self._refused, self._said_at = 0, -REFUSALS_EVERY
        self._closed = False
        listener.listen(WAITING_CONNECTIONS)
        self._thread = threading.Thread(target=self._accept, name="specbranch-door", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Take no more connections."""
        self._closed = True
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes `accept`
        self._listener.close()
        self._thread.join(1.0)

    def _accept(self) -> None:
        while not self._closed:
            try:
                stream, address = self._listener.accept()
            except OSError as error:  # such as too many open files
                if not self._closed:
                    self._note("somebody", f"it cannot be taken ({error.strerror})")
                    time.sleep(0.1)
                continue
            if not self._take_place(address[0]):
                stream.close()
                self._note(address[0], "too many are at the door")
                continue
            try:
                threading.Thread(target=self._greet, args=(stream, address[0]), daemon=True).start()
            except RuntimeError:  # the system has no thread left
                stream.close()
                self._give_place(address[0])
                self._note(address[0], "there is no thread for it")

    def _take_place(self, who: str) -> bool:
        """Take a place at the door; False if it is full, or full of connections from there."""
        with self._lock:
            crowd = self._greeted[who] >= MOST_FROM_ONE and not is_loopback(who)
            if crowd or not self._places.acquire(blocking=False):
                return False
            self._greeted[who] += 1
            return True

    def _give_place(self, who: str) -> None:
        with self._lock:
            self._greeted[who] -= 1
            if not self._greeted[who]:
                del self._greeted[who]
            self._places.release()

    def _greet(self, stream: socket.socket, who: str) -> None:
        try:
            tuned(stream)
            stream.settimeout(GREETING_SECONDS)
            if self._context is not None:
                stream = self._context.wrap_socket(stream, server_side=True)
            admit(stream, self._key)
            self._let_in(stream, who)
        except Refused as refused:
            stream.close()
            self._note(who, str(refused))
        except (OSError, ValueError):  # every error of TLS is an OSError
            stream.close()
            self._note(who, "no TLS came about")
        finally:
            self._give_place(who)

    def _note(self, who: str, why: str) -> None:
        """Log a refusal, but not each of a flood."""
        with self._lock:
            self._refused += 1
            if (now := time.monotonic()) - self._said_at < REFUSALS_EVERY:
                return
            self._said_at, count, self._refused = now, self._refused, 0
        more = f" (and {count - 1} more before it)" if count > 1 else ""
        log.warning("Refused a connection from %s: %s%s.", who, why, more)
