"""Carries out the orders of one target with a draft worker, and answers them over a channel.

Owns the target's sessions (each has a number of its own in the worker, which may serve several targets), and the
messages that come while a round is drafted. How to draft is `drafter`'s; links are the channel's. Invariant: after
`close` the worker holds nothing of this target.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Mapping
from itertools import count
from typing import Protocol, TypeVar

from specbranch.core.orders import Branch, DraftOrder, Effort, Grow
from specbranch.core.slots import ROOT
from specbranch.exec.drafter import Drafter
from specbranch.exec.link import LinkLost
from specbranch.exec.messages import (
    Enough,
    HeadsDrawn,
    Leave,
    Open,
    RoundDrafted,
    StaleHolding,
    TargetDone,
    WireMessage,
    Work,
)
from specbranch.exec.wire import BadMessage

MOST_SESSIONS = 4096  # of one target at a time
MOST_WAITING = 2 * MOST_SESSIONS  # messages that may come while a round is drafted
Value = TypeVar("Value")


class Channel(Protocol):
    """The worker's end of a link, in messages."""

    def send(self, message: WireMessage) -> None:
        """Send a message."""
        ...

    def look(self) -> WireMessage | None:
        """Return the next message if it is there; raises LinkLost once the target is gone."""
        ...


class DraftFailed(Exception):
    """The draft failed while drafting; a sentence says why."""


class DraftService:
    """One target's sessions in a draft worker."""

    def __init__(self, drafter: Drafter, channel: Channel, numbers: Iterator[int] | None = None) -> None:
        """`numbers`: of the worker's sessions; services of one worker share them."""
        self._drafter, self._channel = drafter, channel
        self._numbers = numbers or count()
        self._own: dict[int, int] = {}  # the worker's number of each of the target's sessions
        self._waiting: deque[WireMessage] = deque()  # what came while a round was drafted
        self.rounds = 0  # that were drafted

    def next(self) -> WireMessage | None:
        """Return the next message if it is there."""
        return self._waiting.popleft() if self._waiting else self._channel.look()

    def answer(self, message: WireMessage) -> None:
        """Carry out a message; raises DraftFailed if the draft cannot, BadMessage if nobody could."""
        match message:
            case Open(session, request):
                self._free(session)
                if len(self._own) >= MOST_SESSIONS:
                    raise BadMessage(f"More than {MOST_SESSIONS} sessions at a time are not served.")
                number = next(self._numbers)
                self._drafter.open(number, request)
                self._own[session] = number
            case Leave(session):
                self._free(session)
            case Work():
                self._work(message)
            case TargetDone() | Enough():
                pass  # came after the round was drafted
            case _:
                raise BadMessage(f"A {type(message).__name__} came out of turn.")

    def close(self) -> None:
        """Free all sessions of this target."""
        for session in list(self._own):
            self._free(session)

    def _free(self, session: int) -> None:
        if (number := self._own.pop(session, None)) is not None:
            self._drafter.free(number)

    def _work(self, work: Work) -> None:
        if unknown := work.orders.keys() - self._own.keys():
            raise BadMessage(f"Session {min(unknown)} was never opened.")
        orders = {self._own[session]: order for session, order in work.orders.items()}
        for order in orders.values():
            _check(order)
        try:
            self._draft(work, orders)
        except (LinkLost, BadMessage):
            raise
        except Exception as error:
            raise DraftFailed(f"{type(error).__name__}: {error}") from error

    def _draft(self, work: Work, orders: dict[int, DraftOrder]) -> None:
        drafter, theirs = self._drafter, {number: session for session, number in self._own.items()}
        if stale := tuple(theirs[number] for number, order in orders.items() if drafter.stale(number, order.on)):
            self._channel.send(StaleHolding(work.ticket, stale))
            return
        start, fed = time.perf_counter(), drafter.rows_fed

        def announce(heads: dict[int, Branch]) -> None:
            if any(order.announces for order in orders.values()):
                self._channel.send(HeadsDrawn(work.ticket, _renamed(heads, theirs)))

        target = _Target(self._channel, work.ticket, self._waiting)
        drafter.enough = target.wants_answer
        made = drafter.draft(orders, target.is_done, announce)
        counts = drafter.prefill_counts()  # also of other targets' sessions
        prompts = _renamed({number: counts[number] for number in orders if number in counts}, theirs)
        effort = Effort(time.perf_counter() - start, drafter.rows_fed - fed, prompts)
        self.rounds += 1
        self._channel.send(RoundDrafted(work.ticket, _renamed(made, theirs), effort))


def _check(order: DraftOrder) -> None:
    """Refuse token ids that no model has, and a tree that is none. Ids beyond the vocabulary are the worker's."""
    if min(order.on.tail, default=0) < 0 or order.on.base < 0:
        raise BadMessage("An order has a token id or a length below 0.")
    if isinstance(order, Grow):
        for n, node in enumerate(order.tree.nodes):
            if node.token < 0 or not ROOT <= node.parent < n:
                raise BadMessage(f"Node {n} of a tree has token {node.token} and parent {node.parent}.")


def _renamed(values: Mapping[int, Value], names: Mapping[int, int]) -> dict[int, Value]:
    """Return values by the target's numbers."""
    return {names[number]: value for number, value in values.items()}


class _Target:
    """Receives a target's messages about the present round while it is drafted; it keeps all others for later."""

    def __init__(self, channel: Channel, ticket: int, waiting: deque[WireMessage]) -> None:
        self._channel, self._ticket, self._waiting = channel, ticket, waiting
        self._done = self._wants_answer = False

    def is_done(self) -> bool:
        """True if the target has finished."""
        self._hear()
        return self._done or self._wants_answer

    def wants_answer(self) -> bool:
        """True if the target wants the answer now."""
        self._hear()
        return self._wants_answer

    def _hear(self) -> None:
        while not self._wants_answer and (message := self._channel.look()) is not None:
            self._done |= message == TargetDone(self._ticket)
            self._wants_answer |= message == Enough(self._ticket)
            if not isinstance(message, TargetDone | Enough):
                self._waiting.append(message)
            if len(self._waiting) > MOST_WAITING:
                raise BadMessage(f"More than {MOST_WAITING} messages came while a round was drafted.")
