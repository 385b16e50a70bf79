"""The streams executor, both models in one process: what is launched first, when drafting ends, and what a failing
draft costs."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from specbranch.config import Rule, SamplingParams, SpeculativeConfig
from specbranch.core.costs import MeasuredCosts
from specbranch.core.loop import Loop
from specbranch.core.methods import METHODS, MethodRounds
from specbranch.core.orders import Context, Draft, Grow, Orders, Plan, Prefill, Verify
from specbranch.core.request import Request
from specbranch.core.runner import Ask, Feed, Proposal, Trial, Verdicts
from specbranch.core.session import Session
from specbranch.core.trees import NO_TREE, Growth
from specbranch.exec.drafter import Drafter
from specbranch.exec.serial import Serial
from specbranch.exec.streams import Streams
from specbranch.exec.verifier import Verifier
from specbranch.lab.toys.toys import Logits, ToyRunner
from tiers import each_value, tiered
from toybench import (
    PROFILE,
    Case,
    Deferred,
    Ending,
    Timeless,
    answer,
    law,
    next_number,
    plainly,
    run_out,
    serial,
    streams,
    wandering,
)

LENGTH = 40  # tokens a lane may have: more than there is time for
ON = Context(0, (1, 2, 3))
SOME = Ending("some", max_tokens=40)
METHODS_WITH_DRAFT = ("speculative", "adaptive", "pearl", "confidence", "specbranch", "tree", "wandering")
TREES = ("specbranch", "tree", "wandering")


class Noting(Deferred):
    """A target that notes when it is started, and asked."""

    def __init__(self, polls: int, notes: list[str]) -> None:
        super().__init__(law(), lambda: polls)
        self.notes = notes

    def verify(self, work: Sequence[Feed], trials: Sequence[Trial]) -> Verdicts:
        self.notes.append("verify" if work else "judge")
        verdicts = super().verify(work, trials)

        def found() -> list[Any]:
            self.notes.append("verdict")
            return verdicts()

        return Verdicts(found, verdicts.ready)


class OddDraft(ToyRunner):
    """A draft that notes its steps, and does something odd in one of them."""

    def __init__(self, notes: list[str], drift: float = 0.1) -> None:
        super().__init__(law(drift))
        self.notes, self.left = notes, -1
        self.odd: Callable[[], None] = lambda: None

    def _score(self, work: Sequence[Feed]) -> list[list[Logits]]:
        self.notes.append("step")
        self.left -= 1
        if self.left == 0:
            self.odd()
        return super()._score(work)


def request(rule: Rule = "match") -> Request:
    return Request(SamplingParams(temperature=0.7), 3, len(ON), rule=rule)


def pair(polls: int, rule: Rule = "match") -> tuple[Streams, list[str]]:
    notes: list[str] = []
    executor = Streams(Verifier(Noting(polls, notes)), Drafter(OddDraft(notes)))
    executor.open(0, request(rule))
    return executor, notes


def grow() -> Grow:
    chances = Timeless(PROFILE).insight.chances()
    return Grow(ON, NO_TREE, Growth((0.0,), chances, free_time=1e9, most=LENGTH, worth=1.0))


def lanes(rule: Rule = "match") -> Draft:
    return Draft(ON, Plan(LENGTH, ((0, 1),), heads="sampled" if rule == "ratio" else "top", until="target"))


@pytest.mark.parametrize("polls", [0, 1, 5])
@pytest.mark.parametrize("order", [lanes(), grow()], ids=["lanes", "tree"])
def test_the_target_is_started_first_and_drafting_ends_when_its_verdict_is_there(
    order: Draft | Grow, polls: int
) -> None:
    executor, notes = pair(polls)
    report = executor.run({0: Orders(order, Verify(ON))})[0]
    # The text itself is prefilled in any case; then the executor looks for the verdict before each step.
    assert notes == ["verify", *["step"] * (1 + polls), "verdict"]
    grown = len(report.tree.steps) if report.tree else len(report.branches[0].tokens)
    assert grown == 1 + polls and report.verdict is not None


def test_under_ratio_judging_begins_once_the_heads_are_drawn_and_lanes_go_on_beside_it() -> None:
    executor, notes = pair(3, "ratio")
    report = executor.run({0: Orders(lanes("ratio"), Verify(ON))})[0]
    assert notes[:3] == ["verify", "step", "judge"], "the forward waits for no head, and judging for no lane"
    assert notes[3:].count("step") >= 3 and notes[-1] == "verdict"
    assert report.verdict is not None and report.branches


@pytest.mark.parametrize("rule", ["match", "ratio"])
def test_what_no_head_can_come_for_is_judged_with_the_forward(rule: Rule) -> None:
    executor, notes = pair(2, rule)
    executor.run({0: Orders(grow(), Verify(ON))})
    executor.run({0: Orders(None, Verify(Context(3, (4,))))})
    assert "judge" not in notes


def test_where_only_one_model_has_work_the_other_is_left_alone() -> None:
    executor, notes = pair(2)
    drafted = executor.run({0: Orders(replace(lanes(), plan=Plan(4)))})[0]
    assert set(notes) == {"step"} and len(drafted.branches[0].tokens) == 4 and drafted.verifying is None
    notes.clear()
    verified = executor.run({0: Orders(verify=Verify(ON))})[0]
    assert notes == ["verify", "verdict"] and verified.verdict is not None and verified.drafting is None


def test_both_spans_lie_beside_each_other_and_the_costs_learn_what_that_adds() -> None:
    executor, _ = pair(4)
    costs, orders = MeasuredCosts(), {0: Orders(grow(), Verify(ON))}
    report = executor.run(orders)[0]
    assert report.drafting and report.verifying
    assert report.verifying.start <= report.drafting.start < report.drafting.end <= report.verifying.end
    costs.target.set(report.verifying.tokens, report.verifying.seconds / 2)
    costs.step.set(1, report.drafting.seconds)
    later = Context(3, (4,))
    for _ in range(2):
        orders = {0: Orders(replace(grow(), on=later), Verify(later))}
        costs.observe(orders, executor.run(orders))
    assert [len(one.values) for one in costs.slow_downs.values()] == [2, 2]


class OnDevice(Noting):
    """A target whose device notes moments on a clock of its own."""

    time = 0.0

    def note(self) -> Callable[[], float]:
        OnDevice.time += 1.0
        moment = OnDevice.time
        return lambda: 100.0 + moment


def test_a_devices_own_times_are_taken_where_it_tells_them_but_not_of_a_step_that_began_before_the_round() -> None:
    notes: list[str] = []
    executor = Streams(Verifier(OnDevice(3, notes)), Drafter(OddDraft(notes)), clock=lambda: 7.0)
    executor.open(0, request())
    report = executor.run({0: Orders(grow(), Verify(ON))})[0]
    assert report.verifying and (report.verifying.start, report.verifying.end) == (101.0, 102.0)
    assert report.drafting and report.drafting.start == 7.0
    plain = executor.run({0: Orders(verify=Verify(Context(3, (4,)), goes_on=True))})[0]
    assert plain.verifying and plain.verifying.start == 7.0


# --- a draft that fails ---


@pytest.fixture(params=[Serial, Streams], ids=["serial", "streams"])
def kind(request: pytest.FixtureRequest) -> type[Serial]:
    found: type[Serial] = request.param
    return found


def start(loop: Loop, case: Case, method: str) -> Session:
    session = case.session(next_number())
    loop.join(session, _rounds(session, method, case.rule))
    return session


def _rounds(session: Session, method: str, rule: Rule) -> MethodRounds:
    if method == "wandering":
        return wandering(session)
    named = "specbranch" if method == "confidence" else method
    config = SpeculativeConfig(
        method=named, policy="confidence" if method == "confidence" else None, num_speculative_tokens=4, rule=rule
    )
    return METHODS[named].start(session, config, Timeless(PROFILE))


def executor_of(kind: type[Serial]) -> tuple[Serial, OddDraft]:
    draft = OddDraft([])
    return kind(Verifier(Deferred(law(), lambda: 2)), Drafter(draft)), draft


def out_of_memory() -> None:
    raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB.\nDetails that nobody reads")


def _around_failure(loop: Loop, session: Session, draft: OddDraft) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Run a request to its end; returns what was said before and after the round in which the draft failed."""
    before: tuple[int, ...] = ()
    while draft.left > 0:
        assert loop.live, "the draft was never at work"
        before = tuple(session.output)
        loop.step()
    behind = tuple(session.output)
    run_out(loop)
    return before, behind


