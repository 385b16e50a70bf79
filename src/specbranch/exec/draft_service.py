"""Takes the messages of one target in a draft worker: opens and frees its sessions, and makes rounds of its orders.

Owns the target's sessions (each has a number of its own in the worker, which may serve several targets), and the
messages that come while a round is drafted. How a round is drafted is `draft_round`'s; links are the channel's.
Invariant: after `close` the worker holds nothing of this target.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from itertools import count

from specbranch.core.orders import DraftOrder, Grow
from specbranch.core.slots import ROOT
from specbranch.exec.draft_batch import DraftBatch
from specbranch.exec.draft_round import Channel, DraftRound, Others
from specbranch.exec.drafter import Drafter
from specbranch.exec.link import LinkLost
from specbranch.exec.messages import Enough, Leave, Open, StaleHolding, TargetDone, WireMessage, Work
from specbranch.exec.wire import BadMessage

MOST_SESSIONS = 4096  # of one target at a time


class DraftFailed(Exception):
    """The draft failed while drafting; a sentence says why."""


class DraftService:
    """One target's sessions in a draft worker."""

    def __init__(
        self, drafter: Drafter, channel: Channel, numbers: Iterator[int] | None = None, others: Others | None = None
    ) -> None:
        """`numbers`: of the worker's sessions; services of one worker share them. `others`: the worker's other
        targets."""
        self._drafter, self._channel, self._others = drafter, channel, others or Others()
        self._numbers = numbers or count()
        self._own: dict[int, int] = {}  # the worker's number of each of the target's sessions
        self._waiting: deque[WireMessage] = deque()  # what came while a round was drafted

    def next(self) -> WireMessage | None:
        """Return the next message if it is there."""
        return self._waiting.popleft() if self._waiting else self._channel.look()

    def answer(self, message: WireMessage) -> None:
        """Carry out a message, an order to its end; raises DraftFailed if the draft cannot, BadMessage if nobody
        could."""
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
                if (round_ := self.begin(message)) is not None:
                    _draft(self._drafter, round_)
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

    def begin(self, work: Work) -> DraftRound | None:
        """Return the round of an order; None if it is answered already, because it has to be sent again."""
        if unknown := work.orders.keys() - self._own.keys():
            raise BadMessage(f"Session {min(unknown)} was never opened.")
        orders = {self._own[session]: order for session, order in work.orders.items()}
        for order in orders.values():
            _check(order)
        names = {self._own[session]: session for session in work.orders}
        if stale := tuple(names[number] for number, order in orders.items() if self._drafter.stale(number, order.on)):
            self._channel.send(StaleHolding(work.ticket, stale))
            return None
        return DraftRound(self._drafter, self._channel, work.ticket, orders, names, self._waiting, self._others)


def raise_failure(error: Exception) -> None:
    """Raise what ended a round: what is wrong with its link, or DraftFailed."""
    if isinstance(error, (LinkLost, BadMessage)):
        raise error
    raise DraftFailed(f"{type(error).__name__}: {error}") from error


def _draft(drafter: Drafter, round_: DraftRound) -> None:
    """Draft a round by itself."""
    batch = DraftBatch(drafter)
    batch.join(round_)
    while len(batch):
        for ended in batch.step():
            if ended.error is not None:
                raise_failure(ended.error)


def _check(order: DraftOrder) -> None:
    """Refuse token ids that no model has, and a tree that is none. Ids beyond the vocabulary are the worker's."""
    if min(order.on.tail, default=0) < 0 or order.on.base < 0:
        raise BadMessage("An order has a token id or a length below 0.")
    if isinstance(order, Grow):
        for n, node in enumerate(order.tree.nodes):
            if node.token < 0 or not ROOT <= node.parent < n:
                raise BadMessage(f"Node {n} of a tree has token {node.token} and parent {node.parent}.")
