"""The draft worker's process beside its target: makes its model, then answers orders until the other end closes.

Owns the child's end of the link and its worker; orders are carried out by `draft_service`. It is started as `python -m
specbranch.exec.child FD` with one end of a socket pair. It is a module of its own, so that a user's script is never
imported again. Invariant: it exits when its parent does.
"""

from __future__ import annotations

import signal
import socket
import sys
from contextlib import suppress
from importlib import import_module

from specbranch.exec.draft_service import DraftFailed, DraftService
from specbranch.exec.drafter import Drafter
from specbranch.exec.link import Link, LinkLost, StreamLink
from specbranch.exec.messages import Broken, Hello, Ready, Recipe, WireMessage
from specbranch.exec.wire import BadMessage, from_bytes, to_bytes


class ParentChannel:
    """The child's end of the link: it may wait for its parent."""

    def __init__(self, link: Link) -> None:
        self._link = link

    def send(self, message: WireMessage) -> None:
        """Send a message, and wait until all its bytes are written."""
        self._link.post(to_bytes(message))
        while self._link.unsent:
            self._link.pump(None)

    def receive(self) -> WireMessage:
        """Wait for the next message; raises LinkLost once the parent is gone."""
        while (message := self._next()) is None:
            self._link.pump(None)
        return message

    def look(self) -> WireMessage | None:
        """Return the next message if it is there."""
        self._link.pump()
        return self._next()

    def wait(self) -> None:
        """Wait until bytes come."""
        self._link.pump(None)

    def _next(self) -> WireMessage | None:
        data = self._link.peek()
        if data is None:
            return None
        self._link.drop()
        return from_bytes(data)


def main(descriptor: int) -> None:
    """Serve on an inherited socket until it closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C, and closes the link afterwards
    channel = ParentChannel(StreamLink(socket.socket(fileno=descriptor)))
    with suppress(LinkLost):  # the parent is gone
        try:
            serve(channel)
        except BadMessage as error:
            channel.send(Broken(str(error)))


def serve(channel: ParentChannel) -> None:
    """Make the worker, then carry out orders."""
    try:
        drafter = _greeted(channel.receive())
    except Exception as error:
        channel.send(Broken(f"{type(error).__name__}: {error}"))
        return
    channel.send(Ready())
    service = DraftService(drafter, channel)
    try:
        while True:
            if (message := service.next()) is None:
                channel.wait()
            else:
                service.answer(message)
    except DraftFailed as error:
        channel.send(Broken(str(error)))
        raise SystemExit(1) from None


def _greeted(message: WireMessage) -> Drafter:
    assert isinstance(message, Hello), "a parent says Hello first"
    sys.path[:] = [*message.path, *(p for p in sys.path if p not in message.path)]
    return _made(message.recipe)


def _made(recipe: Recipe) -> Drafter:
    for needed in recipe.modules:
        import_module(needed)
    module, _, name = recipe.function.partition(":")
    drafter: Drafter = getattr(import_module(module), name)(**recipe.given)
    return drafter


if __name__ == "__main__":
    main(int(sys.argv[1]))