def _in_order(kind: type[Serial], case: Case, method: str) -> Session:
    """The same request with a draft that does not fail."""
    loop = Loop(executor_of(kind)[0])
    session = start(loop, case, method)
    run_out(loop)
    return session


@each_value
@pytest.mark.parametrize("rule", ["match", "ratio"])
@pytest.mark.parametrize("method", METHODS_WITH_DRAFT)
def test_a_draft_that_fails_loses_no_request(
    kind: type[Serial], method: str, rule: Rule, caplog: pytest.LogCaptureFixture
) -> None:
    """Its text is that of a draft in order up to the failure, and plain decoding's behind it. That of the round between
    them has the target's law under the ratio rule (`test_law_lost_draft`)."""
    for at in (1, 3, 12):
        executor, draft = executor_of(kind)
        loop, draft.odd, draft.left = Loop(executor), out_of_memory, at
        case = Case((at % 6, 1, 2), 0.7, at, SOME, rule)
        caplog.clear()
        session = start(loop, case, method)
        before, behind = _around_failure(loop, session, draft)
        session.stats.check()
        assert session.finished == "length" and session.stats.rounds_without_draft > 10
        assert before == tuple(_in_order(kind, case, method).output[: len(before)])
        assert answer(session) == plainly(case, law(), behind)
        if rule == "match" or method in TREES:  # which draw nothing beforehand: every token is the target's own draw
            assert answer(session) == plainly(case, law())
        said = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
        failure = "RuntimeError: CUDA out of memory. Tried to allocate 2.00 GiB."
        assert said == [f"The draft failed ({failure}); 1 request(s) go on without it, in plain decoding."]
        after, steps = start(loop, case, method), len(draft.notes)
        run_out(loop)
        assert len(draft.notes) > steps + 3 and after.stats.rounds_without_draft == 0, (
            "the next request has a draft again"
        )


