"""Many requests through the scheduler: each text as if alone, whoever arrives, leaves, fails or is preempted."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from typing import Any

import pytest

import toybench
from paged_toys import PagedToyRunner
from plain_toys import PlainPagedToyRunner, PlainToyRunner
from specbranch.clock.profile import CostProfile
from specbranch.clock.virtual_clock import MeteredDrafter, VirtualClock
from specbranch.config import Rule, SpeculativeConfig
from specbranch.core.loop import Executor, Loop
from specbranch.core.methods import METHODS, MethodRounds
from specbranch.core.orders import Orders
from specbranch.core.prefill_budget import RoundLimits
from specbranch.core.request import Spot
from specbranch.core.runner import Feed, Trial, Verdicts
from specbranch.core.scheduler import Scheduler, Ticket
from specbranch.core.session import Session
from specbranch.errors import CacheFull, DeadlinePassed
from specbranch.exec import process
from specbranch.exec.child_speed import ChildLimits
from specbranch.exec.drafter import Drafter
from specbranch.exec.process import Process
from specbranch.exec.serial import Serial
from specbranch.exec.streams import Streams
from specbranch.exec.verifier import Verifier
from specbranch.lab.toys.toys import Logits, ToyRunner, ToySampler
from tiers import each_value, tiered
from toybench import (
    NAMES,
    Case,
    Deferred,
    Ending,
    Timeless,
    answer,
    config_of,
    decode,
    drafter_recipe,
    law,
    next_number,
    plainly,
    serial,
)

DRIFT = 0.2
CHUNK = 8
LIMITS = RoundLimits(prefill_chunk=CHUNK, prompt_tokens=CHUNK, prompt_tokens_alone=3 * CHUNK)
CONTEXT = 400
ENDINGS = (
    Ending("long", max_tokens=40),
    Ending("stop ids", stop_token_ids=(0,)),
    Ending("one token", max_tokens=1),
    Ending("odd", max_tokens=23),
)
MOST_ROUNDS = 200_000


def toy(drift: float = 0.0, kv_slots: int | None = None, **given: Any) -> ToyRunner:
    """A toy that reads prompts in chunks; with `kv_slots` its cache is bounded, and knows what it has read."""
    if kv_slots is not None:
        return PagedToyRunner(law(drift), kv_slots, page=1, prefill_chunk=CHUNK, context_length=CONTEXT)
    runner = ToyRunner(law(drift), CONTEXT, **given)
    runner.prefill_chunk = CHUNK
    return runner


class PagedDeferred(PagedToyRunner):
    """A bounded toy whose verdicts are there once they were asked for twice, or when they are waited for."""

    def verify(self, work: Sequence[Feed], trials: Sequence[Trial]) -> Verdicts:
        found, polls = super().verify(work, trials), iter(range(2))
        return Verdicts(found, lambda: next(polls, None) is None)


def deferred_toy(kv_slots: int | None) -> ToyRunner:
    if kv_slots is not None:
        return PagedDeferred(law(), kv_slots, page=1, prefill_chunk=CHUNK, context_length=CONTEXT)
    runner = Deferred(law(), lambda: 2, CONTEXT)
    runner.prefill_chunk = CHUNK
    return runner


def plain_toy(kv_slots: int | None) -> ToyRunner:
    """A toy that decodes a batch plainly, with one step launched ahead."""
    if kv_slots is not None:
        return PlainPagedToyRunner(law(), kv_slots, page=1, prefill_chunk=CHUNK, context_length=CONTEXT)
    runner = PlainToyRunner(law(), CONTEXT)
    runner.prefill_chunk = CHUNK
    return runner


# On a busy machine, a round that goes on without its draft has another text under the ratio rule.
WAITING = ChildLimits(first=300.0, hung=300.0, grace=60.0, unmeasured=60.0)


def executors(kv_slots: int | None, draft_kv_slots: int | None = None) -> dict[str, Callable[[], Executor]]:
    return {
        "serial": lambda: Serial(Verifier(toy(kv_slots=kv_slots)), Drafter(toy(DRIFT, draft_kv_slots))),
        "plain": lambda: Serial(Verifier(plain_toy(kv_slots)), Drafter(toy(DRIFT, draft_kv_slots))),
        "plain streams": lambda: Streams(Verifier(plain_toy(kv_slots)), Drafter(toy(DRIFT, draft_kv_slots))),
        "plain process": lambda: Process(Verifier(plain_toy(kv_slots)), drafter_recipe(DRIFT), WAITING),
        "process": lambda: Process(Verifier(toy(kv_slots=kv_slots)), drafter_recipe(DRIFT), WAITING),
        "streams": lambda: Streams(Verifier(deferred_toy(kv_slots)), Drafter(toy(DRIFT, draft_kv_slots))),
        "clock": lambda: VirtualClock(
            Verifier(toy(kv_slots=kv_slots)), MeteredDrafter(toy(DRIFT, draft_kv_slots)), toybench.SHARED
        ),
    }


@dataclass
class Asked:
    """A request of a test."""

    case: Case
    config: SpeculativeConfig
    session: Session
    ticket: Ticket | None = None


@dataclass
class Desk:
    """Submits requests at random times, cancels some, and runs rounds."""

    scheduler: Scheduler
    rng: random.Random
    cancels: float = 0.0
    pauses: float = 0.0
    profile: CostProfile = toybench.SHARED  # that methods plan by
    cancelled: list[Asked] = field(default_factory=list)
    done: list[Asked] = field(default_factory=list)

    def submit(self, case: Case, config: SpeculativeConfig, limit: int = CONTEXT, **how: Any) -> Asked:
        asked = Asked(case, config, case.session(next_number(), limit))
        start = partial(METHODS[config.method].start, asked.session, config, Timeless(self.profile))
        asked.ticket = self.scheduler.submit(asked.session, start, **how)
        self.done.append(asked)
        return asked

    def run(self, waiting: Sequence[tuple[Case, SpeculativeConfig]] = ()) -> None:
        left = list(waiting)
        for _ in range(MOST_ROUNDS):
            for _ in range(min(len(left), self.rng.choice((0, 0, 1, 3)) if self.scheduler.busy else 1)):
                self.submit(*left.pop(0), priority=self.rng.choice((0, 0, 1)))
            self._cancel_some()
            self._pause_some()
            if not left and not self.scheduler.tickets:
                return
            self.scheduler.step()
        raise AssertionError("the scheduler does not end")

    def _pause_some(self) -> None:
        """Pause some requests, and let some go on; if all rest, all go on."""
        for asked in self.done if self.pauses else ():
            ticket = asked.ticket
            if ticket is None or ticket.state == "over":
                continue
            if self.rng.random() < (0.2 if ticket.paused else self.pauses) or (
                ticket.paused and not self.scheduler.busy
            ):
                self.scheduler.set_paused(ticket, not ticket.paused)

    def _cancel_some(self) -> None:
        for asked in self.done:
            if asked.ticket and asked.ticket.state != "over" and self.rng.random() < self.cancels:
                self.scheduler.cancel(asked.ticket)
                self.cancelled.append(asked)


def mixed(
    number: int, seed: int = 4, rules: tuple[Rule, ...] = ("match", "ratio")
) -> list[tuple[Case, SpeculativeConfig]]:
    """Requests of every method, temperature, ending, rule and length of prompt."""
    rng = random.Random(seed)
    out: list[tuple[Case, SpeculativeConfig]] = []
    for at in range(number):
        method, rule = NAMES[at % len(NAMES)], rng.choice(rules)
        if method in METHODS and METHODS[method].policy == "planner":
            # it goes by the times it sees, and under ratio another plan says other tokens of the same law
            rule = "match"
        prompt = tuple(rng.randrange(6) for _ in range(rng.choice((1, 4, 8, 9, 30, 100))))
        out.append((Case(prompt, rng.choice((0.0, 0.7, 1.3)), at, rng.choice(ENDINGS), rule), config_of(method, rule)))
    return out


def check(asked: Sequence[Asked], whole: Sequence[Asked] = ()) -> None:
    """Each text is that of the request alone; of one that was cancelled, its beginning."""
    alone = serial(DRIFT)
    for one in asked:
        by_law = plainly(one.case, law()) if one.case.rule == "match" or one.case.temperature == 0.0 else None
        expected = by_law or answer(decode(alone, one.case, one.config))
        if one in whole:
            assert one.session.finished is None
            assert tuple(one.session.output) == expected.tokens[: len(one.session.output)]
        else:
            assert answer(one.session) == expected, (one.case, one.config)
        one.session.stats.check()


def holds_nothing(executor: Executor) -> bool:
    workers = [executor.target, getattr(executor, "draft", None)]  # type: ignore[attr-defined]
    return not any(worker._held for worker in workers if worker is not None)


BOTH: tuple[Rule, ...] = ("match", "ratio")
# KV slots of target and draft. Under the ratio rule a draft without memory drafts nothing, so the tokens are others of
# the same law. Those cases run under match alone.
MEMORIES: dict[str, tuple[int | None, int | None, tuple[Rule, ...]]] = {
    "much memory": (None, None, BOTH),
    "little memory": (260, None, BOTH),
    "little memory for both": (260, 150, ("match",)),
}


@each_value
@pytest.mark.parametrize("memory", MEMORIES)
@pytest.mark.parametrize(
    "kind", tiered(("serial", "plain", "process", "streams", "clock"), ("serial", "plain", "process").__contains__)
)
def test_requests_arriving_and_cancelled_at_random_give_what_each_gives_alone(kind: str, memory: str) -> None:
    kv_slots, draft_kv_slots, rules = MEMORIES[memory]
    executor = executors(kv_slots, draft_kv_slots)[kind]()
    scheduler = Scheduler(Loop(executor, limits=LIMITS), most=12, ahead=4)
    desk = Desk(scheduler, random.Random(2), cancels=0.001)
    desk.run(mixed(60, rules=rules))
    executor.close()
    check(desk.done, desk.cancelled)
    reported = scheduler.snapshot()
    assert len(desk.cancelled) == reported.cancelled > 3 and reported.finished == 60 - reported.cancelled
    assert (reported.preemptions > 0) == (kv_slots is not None)
    assert holds_nothing(executor) and reported.running == reported.waiting == 0


@pytest.mark.parametrize("kv_slots", [None, 260])
@pytest.mark.parametrize("number", tiered((150, 2000), (150).__eq__))
def test_rounds_of_plain_decoding_give_what_each_request_gives_alone(number: int, kv_slots: int | None) -> None:
    """Some requests cannot be decoded so, and one in 30 plans: then rounds are ordered meanwhile."""
    executor = executors(kv_slots)["plain"]()
    scheduler = Scheduler(Loop(executor, limits=LIMITS), most=12, ahead=4)
    desk, plain = Desk(scheduler, random.Random(6), cancels=0.001), config_of("autoregressive", "match")
    requests = [
        (case, config if at % 30 == 0 else plain) for at, (case, config) in enumerate(mixed(number, 9, ("match",)))
    ]
    desk.run(requests)
    check(desk.done, desk.cancelled)
    assert executor.target.runner.steps > number // 2  # type: ignore[attr-defined]
    assert holds_nothing(executor) and (scheduler.snapshot().preemptions > 0) == (kv_slots is not None)


@each_value
@pytest.mark.parametrize("memory", MEMORIES)
@pytest.mark.parametrize("kind", ["plain", "plain streams", "plain process"])
@pytest.mark.parametrize("number", tiered((120, 2000), (120).__eq__))
def test_sessions_of_every_method_share_rounds_of_plain_decoding(number: int, kind: str, memory: str) -> None:
    """One in four drafts, plans, looks up or guesses, under both rules; requests are cancelled and paused."""
    kv_slots, draft_kv_slots, rules = MEMORIES[memory]
    executor = executors(kv_slots and 2 * kv_slots, draft_kv_slots)[kind]()
    scheduler, rng = Scheduler(Loop(executor, limits=LIMITS), most=16, ahead=4), random.Random(12)
    desk, plain = Desk(scheduler, rng, cancels=0.001, pauses=0.01), config_of("autoregressive", "match")
    requests = [(case, config if at % 4 == 0 else plain) for at, (case, config) in enumerate(mixed(number, 9, rules))]
    desk.run(requests)
    executor.close()
    check(desk.done, desk.cancelled)
    runner = executor.target.runner  # type: ignore[attr-defined]
    assert runner.steps > number // 4 and runner.verified > number // 16
    assert not scheduler.loop._plain._rounds.has_failed
    assert holds_nothing(executor) and (scheduler.snapshot().preemptions > 0) == (kv_slots is not None)


@pytest.mark.slow
@pytest.mark.parametrize("memory", MEMORIES)
def test_thousands_of_requests_give_what_each_gives_alone(memory: str) -> None:
    kv_slots, draft_kv_slots, rules = MEMORIES[memory]
    executor = executors(kv_slots, draft_kv_slots)["serial"]()
    scheduler = Scheduler(Loop(executor, limits=LIMITS), most=24, ahead=4)
    desk = Desk(scheduler, random.Random(7), cancels=0.0003)
    desk.run(mixed(3000, seed=8, rules=rules))
    check(desk.done, desk.cancelled)
    assert holds_nothing(executor) and (scheduler.snapshot().preemptions > 20) == (kv_slots is not None)


def test_every_request_makes_progress_where_only_one_fits() -> None:
    executor = executors(160)["serial"]()
    desk = Desk(Scheduler(Loop(executor, limits=LIMITS)), random.Random(3))
    requests = [(Case((at, *[1] * 80), 0.7, at, ENDINGS[0]), config_of("specbranch", "match")) for at in range(6)]
    desk.run(requests)
    check(desk.done)


def test_a_request_that_is_alone_and_does_not_fit_fails_with_what_it_has() -> None:
    executor = executors(60)["serial"]()
    desk = Desk(Scheduler(Loop(executor, limits=LIMITS)), random.Random(3))
    case = Case((1, *[2] * 40), 0.7, 5, Ending("long", max_tokens=100))
    greedy, other = desk.submit(case, config_of("autoregressive", "match")), desk.submit(*mixed(1)[0])
    desk.run()
    assert isinstance(greedy.session.error, CacheFull) and "0 free (of 60)" in str(greedy.session.error)
    said = tuple(greedy.session.output)
    assert len(said) == 20 and said == plainly(case, law()).tokens[:20]
    check([other])


def test_a_request_that_can_never_fit_is_refused_by_a_sentence() -> None:
    scheduler = Scheduler(Loop(executors(60)["serial"](), limits=LIMITS))
    asked = Desk(scheduler, random.Random(3)).submit(Case((1,) * 61, 0.0, 0, ENDINGS[0]), config_of("tree", "match"))
    assert asked.session.finished == "error" and asked.ticket and asked.ticket.state == "over"
    assert "61 tokens, but the cache has 60 KV slots" in str(asked.session.error)


def test_a_cancelled_request_is_gone_within_a_round_also_while_its_prompt_is_read() -> None:
    executor = executors(None)["serial"]()
    scheduler = Scheduler(Loop(executor, limits=LIMITS))
    desk = Desk(scheduler, random.Random(3))
    other = desk.submit(Case((1, 2), 0.7, 3, ENDINGS[0]), config_of("autoregressive", "match"))
    scheduler.step()
    long = desk.submit(Case((1,) * 300, 0.7, 4, ENDINGS[0]), config_of("speculative", "match"))
    for _ in range(4):
        scheduler.step()
    assert scheduler.snapshot().prefilling == 1 and len(executor.target.slots(long.session.number).prefix) == 4 * CHUNK  # type: ignore[attr-defined]
    assert long.ticket
    scheduler.cancel(long.ticket)
    with pytest.raises(KeyError):
        executor.target.slots(long.session.number)  # type: ignore[attr-defined]
    desk.run()
    check([other])
    assert long.session.output == []


def test_a_deadline_ends_a_request_with_what_it_has_wherever_it_is() -> None:
    executor = executors(None)["clock"]()
    scheduler = Scheduler(Loop(executor, limits=LIMITS), most=1)
    desk = Desk(scheduler, random.Random(3))
    live, waiting = (
        desk.submit(Case((1, at), 0.7, at, ENDINGS[0]), config_of("autoregressive", "match"), within=105.0)
        for at in (1, 2)
    )
    other = desk.submit(Case((1, 3), 0.7, 3, ENDINGS[0]), config_of("autoregressive", "match"))
    desk.run()
    assert isinstance(live.session.error, DeadlinePassed) and "within its 105 s; it has 11 tokens" in str(
        live.session.error
    )
    assert tuple(live.session.output) == plainly(live.case, law()).tokens[:11]
    assert isinstance(waiting.session.error, DeadlinePassed) and waiting.session.output == []
    check([other])


def test_on_a_clock_that_stands_still_a_resting_request_is_late_by_the_walls() -> None:
    executor, wall = executors(None)["clock"](), [0.0]
    scheduler = Scheduler(Loop(executor, limits=LIMITS), wall=lambda: wall[0])
    desk, plain = Desk(scheduler, random.Random(3)), config_of("autoregressive", "match")
    asked = [desk.submit(Case((1, at), 0.7, at, ENDINGS[0]), plain, within=100.0) for at in range(2)]
    for _ in range(2):
        scheduler.step()
    spent = executor.now()
    slow, other = asked
    assert slow.ticket and 0.0 < spent < 30.0
    scheduler.set_paused(slow.ticket, True)
    wall[0] = 40.0
    scheduler.set_paused(slow.ticket, False)  # these 40 s count, and what it decodes now
    scheduler.set_paused(slow.ticket, True)
    assert scheduler.seconds_left == pytest.approx(60.0 - spent)
    while not other.session.finished:
        scheduler.step()
    assert slow.session.finished is None or executor.now() > 60.0
    wall[0] += 61.0
    scheduler.step()
    assert isinstance(slow.session.error, DeadlinePassed) and "within its 100 s" in str(slow.session.error)


def test_higher_priorities_go_first_and_within_one_nobody_is_overtaken() -> None:
    scheduler = Scheduler(Loop(executors(None)["serial"](), limits=LIMITS), most=2)
    desk, began = Desk(scheduler, random.Random(3)), list[int]()
    join = scheduler.loop.join
    scheduler.loop.join = lambda session, rounds: (began.append(session.number), join(session, rounds))[1]  # type: ignore[method-assign]
    asked = [desk.submit(*one, priority=at % 3) for at, one in enumerate(mixed(24))]
    desk.run()
    by_priority = [one.session.number for priority in (2, 1, 0) for one in asked[priority::3]]
    assert began == by_priority


def test_a_request_is_admitted_within_the_bound() -> None:
    """⌊k / M⌋ · R rounds, for k before it, M at once, none of more than R rounds."""
    most, rng = 5, random.Random(5)
    scheduler = Scheduler(
        Loop(executors(None)["serial"](), limits=replace(LIMITS, prompt_tokens_alone=None)), most=most
    )
    desk = Desk(scheduler, rng)
    asked = [
        desk.submit(
            Case((at,), 0.7, at, Ending("any", max_tokens=rng.randint(1, 30))), config_of("autoregressive", "match")
        )
        for at in range(40)
    ]
    admitted: dict[int, int] = {}
    for at in count():
        if not scheduler.tickets:
            break
        scheduler.step()
        for one in asked:
            if one.ticket and one.ticket.was_live:
                admitted.setdefault(one.session.number, at)
    waits = [admitted[one.session.number] for one in asked]
    assert all(wait <= k // most * 30 for k, wait in enumerate(waits)) and max(waits) > 30


def test_a_short_prompt_does_not_wait_for_long_ones_to_be_read() -> None:
    """With m texts unread one of p chunks is read within m · p rounds of the target."""
    scheduler = Scheduler(Loop(executors(None)["serial"](), limits=LIMITS))
    desk = Desk(scheduler, random.Random(3))
    plain = config_of("autoregressive", "match")
    desk.submit(Case((1, 2), 0.7, 3, Ending("long", max_tokens=300)), plain)
    scheduler.step()
    for at in range(3):
        desk.submit(Case((at,) * 300, 0.7, at, ENDINGS[2]), plain)
    scheduler.step()
    short = desk.submit(Case((5,) * (2 * CHUNK), 0.7, 9, ENDINGS[2]), plain)
    rounds = 0
    while not short.session.finished:
        scheduler.step()
        rounds += 1
    assert rounds <= 4 * 2
    desk.run()
    check(desk.done)


@pytest.mark.parametrize(("others", "chunks"), [(1, 4), (CHUNK, 4), (2 * CHUNK, 2), (4 * CHUNK, 1)])
def test_beside_many_rows_as_many_tokens_of_a_prompt_are_read(others: int, chunks: int) -> None:
    """A round that is long anyway takes more of a prompt: else prompts would be read more slowly than they come."""
    scheduler = Scheduler(Loop(executors(None)["serial"](), limits=LIMITS))
    desk, plain = Desk(scheduler, random.Random(3)), config_of("autoregressive", "match")
    for at in range(others):
        desk.submit(Case((at % 6,), 0.7, at, Ending("long", max_tokens=300)), plain)
    for _ in range(3):
        scheduler.step()
    new = desk.submit(Case((5,) * (4 * CHUNK + 1), 0.7, 99, ENDINGS[0]), plain)
    rounds = 0
    while not new.session.output:
        scheduler.step()
        rounds += 1
    assert rounds == chunks


def test_a_paused_session_takes_no_part_and_no_batch_slot_and_goes_on_later() -> None:
    executor = executors(130)["serial"]()
    scheduler = Scheduler(Loop(executor, limits=LIMITS), most=1)
    desk = Desk(scheduler, random.Random(3))
    plain = config_of("autoregressive", "match")
    slow, other = (desk.submit(Case((at,) * 40, 0.7, at, ENDINGS[0]), plain) for at in (1, 2))
    assert slow.ticket and other.ticket
    for _ in range(4):
        scheduler.step()
    scheduler.set_paused(slow.ticket, True)
    said = len(slow.session.output)
    while not other.session.finished:
        scheduler.step()
    assert said == len(slow.session.output) > 0 and not scheduler.busy and scheduler.step() == []
    scheduler.set_paused(slow.ticket, False)
    desk.run()
    check(desk.done)


class Failing(ToySampler):
    """A sampler that cannot do one request's rows."""

    def __init__(self, seed: int, error: Exception) -> None:
        self.seed, self.error = seed, error

    def pick(self, rows: Sequence[Logits], spots: Sequence[Spot]) -> list[int]:
        if any(spot.request.seed == self.seed and spot.position > 12 for spot in spots):
            raise self.error
        return super().pick(rows, spots)

    def propose(self, rows: Sequence[Logits], spots: Sequence[Spot], asks: Any) -> Any:
        if any(spot.request.seed == self.seed and spot.position > 12 for spot in spots):
            raise self.error
        return super().propose(rows, spots, asks)


