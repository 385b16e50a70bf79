"""Many sessions in one loop: each gives what it gives alone, whoever joins, leaves or fails beside it."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count

import pytest

import toybench
from specbranch.clock.profile import CostProfile
from specbranch.clock.virtual_clock import MeteredDrafter, VirtualClock
from specbranch.config import Rule, SpeculativeConfig
from specbranch.core.loop import Executor, Loop
from specbranch.core.methods import METHODS, MethodRounds
from specbranch.core.orders import Orders
from specbranch.core.session import Session
from specbranch.errors import CacheFull
from specbranch.exec.process import Process
from specbranch.exec.serial import Serial
from specbranch.exec.streams import Streams
from specbranch.exec.verifier import Verifier
from specbranch.lab.toys.toys import ToyRunner
from tiers import each_value, tiered
from toybench import (
    MOST_ROUNDS,
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
    make_drafter,
    next_number,
    plainly,
    serial,
)

DRIFT = 0.2
CONTEXT = 120  # tokens a sequence may have here; only the greedy one asks for more
LONG = Ending("long", max_tokens=40)
TOO_LONG = Ending("too long", max_tokens=1000)
ENDINGS = (
    LONG,
    Ending("stop ids", stop_token_ids=(0,)),
    Ending("one token", max_tokens=1),
    Ending("odd", max_tokens=23),
)
PROFILE = CostProfile(target=((1, 10.0), (8, 12.0)), draft=((1, 2.0), (8, 3.0)))


def small_verifier() -> Verifier:
    return Verifier(ToyRunner(law(), context_length=CONTEXT, tail=32))


def on_clock() -> VirtualClock:
    return VirtualClock(small_verifier(), MeteredDrafter(ToyRunner(law(DRIFT))), PROFILE)


@pytest.fixture(params=["serial", "process", "streams", "clock"])
def executor(request: pytest.FixtureRequest) -> Iterator[Executor]:
    makers: dict[str, Callable[[], Executor]] = {
        "serial": lambda: Serial(small_verifier(), make_drafter(DRIFT)),
        "process": lambda: Process(small_verifier(), drafter_recipe(DRIFT)),
        "streams": lambda: Streams(Verifier(Deferred(law(), lambda: 2, CONTEXT, 32)), make_drafter(DRIFT)),
        "clock": on_clock,
    }
    made = makers[request.param]()
    yield made
    made.close()


def mixed(count: int, rules: tuple[Rule, ...]) -> list[tuple[Case, SpeculativeConfig]]:
    """Requests of every method, temperature, ending and rule."""
    rng = random.Random(4)
    out: list[tuple[Case, SpeculativeConfig]] = []
    for seed in range(count):
        method, rule = NAMES[seed % len(NAMES)], rng.choice(rules)
        if method in METHODS and METHODS[method].policy == "planner":
            # it goes by the times it sees, and under ratio another plan says other tokens of the same law
            rule = "match"
        prompt = tuple(rng.randrange(6) for _ in range(rng.choice((1, 4, 30))))
        case = Case(prompt, rng.choice((0.0, 0.7, 1.3)), seed, rng.choice(ENDINGS), rule)
        out.append((case, config_of(method, rule)))
    return out


def start(loop: Loop, case: Case, config: SpeculativeConfig, limit: int = CONTEXT) -> Session:
    session = case.session(next_number(), limit)
    loop.join(session, METHODS[config.method].start(session, config, Timeless(toybench.PROFILE)))
    return session


def step_until_done(loop: Loop, each_round: Callable[[], None] = lambda: None) -> None:
    for _ in range(MOST_ROUNDS):
        each_round()
        if not loop.live:
            return
        loop.step()
    raise AssertionError("the loop does not end")


def join_some(
    loop: Loop, waiting: list[tuple[Case, SpeculativeConfig]], joined: list[Session], rng: random.Random
) -> None:
    for _ in range(min(len(waiting), rng.choice((0, 0, 1, 3)) if loop.live else 1)):
        joined.append(start(loop, *waiting.pop(0)))


@pytest.mark.slow
@each_value
@pytest.mark.parametrize("rules", [("match",), ("match", "ratio")], ids=["match", "both-rules"])
def test_sessions_joining_at_different_times_give_what_each_gives_alone(
    executor: Executor, rules: tuple[Rule, ...]
) -> None:
    requests = mixed(36, rules)
    loop, joined = Loop(executor), list[Session]()
    step_until_done(loop, partial(join_some, loop, list(requests), joined, random.Random(1)))
    assert len(joined) == len(requests)
    alone = serial(DRIFT)
    for session, (case, config) in zip(joined, requests, strict=True):
        expected = decode(alone, case, config)
        assert answer(session) == answer(expected)
        assert session.stats.tested_at == expected.stats.tested_at or METHODS[config.method].plans(config)
        session.stats.check()


def test_a_session_that_leaves_early_disturbs_no_other(executor: Executor) -> None:
    loop = Loop(executor)
    requests = [(case, config) for case, config in mixed(30, ("match",)) if case.ending.max_tokens > 20]
    sessions = [start(loop, *request) for request in requests]
    for _ in range(4):
        loop.step()
    leaving = [session for session in sessions[::3] if not session.finished]
    for session in leaving:
        loop.remove(session)
    step_until_done(loop)
    assert len(leaving) >= 2
    for session, (case, _) in zip(sessions, requests, strict=True):
        whole = plainly(case, law())
        if session in leaving:
            assert session.finished is None
            session.stats.check()  # what was in flight is counted too
            assert session.stats.finished >= session.stats.first_token
            assert tuple(session.output) == whole.tokens[: len(session.output)]
        else:
            assert answer(session) == whole


def test_leaving_twice_is_harmless(executor: Executor) -> None:
    loop = Loop(executor)
    session = start(loop, Case((1,), 0.0, 0, LONG), config_of("confidence", "match"))
    loop.step()
    loop.remove(session)
    loop.remove(session)
    assert not loop.live


@each_value
@pytest.mark.parametrize("method", tiered(METHODS, ("autoregressive", "specbranch").__contains__))
def test_a_session_whose_cache_is_full_fails_alone(executor: Executor, method: str) -> None:
    loop = Loop(executor)
    requests = [r for r in mixed(12, ("match",)) if r[0].ending is LONG]
    others = [start(loop, *request) for request in requests]
    greedy_for_room = Case((1, 2, 3), 0.7, 99, TOO_LONG)
    failing = start(loop, greedy_for_room, config_of(method, "match"), limit=1000)
    step_until_done(loop)
    assert failing.finished == "error"
    failing.stats.check()
    assert isinstance(failing.error, CacheFull)
    assert "free (capacity 152, tail 32)" in str(failing.error)
    assert CONTEXT <= len(failing.tokens) <= 153
    assert tuple(failing.output) == plainly(greedy_for_room, law()).tokens[: len(failing.output)]
    assert [answer(session) for session in others] == [plainly(case, law()) for case, _ in requests]


def test_a_prompt_beyond_the_cache_fails_at_once_and_alone(executor: Executor) -> None:
    loop = Loop(executor)
    other = start(loop, Case((1, 2), 0.7, 3, LONG), config_of("confidence", "match"))
    failing = start(loop, Case((1,) * 500, 0.0, 0, LONG), config_of("confidence", "match"), limit=1000)
    loop.step()
    assert isinstance(failing.error, CacheFull)
    assert failing.output == []
    step_until_done(loop)
    assert answer(other) == plainly(Case((1, 2), 0.7, 3, LONG), law())


def test_finished_sessions_hold_nothing() -> None:
    executor = Serial(small_verifier(), make_drafter(DRIFT))
    loop = Loop(executor)
    sessions = [start(loop, *request) for request in mixed(12, ("match",))]
    loop.step()
    loop.remove(sessions[0])
    step_until_done(loop)
    assert executor.draft
    for worker in (executor.target, executor.draft):
        for session in sessions:
            with pytest.raises(KeyError):
                worker.slots(session.number)


@pytest.mark.parametrize("method", ["speculative", "pearl", "confidence", "tree"])
def test_a_draft_that_forgot_one_session_gets_it_anew_and_the_others_keep_what_they_have(method: str) -> None:
    executor = Serial(small_verifier(), make_drafter(0.0))
    loop = Loop(executor)
    requests = [(Case((seed, 1), 0.7, seed, LONG), config_of(method, "match")) for seed in range(3)]
    sessions = [start(loop, *request) for request in requests]
    for _ in range(5):
        loop.step()
    assert executor.draft
    executor.draft.free(sessions[1].number)
    executor.draft.open(sessions[1].number, sessions[1].request)
    step_until_done(loop)
    for session, (case, _) in zip(sessions, requests, strict=True):
        assert answer(session) == plainly(case, law())
        assert session.stats.accepted_at == session.stats.tested_at, "a perfect draft was rejected"
        assert session.stats.branch_hits == session.stats.branch_points or method == "tree"


def stumbling(session: Session, after: int) -> MethodRounds:
    """Decodes plainly, until it makes a mistake."""
    for at in count():
        reports = yield Orders(verify=session.verify())
        assert reports.verdict is not None
        session.commit((), reports.verdict)
        if at == after:
            raise ZeroDivisionError("a mistake of the method's")


@each_value
@pytest.mark.parametrize("method", ["autoregressive", "specbranch", "pearl"])
def test_a_method_that_raises_takes_no_other_with_it(executor: Executor, method: str) -> None:
    """The sessions that come after it in the round have their reports all the same."""
    loop = Loop(executor)
    cases = [Case((at, 2, 3), 0.7, at, LONG) for at in range(4)]
    sessions = [start(loop, cases[0], config_of(method, "match"))]
    bad = cases[1].session(next_number(), CONTEXT)
    loop.join(bad, stumbling(bad, after=5))
    sessions += [start(loop, case, config_of(method, "match")) for case in cases[2:]]
    step_until_done(loop)
    assert isinstance(bad.error, ZeroDivisionError) and bad.finished == "error" and len(bad.output) == 6
    assert [answer(session) for session in sessions] == [plainly(case, law()) for case in (cases[0], *cases[2:])]


def test_an_interrupt_within_a_step_loses_no_other_request() -> None:
    """The round is made again for those that had not taken their reports; the one that was interrupted has failed."""
    loop = Loop(serial(DRIFT))
    cases = [Case((at, 2, 3), 0.7, at, LONG) for at in range(3)]
    struck = cases[0].session(next_number(), CONTEXT)

    def interrupted() -> MethodRounds:
        yield Orders(verify=struck.verify())
        raise KeyboardInterrupt

    loop.join(struck, interrupted())
    sessions = [start(loop, case, config_of("specbranch", "match")) for case in cases[1:]]
    with pytest.raises(KeyboardInterrupt):
        loop.step()
    step_until_done(loop)
    assert struck.finished == "error"
    assert [answer(session) for session in sessions] == [plainly(case, law()) for case in cases[1:]]
