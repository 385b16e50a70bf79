"""The draft worker's process: makes its model, then answers orders until the other end hangs up.

Started as `python -m specbranch.exec.child FD` with one end of a socket pair; a module of its own, so that a user's
script is never imported again. Invariant: it exits when its parent does.
"""

from __future__ import annotations

import signal
import sys
import time
from collections import deque
from contextlib import suppress
from importlib import import_module

from specbranch.core.orders import Branch, Span
from specbranch.exec.drafter import Drafter
from specbranch.exec.messages import (
    Broken,
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
from specbranch.exec.wire import BadMessage, Wire


def main(descriptor: int) -> None:
    """Serve on an inherited socket until it closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle; it hangs up afterwards
    line = Wire(descriptor)
    with suppress(EOFError, BrokenPipeError, ConnectionResetError):  # the parent is gone
        try:
            serve(line)
        except BadMessage as error:
            line.send(Broken(str(error)))


def serve(line: Wire) -> None:
    """Make the worker, then carry out orders."""
    try:
        drafter = _greeted(line.receive())
    except Exception as error:
        line.send(Broken(f"{type(error).__name__}: {error}"))
        return
    line.send(Ready())
    backlog: deque[WireMessage] = deque()  # what came while a round was drafted
    while True:
        _answer(line, drafter, backlog.popleft() if backlog else line.receive(), backlog)


def _greeted(message: WireMessage) -> Drafter:
    assert isinstance(message, Hello), "a parent says Hello first"
    sys.path[:] = [*message.path, *(p for p in sys.path if p not in message.path)]
    return _made(message.recipe)


def _made(recipe: Recipe) -> Drafter:
    module, _, name = recipe.function.partition(":")
    drafter: Drafter = getattr(import_module(module), name)(**recipe.given)
    return drafter


def _answer(line: Wire, drafter: Drafter, message: WireMessage, backlog: deque[WireMessage]) -> None:
    match message:
        case Open(session, request):
            drafter.leave(session)
            drafter.open(session, request)
        case Leave(session):
            drafter.leave(session)
        case Work():
            _work(line, drafter, message, backlog)
        case TargetDone():
            pass  # came after the round was drafted


def _work(line: Wire, drafter: Drafter, work: Work, backlog: deque[WireMessage]) -> None:
    if stale := tuple(session for session, order in work.orders.items() if drafter.stale(session, order.on)):
        line.send(StaleHolding(work.ticket, stale))
        return
    start, fed = time.perf_counter(), drafter.rows_fed

    def announce(heads: dict[int, Branch]) -> None:
        if any(order.announces for order in work.orders.values()):
            line.send(HeadsDrawn(work.ticket, heads))

    try:
        made = drafter.draft(work.orders, _TargetDone(line, work.ticket, backlog), announce)
    except Exception as error:
        line.send(Broken(f"{type(error).__name__}: {error}"))
        raise SystemExit(1) from None
    else:
        span = Span(start, time.perf_counter(), drafter.rows_fed - fed, drafter.prompts_read())
        line.send(RoundDrafted(work.ticket, made, span))


class _TargetDone:
    """Asks whether the parent has said that the target is done; whatever else it says meanwhile is kept for later."""

    def __init__(self, line: Wire, ticket: int, backlog: deque[WireMessage]) -> None:
        self._line = line
        self._ticket = ticket
        self._backlog = backlog
        self._done = False

    def __call__(self) -> bool:
        while not self._done and self._line.poll():
            message = self._line.receive()
            self._done = message == TargetDone(self._ticket)
            if not isinstance(message, TargetDone):
                self._backlog.append(message)
        return self._done


if __name__ == "__main__":
    main(int(sys.argv[1]))