def test_requests_that_were_not_drafted_for_keep_their_draft(kind: type[Serial]) -> None:
    executor, draft = executor_of(kind)
    loop, cases = Loop(executor), [Case((at, 1, 2), 0.7, at, SOME) for at in range(3)]
    sessions = [start(loop, case, "pearl") for case in cases[:2]]
    loop.step()
    draft.odd, draft.left = out_of_memory, 1
    loop.step()
    sessions.append(start(loop, cases[2], "pearl"))
    run_out(loop)
    assert [answer(session) for session in sessions] == [plainly(case, law()) for case in cases]
    assert [session.stats.rounds_without_draft > 0 for session in sessions] == [True, True, False]


class Unsound(OddDraft):
    """Says after a while that it is sure of its tokens to a degree that is no number."""

    def propose(self, work: Sequence[Feed], asks: Sequence[Ask]) -> list[Proposal]:
        found = super().propose(work, asks)
        return found if len(self.notes) < 8 else [replace(one, confidence=math.nan) for one in found]


@pytest.mark.parametrize("method", METHODS_WITH_DRAFT)
def test_a_draft_whose_numbers_are_none_is_given_up(
    kind: type[Serial], method: str, caplog: pytest.LogCaptureFixture
) -> None:
    executor, case = kind(Verifier(Deferred(law(), lambda: 2)), Drafter(Unsound([]))), Case((4, 1, 2), 0.7, 4, SOME)
    loop = Loop(executor)
    session = start(loop, case, method)
    run_out(loop)
    assert answer(session) == plainly(case, law())
    assert session.stats.rounds_without_draft > 10
    assert [record.getMessage()[:27] for record in caplog.records] == ["The draft failed (NoNumber:"]


