"""Rounds of draft trees on the device, here on the CPU with the kernels' twins: no text changes, whoever takes part."""

from __future__ import annotations

import itertools
import random
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from specbranch.config import SamplingParams, SpeculativeConfig
from specbranch.core.forest import FOREST_VARIABLE, ForestPlan
from specbranch.core.forest_plan import forest_plan
from specbranch.core.loop import Loop
from specbranch.core.methods import METHODS
from specbranch.core.orders import Orders, Reports
from specbranch.core.prefill_budget import RoundLimits
from specbranch.core.request import Request
from specbranch.core.scheduler import Scheduler
from specbranch.core.session import Session
from specbranch.core.trees import Tree
from specbranch.core.way_choice import WayChoice
from specbranch.exec.drafter import Drafter
from specbranch.exec.serial import Serial
from specbranch.exec.verifier import Verifier
from specbranch.models.gpu.forest_rounds import ForestDecoder
from specbranch.models.gpu.runner import GpuRunner
from specbranch.models.loading import load_native
from tiers import tiered
from tiny_models import saved, some_tokens, tiny
from toybench import SHARED, Timeless, run_out

pytestmark = pytest.mark.usefixtures("one_thread")
CONTEXT = 400


@pytest.fixture(scope="module")
def decoders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    """A target, and a draft that is the target with its weights disturbed, so that it agrees now and then."""
    folder: Path = tmp_path_factory.mktemp("pair")
    target = tiny("llama")
    saved(target, folder / "target")
    torch.manual_seed(5)
    for parameter in target.parameters():
        parameter.data.add_(torch.randn_like(parameter) * parameter.data.std() * 0.08)
    saved(target, folder / "draft")
    big, small = (
        load_native(folder / name, context_length=CONTEXT, dtype="float64").decoder for name in ("target", "draft")
    )
    return big, small