@pytest.mark.parametrize("method", ["autoregressive", "speculative", "specbranch", "pearl"])
def test_a_sampler_that_raises_takes_no_other_with_it(method: str) -> None:
    sampler = Failing(3, ZeroDivisionError("no such row"))
    executor = Serial(Verifier(toy(sampler=sampler)), Drafter(toy(DRIFT)))
    desk = Desk(Scheduler(Loop(executor, limits=LIMITS)), random.Random(3))
    asked = [desk.submit(Case((at, 1), 0.7, at, ENDINGS[0]), config_of(method, "match")) for at in range(6)]
    desk.run()
    assert isinstance(asked[3].session.error, ZeroDivisionError) and 0 < len(asked[3].session.output) <= 20
    check([one for one in asked if one is not asked[3]])
    assert holds_nothing(executor)


@pytest.mark.parametrize("error", [RuntimeError("no memory"), KeyError("a mistake")], ids=["torch's", "ours"])
@pytest.mark.parametrize("method", ["speculative", "tree", "pearl"])
def test_a_draft_that_raises_takes_no_other_with_it(method: str, error: Exception) -> None:
    executor = Serial(Verifier(toy()), Drafter(toy(DRIFT, sampler=Failing(3, error))))
    desk = Desk(Scheduler(Loop(executor, limits=LIMITS)), random.Random(3))
    asked = [desk.submit(Case((at, 1), 0.7, at, ENDINGS[0]), config_of(method, "match")) for at in range(6)]
    desk.run()
    check(asked if isinstance(error, RuntimeError) else [one for one in asked if one is not asked[3]])


