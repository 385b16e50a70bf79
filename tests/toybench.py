"""A bench of toy models: executors around them, requests of every kind, and one session run to its end.

Owns what tests on toys share. Invariant: `plainly` decodes from the law and the noise alone, without cache, worker or
session. So a fault in any of those cannot hide on both sides of a comparison.
"""

from __future__ import annotations

import itertools
import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import FrameType, ModuleType
from typing import Any

from specbranch.clock.profile import CostProfile
from specbranch.clock.virtual_clock import MeteredDrafter, VirtualClock
from specbranch.config import PolicyName, Rule, SamplingParams, SpeculativeConfig
from specbranch.core import noise
from specbranch.core.costs import Costs
from specbranch.core.experience import Experience, Insight
from specbranch.core.forecast import Signal
from specbranch.core.lookup import Ngrams
from specbranch.core.loop import Executor, Loop
from specbranch.core.market import LaneGrant, RowGrant, RowOffer
from specbranch.core.methods import METHODS, MethodRounds
from specbranch.core.orders import Orders, Reports
from specbranch.core.planner import Planner
from specbranch.core.policy import Policy
from specbranch.core.request import Request
from specbranch.core.runner import Feed, Trial, Verdicts
from specbranch.core.session import Session, Watcher
from specbranch.core.slots import ROOT, TAIL
from specbranch.core.trace import Trace
from specbranch.core.tree_rounds import decode_tree
from specbranch.core.trees import Growth, Tree
from specbranch.exec.drafter import Drafter
from specbranch.exec.messages import Recipe, WireMessage
from specbranch.exec.process import Process
from specbranch.exec.serial import Serial
from specbranch.exec.streams import Streams
from specbranch.exec.verifier import Verifier
from specbranch.lab.toys.toys import ListLaw, Logits, ToyLaw, ToyRunner, shaped

VOCABULARY = 6
SHARPNESS = 2.0
LIMIT = 1000  # tokens of a sequence, unless a test says otherwise
PROFILE = CostProfile(target=((1, 10.0), (8, 12.0)), draft=((1, 3.0), (8, 5.0)), slow_down=0.3, host=0.1)
# The same with rows and steps that cost little more in a batch, so that several sessions at once have much to draft.
SHARED = replace(PROFILE, target=((1, 10.0), (512, 12.0)), draft=((1, 0.5), (512, 1.0)))
MOST_ROUNDS = 5000
NAMES = (*METHODS, "confidence")  # methods, and one by another policy

_numbers = itertools.count()


def config_of(method: str, rule: Rule) -> SpeculativeConfig:
    """The settings of one of NAMES."""
    policy: PolicyName | None = "confidence" if method == "confidence" else None
    named = "specbranch" if policy else method
    ahead = {"lookahead_window": 3, "lookahead_ngram": 3, "lookahead_candidates": 3}
    return SpeculativeConfig(
        method=named, policy=policy, num_speculative_tokens=3, max_branches=12, stop_below=0.4, rule=rule, **ahead
    )


class SlowRunner(ToyRunner):
    """A toy that takes a while for each forward, as a model does; `seconds` may be changed at any time."""

    def __init__(self, law: ToyLaw, seconds: float = 0.0, context_length: int = 4096, tail: int = TAIL) -> None:
        super().__init__(law, context_length, tail)
        self.seconds = seconds

    def _score(self, work: Sequence[Feed]) -> list[list[Logits]]:
        """Read new nodes, slowly."""
        if self.seconds:
            time.sleep(self.seconds)
        return super()._score(work)

    def _said(self, seq: int, node: int, token: int) -> tuple[float, ...]:
        """A probe that tells all."""
        return (*self._rows[seq][node], token)


class Deferred(SlowRunner):
    """A target on a device that works by itself: its verdicts are there after more than `polls` polls, or when they
    are waited for."""

    def __init__(self, law: ToyLaw, polls: Callable[[], int], context_length: int = 4096, tail: int = TAIL) -> None:
        super().__init__(law, 0.0, context_length, tail)
        self.polls = polls
        self.asked = 0

    def verify(self, work: Sequence[Feed], trials: Sequence[Trial]) -> Verdicts:
        """Read new nodes; the verdicts come later."""
        left, found = self.polls(), super().verify(work, trials)
        asked_at = self.asked

        def ready() -> bool:
            self.asked += 1
            return self.asked - asked_at > left

        return Verdicts(found, ready)


def law(drift: float = 0.0, vocabulary: int = VOCABULARY) -> ToyLaw:
    """The target's law, or a draft's that has drifted from it."""
    return ToyLaw(vocabulary, sharpness=SHARPNESS, drift=drift)


def make_drafter(drift: float, vocabulary: int = VOCABULARY, seconds: float = 0.0) -> Drafter:
    """Make a draft worker; importable, so that a child process can make its own."""
    return Drafter(SlowRunner(law(drift, vocabulary), seconds))


def drafter_recipe(drift: float, vocabulary: int = VOCABULARY, seconds: float = 0.0) -> Recipe:
    """What exec.process.Process is given to make a child's worker."""
    return Recipe("toybench:make_drafter", {"drift": drift, "vocabulary": vocabulary, "seconds": seconds})