@pytest.fixture(autouse=True)
def on_the_device(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv(FOREST_VARIABLE, "1")
    yield


class Noting(Serial):
    """Counts rounds of the forest, those that were launched ahead, and other rounds."""

    forests = others = ahead = steps = 0

    def decode_forest(self, *given: Any) -> Any:
        found = super().decode_forest(*given)
        self.steps += len(found.steps or ()) if found is not None else 0
        self.forests += found is not None
        self.ahead += found is not None and bool(found.launched)
        return found

    def run(self, orders: Any) -> Any:
        self.others += 1
        return super().run(orders)


def executor(decoders: tuple[Any, Any], pages: int | None = None, draft: bool = True) -> Noting:
    big, small = (GpuRunner(decoder, CONTEXT, pages=pages) for decoder in decoders)
    return Noting(Verifier(big), Drafter(small) if draft else None)


def session_of(number: int, prompt: list[int], **params: Any) -> Session:
    request = Request(SamplingParams(**params), seed=number, prompt_length=len(prompt), eos_ids=(7,))
    return Session(number, prompt, request, CONTEXT)


def start(loop: Loop, session: Session, method: str = "specbranch") -> None:
    config = SpeculativeConfig(method=method, num_speculative_tokens=4)
    loop.join(session, METHODS[method].start(session, config, Timeless(SHARED)))


def alone(decoders: tuple[Any, Any], session: Session) -> Session:
    """The same request by plain decoding."""
    prompt = session.tokens[: session.request.prompt_length]
    other = Session(session.number, prompt, session.request, session.limit, session._watch)
    loop = Loop(Serial(Verifier(GpuRunner(decoders[0], CONTEXT))))
    config = SpeculativeConfig(method="autoregressive")
    loop.join(other, METHODS["autoregressive"].start(other, config, Timeless(SHARED)))
    run_out(loop)
    return other


def assert_as_alone(decoders: tuple[Any, Any], sessions: list[Session]) -> None:
    for session in sessions:
        plain = alone(decoders, session)
        assert session.error is None, session.error
        assert (session.tokens, session.finished) == (plain.tokens, plain.finished), session.number
        session.stats.check()


@pytest.mark.slow
def test_steps_launched_ahead_of_the_answer_change_no_tree(
    decoders: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step too many has no nodes."""
    seen: dict[int, list[tuple[Tree | None, int]]] = {}
    steps: dict[int, int] = {}

    def planned(*given: Any, lead: int) -> ForestPlan:
        return replace(forest_plan(*given), lead=lead)

    for lead in (0, 1):
        monkeypatch.setattr("specbranch.core.forest_loop.forest_plan", partial(planned, lead=lead))
        works, session = executor(decoders), session_of(1, some_tokens(40, seed=1), max_tokens=60)
        session.on_round = lambda orders, reports, added, lead=lead: seen.setdefault(lead, []).append(
            (reports.tree, added)
        )
        loop = Loop(works)
        start(loop, session)
        run_out(loop)
        assert_as_alone(decoders, [session])
        works.draft.runner.check()
        steps[lead] = works.steps
    assert seen[0] == seen[1] and steps[0] < steps[1]


def test_each_draft_step_counts_for_the_report_it_ended_before(
    decoders: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the host asks before each step it reads a round behind that round's own steps, otherwise before them."""
    plans = itertools.cycle([(1, 5), (1, 5), (3, 0), (3, 0), (1, 5), (2, 0)])  # steps, and those that are asked for

    def planned(*given: Any) -> ForestPlan:
        steps, more = next(plans)
        return replace(forest_plan(*given), steps=steps, more=more)

    monkeypatch.setattr("specbranch.core.forest_loop.forest_plan", planned)
    monkeypatch.setattr("specbranch.core.forest_loop.PLAN_ROUNDS", 1)
    works, session = executor(decoders), session_of(1, some_tokens(40, seed=1), max_tokens=80, ignore_eos=True)
    reported: list[list[int] | None] = []
    decode = works.decode_forest

    def decode_forest(*given: Any) -> Any:
        found = decode(*given)
        reported.append(None if found.steps is None else list(found.steps))
        return found

    launched: list[tuple[bool, list[int]]] = []  # of each round: was the device asked, and its draft steps
    grow = ForestDecoder._grow

    def growing(self: ForestDecoder, *given: Any) -> Any:
        steps = grow(self, *given)
        launched.append((steps is not None, self._grown))
        return steps

    monkeypatch.setattr(works, "decode_forest", decode_forest)
    monkeypatch.setattr(ForestDecoder, "_grow", growing)
    loop = Loop(works)
    start(loop, session)
    run_out(loop)
    first = next(n for n, steps in enumerate(reported) if steps is not None)
    launched = launched[len(launched) - len(reported) - (len(launched) > len(reported)) :]
    for n in range(first, min(len(reported), len(launched))):
        (asked_before, before), (asked, own) = launched[n - 1], launched[n]
        assert reported[n] == (before if not asked_before else []) + (own if asked else []), n
    assert {asked for asked, _ in launched} == {True, False}
    assert_as_alone(decoders, [session])


def test_draft_steps_that_wait_are_launched_before_the_draft_reads_and_dropped_with_their_session(
    decoders: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def planned(*given: Any) -> ForestPlan:
        return replace(forest_plan(*given), steps=1, more=5)

    monkeypatch.setattr("specbranch.core.forest_loop.forest_plan", planned)
    works, waiting = executor(decoders), list[bool]()
    caught_up = works._caught_up

    def in_flight() -> Any:
        forest = works.target.runner.forest
        return forest._flight.growing if forest is not None and forest._flight is not None else None

    def seen(orders: Any) -> set[int]:
        growing = in_flight()
        waiting.append(growing is not None and growing.gi_frame is not None)
        return caught_up(orders)

    monkeypatch.setattr(works, "_caught_up", seen)
    session = session_of(1, some_tokens(40, seed=1), max_tokens=80, ignore_eos=True)
    loop = Loop(works)
    start(loop, session)
    while works.ahead < 6:
        loop.step()
    growing = in_flight()
    assert growing.gi_frame is not None and len(waiting) > 5 and not any(waiting)
    loop.remove(session)
    assert growing.gi_frame is None


@pytest.mark.parametrize("temperature", tiered([0.9, 0.0], (0.9).__eq__))
@pytest.mark.parametrize("method", tiered(["specbranch", "tree", "auto"], "specbranch".__eq__))
def test_a_lone_session_has_the_text_of_plain_decoding(
    method: str, temperature: float, decoders: tuple[Any, Any]
) -> None:
    works = executor(decoders)
    for number, length in enumerate((3, 40, 150)):
        loop, session = (
            Loop(works),
            session_of(number, some_tokens(length, seed=number), temperature=temperature, max_tokens=60),
        )
        start(loop, session, method)
        run_out(loop)
        assert_as_alone(decoders, [session])
        works.target.runner.check()
        works.draft.runner.check()
    assert works.forests > 20 and works.ahead > 15
    assert session.stats.accepted > 0 and session.stats.drafted > session.stats.accepted


def random_request(rng: random.Random, number: int) -> tuple[Session, str]:
    """A request for a batch: most can take part in rounds of the forest, some cannot."""
    prompt = some_tokens(rng.choice((2, 30, 90, 200)), seed=rng.randrange(3))
    params: dict[str, Any] = {"temperature": rng.choice((0.0, 0.8, 1.2)), "max_tokens": rng.choice((1, 2, 20, 50))}
    method = rng.choice(("specbranch", "specbranch", "specbranch", "auto", "tree", "autoregressive"))
    if rng.random() < 0.05:
        params["top_p"] = 0.9
    if rng.random() < 0.05:
        method = rng.choice(("lookup", "speculative", "pearl"))
    session = session_of(number, prompt, **params)
    if rng.random() < 0.3:  # as a stop string does
        ends = rng.randrange(60)
        session._watch = lambda token: token == ends
    return session, method


@pytest.mark.parametrize("seed", tiered(range(8), (2).__eq__))
def test_sessions_that_come_and_go_have_their_texts_of_plain_decoding(seed: int, decoders: tuple[Any, Any]) -> None:
    rng, works = random.Random(seed), executor(decoders)
    chunk = works.target.runner.prefill_chunk
    loop = Loop(works, limits=RoundLimits(prefill_chunk=chunk, prompt_tokens=max(64, chunk), prompt_tokens_alone=512))
    waiting = [random_request(rng, number) for number in range(12)]
    sessions, gone, paused = [session for session, _ in waiting], set[int](), set[int]()
    while waiting or loop.live:
        while waiting and rng.random() < 0.4 and len(loop.members) < (9 if seed % 2 else 6):
            session, method = waiting.pop()
            start(loop, session, method)
        live = [member.session for member in loop.members.values()]
        if live and rng.random() < 0.05:  # cancelled
            session = rng.choice(live)
            gone.add(session.number)
            loop.remove(session)
        if live and rng.random() < 0.1 and (one := rng.choice(live)).number in loop.members:
            loop.set_paused(one, one.number not in paused)
            paused ^= {one.number}
        if live and rng.random() < 0.05 and (one := rng.choice(live)).number in loop.members:
            loop.preempt(one)
            loop.resume(one)
        if not loop.can_step:
            for number in list(loop.members):
                loop.set_paused(loop.members[number].session, False)
            paused = set()
        loop.step()
    assert works.forests > 5
    assert_as_alone(decoders, [session for session in sessions if session.number not in gone])
    for worker in (works.target, works.draft):
        worker.runner.check()
        assert worker.runner.kv_slots_free == worker.runner.kv_slots


@pytest.mark.slow
def test_a_large_batch_counts_the_rounds_of_which_no_method_hears(decoders: tuple[Any, Any]) -> None:
    works = executor(decoders)
    loop, seen = Loop(works), dict[int, list[tuple[int, int]]]()

    def watch(number: int, orders: Orders, reports: Reports, added: int) -> None:
        assert orders.verify is not None and reports.verdict is not None
        assert len(reports.verdict.path) <= len(orders.verify.tokens)
        seen.setdefault(number, []).append((added, len(reports.verdict.path)))

    sessions = [session_of(n, some_tokens(30, seed=n), temperature=0.0, max_tokens=40) for n in range(7)]
    for session in sessions:
        session.on_round = partial(watch, session.number)
        start(loop, session)
    sessions[3]._watch = lambda token: token % 16 == 0  # as a stop string does
    heard = silent = 0
    while loop.live:
        loop.step()
        quiet = sum(len(session._rounds) for session in sessions)
        silent, heard = max(silent, quiet), heard + (quiet == 0)
    assert silent > 7 and heard
    assert_as_alone(decoders, sessions)
    for session in sessions:
        stats = session.stats
        rounds = seen[session.number]
        assert sum(added for added, _ in rounds) == stats.emitted == len(session.output)
        assert all(added == accepted + 1 for added, accepted in rounds[:-1])  # the last one may be cut
        assert sum(arm.tokens for arm in stats.arms.by_name.values()) == stats.emitted - 1
        assert sum(arm.rounds for arm in stats.arms.by_name.values()) == stats.target_forwards


@pytest.mark.slow
def test_a_batch_that_grows_too_large_goes_on_without_and_loses_no_token(
    decoders: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("specbranch.core.forest_loop.MOST_FOREST_SESSIONS", 3)
    works = executor(decoders)
    loop = Loop(works)
    sessions = [session_of(n, some_tokens(30, seed=n), temperature=0.0, max_tokens=20) for n in range(5)]
    for session in sessions[:3]:
        start(loop, session)
    for _ in range(5):
        loop.step()
    within = works.forests
    for session in sessions[3:]:
        start(loop, session)
    for _ in range(6):
        loop.step()
    assert within > 2 and works.forests <= within + 1
    run_out(loop)
    assert works.forests > within + 1  # once fewer are left
    assert_as_alone(decoders, sessions)


@pytest.mark.slow
def test_a_burst_of_prompts_goes_with_plain_rounds_and_loses_no_token(decoders: tuple[Any, Any]) -> None:
    works = executor(decoders)
    chunk = works.target.runner.prefill_chunk
    loop = Loop(works, limits=RoundLimits(prefill_chunk=chunk, prompt_tokens=max(64, chunk), prompt_tokens_alone=512))
    sessions = [session_of(n, some_tokens(30, seed=n), temperature=0.0, max_tokens=40) for n in range(5)]
    sessions += [session_of(n, some_tokens(300, seed=n), temperature=0.0, max_tokens=20) for n in range(5, 9)]
    for session in sessions[:5]:
        start(loop, session)
    while works.forests < 3:
        loop.step()
    for session in sessions[5:]:
        start(loop, session)
    loop.step()  # a round is in flight
    before, while_waiting, tokens = works.forests, 0, sum(len(session.output) for session in sessions[:5])
    while sum(member.uncomputed > 0 for member in loop.members.values()) > 1:
        loop.step()
        while_waiting += 1
    assert while_waiting > 2 and works.forests <= before + 1
    assert sum(len(session.output) for session in sessions[:5]) > tokens + while_waiting
    run_out(loop)
    assert works.forests > before + 1
    assert_as_alone(decoders, sessions)


@pytest.mark.slow
def test_plain_sessions_beside_a_large_batch_hear_of_each_round(decoders: tuple[Any, Any]) -> None:
    works = executor(decoders)
    loop = Loop(works)
    sessions = [session_of(n, some_tokens(30, seed=n), temperature=0.0, max_tokens=20) for n in range(7)]
    for session in sessions:
        start(loop, session, "autoregressive" if session.number > 4 else "specbranch")
    kept = 0
    while loop.live:
        loop.step()
        kept = max(kept, *(len(session._rounds) for session in sessions[5:]))
    assert works.forests > 5 and not kept
    assert_as_alone(decoders, sessions)


@pytest.mark.slow
def test_a_pool_that_is_too_small_for_all_preempts_and_changes_no_text(decoders: tuple[Any, Any]) -> None:
    works = executor(decoders, pages=5)
    loop = Loop(works)
    scheduler = Scheduler(loop, most=4)
    sessions = [session_of(n, some_tokens(90, seed=n), temperature=0.8, max_tokens=150) for n in range(5)]
    for session in sessions:
        config = SpeculativeConfig(method="specbranch")
        scheduler.submit(session, partial(METHODS["specbranch"].start, session, config, Timeless(SHARED)))
    for _ in range(3000):
        if not scheduler.tickets:
            break
        scheduler.step()
    assert works.forests > 10
    assert_as_alone(decoders, sessions)


def test_without_a_draft_looked_up_tokens_are_verified(decoders: tuple[Any, Any]) -> None:
    works = executor(decoders, draft=False)
    loop, prompt = Loop(works), some_tokens(12) * 6
    session = session_of(1, prompt, temperature=0.0, max_tokens=80)
    start(loop, session, "auto")
    run_out(loop)
    assert_as_alone(decoders, [session])
    assert works.forests > 5 and works.others < 3


def test_a_warm_up_leaves_no_session_and_changes_nothing(decoders: tuple[Any, Any]) -> None:
    works = executor(decoders)
    works.target.runner._forest_with(works.draft.runner).warm_up((3, 1))
    loop, session = Loop(works), session_of(1, some_tokens(30), temperature=0.0, max_tokens=20)
    start(loop, session)
    run_out(loop)
    assert_as_alone(decoders, [session])


@pytest.mark.slow
@pytest.mark.parametrize("count", [3, 7])
def test_a_batch_that_turns_to_plain_decoding_loses_no_token(
    count: int, decoders: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A round with trees is in flight when the batch's choice changes."""
    ways, choose = itertools.cycle(["planned"] * 5 + ["plain"] * 5), WayChoice.choose
    current = {"way": "planned"}

    def chosen(self: WayChoice, session: Session, tree: Any) -> Any:
        found = choose(self, session, tree)
        return current["way"] if session.batch_size > 1 else found

    monkeypatch.setattr(WayChoice, "choose", chosen)
    monkeypatch.setattr(WayChoice, "plain_rounds", lambda self, session: 3)
    works = executor(decoders)
    loop = Loop(works)
    sessions = [session_of(n, some_tokens(30, seed=n), temperature=0.0, max_tokens=50) for n in range(count)]
    for session in sessions:
        start(loop, session)
    while loop.live:
        current["way"] = next(ways)
        loop.step()
    assert works.forests > 5
    assert_as_alone(decoders, sessions)
    for session in sessions:
        counted = sum(arm.tokens for arm in session.stats.arms.by_name.values())
        assert counted == session.stats.emitted - 1


@pytest.mark.slow
@pytest.mark.parametrize("context", [384, 400])
def test_sessions_reach_the_end_of_their_context(
    context: int, decoders: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a page ends just behind the context, page tables have no room for what a round could write."""
    monkeypatch.setattr(sys.modules[__name__], "CONTEXT", context)
    works = executor(decoders)
    loop = Loop(works)
    sessions = [
        session_of(n, some_tokens(context - 60 + n, seed=n), temperature=0.0, max_tokens=200, ignore_eos=True)
        for n in range(3)
    ]
    for session in sessions:
        start(loop, session)
    run_out(loop)
    assert_as_alone(decoders, sessions)


@pytest.mark.slow
def test_a_draft_without_memory_leaves_the_rounds_on_the_device(decoders: tuple[Any, Any]) -> None:
    big, small = GpuRunner(decoders[0], CONTEXT), GpuRunner(decoders[1], CONTEXT, pages=1)
    works = Noting(Verifier(big), Drafter(small))
    loop = Loop(works)
    sessions = [session_of(n, some_tokens(40, seed=n), temperature=0.0, max_tokens=40) for n in range(3)]
    for session in sessions:
        start(loop, session)
    run_out(loop)
    assert works.forests > 20 and not loop._forest._has_failed
    assert_as_alone(decoders, sessions)
