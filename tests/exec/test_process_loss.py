"""Losing the draft process never loses a request: the answer is complete and identical, and the statistics say what
happened."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from specbranch.config import PolicyName, Rule, SamplingParams, SpeculativeConfig
from specbranch.core.loop import Loop
from specbranch.core.methods import METHODS, MethodRounds
from specbranch.core.orders import Context, Draft, Orders, Plan
from specbranch.core.request import Request
from specbranch.core.runner import Feed
from specbranch.core.session import Session
from specbranch.errors import ModelError
from specbranch.exec import process
from specbranch.exec.child_speed import ChildLimits
from specbranch.exec.drafter import Drafter
from specbranch.exec.messages import Recipe, TargetDone, Work
from specbranch.exec.process import LONGEST_RESTART_WAIT, Process
from specbranch.exec.verifier import Verifier
from specbranch.exec.wire import BadMessage
from specbranch.lab.toys.toys import Logits
from tiers import tiered
from toybench import (
    MOST_ROUNDS,
    SHARED,
    Case,
    Ending,
    Overheard,
    SlowRunner,
    Timeless,
    answer,
    drafter_recipe,
    law,
    make_drafter,
    next_number,
    plainly,
    wandering,
)

DRIFT = 0.1
WAITING = 0.02  # seconds a target forward takes while a new child starts, so that the start falls inside the request
LONG = Ending("long", max_tokens=240)
HASTY = ChildLimits(first=0.3, hung=0.3, grace=0.05, unmeasured=0.1)
METHODS_WITH_DRAFT = ("speculative", "adaptive", "pearl", "confidence", "wandering")


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """A new child is started at once, except on a clock of the test's own."""
    monkeypatch.setattr(process, "LONGEST_RESTART_WAIT", 0.0)