class Moody:
    """A forecaster with random signals: every class comes up, and row and token alone decide which."""

    def signal(self, said: tuple[float, ...] | None, position: int) -> Signal | None:
        """Foretell whatever comes to its mind; now and then nothing."""
        assert said is not None
        rng = random.Random(f"{[round(x, 6) for x in said]} {position}")
        if rng.random() < 0.1:
            return None
        weights = [[rng.random() for _ in range(3)] for _ in range(8)]
        return Signal(tuple((a / (a + b + c), b / (a + b + c), c / (a + b + c)) for a, b, c in weights))


def make_verifier(vocabulary: int = VOCABULARY, seconds: float = 0.0) -> Verifier:
    """Make a target worker."""
    return Verifier(SlowRunner(law(0.0, vocabulary), seconds), Moody())


def serial(drift: float, vocabulary: int = VOCABULARY) -> Serial:
    """The reference executor."""
    return Serial(make_verifier(vocabulary), make_drafter(drift, vocabulary))


def process(
    drift: float, vocabulary: int = VOCABULARY, target_seconds: float = 0.0, draft_seconds: float = 0.0
) -> Process:
    """The draft in a child; to be closed."""
    return Process(make_verifier(vocabulary, target_seconds), drafter_recipe(drift, vocabulary, draft_seconds))


def streams(drift: float, vocabulary: int = VOCABULARY) -> Streams:
    """Both in this process; the target has its verdicts after any number of the draft's steps."""
    target = Deferred(law(0.0, vocabulary), partial(random.Random(5).randrange, 7))
    return Streams(Verifier(target, Moody()), make_drafter(drift, vocabulary))


class Interrupted:
    """Raises a KeyboardInterrupt before the line numbered `at` of some modules, counted as they are run."""

    def __init__(self, at: int, *modules: ModuleType) -> None:
        self.files, self.left = {module.__file__ for module in modules}, at

    def __enter__(self) -> Interrupted:
        self.before = sys.gettrace()
        sys.settrace(self._trace)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(self.before)

    def _trace(self, frame: FrameType, event: str, _: Any) -> Callable[..., Any] | None:
        if frame.f_code.co_filename not in self.files:
            return None
        if event == "line":
            self.left -= 1
            if self.left == 0:
                raise KeyboardInterrupt
        return self._trace


class Overheard(Process):
    """Notes what the child is sent."""

    def __init__(self, target: Verifier, recipe: Recipe) -> None:
        self.sent_messages: list[Any] = []
        super().__init__(target, recipe)

    def _post(self, message: WireMessage) -> None:
        self.sent_messages.append(message)
        super()._post(message)


def virtual_clock(drift: float, vocabulary: int = VOCABULARY, profile: CostProfile = PROFILE) -> VirtualClock:
    """Both side by side on a clock charged by a profile."""
    return VirtualClock(make_verifier(vocabulary), MeteredDrafter(ToyRunner(law(drift, vocabulary))), profile)


