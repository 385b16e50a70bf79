"""The draft worker's process: makes its model, then answers orders until the other end hangs up.

Started as `python -m specbranch.exec.child FD` with one end of a socket pair; a module of its own, so that a user's script is never
imported again. Invariant: it exits when its parent does.
"""

from __future__ import annotations

import pickle
import signal
import sys
import time
from collections import deque
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

from specbranch.core.orders import Span
from specbranch.exec.drafter import Drafter
from specbranch.exec.messages import Broken, HeadDrawn, Hello, Leave, Open, Ready, RoundDrafted, StaleHolding, TargetDone, Work
from specbranch.exec.worker import Stale


def main(descriptor: int) -> None:
    """Serve on an inherited socket until it closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle; it hangs up afterwards
    connection: Connection[Any, Any] = Connection(descriptor)
    with suppress(EOFError, BrokenPipeError, ConnectionResetError):  # the parent is gone
        serve(connection)


def serve(connection: Connection[Any, Any]) -> None:
    """Make the worker, then carry out orders."""
    hello: Hello = connection.recv()
    sys.path[:] = [*hello.path, *(p for p in sys.path if p not in hello.path)]
    try:
        drafter: Drafter = pickle.loads(hello.pickled_make)()
    except Exception as error:
        connection.send(Broken(f"{type(error).__name__}: {error}"))
        return
    connection.send(Ready())
    backlog: deque[object] = deque()  # what came while a round was drafted
    while True:
        _answer(connection, drafter, backlog.popleft() if backlog else connection.recv(), backlog)


def _answer(connection: Connection[Any, Any], drafter: Drafter, message: object, backlog: deque[object]) -> None:
    match message:
        case Open(session, request):
            drafter.leave(session)
            drafter.open(session, request)
        case Leave(session):
            drafter.leave(session)
        case Work():
            _work(connection, drafter, message, backlog)
        case TargetDone():
            pass  # came after the round was drafted


def _work(connection: Connection[Any, Any], drafter: Drafter, work: Work, backlog: deque[object]) -> None:
    start, fed = time.perf_counter(), drafter.rows_fed
    try:
        made = drafter.draft(
            work.orders,
            done=_TargetDone(connection, work.ticket, backlog),
            announce=lambda session, branch: connection.send(HeadDrawn(work.ticket, session, branch)),
        )
    except Stale:
        connection.send(StaleHolding(work.ticket))
    except Exception as error:
        connection.send(Broken(f"{type(error).__name__}: {error}"))
        raise SystemExit(1) from None
    else:
        connection.send(RoundDrafted(work.ticket, made, Span(start, time.perf_counter(), drafter.rows_fed - fed)))


class _TargetDone:
    """Asks whether the parent has said that the target is done; whatever else it says meanwhile is kept for later."""

    def __init__(self, connection: Connection[Any, Any], ticket: int, backlog: deque[object]) -> None:
        self._connection = connection
        self._ticket = ticket
        self._backlog = backlog
        self._done = False

    def __call__(self) -> bool:
        while not self._done and self._connection.poll():
            message: object = self._connection.recv()
            self._done = message == TargetDone(self._ticket)
            if not isinstance(message, TargetDone):
                self._backlog.append(message)
        return self._done


if __name__ == "__main__":
    main(int(sys.argv[1]))
