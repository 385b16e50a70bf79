"""A draft process that hangs, lies or is slow costs its requests the draft and nothing else.

Every answer is complete and identical, and nobody waits for long.
"""

from __future__ import annotations

import math
import os
import random
import signal
import struct
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from specbranch.config import SamplingParams
from specbranch.core.costs import MeasuredCosts
from specbranch.core.loop import Loop
from specbranch.core.methods import METHODS
from specbranch.core.orders import Branch, Context, Draft, Drafted, DraftOrder, Orders, Plan
from specbranch.core.rehearsal import rehearse, rehearsed
from specbranch.core.request import Request
from specbranch.core.rounds import MethodRounds
from specbranch.core.runner import Feed
from specbranch.core.scheduler import Scheduler
from specbranch.core.session import Session
from specbranch.core.trees import Tree
from specbranch.errors import DeadlinePassed
from specbranch.exec import link, process
from specbranch.exec.child_speed import ChildLimits
from specbranch.exec.draft_steps import ALONE, Drafting, Ends
from specbranch.exec.drafter import Announce, Drafter
from specbranch.exec.messages import Recipe
from specbranch.exec.process import Process
from specbranch.exec.serial import Serial
from specbranch.exec.verifier import Verifier
from specbranch.lab.toys.toys import Logits
from tiers import tiered
from toybench import (
    MOST_ROUNDS,
    PROFILE,
    VOCABULARY,
    Case,
    Ending,
    Interrupted,
    SlowRunner,
    Timeless,
    answer,
    config_of,
    drafter_recipe,
    law,
    make_drafter,
    next_number,
    plainly,
    wandering,
)

DRIFT = 0.1
HANG = 30.0  # seconds: a guard against hangs, far longer than anything here takes
PATIENT = ChildLimits(first=1000.0, hung=1000.0, grace=0.05, unmeasured=0.05)  # with the child, not with its answers
HASTY = ChildLimits(first=0.2, hung=0.2, grace=0.05, unmeasured=0.05)
LONG = Ending("long", max_tokens=240)
WAITING = 0.02  # seconds of a target forward while the child is away, so that it comes back within the request


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """A new child is started at once."""
    monkeypatch.setattr(process, "LONGEST_RESTART_WAIT", 0.0)


def write(data: bytes) -> None:
    """Write to the parent whatever comes to the child's mind."""
    os.write(int(sys.argv[1]), data)


def stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def longer(branch: Branch) -> Branch:
    """The same chain, longer than any cache's tail."""
    return replace(branch, tokens=branch.tokens * 200, confidence=branch.confidence * 200, q=None)


def of_branches(change: Callable[[Branch], Branch]) -> Callable[[Mapping[int, Drafted]], dict[int, Drafted]]:
    def lie(made: Mapping[int, Drafted]) -> dict[int, Drafted]:
        return {n: tuple(map(change, what)) if isinstance(what, tuple) else what for n, what in made.items()}

    return lie


def huge(made: Mapping[int, Drafted]) -> dict[int, Drafted]:
    write(struct.pack(">Q", 2**40) + b"[")
    return dict(made)


def half(made: Mapping[int, Drafted]) -> dict[int, Drafted]:
    write(struct.pack(">Q", 5000) + b'["RoundDrafted",[')
    stop()
    return dict(made)


def foreign(made: Mapping[int, Drafted]) -> dict[int, Drafted]:
    write(struct.pack(">Q", 5) + b"\x80\x04K\x01.")
    return dict(made)


def stopped(made: Mapping[int, Drafted]) -> dict[int, Drafted]:
    stop()
    return dict(made)


LIES: dict[str, Callable[[Mapping[int, Drafted]], dict[int, Drafted]]] = {
    "a huge message": huge,
    "foreign bytes": foreign,
    "overlong chains": of_branches(longer),
    "ids below 0": of_branches(lambda one: replace(one, tokens=tuple(-1 for _ in one.tokens))),
    "ids beyond the vocabulary": of_branches(lambda one: replace(one, tokens=tuple(10**6 for _ in one.tokens))),
    "NaN": of_branches(lambda one: replace(one, confidence=tuple(math.nan for _ in one.confidence))),
    "trees for chains": lambda made: dict.fromkeys(made, Tree()),
    "other sessions": lambda made: {**made, 10**9: ()},
}
HANGS = {"half": half, "stopped": stopped}


