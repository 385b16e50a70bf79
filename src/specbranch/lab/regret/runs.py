"""Methods on a case: the fixed arms, the judged methods, and what each request took.

Owns the arms and the run of one method over all requests of a case. Invariants: every method emits the script; any
other text is an error. A run starts from empty experience and keeps it to its end.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from specbranch.config import SamplingParams, SpeculativeConfig
from specbranch.core.costs import MeasuredCosts
from specbranch.core.experience import Experience
from specbranch.core.loop import Loop
from specbranch.core.methods import METHODS, PLAIN, MethodRounds, find_method
from specbranch.core.rehearsal import rehearse
from specbranch.core.request import Request
from specbranch.core.session import Session
from specbranch.errors import BadParameter
from specbranch.lab.regret.case import REQUEST_TOKENS, Case
from specbranch.lab.regret.forest_machine import padded
from specbranch.lab.regret.machine import MachineClock
from specbranch.lab.regret.toy_pair import Script, Scripts
from specbranch.lab.replay.decode import Diverged

PLAIN_ARM = "plain"
LAB_REHEARSAL_SECONDS = 60.0  # on the machine's clock; all sizes get their turns
LAB_REHEARSAL_TURNS = 3
ARMS: dict[str, SpeculativeConfig] = {
    PLAIN_ARM: SpeculativeConfig(method=PLAIN),
    "lookup": SpeculativeConfig(method="lookup"),
    "speculative-2": SpeculativeConfig(method="speculative", num_speculative_tokens=2),
    "speculative-5": SpeculativeConfig(method="speculative", num_speculative_tokens=5),
    "speculative-10": SpeculativeConfig(method="speculative", num_speculative_tokens=10),
    "tree": SpeculativeConfig(method="tree"),
}
OVERLAP_ARMS: dict[str, SpeculativeConfig] = {"pearl": SpeculativeConfig(method="pearl")}  # for two devices
Start = Callable[[Session, Experience], MethodRounds]


@dataclass(frozen=True, slots=True)
class Contender:
    """A method that takes part: how it starts a request."""

    name: str
    start: Start
    learns_costs: bool = True


@dataclass(frozen=True, slots=True)
class BatchTime:
    """What one batch of requests took; a batch of one is a request."""

    requests: int
    tokens: int
    seconds: float  # without first-time spikes
    forwards: int  # of the target
    draft_steps: int


@dataclass(frozen=True, slots=True)
class Run:
    """One method over a whole case."""

    name: str
    batches: tuple[BatchTime, ...]

    @property
    def cold(self) -> float:
        """Seconds of the first half of the requests (1 to 4 of eight)."""
        return sum(batch.seconds for batch in self.batches[: len(self.batches) // 2])

    @property
    def warm(self) -> float:
        """Seconds of the second half (5 to 8)."""
        return sum(batch.seconds for batch in self.batches[len(self.batches) // 2 :])

    @property
    def seconds(self) -> float:
        """Seconds of all requests."""
        return self.cold + self.warm


def contender(name: str, config: SpeculativeConfig) -> Contender:
    """Return a method of the engine."""
    method = find_method(config.method or PLAIN, has_draft=True)
    return Contender(name, lambda session, experience: method.start(session, config, experience), method.plans(config))


def arms_of(case: Case) -> list[Contender]:
    """Return the fixed methods that a case compares with."""
    named = {**ARMS, **OVERLAP_ARMS} if case.overlap else ARMS
    return [contender(name, config) for name, config in named.items()]


def judged(names: tuple[str, ...]) -> list[Contender]:
    """Return the planned methods of these names."""
    found = [contender(name, SpeculativeConfig(method=name)) for name in names]
    fixed = [one.name for one in found if not one.learns_costs]
    if fixed or not found:
        planned = ", ".join(name for name, method in METHODS.items() if method.policy == "planner")
        raise BadParameter(f"--methods is {','.join(names)!r}; expected methods that plan: {planned}.")
    return found


def run(scripts: Scripts, one: Contender, forest: bool = False) -> Run:
    """Decode all requests of a case, batch after batch; `forest` as for `CaseRun`."""
    return CaseRun(scripts, one, forest).run()


class CaseRun:
    """One method at work on a case. The method gets a session and its own experience, never the case."""

    def __init__(self, scripts: Scripts, one: Contender, forest: bool = False) -> None:
        """`forest`: the machine makes rounds of the forest, unless it has two devices."""
        self.scripts, self.contender = scripts, one
        forest = forest and not scripts.case.overlap
        self.clock = MachineClock(scripts, self._progress, forest)
        costs = MeasuredCosts(scripts.case.overlap, padded if forest else None, launches_ahead=forest)
        self.experience = Experience(costs, has_draft=True)
        self._loop = Loop(self.clock, costs=self.experience.learned if one.learns_costs else None)
        self._sessions: list[Session] = []
        self._ended = 0  # tokens of earlier batches
        if one.learns_costs and self.experience.learned is not None:  # as an engine does when it loads
            costs = self.experience.learned
            rehearse(self.clock, costs, scripts.vocabulary, True, LAB_REHEARSAL_SECONDS, True, LAB_REHEARSAL_TURNS)

    def run(self) -> Run:
        """Decode all batches."""
        return Run(self.contender.name, tuple(self._batch(batch) for batch in self.scripts.case.batches))

    def _batch(self, numbers: range) -> BatchTime:
        costs = self.clock.costs
        seconds, forwards, steps = self.clock.charged, len(costs.forwards), len(costs.draft_steps)
        self._sessions = [_session(number, self.scripts.requests[number]) for number in numbers]
        for session in self._sessions:
            self._loop.join(session, self.contender.start(session, self.experience))
        while self._loop.live:
            self._loop.step()
        tokens = sum(self._checked(session) for session in self._sessions)
        self._ended, self._sessions = self._ended + tokens, []
        return BatchTime(
            requests=len(numbers),
            tokens=tokens,
            seconds=self.clock.charged - seconds,
            forwards=len(costs.forwards) - forwards,
            draft_steps=len(costs.draft_steps) - steps,
        )

    def _checked(self, session: Session) -> int:
        """Return how many tokens a session emitted, if they are the script's."""
        if session.error is not None:
            raise session.error
        expected = self.scripts.requests[session.number].answer[:REQUEST_TOKENS]
        if tuple(session.output) != expected:
            raise Diverged(
                f"{self.contender.name} emitted {session.output} in request {session.number}, not {expected}"
            )
        return len(session.output)

    def _progress(self) -> float:
        now = sum(session.stats.emitted for session in self._sessions)
        return (self._ended + now) / (REQUEST_TOKENS * len(self.scripts.requests))


def _session(number: int, script: Script) -> Session:
    request = Request(SamplingParams(max_tokens=REQUEST_TOKENS), number, len(script.prompt))
    return Session(number, script.prompt, request, len(script.prompt) + REQUEST_TOKENS)
