"""Drafts for several targets at once: each step is one forward for the orders of all of them.

Owns which orders take the next step together. An order joins between two steps, and leaves when its own end condition
is met (`draft_round`). Invariants: what an order is answered depends on its own target alone; other targets cost it
time, never tokens. A step holds at most one chunk of prefill, so no order waits for another's prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

from specbranch.core.market import MOST_ROWS
from specbranch.exec.draft_round import DraftRound
from specbranch.exec.draft_steps import Chunk, Forward
from specbranch.exec.drafter import Drafter


class Ended(NamedTuple):
    """A round that is over: it is answered, or an error says why it is not."""

    round: DraftRound
    error: Exception | None = None


class DraftBatch:
    """The rounds that a worker drafts just now."""

    def __init__(self, drafter: Drafter) -> None:
        self._drafter = drafter
        self._rounds: list[DraftRound] = []  # the one whose prompt is prefilled next comes first
        self._ended: list[Ended] = []

    def __len__(self) -> int:
        return len(self._rounds)

    def join(self, round_: DraftRound) -> None:
        """Take a round into the next step."""
        self._rounds.append(round_)

    def leave(self, round_: DraftRound) -> None:
        """Drop a round whose target is gone."""
        self._rounds.remove(round_)
        round_.close()

    def step(self) -> list[Ended]:
        """Take one step of all rounds; returns those that are over."""
        for round_ in [one for one in self._rounds if one.step is None]:
            self._attempt(round_, round_.begin)
        chunked = self._prefill()
        forwards = list(self._forwards())
        for group in forwards:
            self._take(group)
        if chunked is not None and not forwards:
            self._attempt(chunked, self._drafter.runner.flush)
        ended, self._ended = self._ended, []
        return ended

    def _prefill(self) -> DraftRound | None:
        """Prefill a chunk for one round; its forward may be that of the step."""
        for round_ in self._rounds:
            if isinstance(round_.step, Chunk):
                self._rounds.remove(round_)
                self._rounds.append(round_)
                self._attempt(round_, round_.prefill)
                if any(one.apart for one in self._rounds):  # a forward of one round has no other's chunk in it
                    self._attempt(round_, self._drafter.runner.flush)
                return round_
        return None

    def _forwards(self) -> Iterator[list[DraftRound]]:
        """Part the rounds that want a forward, so that no forward has too many rows."""
        group, rows = list[DraftRound](), 0
        for round_ in list(self._rounds):
            if not isinstance(round_.step, Forward):
                continue
            if round_.apart:
                yield [round_]
                continue
            if group and rows + round_.step.rows > MOST_ROWS:
                yield group
                group, rows = [], 0
            group.append(round_)
            rows += round_.step.rows
        if group:
            yield group

    def _take(self, group: list[DraftRound]) -> None:
        """Compute a forward, and hand each round its part.

        If it fails, nobody knows whose rows did it: each round of the group is drafted anew, apart from the others.
        """
        steps = [round_.step for round_ in group if isinstance(round_.step, Forward)]
        try:
            answers = self._drafter.take(steps)
        except Exception as error:
            if len(group) == 1:
                self._end(group[0], error)
            for round_ in group if len(group) > 1 else ():
                round_.draft_apart()
            return
        for round_, proposals in zip(group, answers, strict=True):
            self._attempt(round_, partial(round_.take, proposals))

    def _attempt(self, round_: DraftRound, work: Callable[[], object]) -> None:
        """Do something for one round; what fails there ends this round alone."""
        try:
            work()
        except Exception as error:
            self._end(round_, error)
        else:
            if round_.answered and round_ in self._rounds:
                self._end(round_)

    def _end(self, round_: DraftRound, error: Exception | None = None) -> None:
        if round_ in self._rounds:
            self.leave(round_)
            self._ended.append(Ended(round_, error))