@pytest.mark.slow
@pytest.mark.parametrize("times", [2, pytest.param(20, marks=pytest.mark.slow)])
def test_a_draft_process_that_is_killed_again_and_again_costs_no_request_anything(
    times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "LONGEST_RESTART_WAIT", 0.0)
    executor = Process(Verifier(toy(kv_slots=400)), drafter_recipe(DRIFT))
    desk, killed = Desk(Scheduler(Loop(executor, limits=LIMITS), most=8), random.Random(3)), 0
    requests = iter(mixed(100_000, rules=("match",)))
    for at in count():
        if killed == times and not desk.scheduler.tickets:
            break
        if killed < times and len(desk.scheduler.tickets) < 10:
            desk.submit(*next(requests))
        desk.scheduler.step()
        if at % 40 == 39 and killed < times and executor.child_pid and executor._child and executor._child.ready:
            os.kill(executor.child_pid, signal.SIGKILL)
            killed += 1
    executor.close()
    check(desk.done)
    assert holds_nothing(executor) and executor.restarts >= times - 1


def test_a_method_that_raises_or_cannot_begin_takes_no_other_with_it() -> None:
    executor = executors(None)["serial"]()
    scheduler = Scheduler(Loop(executor, limits=LIMITS))
    desk = Desk(scheduler, random.Random(3))
    asked = [desk.submit(*one) for one in mixed(8)]
    sessions = [Case((1, 2, 3), 0.7, at, ENDINGS[0]).session(next_number(), CONTEXT) for at in range(2)]

    def stumbling() -> MethodRounds:
        yield Orders(verify=sessions[0].verify())
        raise ZeroDivisionError("a mistake of the method's")

    def unwilling() -> MethodRounds:
        raise LookupError("it cannot begin")

    for session, start in zip(sessions, (stumbling, unwilling), strict=True):
        scheduler.submit(session, start)
    desk.run()
    assert [type(session.error) for session in sessions] == [ZeroDivisionError, LookupError]
    check(asked)
    assert scheduler.snapshot().failed == 2 and holds_nothing(executor)


