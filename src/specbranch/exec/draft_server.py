"""A draft worker on a network: one draft model, and the sessions of several targets.

Owns the loop of the worker: it takes messages of all connections, and steps the orders of all targets together
(`draft_batch`). The door (`door`) runs in threads of its own, the model in the thread that calls `run` alone.
Invariants: whatever one connection sends or does not read costs that connection only. A connection that ends leaves
nothing behind.
"""

from __future__ import annotations

import logging
import select
import signal
import socket
import ssl
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from itertools import count

from specbranch.core.draft_evaluation import NOT_EVALUATED, DraftEvaluation
from specbranch.core.trees import EDGES
from specbranch.exec.children import MOST_MESSAGE
from specbranch.exec.door import Door
from specbranch.exec.draft_batch import DraftBatch
from specbranch.exec.draft_round import DraftRound, Others
from specbranch.exec.draft_service import DraftFailed, DraftService, raise_failure
from specbranch.exec.drafter import Drafter
from specbranch.exec.greeting import as_stream
from specbranch.exec.link import LinkLost, StreamLink
from specbranch.exec.messages import (
    Broken,
    Evaluated,
    Join,
    Ready,
    Served,
    TellEvaluation,
    TellTokens,
    Tokens,
    WireMessage,
    Work,
)
from specbranch.exec.wire import BadMessage, from_bytes, to_bytes

log = logging.getLogger("specbranch.draft_worker")

MOST_TARGETS = 64  # connections at a time
MESSAGES_AT_ONCE = 256  # of one target, before others have their turn
FAILURES_IN_A_ROW = 3  # of the draft, after which the worker gives up: its device may be broken
LAST_WORDS = 0.05  # seconds to write why a connection is closed


class WorkerFailed(Exception):
    """The draft fails again and again."""


class Connection:
    """A target's connection: it never waits for the target."""

    def __init__(
        self, link: StreamLink, who: str, drafter: Drafter, numbers: Iterator[int], others: Others | None = None
    ) -> None:
        self.link, self.who = link, who
        self.service = DraftService(drafter, self, numbers, others)
        self.round: DraftRound | None = None  # its order at work
        self.joined = False

    def send(self, message: WireMessage) -> None:
        """Send what the socket takes at once; the loop writes the rest. Raises LinkLost if too much is unread."""
        self.link.post(to_bytes(message))
        self.link.pump()
        if self.link.unsent > MOST_MESSAGE:
            raise LinkLost("it does not read its answers")

    def look(self) -> WireMessage | None:
        """Return the next message if it is there."""
        self.link.pump()
        data = self.link.peek()
        if data is None:
            return None
        self.link.drop()
        return from_bytes(data)