class Liar(Drafter):
    """Goes wrong in its order numbered `at`."""

    def __init__(self, how: str, at: int) -> None:
        super().__init__(SlowRunner(law(DRIFT)))
        self.lie, self.left = (LIES | HANGS)[how], at

    def drafting(
        self, orders: Mapping[int, DraftOrder], ends: Ends = ALONE, announce: Announce | None = None
    ) -> Drafting[dict[int, Drafted]]:
        made = yield from super().drafting(orders, ends, announce)
        self.left -= 1
        return self.lie(made) if self.left == 0 else made


def make_liar_once(notes: str, how: str, at: int = 5) -> Drafter:
    """Make a draft worker that goes wrong; a second one does not."""
    return make_drafter(DRIFT) if started_before(notes) else Liar(how, at)


def started_before(notes: str) -> bool:
    path = Path(notes)
    before = path.exists()
    path.touch()
    return before


def recipe(function: Callable[..., Drafter], **given: Any) -> Recipe:
    return Recipe(f"{__name__}:{function.__name__}", given)


def executor_with(made_by: Recipe, limits: ChildLimits) -> tuple[Process, SlowRunner]:
    target = SlowRunner(law())
    return Process(Verifier(target), made_by, limits), target


def started(session: Session, method: str) -> MethodRounds:
    if method == "wandering":
        return wandering(session)
    config = config_of(method, session.request.rule)
    return METHODS[config.method].start(session, config, Timeless(PROFILE))


def join(loop: Loop, method: str, seed: int, ending: Ending = LONG) -> tuple[Session, Case]:
    case = Case((seed % 6, 1), 0.7, seed, ending)
    session = case.session(next_number())
    loop.join(session, started(session, method))
    return session, case


def finish(loop: Loop, each_round: Callable[[], None] = lambda: None) -> None:
    for _ in range(MOST_ROUNDS):
        if not loop.live:
            return
        each_round()
        loop.step()
    raise AssertionError("the request does not end")


def finish_slowly_without_draft(loop: Loop, session: Session, executor: Process, target: SlowRunner) -> None:
    """Run to the end; the target is slow from the loss of the first child until its successor has come."""

    def slowly() -> None:
        away = session.stats.rounds_without_draft > 0 and not executor.restarts
        target.seconds = WAITING if away else 0.0

    finish(loop, slowly)


@pytest.mark.parametrize("how", tiered(LIES, "overlong chains".__eq__))
def test_a_child_that_answers_nonsense_is_lost_and_the_request_is_not(how: str, tmp_path: Path) -> None:
    liar = recipe(make_liar_once, notes=str(tmp_path / "started"), how=how)
    executor, target = executor_with(liar, replace(PATIENT, grace=10.0, unmeasured=10.0))
    with closing(executor):
        loop = Loop(executor)
        session, case = join(loop, "confidence", 3)
        finish_slowly_without_draft(loop, session, executor, target)
        assert answer(session) == plainly(case, law())
        session.stats.check()
        assert session.stats.rounds_without_draft > 0
        assert executor.restarts == 1
        assert "draft" in session.origins[-40:]


@pytest.mark.parametrize("how", tiered(HANGS, ("half",).__contains__))
@pytest.mark.parametrize("method", tiered(["pearl", "wandering"], ("pearl",).__contains__))
def test_while_a_child_hangs_everybody_goes_on(how: str, method: str, tmp_path: Path) -> None:
    hangs = recipe(make_liar_once, notes=str(tmp_path / "started"), how=how)
    executor, _ = executor_with(hangs, PATIENT)
    started_at = time.monotonic()
    with closing(executor):
        loop = Loop(executor)
        runs = [join(loop, name, seed) for seed, name in enumerate((method, "autoregressive", method))]
        finish(loop)
        assert executor.draft_state == "busy"
        assert executor.restarts == 0
    assert [answer(session) for session, _ in runs] == [plainly(case, law()) for _, case in runs]
    assert runs[0][0].stats.rounds_without_draft > 100
    assert time.monotonic() - started_at < HANG