@dataclass(frozen=True)
class Ending:
    """How a request is to end. `watch` makes a fresh watcher for each run; it stands for stop strings."""

    name: str
    max_tokens: int = 56
    eos_ids: tuple[int, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    watch: Callable[[], Watcher] | None = None


@dataclass(frozen=True)
class Case:
    """A request: all that decides its output."""

    prompt: tuple[int, ...]
    temperature: float
    seed: int
    ending: Ending
    rule: Rule = "match"

    @property
    def params(self) -> SamplingParams:
        """The sampling parameters."""
        ending = self.ending
        return SamplingParams(
            temperature=self.temperature,
            max_tokens=ending.max_tokens,
            stop_token_ids=ending.stop_token_ids,
            ignore_eos=ending.ignore_eos,
        )

    def session(self, number: int = 0, limit: int = LIMIT) -> Session:
        """A session for it."""
        request = Request(
            self.params, self.seed, len(self.prompt), rule=self.rule, eos_ids=self.ending.eos_ids, wants_forecast=True
        )
        return Session(number, self.prompt, request, limit, self.ending.watch() if self.ending.watch else None)


@dataclass(frozen=True)
class Answer:
    """What a request gave: what every method must agree on."""

    tokens: tuple[int, ...]
    finished: str | None


def answer(session: Session) -> Answer:
    """What a session gave."""
    return Answer(tuple(session.output), session.finished)


def plainly(case: Case, model: ToyLaw, said: Sequence[int] = ()) -> Answer:
    """Decode token by token from the law alone, without a cache: argmax of log p + noise over the whole sequence.
    Under the ratio rule it is a draw from p. The answer starts with what was `said`."""
    tokens, ending = [*case.prompt, *said], case.ending
    watcher = ending.watch() if ending.watch else None
    ends = set(ending.stop_token_ids) | (set() if ending.ignore_eos else set(ending.eos_ids))
    for _ in range(ending.max_tokens - len(said)):
        tokens.append(_draw(model.logits_of(tokens), case, len(tokens)))
        watched = watcher is not None and watcher(tokens[-1])
        if tokens[-1] in ends or watched:
            return Answer(tuple(tokens[len(case.prompt) :]), "stop")
    return Answer(tuple(tokens[len(case.prompt) :]), "length")


def _draw(logits: Logits, case: Case, position: int) -> int:
    if case.temperature == 0.0:
        return logits.index(max(logits))
    if case.rule == "ratio":
        return ListLaw(shaped(logits, case.temperature)).draw(noise.uniform(case.seed, 0, position, "own"))
    gumbel = noise.gumbel_row(case.seed, 0, position, len(logits))
    scores = [x / case.temperature + g for x, g in zip(logits, gumbel, strict=True)]
    return scores.index(max(scores))


class Timeless(Experience):
    """Goes by the profile where the executor's own clock has nothing to do with it: always as fast as it was at
    first."""

    def __init__(self, costs: Costs) -> None:
        super().__init__(costs)
        self.insight = Unmoved()

    def record_forwards(self, orders: Orders, reports: Reports, *given: float) -> float:
        """Return the seconds in which the initial rate brings the tokens of this run."""
        emitted = len(reports.verdict.path) + 1 if reports.verdict is not None else 0
        return emitted * (self.costs.target_seconds(1) + self.costs.host) / 1.5


class Unmoved(Insight):
    """Learns nothing from the times of drafts."""

    @property
    def beyond(self) -> float:  # type: ignore[override]
        return 0.0

    @beyond.setter
    def beyond(self, value: float) -> None:
        pass


class Wanderer(Planner):
    """Extends and sends random nodes; they depend on the text and on past verdicts."""

    def __init__(self, session: Session, ngrams: Ngrams | None = None) -> None:
        super().__init__(Experience(PROFILE), ngrams=ngrams)
        self.session = session

    def _random(self, purpose: str) -> random.Random:
        stats = self.session.stats
        return random.Random(hash((purpose, tuple(self.session.tokens), stats.rejected, stats.losing, stats.siblings)))

    def _draft_gain(self) -> float:
        """So much that no round is plain."""
        return 100.0

    def lane_offer(self, tree: Tree, uncomputed: int) -> None:
        """Ask nobody."""

    def plan_draft_before_verify(self, tree: Tree, uncomputed: int, grant: LaneGrant) -> Growth | None:
        return self._any("alone") if self._random("whether").random() < 0.6 else None

    def plan_draft_during_verify(self, tree: Tree, grant: RowGrant) -> Growth | None:
        return self._any("beside", free_time=1e9) if self._random("also").random() < 0.7 else None

    def candidates(self, tree: Tree, room: int) -> list[int]:
        rng, numbers = self._random("sent"), list[int]()
        for n, node in enumerate(tree.nodes):
            there = node.parent == ROOT or node.parent in numbers
            if there and node.depth < room and len(numbers) < 12 and rng.random() < 0.8:
                numbers.append(n)
        return numbers

    def row_offer(self, tree: Tree, numbers: list[int]) -> RowOffer:
        return replace(super().row_offer(tree, numbers), reaches=(1.0,) * len(numbers), rate=0.0)

    def _any(self, purpose: str, free_time: float = 0.0) -> Growth:
        rng = self._random(purpose)
        steps, lanes = rng.choice((1, 2, 4, 6)), rng.choice((1, 2, 3))
        return Growth(
            (0.0,) * lanes,
            self.insight.chances(),
            free_time=free_time,
            children=rng.choice((1, 2, 4)),
            most=steps * lanes,
            worth=1.0,
        )


def wandering(session: Session) -> MethodRounds:
    """Every order of growing and sending comes up."""
    return decode_tree(session, Wanderer(session, Ngrams(session.tokens, 2)))


def decode(
    executor: Executor,
    case: Case,
    config: SpeculativeConfig,
    trace: Trace | None = None,
    policy: Policy | None = None,
    experience: Experience | None = None,
    start: Callable[[Session], MethodRounds] | None = None,
) -> Session:
    """Run one session alone to its end and check its statistics; `policy` replaces the method's own, `start` the
    method."""
    experience = experience or Experience()
    loop, session, method = (
        Loop(executor, trace, experience.learned),
        case.session(next(_numbers)),
        METHODS[config.method],
    )
    if start:
        loop.join(session, start(session))
    else:
        loop.join(session, method.run(session, config, policy) if policy else method.start(session, config, experience))
    run_out(loop)
    session.stats.check()
    return session


def run_out(loop: Loop) -> None:
    """Run rounds until no session is live; a loop that never ends is a failure, not a hang."""
    for _ in range(MOST_ROUNDS):
        if not loop.live:
            return
        loop.step()
    raise AssertionError(f"not finished after {MOST_ROUNDS} rounds")


def total(sessions: Sequence[Session], name: str) -> int:
    """The sum of one counter over many requests."""
    values = [getattr(session.stats, name) for session in sessions]
    return sum(sum(v) if isinstance(v, list) else v for v in values)


def acceptance(sessions: Sequence[Session]) -> float:
    """Accepted over tested, on pending chains."""
    return total(sessions, "accepted_at") / max(total(sessions, "tested_at"), 1)


def next_number() -> int:
    """A session number that was not used before."""
    return next(_numbers)