def test_an_error_of_the_target_itself_is_raised() -> None:
    executor = executors(None)["serial"]()
    scheduler = Scheduler(Loop(executor, limits=LIMITS))
    desk = Desk(scheduler, random.Random(3))
    for one in mixed(3):
        desk.submit(*one)
    executor.target.runner.verify = None  # type: ignore[attr-defined]
    with pytest.raises(TypeError):
        scheduler.step()


class Gaps:
    """When each session said something, on the executor's clock."""

    def __init__(self, sessions: Sequence[Session], executor: Executor) -> None:
        self.sessions, self.executor = sessions, executor
        self.last = {session.number: (0, executor.now()) for session in sessions}
        self.longest = 0.0

    def look(self) -> None:
        now = self.executor.now()
        for session in self.sessions:
            said, since = self.last[session.number]
            if len(session.output) > said:
                self.longest = max(self.longest, now - since if said else 0.0)
                self.last[session.number] = (len(session.output), now)


def usual_round(scheduler: Scheduler, executor: Executor, gaps: Gaps, rounds: int) -> float:
    for _ in range(rounds):
        scheduler.step()
        gaps.look()
    return gaps.longest


# Costs of a GPU, and those of SmolLM2 on a CPU, with their chunks: seconds by rows, to a chunk.
GPU = CostProfile(target=((1, 5.0), (8, 5.5), (64, 6.0), (256, 7.3), (512, 9.0)), draft=((1, 1.2), (256, 1.8)))
CPU = CostProfile(
    target=((1, 0.034), (8, 0.084), (16, 0.12)), draft=((1, 0.006), (8, 0.016), (16, 0.024)), overlap=False
)