@pytest.mark.parametrize("how", tiered(HANGS, ("half",).__contains__))
def test_deadlines_and_cancellations_act_while_a_child_hangs(how: str, tmp_path: Path) -> None:
    hangs = recipe(make_liar_once, notes=str(tmp_path / "started"), how=how)
    executor, target = executor_with(hangs, PATIENT)
    with closing(executor):
        target.seconds = 0.002
        scheduler = Scheduler(Loop(executor))
        cases = [Case((seed, 1), 0.7, seed, replace(LONG, max_tokens=900)) for seed in range(3)]
        sessions = [case.session(next_number()) for case in cases]
        late, cancelled, plain = (
            scheduler.submit(session, lambda s=session, m=method: started(s, m), within=within)  # type: ignore[misc]
            for session, method, within in zip(
                sessions, ("pearl", "wandering", "autoregressive"), (0.7, None, None), strict=True
            )
        )
        end = time.monotonic() + HANG
        while late.state != "over":
            scheduler.step()
            assert time.monotonic() < end, "the deadline does not fire"
        assert isinstance(sessions[0].error, DeadlinePassed)
        assert executor.draft_state == "busy"
        scheduler.cancel(cancelled)
        held = len(sessions[2].output)
        scheduler.step()
        assert len(sessions[2].output) == held + 1
        scheduler.cancel(plain)
        for session, case in zip(sessions, cases, strict=True):
            assert tuple(session.output) == plainly(case, law()).tokens[: len(session.output)]


@pytest.mark.slow
@pytest.mark.parametrize("how", tiered(HANGS, ("half",).__contains__))
def test_a_child_that_misses_its_limit_is_killed_and_another_drafts_on(how: str, tmp_path: Path) -> None:
    hangs = recipe(make_liar_once, notes=str(tmp_path / "started"), how=how)
    executor, target = executor_with(hangs, HASTY)
    with closing(executor):
        first = executor.child_pid
        loop = Loop(executor)
        session, case = join(loop, "confidence", 4)
        finish_slowly_without_draft(loop, session, executor, target)
        assert answer(session) == plainly(case, law())
        assert executor.restarts == session.stats.draft_restarts == 1
        assert executor.child_pid != first
        assert "draft" in session.origins[-40:]


PROMPT = 60_000  # tokens of three digits: more than a socket's buffer holds


class Deaf(Drafter):
    """Reads nothing once it has a session."""

    def open(self, session: int, request: Request) -> None:
        super().open(session, request)
        stop()


def make_deaf_once(notes: str) -> Drafter:
    """Make a draft worker that does not read; a second one does."""
    runner = SlowRunner(law(DRIFT, 1000), context_length=2 * PROMPT)
    return Drafter(runner) if started_before(notes) else Deaf(runner)


def answered(executor: Serial | Process, prompt: Sequence[int], method: str) -> Session:
    """Decode after a prompt; slowly until a lost child has its successor."""
    request = Request(SamplingParams(temperature=0.7, max_tokens=60), 5, len(prompt))
    session, loop = Session(next_number(), prompt, request, 2 * PROMPT), Loop(executor)
    loop.join(session, started(session, method))
    runner = executor.target.runner
    assert isinstance(runner, SlowRunner)

    def slowly() -> None:
        runner.seconds = 2 * WAITING if isinstance(executor, Process) and not executor.restarts else 0.0

    finish(loop, slowly)
    return session