def test_a_target_that_fails_is_not_taken_for_a_draft(kind: type[Serial]) -> None:
    class Failing(Deferred):
        def _score(self, work: Sequence[Feed]) -> list[list[Logits]]:
            raise RuntimeError("device-side assert triggered")

    executor = kind(Verifier(Failing(law(), lambda: 2)), Drafter(OddDraft([])))
    executor.open(0, request())
    with pytest.raises(RuntimeError, match="device-side assert"):
        executor.run({0: Orders(grow(), Verify(ON))})


class FailsAtJudging(Deferred):
    """A target that reads what it is given and fails when it is to judge."""

    def verify(self, work: Sequence[Feed], trials: Sequence[Trial]) -> Verdicts:
        if not work:
            raise RuntimeError("device-side assert triggered")
        return super().verify(work, trials)


class FailsWhenAsked(Deferred):
    """A target that fails when its verdicts are polled, and when they are waited for."""

    def verify(self, work: Sequence[Feed], trials: Sequence[Trial]) -> Verdicts:
        super().verify(work, trials)

        def fail() -> Any:
            raise RuntimeError("device-side assert triggered")

        return Verdicts(fail, fail)


@pytest.mark.parametrize(
    ("target", "order", "rule"),
    [
        (FailsAtJudging, lanes("ratio"), "ratio"),
        (FailsWhenAsked, lanes(), "match"),
        (FailsWhenAsked, lanes("ratio"), "ratio"),
        (FailsWhenAsked, grow(), "match"),
    ],
    ids=["judging", "lanes", "lanes by ratio", "tree"],
)
def test_a_target_that_fails_while_the_draft_works_is_not_taken_for_the_draft(
    target: type[Deferred], order: Draft | Grow, rule: Rule, caplog: pytest.LogCaptureFixture
) -> None:
    notes: list[str] = []
    executor = Streams(Verifier(target(law(), lambda: 2)), Drafter(OddDraft(notes)))
    executor.open(0, request(rule))
    with pytest.raises(RuntimeError, match="device-side assert"):
        executor.run({0: Orders(order, Verify(ON))})
    assert not caplog.records, "the draft is not blamed"
    assert len(notes) == 1, "nor does it go on for a target that has failed"
    assert not executor._without


# --- an interrupt ---


class Struck:
    """A runner that is interrupted once, right after its n-th call has done its work."""

    def __init__(self, inner: ToyRunner, calls: Iterator[int]) -> None:
        self._inner, self._calls = inner, calls

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._inner, name)
        return (
            partial(self._call, found) if name in ("extend", "feed", "keep", "rewind", "propose", "verify") else found
        )

    def _call(self, found: Callable[..., Any], *given: Any) -> Any:
        result = found(*given)
        if next(self._calls) == 0:
            raise KeyboardInterrupt
        return result


@pytest.mark.parametrize("method", tiered(METHODS_WITH_DRAFT, ("pearl", "wandering").__contains__))
def test_an_interrupt_at_any_call_of_either_model_leaves_both_usable(method: str) -> None:
    case, struck = Case((1, 2, 3), 0.7, 4, SOME), 0
    for at in range(0, 120, 6):
        calls = iter(range(at, -100000, -1))
        target, draft = (Struck(runner, calls) for runner in (Deferred(law(), lambda: 2), ToyRunner(law(0.2))))
        loop = Loop(Streams(Verifier(target), Drafter(draft)))  # type: ignore[arg-type]
        session = start(loop, case, method)
        try:
            run_out(loop)
        except KeyboardInterrupt:
            struck += 1
            run_out(loop)  # the orders of the round are carried out again
        assert answer(session) == plainly(case, law())
    assert struck > 10


@pytest.mark.parametrize("works", [serial, streams])
def test_a_round_that_only_reads_takes_the_time_that_it_takes(works: Callable[[float], Serial]) -> None:
    executor, prompt = works(0.3), tuple(range(3, 15)) * 20
    executor.open(0, Request(SamplingParams(), 0, len(prompt)))
    span = executor.run({0: Orders(prefill=Prefill(Context(0, prompt), len(prompt)))})[0].verifying
    assert span is not None and span.tokens > 100 and span.end > span.start
