"""One order of one target while a draft worker drafts it.

Owns its steps, its end conditions and its answer. Who takes steps together is `draft_batch`'s. Invariant: its lanes
end by its plan, or between two steps when its own target says so; what is drafted until then is all in the answer.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, TypeVar

from specbranch.core.orders import Branch, Drafted, DraftOrder, Effort
from specbranch.core.runner import Done, Proposal
from specbranch.exec.draft_steps import Chunk, Drafting, Ends, Forward
from specbranch.exec.drafter import Drafter, checked
from specbranch.exec.messages import Enough, HeadsDrawn, RoundDrafted, TargetDone, WireMessage
from specbranch.exec.wire import BadMessage
from specbranch.exec.worker import never

MOST_WAITING = 8192  # messages that may come while a round is drafted
Value = TypeVar("Value")


class Channel(Protocol):
    """The worker's end of a link, in messages."""

    def send(self, message: WireMessage) -> None:
        """Send a message."""
        ...

    def look(self) -> WireMessage | None:
        """Return the next message if it is there; raises LinkLost once the target is gone."""
        ...


@dataclass(frozen=True, slots=True)
class Others:
    """What a round has to know of the rest of its worker."""

    connected: Done = never  # there are other targets
    waiting: Done = never  # others have orders here
    stopping: Done = never  # the worker stops: rounds end with what they have


class Target:
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


class DraftRound:
    """An order at work."""

    def __init__(
        self,
        drafter: Drafter,
        channel: Channel,
        ticket: int,
        orders: Mapping[int, DraftOrder],
        names: Mapping[int, int],
        waiting: deque[WireMessage],
        others: Others,
    ) -> None:
        """`orders`: by the worker's numbers of sessions; `names`: the target's number of each."""
        self.step: Forward | Chunk | None = None  # what it computes next; None: it has not begun
        self.apart = False  # a forward with others has failed
        self.answered = False
        self._drafter, self._channel, self._ticket = drafter, channel, ticket
        self._orders, self._names = orders, names
        target = Target(channel, ticket, waiting)
        self._ends = Ends(
            target.is_done, lambda: target.wants_answer() or others.stopping(), others.connected, others.waiting
        )
        self._started_at, self._rows, self._announced = time.perf_counter(), 0, False
        self._drafting: Drafting[dict[int, Drafted]] | None = None

    def begin(self) -> None:
        """Prepare the first step."""
        self._drafting = self._drafter.drafting(self._orders, self._ends, self._announce)
        self._advance(None)

    def prefill(self) -> None:
        """Prefill the chunk that is due."""
        assert isinstance(self.step, Chunk)
        before = self._drafter.rows_fed
        reached = self._drafter.prefill_further(self.step.session, self.step.order).tokens
        self._rows += self._drafter.rows_fed - before
        self._advance(reached)

    def take(self, proposals: list[Proposal]) -> None:
        """Take the answers of a forward, and prepare the next step."""
        assert isinstance(self.step, Forward)
        self._rows += self.step.rows
        self._advance(checked(proposals))

    def draft_apart(self) -> None:
        """Begin anew, in forwards of its own: an order may be repeated."""
        self.close()
        self.step, self.apart = None, True

    def close(self) -> None:
        """Drop what was drafted."""
        if self._drafting is not None:
            self._drafting.close()

    def _advance(self, answer: list[Proposal] | int | None) -> None:
        assert self._drafting
        before = self._drafter.rows_fed
        try:
            self.step = self._drafting.send(answer)
        except StopIteration as ended:
            self._answer(ended.value)
        finally:
            self._rows += self._drafter.rows_fed - before

    def _announce(self, heads: dict[int, Branch]) -> None:
        if not self._announced and any(order.announces for order in self._orders.values()):
            self._announced = True
            self._channel.send(HeadsDrawn(self._ticket, renamed(heads, self._names)))

    def _answer(self, made: dict[int, Drafted]) -> None:
        prompts = renamed(self._drafter.prefill_counts(self._orders), self._names)
        effort = Effort(time.perf_counter() - self._started_at, self._rows, prompts)
        self.answered = True
        self._channel.send(RoundDrafted(self._ticket, renamed(made, self._names), effort))


def renamed(values: Mapping[int, Value], names: Mapping[int, int]) -> dict[int, Value]:
    """Return values by the target's numbers."""
    return {names[number]: value for number, value in values.items()}