@pytest.mark.slow
def test_a_long_prompt_for_a_child_that_does_not_read_holds_up_nobody(tmp_path: Path) -> None:
    rng = random.Random(3)
    prompt = [rng.randrange(100, 1000) for _ in range(PROMPT)]
    target = Verifier(SlowRunner(law(), context_length=2 * PROMPT))
    expected = answered(Serial(target), prompt, "autoregressive").output
    started_at = time.monotonic()
    with closing(Process(target, recipe(make_deaf_once, notes=str(tmp_path / "started")), HASTY)) as executor:
        session = answered(executor, prompt, "pearl")
        assert session.output == expected
        assert session.stats.rounds_without_draft > 0
        assert executor.restarts >= 1
    assert time.monotonic() - started_at < HANG


class SlowOnce(SlowRunner):
    """A draft one of whose forwards takes long."""

    def __init__(self, at: int, seconds: float) -> None:
        super().__init__(law(DRIFT))
        self.left, self.long = at, seconds

    def _score(self, work: Sequence[Feed]) -> list[list[Logits]]:
        self.left -= 1
        self.seconds = self.long if self.left == 0 else 0.0
        return super()._score(work)


def make_slow_once(at: int, seconds: float) -> Drafter:
    return Drafter(SlowOnce(at, seconds))


@pytest.mark.slow
@pytest.mark.parametrize("method", tiered(["confidence", "wandering"], ("wandering",).__contains__))
def test_a_late_answer_is_dropped_and_the_child_is_used_again(method: str) -> None:
    executor, target = executor_with(recipe(make_slow_once, at=20, seconds=0.4), PATIENT)
    states = []
    with closing(executor):
        loop = Loop(executor)
        session, case = join(loop, method, 6)

        def slowly() -> None:
            states.append(executor.draft_state)
            target.seconds = 0.005 if executor.draft_state == "busy" else 0.0

        finish(loop, slowly)
        assert answer(session) == plainly(case, law())
        session.stats.check()
        assert {"ready", "busy"} == set(states) and states[-1] == "ready"
        assert session.stats.rounds_without_draft > 0 == executor.restarts
        assert "draft" in session.origins[session.origins.index("target") :][-60:]


@pytest.mark.slow
def test_a_rehearsal_waits_for_a_child_whose_first_round_takes_long() -> None:
    executor, _ = executor_with(recipe(make_slow_once, at=1, seconds=0.5), PATIENT)
    costs = MeasuredCosts(overlap=True)
    with closing(executor):
        rehearse(executor, costs, VOCABULARY, True, HANG)
    assert rehearsed(costs, True)


def test_a_slow_child_is_asked_for_what_there_is() -> None:
    # the first step takes as long as it takes; what comes behind it is cut
    executor, _ = executor_with(drafter_recipe(DRIFT, seconds=0.02), replace(PATIENT, grace=HANG))
    with closing(executor):
        executor.open(0, Request(SamplingParams(), 0, 2))
        report = executor.run({0: Orders(Draft(Context(0, (1, 2)), Plan(2000)))})[0]
        assert not report.draft_lost
        assert 1 <= len(report.branches[0].tokens) < 2000


@pytest.mark.slow
def test_an_interrupt_at_any_line_of_the_executor_changes_no_answer() -> None:
    limits = replace(HASTY, first=5.0, hung=0.5)
    executor, _ = executor_with(drafter_recipe(DRIFT), limits)
    ending = replace(LONG, max_tokens=24)
    rng, interrupted = random.Random(9), 0
    with closing(executor):
        for seed in range(40):
            loop = Loop(executor)
            session, case = join(loop, ("pearl", "wandering")[seed % 2], seed, ending)
            try:
                with Interrupted(rng.randrange(1, 1500), process, link):
                    finish(loop)
            except KeyboardInterrupt:
                interrupted += 1
            finish(loop)
            assert answer(session) == plainly(case, law())
        assert interrupted > 20
        end = time.monotonic() + HANG
        while True:  # and it drafts again
            loop = Loop(executor)
            session, case = join(loop, "pearl", 99, LONG)
            finish(loop)
            assert answer(session) == plainly(case, law())
            if "draft" in session.origins:
                break
            assert time.monotonic() < end, "drafting does not resume"
            time.sleep(0.05)