class DraftServer:
    """Serves one draft to several targets."""

    def __init__(
        self,
        drafter: Drafter,
        served: Served,
        tokens: Mapping[int, str],
        listener: socket.socket,
        key: bytes = b"",
        context: ssl.SSLContext | None = None,
        evaluation: DraftEvaluation = NOT_EVALUATED,
    ) -> None:
        """`evaluation`: of the draft; targets plan by it until they have seen verdicts of their own."""
        self._drafter, self._served, self._tokens, self._evaluation = drafter, served, tokens, evaluation
        self._numbers = count()
        self._connections: dict[int, Connection] = {}  # by descriptor
        self._batch = DraftBatch(drafter)
        self._arrived: deque[tuple[socket.socket, str]] = deque()  # through the door
        self._stopping = False
        self._failures = 0
        self._bell, self._rung = socket.socketpair()  # wakes the loop
        for end in (self._bell, self._rung):
            end.setblocking(False)
        self._poll = select.poll()
        self._poll.register(self._rung, select.POLLIN)
        self._door = Door(listener, key, context, self._let_in)

    @property
    def targets(self) -> int:
        """How many targets are connected; any thread may read it."""
        return len(self._connections)

    def run(self) -> None:
        """Serve until `stop`; raises WorkerFailed if the draft fails again and again."""
        try:
            while not self._stopping:
                self._wait(0.0 if self._carry_on() else None)
            while len(self._batch):  # each ends after its present step
                self._draft()
        finally:
            self._close()

    def stop(self, *_: object) -> None:
        """Stop after the present step; a signal handler may call it. The second call interrupts."""
        if self._stopping:
            signal.default_int_handler(signal.SIGINT, None)
        self._stopping = True
        self._ring()

    def _let_in(self, stream: socket.socket, who: str) -> None:
        """Take a connection; called by threads of the door."""
        self._arrived.append((stream, who))
        self._ring()

    def _ring(self) -> None:
        with suppress(OSError):  # it is full, so the loop wakes anyhow; or it is closed
            self._bell.send(b"!")

    def _wait(self, seconds: float | None = None) -> None:
        """Wait until something comes; move bytes, and take who has arrived."""
        for descriptor, connection in self._connections.items():
            self._poll.modify(descriptor, select.POLLIN | (select.POLLOUT if connection.link.unsent else 0))
        for descriptor, _ in self._poll.poll(None if seconds is None else 0):
            if descriptor in self._connections:
                self._attempt(self._connections[descriptor], _move)
            elif descriptor == self._rung.fileno():
                self._rung.recv(4096)
        while self._arrived:
            self._welcome(*self._arrived.popleft())

    def _welcome(self, stream: socket.socket, who: str) -> None:
        if len(self._connections) >= MOST_TARGETS:
            stream.close()
            log.warning("Refused a target at %s: there are %d already.", who, MOST_TARGETS)
            return
        link = StreamLink(as_stream(stream), MOST_MESSAGE)
        others = Others(self._has_others, partial(self._others_wait, link.fileno()), lambda: self._stopping)
        connection = Connection(link, who, self._drafter, self._numbers, others)
        self._connections[link.fileno()] = connection
        self._poll.register(link, select.POLLIN)
        self._attempt(connection, self._introduce)

    def _introduce(self, connection: Connection) -> bool:
        connection.send(self._served)
        return True

    def _has_others(self) -> bool:
        return len(self._connections) > 1

    def _others_wait(self, descriptor: int) -> bool:
        """True if another round is at work, or something comes from another target."""
        return len(self._batch) > 1 or any(ready != descriptor for ready, _ in self._poll.poll(0))

    def _carry_on(self) -> bool:
        """Carry out what has come, and take a step; returns whether there was anything to do."""
        busy = False
        for connection in list(self._connections.values()):
            if connection.round is None:
                busy |= self._attempt(connection, self._take_messages)
        return self._draft() or busy

    def _take_messages(self, connection: Connection) -> bool:
        """Carry out messages up to the first order, which joins the others; returns whether there were any."""
        worked = False
        for _ in range(MESSAGES_AT_ONCE):
            if connection.round is not None or (message := connection.service.next()) is None:
                break
            worked = True
            if not connection.joined:
                self._meet(connection, message)
            elif isinstance(message, Work):
                connection.round = connection.service.begin(message)
            else:
                connection.service.answer(message)
        if connection.round is not None:
            self._batch.join(connection.round)
        return worked

    def _draft(self) -> bool:
        """Take a step of all rounds; returns whether there are any."""
        drafting = len(self._batch) > 0
        for round_, error in self._batch.step() if drafting else ():
            connection = next(one for one in self._connections.values() if one.round is round_)
            connection.round = None
            if error is None:
                self._failures = 0
            else:
                self._attempt(connection, partial(_failed, error))
        return drafting

    def _meet(self, connection: Connection, message: WireMessage) -> None:
        match message:
            case TellTokens():
                connection.send(Tokens(self._served.vocabulary, dict(self._tokens)))
            case TellEvaluation():
                connection.send(Evaluated(self._evaluation, EDGES))
            case Join(vocabulary) if vocabulary >= self._served.vocabulary:
                connection.joined = True
                connection.send(Ready())
                log.info("A target at %s has joined.", connection.who)
            case Join(vocabulary):
                raise BadMessage(
                    f"This worker drafts {self._served.vocabulary} token ids, of which the target has the first "
                    f"{vocabulary}. Start it with --vocabulary {vocabulary}."
                )
            case _:
                raise BadMessage(f"A {type(message).__name__} came before a target has joined.")

    def _attempt(self, connection: Connection, work: Callable[[Connection], bool]) -> bool:
        """Do something for a connection; whatever fails there ends this connection alone."""
        try:
            return work(connection)
        except LinkLost as lost:
            self._drop(connection, str(lost))
        except BadMessage as bad:
            self._drop(connection, f"it cannot be understood: {bad}", Broken(str(bad)))
        except DraftFailed as failed:
            self._drop(connection, f"the draft failed for it: {failed}", Broken(str(failed)))
            self._failures += isinstance(failed.__cause__, RuntimeError)  # every error of a device is one
            if self._failures >= FAILURES_IN_A_ROW:
                raise WorkerFailed(str(failed)) from failed
        return True

    def _drop(self, connection: Connection, why: str, last: Broken | None = None) -> None:
        """End a connection; `last`: what it is told."""
        descriptor = connection.link.fileno()
        if last is not None:
            connection.link.post(to_bytes(last))
            connection.link.pump(LAST_WORDS)
        self._poll.unregister(descriptor)
        del self._connections[descriptor]
        if connection.round is not None:
            self._batch.leave(connection.round)
        connection.service.close()
        connection.link.close()
        log.info("The target at %s has left: %s.", connection.who, why.rstrip("."))

    def _close(self) -> None:
        self._door.close()
        for connection in list(self._connections.values()):
            self._drop(connection, "the worker stops")
        while self._arrived:
            self._arrived.popleft()[0].close()
        self._bell.close()
        self._rung.close()


def _move(connection: Connection) -> bool:
    connection.link.pump()
    return True


def _failed(error: Exception, connection: Connection) -> bool:
    raise_failure(error)
    return True
