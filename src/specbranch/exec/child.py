"""The draft worker's process: makes its model, then answers orders until the other end closes.

Owns the child's end of the link and its worker; how to draft is `drafter`'s. It is started as `python -m
specbranch.exec.child FD` with one end of a socket pair. It is a module of its own, so that a user's script is never
imported again. Invariant: it exits when its parent does.
"""

from __future__ import annotations

import signal
import socket
import sys
import time
from collections import deque
from contextlib import suppress
from importlib import import_module

from specbranch.core.orders import Branch, Span
from specbranch.exec.drafter import Drafter
from specbranch.exec.link import Link, LinkLost
from specbranch.exec.messages import (
    Broken,
    Enough,
    HeadsDrawn,
    Hello,
    Leave,
    Open,
    Ready,
    Recipe,
    RoundDrafted,
    StaleHolding,
    TargetDone,
    WireMessage,
    Work,
)
from specbranch.exec.wire import BadMessage, from_bytes, to_bytes


class Channel:
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
        while (data := self._link.take()) is None:
            self._link.pump(None)
        return from_bytes(data)

    def look(self) -> WireMessage | None:
        """Return the next message if it is there."""
        self._link.pump()
        data = self._link.take()
        return None if data is None else from_bytes(data)


def main(descriptor: int) -> None:
    """Serve on an inherited socket until it closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C, and closes the link afterwards
    channel = Channel(Link(socket.socket(fileno=descriptor)))
    with suppress(LinkLost):  # the parent is gone
        try:
            serve(channel)
        except BadMessage as error:
            channel.send(Broken(str(error)))


def serve(channel: Channel) -> None:
    """Make the worker, then carry out orders."""
    try:
        drafter = _greeted(channel.receive())
    except Exception as error:
        channel.send(Broken(f"{type(error).__name__}: {error}"))
        return
    channel.send(Ready())
    backlog: deque[WireMessage] = deque()  # what came while a round was drafted
    while True:
        _answer(channel, drafter, backlog.popleft() if backlog else channel.receive(), backlog)


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


def _answer(channel: Channel, drafter: Drafter, message: WireMessage, backlog: deque[WireMessage]) -> None:
    match message:
        case Open(session, request):
            drafter.free(session)
            drafter.open(session, request)
        case Leave(session):
            drafter.free(session)
        case Work():
            _work(channel, drafter, message, backlog)
        case TargetDone() | Enough():
            pass  # came after the round was drafted


def _work(channel: Channel, drafter: Drafter, work: Work, backlog: deque[WireMessage]) -> None:
    if stale := tuple(session for session, order in work.orders.items() if drafter.stale(session, order.on)):
        channel.send(StaleHolding(work.ticket, stale))
        return
    start, fed = time.perf_counter(), drafter.rows_fed

    def announce(heads: dict[int, Branch]) -> None:
        if any(order.announces for order in work.orders.values()):
            channel.send(HeadsDrawn(work.ticket, heads))

    parent = _Parent(channel, work.ticket, backlog)
    drafter.enough = parent.wants_answer
    try:
        made = drafter.draft(work.orders, parent.target_done, announce)
    except Exception as error:
        channel.send(Broken(f"{type(error).__name__}: {error}"))
        raise SystemExit(1) from None
    else:
        span = Span(start, time.perf_counter(), drafter.rows_fed - fed, drafter.prefill_counts())
        channel.send(RoundDrafted(work.ticket, made, span))


class _Parent:
    """Receives the parent's messages about the present round while it is drafted; it keeps all others for later."""

    def __init__(self, channel: Channel, ticket: int, backlog: deque[WireMessage]) -> None:
        self._channel = channel
        self._ticket = ticket
        self._backlog = backlog
        self._target_done = self._wants_answer = False

    def target_done(self) -> bool:
        """True if the target has finished."""
        self._hear()
        return self._target_done or self._wants_answer

    def wants_answer(self) -> bool:
        """True if the parent wants the answer now."""
        self._hear()
        return self._wants_answer

    def _hear(self) -> None:
        while not self._wants_answer and (message := self._channel.look()) is not None:
            self._target_done |= message == TargetDone(self._ticket)
            self._wants_answer |= message == Enough(self._ticket)
            if not isinstance(message, TargetDone | Enough):
                self._backlog.append(message)


if __name__ == "__main__":
    main(int(sys.argv[1]))