class HandClock:
    """A clock that a test moves."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(process, "LONGEST_RESTART_WAIT", LONGEST_RESTART_WAIT)
        self.time = 0.0

    def __call__(self) -> float:
        return self.time


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch, no_waiting: None) -> HandClock:
    return HandClock(monkeypatch)


class Target(SlowRunner):
    """A target that may do something in the middle of a round: `surprise` is called once, in the forward numbered
    `at`."""

    def __init__(self) -> None:
        super().__init__(law())
        self.at = -1
        self.surprise: Callable[[], None] = lambda: None

    def _score(self, work: Sequence[Feed]) -> list[list[Logits]]:
        self.at -= 1
        if self.at == 0:
            self.surprise()
        return super()._score(work)


class FaultyDraftRunner(SlowRunner):
    """A draft whose forward goes wrong after a while."""

    def __init__(self, how: str) -> None:
        super().__init__(law(DRIFT))
        self.how = how
        self.left = 12

    def _score(self, work: Sequence[Feed]) -> list[list[Logits]]:
        self.left -= 1
        if self.left < 0:
            if self.how == "hangs":
                time.sleep(60)
            raise RuntimeError("out of luck")
        return super()._score(work)


def starts(notes: Path) -> int:
    """How often a child was started that keeps notes."""
    return len(notes.read_text()) if notes.exists() else 0


def noted_start(notes: Path) -> int:
    """Note a start; returns how many there were."""
    with notes.open("a") as file:
        file.write(".")
    return starts(notes)


def recipe(function: Callable[..., Drafter], **given: str) -> Recipe:
    """How a child makes its worker by a function of this file."""
    return Recipe(f"{__name__}:{function.__name__}", given)


def make_faulty_once(notes: str, how: str) -> Drafter:
    """Make a draft worker that goes wrong, the first time."""
    first = noted_start(Path(notes)) == 1
    return Drafter(FaultyDraftRunner(how)) if first else make_drafter(DRIFT)


def make_only_once(notes: str, how: str) -> Drafter:
    """Make a draft worker the first time; fail ever after."""
    if noted_start(Path(notes)) == 1:
        return make_drafter(DRIFT)
    if how == "raises":
        raise RuntimeError("no weights today")
    os._exit(3)


def make_never(how: str) -> Drafter:
    """Fail to make a draft worker."""
    if how == "raises":
        raise FileNotFoundError("draft weights are missing")
    os._exit(3)


def alive(pid: int) -> bool:
    """Whether a process runs; one that only waits to be buried does not."""
    status = Path(f"/proc/{pid}/stat")
    if Path("/proc/self/stat").exists():
        return status.exists() and status.read_text().rsplit(")", 1)[1].split()[0] != "Z"
    return subprocess.run(["kill", "-0", str(pid)], capture_output=True, check=False).returncode == 0


def gone_within(pid: int, seconds: float) -> bool:
    end = time.monotonic() + seconds
    while alive(pid) and time.monotonic() < end:
        time.sleep(0.01)
    return not alive(pid)


def wait_until(happened: Callable[[], bool], seconds: float = 60.0) -> None:
    """Wait for something that must happen."""
    end = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < end, "it does not happen"
        time.sleep(0.005)


def executor_with(
    made_by: Recipe | None = None, limits: ChildLimits | None = None, clock: Callable[[], float] = time.perf_counter
) -> tuple[Process, Target]:
    target = Target()
    return Process(Verifier(target), made_by or drafter_recipe(DRIFT), limits, clock), target


def ask(executor: Process) -> bool:
    """Order a draft; returns whether one came."""
    executor.open(0, Request(SamplingParams(), 0, 2))
    report = executor.run({0: Orders(Draft(Context(0, (1, 2)), Plan(2)))})[0]
    executor.free(0)
    return not report.draft_lost


def ask_until(executor: Process, happened: Callable[[], bool]) -> None:
    """Order drafts until something has happened, on a clock that stands still."""
    end = time.monotonic() + 60.0
    while not happened():
        assert time.monotonic() < end, "it does not happen"
        ask(executor)
        time.sleep(0.005)


def lose(executor: Process) -> None:
    """Kill the child and let its end be found out."""
    if executor.draft_state != "lost":
        send(executor, signal.SIGKILL)
    ask_until(executor, lambda: executor.child_pid is None)


def started_at(executor: Process, clock: HandClock, seconds: int, started: Callable[[], int]) -> list[float]:
    """The seconds at which new children were started while a clock moves on; each is left time to fail."""
    first, found = clock.time, list[float]()
    for _ in range(seconds):
        clock.time += 1.0
        before = started()
        ask(executor)
        if executor.child_pid or started() > before:
            found.append(clock.time - first)
            ask_until(executor, lambda: executor.child_pid is None)
    return found


def begin(
    executor: Process, method: str, seed: int, rule: Rule = "match", until_target: bool = False
) -> tuple[Loop, Session, Case]:
    case = Case((seed % 6, 1), 0.7, seed, LONG, rule)
    session, loop = case.session(next_number()), Loop(executor)
    loop.join(session, started(session, method, rule, until_target))
    return loop, session, case


def started(session: Session, method: str, rule: Rule = "match", until_target: bool = False) -> MethodRounds:
    """Start a session by a method's name. `confidence` is specbranch by that policy; `wandering` extends trees at
    random."""
    if method == "wandering":
        return wandering(session)
    policy: PolicyName | None = "confidence" if method == "confidence" else None
    named = "specbranch" if policy else method
    config = SpeculativeConfig(
        method=named, policy=policy, num_speculative_tokens=3, max_branches=8, rule=rule, until_target=until_target
    )
    return METHODS[named].start(session, config, Timeless(SHARED))


def finish(loop: Loop, each_round: Callable[[], None] = lambda: None) -> None:
    for _ in range(MOST_ROUNDS):
        if not loop.live:
            return
        each_round()
        loop.step()
    raise AssertionError("the request does not end")


def run_with_loss(
    executor: Process, target: Target, method: str, seed: int, lose: Callable[[], None], at: int
) -> tuple[Session, int]:
    """Run a request and lose the child in its forward `at`; returns it and how many tokens it had when the new child
    was ready."""
    loop, session, case = begin(executor, method, seed)
    target.surprise, target.at = lose, at
    before, resumed = executor.restarts, [0]

    def slowly_while_a_child_starts() -> None:
        lost = session.stats.rounds_without_draft > 0 and executor.restarts == before
        target.seconds = WAITING if lost else 0.0
        if not resumed[0] and executor.restarts > before:
            resumed[0] = len(session.output)

    finish(loop, slowly_while_a_child_starts)
    assert answer(session) == plainly(case, law())
    session.stats.check()
    return session, resumed[0]


def send(executor: Process, number: int) -> None:
    assert executor.child_pid
    os.kill(executor.child_pid, number)


@pytest.mark.parametrize("kills", tiered((2, 20), (2).__eq__))
def test_a_draft_process_killed_in_mid_request_changes_nothing(kills: int) -> None:
    rng = random.Random(2)
    executor, target = executor_with()
    with closing(executor):
        for seed in range(kills):
            method = METHODS_WITH_DRAFT[seed % 5]
            session, resumed = run_with_loss(
                executor, target, method, seed, partial(send, executor, signal.SIGKILL), rng.randint(1, 40)
            )
            assert session.stats.rounds_without_draft > 0
            assert session.stats.draft_restarts == 1
            assert 0 < resumed < 220
            assert session.origins[resumed:].count("draft") > 10, "drafting did not resume"
        assert executor.restarts == kills


@pytest.mark.slow
def test_a_child_killed_between_two_rounds_is_replaced_for_all_sessions() -> None:
    executor, target = executor_with()
    with closing(executor):
        loop = Loop(executor)
        runs = []
        for seed in range(4):
            case = Case((seed, 1), 0.7, seed, LONG)
            session = case.session(next_number())
            loop.join(session, started(session, "wandering" if seed % 2 else "confidence"))
            runs.append((session, case))
        for _ in range(5):
            loop.step()
        send(executor, signal.SIGKILL)

        def slowly() -> None:
            target.seconds = WAITING if executor.restarts == 0 else 0.0

        finish(loop, slowly)
        for session, case in runs:
            assert answer(session) == plainly(case, law())
            assert session.stats.rounds_without_draft > 0
            assert session.stats.draft_restarts == 1
            assert "draft" in session.origins[-50:]


@pytest.mark.slow
def test_only_a_new_child_gets_an_order_twice_and_then_also_that_the_target_is_done() -> None:
    target = Target()
    with closing(Overheard(Verifier(target), drafter_recipe(DRIFT))) as executor:
        loop, session, case = begin(executor, "pearl", 4, until_target=True)
        target.surprise, target.at = partial(send, executor, signal.SIGKILL), 9

        def slowly() -> None:
            target.seconds = WAITING if session.stats.rounds_without_draft and not executor.restarts else 0.0

        finish(loop, slowly)
        assert answer(session) == plainly(case, law())
        tickets = [message.ticket for message in executor.sent_messages if isinstance(message, Work)]
        assert len(tickets) - len(set(tickets)) == executor.restarts == 1
        second = next(
            i
            for i, m in enumerate(executor.sent_messages)
            if isinstance(m, Work) and m.orders[session.number].on.base == 0 and i > 3
        )
        assert executor.sent_messages[second + 1] == TargetDone(
            tickets[tickets.index(executor.sent_messages[second].ticket)]
        )


@pytest.mark.slow
def test_a_killed_child_ends_no_request_under_the_ratio_rule() -> None:
    executor, target = executor_with()
    with closing(executor):
        for seed, method in enumerate(("pearl", "confidence", "wandering")):
            loop, session, _ = begin(executor, method, seed, "ratio")
            target.surprise, target.at = partial(send, executor, signal.SIGKILL), 7
            finish(loop)
            assert session.finished == "length"
            assert len(session.output) == LONG.max_tokens
            session.stats.check()


@pytest.mark.slow
@pytest.mark.parametrize("how", ["hangs", "raises"])
def test_a_child_that_goes_wrong_while_drafting_is_replaced(tmp_path: Path, how: str) -> None:
    notes = tmp_path / "starts"
    executor, target = executor_with(recipe(make_faulty_once, notes=str(notes), how=how), HASTY)
    with closing(executor):
        session, resumed = run_with_loss(executor, target, "confidence", 3, lambda: None, at=-1)
        assert session.stats.rounds_without_draft > 0
        assert starts(notes) == 2
        assert executor.restarts == session.stats.draft_restarts == 1
        assert "draft" in session.origins[resumed:]


@pytest.mark.slow
def test_a_stopped_child_counts_as_hung_and_is_replaced() -> None:
    executor, target = executor_with(limits=HASTY)
    with closing(executor):
        first = executor.child_pid
        session, resumed = run_with_loss(executor, target, "pearl", 5, partial(send, executor, signal.SIGSTOP), 9)
        assert session.stats.draft_restarts == 1
        assert "draft" in session.origins[resumed:]
        assert first
        assert not alive(first)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "said"), [("raises", "FileNotFoundError: draft weights are missing"), ("exits", "the draft process ended")]
)
def test_a_child_that_cannot_start_is_a_sentence(how: str, said: str) -> None:
    with pytest.raises(ModelError, match=f"The draft worker could not start: .*{said}"):
        executor_with(recipe(make_never, how=how))


@pytest.mark.slow
@pytest.mark.parametrize("how", ["raises", "exits"])
def test_a_child_that_never_starts_again_is_tried_after_longer_and_longer_waits(
    tmp_path: Path, how: str, clock: HandClock
) -> None:
    notes = tmp_path / "starts"
    executor, _ = executor_with(recipe(make_only_once, notes=str(notes), how=how), clock=clock)
    with closing(executor):
        lose(executor)
        assert started_at(executor, clock, 8, lambda: starts(notes)) == [1.0, 3.0, 7.0]
        assert starts(notes) == 4
        assert executor.restarts == 0


def test_a_request_completes_while_no_child_is_started(tmp_path: Path, clock: HandClock) -> None:
    notes = tmp_path / "starts"
    executor, target = executor_with(recipe(make_only_once, notes=str(notes), how="raises"), clock=clock)
    with closing(executor):
        for seed, method in enumerate(("confidence", "pearl")):
            loop, session, case = begin(executor, method, seed)
            if executor.child_pid:
                target.surprise, target.at = partial(send, executor, signal.SIGKILL), 5
            finish(loop)
            assert answer(session) == plainly(case, law())
            assert session.stats.rounds_without_draft > 60
        assert executor.child_pid is None
        assert starts(notes) == 1


@pytest.mark.slow
def test_the_state_of_the_draft_can_be_read_at_any_time(clock: HandClock) -> None:
    executor, _ = executor_with(clock=clock)
    with closing(executor):
        assert executor.draft_state == "ready"
        send(executor, signal.SIGKILL)
        wait_until(lambda: executor.draft_state == "lost")  # before any round has found out
        lose(executor)
        assert executor.draft_state == "lost"
        clock.time += 1.0
        ask(executor)
        assert executor.draft_state == "starting"
        ask_until(executor, lambda: executor.draft_state == "ready")
    assert executor.draft_state == "lost"


def test_waits_double_up_to_a_minute_and_a_drafted_round_makes_them_short_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, clock: HandClock
) -> None:
    executor, _ = executor_with(clock=clock)
    tries: list[float] = []

    def refuse(*_: Any, **__: Any) -> None:
        tries.append(clock.time)
        raise OSError("out of memory")

    with closing(executor):
        lose(executor)
        with monkeypatch.context() as patch:
            patch.setattr(subprocess, "Popen", refuse)
            assert started_at(executor, clock, 200, lambda: len(tries)) == [1, 3, 7, 15, 31, 63, 123, 183]
        said = [record.getMessage() for record in caplog.records]
        assert [line.rpartition(" again in ")[2] for line in said] == [
            f"{n} s." for n in (1, 2, 4, 8, 16, 32, 60, 60, 60)
        ]
        clock.time += LONGEST_RESTART_WAIT
        ask_until(executor, lambda: ask(executor))
        lose(executor)
        assert caplog.records[-1].getMessage().endswith("tried again in 1 s.")
        clock.time += 1.0
        ask(executor)
        assert executor.child_pid


@pytest.mark.slow
def test_a_process_that_cannot_even_be_made_again_ends_no_request(monkeypatch: pytest.MonkeyPatch) -> None:
    executor, target = executor_with()
    with closing(executor):
        loop, session, case = begin(executor, "confidence", 8)
        target.surprise, target.at = partial(send, executor, signal.SIGKILL), 5

        def refuse(*_: Any, **__: Any) -> None:
            raise OSError("out of memory")

        monkeypatch.setattr(subprocess, "Popen", refuse)
        finish(loop)
        assert answer(session) == plainly(case, law())
        assert executor.child_pid is None


def test_a_worker_that_cannot_be_sent_starts_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Any] = []
    monkeypatch.setattr(subprocess, "Popen", lambda *args, **_: started.append(args))
    with pytest.raises(BadMessage, match="This Hello cannot be sent: Object of type ToyLaw is not JSON serializable"):
        executor_with(Recipe("toybench:make_drafter", {"drift": law()}))
    assert started == []


def test_no_child_is_left_after_close() -> None:
    executor, _ = executor_with()
    pid = executor.child_pid
    assert pid
    assert alive(pid)
    executor.close()
    assert not alive(pid)
    assert executor.child_pid is None
    executor.close()


@pytest.mark.slow
def test_a_child_that_is_drafting_is_gone_after_close_too() -> None:
    executor, _ = executor_with(drafter_recipe(DRIFT, seconds=0.2))
    begin(executor, "confidence", 1)
    pid = executor.child_pid
    assert pid
    executor.close()
    assert not alive(pid)


SCRIPT = """
import os, signal, sys
from toybench import process
executor = process(0.1)
print(executor.child_pid, flush=True)
{ending}
"""


@pytest.mark.parametrize(
    "ending",
    tiered(
        ("", "os._exit(1)", "raise SystemExit(3)", "os.kill(os.getpid(), signal.SIGKILL)"),
        "os.kill(os.getpid(), signal.SIGKILL)".__eq__,
    ),
)
def test_a_parent_that_exits_without_closing_leaves_no_child(ending: str) -> None:
    here = str(Path(__file__).parents[1])
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([here, *sys.path])}
    script = [sys.executable, "-c", SCRIPT.format(ending=ending)]
    done = subprocess.run(script, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert gone_within(int(done.stdout), 10.0), done.stderr


def make_always_faulty(how: str) -> Drafter:
    """Make a draft worker that goes wrong in its first forward."""
    runner = FaultyDraftRunner(how)
    runner.left = 0
    return Drafter(runner)


@pytest.mark.slow
def test_a_child_that_breaks_in_every_round_is_waited_for_longer_and_longer(
    clock: HandClock, caplog: pytest.LogCaptureFixture
) -> None:
    executor, _ = executor_with(recipe(make_always_faulty, how="raises"), clock=clock)
    with closing(executor):
        ask_until(executor, lambda: executor.child_pid is None)
        assert started_at(executor, clock, 6, lambda: 0) == [1.0, 3.0]
        assert executor.restarts == 2
    assert [record.getMessage()[-5:] for record in caplog.records if "lost" in record.getMessage()] == [
        " 1 s.",
        " 2 s.",
        " 4 s.",
    ]


def make_slowly() -> Drafter:
    """Take far too long to make a draft worker, once the first was made."""
    if os.environ.get("SPECBRANCH_TEST_SLOW_START"):
        time.sleep(60)
    return make_drafter(DRIFT)


def test_a_new_child_that_is_never_ready_is_given_up(monkeypatch: pytest.MonkeyPatch, clock: HandClock) -> None:
    executor, _ = executor_with(recipe(make_slowly), clock=clock)
    with closing(executor):
        monkeypatch.setenv("SPECBRANCH_TEST_SLOW_START", "1")
        lose(executor)
        clock.time += 1.0
        assert not ask(executor)
        slow = executor.child_pid
        clock.time += ChildLimits().start
        assert not ask(executor)
        assert slow and executor.child_pid == slow
        clock.time += 1.0
        assert not ask(executor)
        assert executor.child_pid is None and not alive(slow)
