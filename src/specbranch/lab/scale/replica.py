"""One replica of a target under load: its queue, its batch, and what it measured.

Owns the requests of one target from arrival to end, on any clock. Where requests come from is the load's
(`fleet_run.py`, `measured.py`). Invariant: every answer is the text of its script; any other is an error.
"""

from __future__ import annotations

from bisect import bisect_right
from math import ceil

from specbranch.config import SamplingParams
from specbranch.core.costs import MeasuredCosts
from specbranch.core.experience import Experience
from specbranch.core.loop import Executor, Loop
from specbranch.core.methods import PLAIN, find_method
from specbranch.core.rehearsal import rehearse
from specbranch.core.request import Request
from specbranch.core.scheduler import Scheduler
from specbranch.core.session import Session
from specbranch.lab.regret.case import REQUEST_TOKENS
from specbranch.lab.regret.toy_pair import Script, Scripts
from specbranch.lab.replay.decode import Diverged
from specbranch.lab.scale.fleet import Fleet

FLEET_REHEARSAL_SECONDS = 60.0  # on the replica's clock; all sizes get their turns
FLEET_REHEARSAL_TURNS = 2


class Replica:
    """A target with its queue."""

    def __init__(self, fleet: Fleet, number: int, scripts: Scripts, executor: Executor) -> None:
        """Time the forwards, as an engine does when it loads."""
        self.latencies: list[float] = []  # of whole requests
        self.unfinished = 0
        self._fleet, self._number, self._scripts, self._executor = fleet, number, scripts, executor
        has_draft = fleet.draft != "none"
        self.costs = MeasuredCosts(fleet.overlap, launches_ahead=fleet.profile.launches_ahead)
        self._experience = Experience(self.costs, has_draft)
        self._scheduler = Scheduler(Loop(executor, costs=self.costs), most=fleet.batch)
        self._live: dict[int, tuple[Session, float]] = {}  # with its arrival
        self._given = self._ended_tokens = 0
        self._emitted: list[tuple[float, int]] = [(0.0, 0)]  # (moment, tokens so far)
        self._first_wave = 0  # requests of it that have not ended
        self.steady = 0.0  # when the first wave had ended
        seconds, turns = FLEET_REHEARSAL_SECONDS, FLEET_REHEARSAL_TURNS
        rehearse(executor, self.costs, scripts.vocabulary, has_draft, seconds, turns=turns)

    def give_first(self) -> None:
        """Take one request for each place in the batch: of different lengths, so that later ones start in turn."""
        for at in range(self._fleet.batch):
            self.give(ceil(REQUEST_TOKENS * (at + 1) / self._fleet.batch))
        self._first_wave = self._fleet.batch

    def give(self, tokens: int = REQUEST_TOKENS) -> None:
        """Take a request that arrives now."""
        script = self._scripts.requests[(self._number + self._given) % len(self._scripts.requests)]
        session = _session(self._given, script, tokens)
        self._live[self._given] = session, self._executor.now()
        self._given, self.unfinished = self._given + 1, self.unfinished + 1
        config = self._fleet.config
        method = find_method(config.method or PLAIN, self._fleet.draft != "none")
        self._scheduler.submit(session, lambda: method.start(session, config, self._experience))

    def step(self) -> int:
        """Run one round; returns how many requests ended in it."""
        self._scheduler.step()
        now, before = self._executor.now(), self.unfinished
        for session, arrived in list(self._live.values()):
            if session.finished:
                self._end(session, now - arrived)
        tokens = self._ended_tokens + sum(session.stats.emitted for session, _ in self._live.values())
        self._emitted.append((now, tokens))
        return before - self.unfinished

    @property
    def ended(self) -> float:
        """When its last round ended."""
        return self._emitted[-1][0]

    def emitted_by(self, moment: float) -> int:
        """Return how many tokens were emitted up to a moment."""
        return self._emitted[bisect_right(self._emitted, moment, key=lambda one: one[0]) - 1][1]

    def _end(self, session: Session, seconds: float) -> None:
        if session.error is not None:
            raise session.error
        script = self._scripts.requests[(self._number + session.number) % len(self._scripts.requests)]
        if tuple(session.output) != script.answer[: session.request.params.max_tokens]:
            raise Diverged(f"Replica {self._number} gave another text to request {session.number}.")
        del self._live[session.number]
        self.unfinished -= 1
        self._ended_tokens += len(session.output)
        if session.number < self._first_wave:
            self.steady = self._executor.now()
        else:
            self.latencies.append(seconds)


def throughput(replicas: list[Replica], first: float, last: float) -> float:
    """Return the tokens a second of all replicas between two moments."""
    tokens = sum(one.emitted_by(last) - one.emitted_by(first) for one in replicas)
    return tokens / (last - first)


def _session(number: int, script: Script, tokens: int) -> Session:
    request = Request(SamplingParams(max_tokens=tokens), number, len(script.prompt))
    return Session(number, script.prompt, request, len(script.prompt) + tokens)