@each_value
@pytest.mark.parametrize(
    "method",
    tiered(("autoregressive", "speculative", "specbranch", "pearl"), ("autoregressive", "pearl").__contains__),
)
@pytest.mark.parametrize(("profile", "prefill_chunk"), [(GPU, 256), (CPU, 16)], ids=["gpu", "cpu"])
def test_a_long_prompt_among_eight_makes_no_gap_longer_than_three_usual_rounds(
    profile: CostProfile, prefill_chunk: int, method: str
) -> None:
    def long_toy(drift: float) -> ToyRunner:
        runner = ToyRunner(law(drift), 6000)
        runner.prefill_chunk = prefill_chunk
        return runner

    executor = VirtualClock(Verifier(long_toy(0.0)), MeteredDrafter(long_toy(DRIFT)), profile)
    limits = RoundLimits(prefill_chunk=prefill_chunk, prompt_tokens=prefill_chunk)
    scheduler = Scheduler(Loop(executor, limits=limits))
    desk, config = Desk(scheduler, random.Random(3), profile=profile), config_of(method, "match")
    endless = Ending("long", max_tokens=3000)
    eight = [desk.submit(Case((at, 1, 2), 0.7, at, endless), config, limit=6000).session for at in range(8)]
    gaps = Gaps(eight, executor)
    usual_round(scheduler, executor, gaps, 10)
    gaps.longest = 0.0
    usual = usual_round(scheduler, executor, gaps, 30)  # a longest gap, from one token to the next
    long = desk.submit(Case(tuple(at % 6 for at in range(16 * prefill_chunk)), 0.7, 9, ENDINGS[0]), config, limit=6000)
    read = 0
    while not long.session.output:
        scheduler.step()
        gaps.look()
        read += 1
    for _ in range(20):  # its draft may still have to read
        scheduler.step()
        gaps.look()
    assert read >= 16 and all(not session.finished for session in eight)
    assert usual < gaps.longest <= 3 * usual


def test_a_request_alone_is_charged_as_if_there_were_no_scheduler() -> None:
    for case, config in mixed(20, rules=("match",)):
        spent = []
        for limits in (None, RoundLimits(prefill_chunk=CHUNK, prompt_tokens=CHUNK)):
            executor = executors(None)["clock"]()
            desk = Desk(Scheduler(Loop(executor, limits=limits)), random.Random(3))
            desk.submit(case, config)
            desk.run()
            spent.append((desk.done[0].session.stats.summary(), executor.now()))
        assert spent[0] == spent[1]
