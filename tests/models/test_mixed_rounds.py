"""Sessions that need the host in each round share the steps of others that decode plainly, on a GPU's runner: here on
the CPU. No text changes, and nobody who decodes plainly is ordered."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch

from specbranch.config import Rule, SamplingParams, SpeculativeConfig
from specbranch.core.experience import Experience
from specbranch.core.forecast import Signal
from specbranch.core.loop import Loop
from specbranch.core.methods import METHODS
from specbranch.core.pages import PAGE
from specbranch.core.prefill_budget import RoundLimits
from specbranch.core.request import Request
from specbranch.core.runner import Verdicts, VerifyWork
from specbranch.core.scheduler import Scheduler, Ticket
from specbranch.core.session import Session
from specbranch.exec.drafter import Drafter
from specbranch.exec.serial import Serial
from specbranch.exec.streams import Streams
from specbranch.exec.verifier import Verifier
from specbranch.models.forward.decoder import Decoder
from specbranch.models.forward.transfer import Reading
from specbranch.models.gpu.decode_rows import DecodeRows
from specbranch.models.gpu.runner import GpuRunner
from specbranch.models.gpu.step import GpuStep
from specbranch.models.loading import load_native
from specbranch.models.runners.native import NativeRunner
from tiers import tiered
from tiny_models import saved, some_tokens, tiny

pytestmark = pytest.mark.usefixtures("one_thread")
CONTEXT = 600
# methods that need the host in each round, with the rules that they say the same tokens under in every mix
HOST_BOUND: list[tuple[str, Rule]] = [
    ("autoregressive", "ratio"),
    ("speculative", "ratio"),
    ("speculative", "match"),
    ("adaptive", "match"),
    ("pearl", "ratio"),
    ("pearl", "match"),
    ("specbranch", "match"),
    ("tree", "match"),
    ("lookup", "match"),
    ("lookahead", "match"),
]
SHAPINGS: list[dict[str, Any]] = [
    {"temperature": 0.9},
    {"temperature": 0.9},
    {"temperature": 0.0},
    {"temperature": 0.8, "top_p": 0.8},
    {"temperature": 0.7, "logprobs": 2, "repetition_penalty": 1.2},
]


class Counting(GpuRunner):
    """Counts its steps, and the trials and rows of others in those of plain decoding."""

    ran = verified = 0

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        run_packed = self.launcher.run_packed

        def counted(*given: Any, **named: Any) -> Any:
            self.ran += 1
            return run_packed(*given, **named)

        self.launcher.run_packed = counted  # type: ignore[method-assign]

    def launch_decode(self, rows: DecodeRows, verify: VerifyWork | None = None) -> tuple[Reading, Verdicts | None]:
        self.verified += len(verify.trials) if verify else 0
        return super().launch_decode(rows, verify)


class Ordering(Serial):
    """Counts the orders of each session."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.ordered: dict[int, int] = {}

    def run(self, orders: Any) -> Any:
        for number in orders:
            self.ordered[number] = self.ordered.get(number, 0) + 1
        return super().run(orders)


class Said:
    """Makes a signal of what a probe says."""

    def signal(self, said: tuple[float, ...] | None, position: int) -> Signal | None:
        return None if said is None else Signal.of([1.0 / (1.0 + abs(one)) for one in said])


@pytest.fixture(scope="module")
def decoders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Decoder, Decoder]:
    """A target, and a draft that often agrees with it: the same weights, a little changed."""
    folder: Path = saved(tiny("llama"), tmp_path_factory.mktemp("llama"))
    target, draft = (load_native(folder, context_length=CONTEXT, dtype="float64").decoder for _ in range(2))
    generator = torch.Generator().manual_seed(1)
    draft.norm += 0.2 * torch.randn(draft.norm.shape, generator=generator, dtype=draft.norm.dtype)
    return target, draft


@pytest.fixture
def chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps take rows of prompts, as they do with a GPU's kernels."""
    monkeypatch.setattr(GpuStep, "takes_chunks", True)


def session(
    number: int, prompt: Sequence[int], how: tuple[str, Rule] | None = None, forecasts: bool = False, **given: Any
) -> Session:
    params = SamplingParams(**{"temperature": 0.8, "max_tokens": 24, "ignore_eos": True, **given})
    rule: Rule = how[1] if how else "match"
    return Session(number, prompt, Request(params, number, len(prompt), rule=rule, wants_forecast=forecasts), CONTEXT)


def started(one: Session, how: tuple[str, Rule] | None = None) -> Any:
    method = how[0] if how else "autoregressive"
    config = SpeculativeConfig(method=method, num_speculative_tokens=3)
    return METHODS[method].start(one, config, Experience())


def alone(decoders: tuple[Decoder, Decoder], one: Session, how: tuple[str, Rule] | None) -> list[int]:
    """The text of a session that is the only one; under the match rule that of plain decoding."""
    other = Session(one.number, one.tokens[: one.request.prompt_length], one.request, one.limit)
    by_ratio = one.request.by_ratio
    if by_ratio:
        target, draft = (GpuRunner(decoder, CONTEXT, pages=8) for decoder in decoders)
        loop = Loop(Serial(Verifier(target), Drafter(draft)))
    else:
        loop = Loop(Serial(Verifier(NativeRunner(decoders[0], CONTEXT, pages=8))))
    loop.join(other, started(other, how if by_ratio else None))
    while loop.live:
        loop.step()
    return other.tokens


def loop_of(executor: Serial, budget: int = 48) -> Loop:
    runner = executor.target.runner
    chunk = runner.prefill_chunk
    limits = RoundLimits(prefill_chunk=chunk, prompt_tokens=max(budget, chunk), prompt_tokens_alone=runner.most_prefill)
    return Loop(executor, limits=limits)


@pytest.mark.usefixtures("chunks")
@pytest.mark.parametrize("executor", tiered((Serial, Streams), lambda kind: kind is Serial))
@pytest.mark.parametrize("seed", tiered((0, 1, 2, 3, 4, 5, 6, 8, 9), (1).__gt__))  # with 7, rows seldom meet
def test_texts_are_those_of_each_session_alone_in_any_mix(
    seed: int, executor: type[Serial], decoders: tuple[Decoder, Decoder]
) -> None:
    """Sessions of all kinds arrive, some are cancelled or paused; the pool may be small."""
    rng = random.Random(seed)
    target = Counting(decoders[0], CONTEXT, pages=rng.choice([9, 40]))
    made = executor(Verifier(target), Drafter(GpuRunner(decoders[1], CONTEXT)))
    scheduler = Scheduler(loop_of(made, rng.choice([8, 48, 300])), most=10)
    text, left, asked = some_tokens(PAGE + 90, seed=seed), 18, list[tuple[Ticket, tuple[str, Rule] | None]]()
    cancelled: list[Session] = []
    while left or scheduler.tickets:
        if left and rng.random() < 0.5:
            left -= 1
            prompt = [*text[: rng.choice([2, 30, PAGE + 1])], *some_tokens(rng.randint(1, 40), seed=left % 3)]
            how = rng.choice(HOST_BOUND) if left % 4 == 0 else None
            one = session(left, prompt, how, **rng.choice(SHAPINGS), max_tokens=rng.randint(10, 26))
            asked.append((scheduler.submit(one, partial(started, one, how)), how))
        for ticket, _ in asked:
            if ticket.state != "over" and rng.random() < 0.002:
                scheduler.cancel(ticket)
                cancelled.append(ticket.session)
            elif ticket.state != "over" and rng.random() < (0.3 if ticket.paused else 0.01):
                scheduler.set_paused(ticket, not ticket.paused)
        scheduler.step()
        target.check()
    for ticket, how in asked:
        one, expected = ticket.session, alone(decoders, ticket.session, how)
        assert one.tokens == (expected if one not in cancelled else expected[: len(one.tokens)]), how
        one.stats.check()
    assert target.verified and target.pool.free == target.pool.pages
    assert not scheduler.loop._plain._rounds.has_failed


@pytest.mark.parametrize("how", tiered(HOST_BOUND, (HOST_BOUND[0], HOST_BOUND[4]).__contains__), ids="-".join)
def test_sessions_that_decode_plainly_are_not_ordered_whoever_shares_their_steps(
    how: tuple[str, Rule], decoders: tuple[Decoder, Decoder]
) -> None:
    """Each round is one step of the target; it has a token of each session that decodes plainly."""
    target = Counting(decoders[0], CONTEXT)
    executor = Ordering(Verifier(target), Drafter(GpuRunner(decoders[1], CONTEXT)))
    loop = loop_of(executor)
    plain = [session(number, some_tokens(10, number), max_tokens=36) for number in range(6)]
    other = session(9, some_tokens(10, 9), how, max_tokens=36)
    for one in plain:
        loop.join(one, started(one))
    for _ in range(3):
        loop.step()
    loop.join(other, started(other, how))
    while not other.output:
        loop.step()
    ordered, ran, verified = sum(executor.ordered.values()), target.ran, target.verified
    tokens, said = [len(one.output) for one in plain], len(other.output)
    for _ in range(15):
        loop.step()
    assert [len(one.output) - before for one, before in zip(plain, tokens, strict=True)] == [15] * 6
    assert sum(executor.ordered.values()) == ordered and target.ran == ran + 15
    assert len(other.output) >= said + 5  # two rounds verify, a third one drafts
    assert target.verified >= verified + 5
    while loop.live:
        loop.step()
    assert other.tokens == alone(decoders, other, how)
    assert [one.tokens for one in plain[::3]] == [alone(decoders, one, None) for one in plain[::3]]


def test_hidden_states_come_from_a_step_that_others_decode_in(decoders: tuple[Decoder, Decoder]) -> None:
    def signals(many: int) -> list[Signal | None]:
        target, found = Counting(decoders[0], CONTEXT), list[Signal | None]()
        target.probe(2, lambda states: states[:, :3])
        loop = loop_of(Serial(Verifier(target, Said()), Drafter(GpuRunner(decoders[1], CONTEXT))))
        sessions = [session(number, some_tokens(10, number), max_tokens=50) for number in range(many)]
        sessions.append(session(9, some_tokens(10, 9), ("speculative", "match"), forecasts=True))
        sessions[-1].on_round = lambda orders, reports, added: found.extend(
            [reports.verdict.signal] if reports.verdict else []
        )
        for one in sessions:
            loop.join(one, started(one, ("speculative", "match") if one is sessions[-1] else None))
        while loop.live:
            loop.step()
        assert (target.verified > 5) == (many > 0)
        return found

    expected, found = signals(0), signals(5)
    assert len(found) == len(expected) > 5
    for one, other in zip(found, expected, strict=True):
        assert one is not None and other is not None
        assert [*chain(*one.chances)] == pytest.approx([*chain(*other.chances)], abs=1e-9)


@pytest.mark.parametrize(
    "what",
    tiered(["freed", "preempted", "paused", "left alone", "too many others"], {"freed", "paused"}.__contains__),
)
def test_a_verify_order_in_flight_that_is_not_read_has_no_effect(what: str, decoders: tuple[Decoder, Decoder]) -> None:
    how: tuple[str, Rule] = ("speculative", "ratio")
    target = Counting(decoders[0], CONTEXT)
    loop = loop_of(Serial(Verifier(target), Drafter(GpuRunner(decoders[1], CONTEXT))))
    sessions = [session(number, some_tokens(10, number), max_tokens=40) for number in range(5)]
    other = session(9, some_tokens(10, 9), how, max_tokens=40)
    for one in sessions:
        loop.join(one, started(one))
    loop.join(other, started(other, how))
    while not loop._plain._rounds.verifying or len(other.output) < 4:
        loop.step()
    if what == "freed":
        loop.remove(other)
    elif what == "preempted":
        loop.preempt(other)
        loop.step()
        loop.resume(other)
    elif what == "paused":
        loop.set_paused(other, True)
        loop.step()
        loop.set_paused(other, False)
    elif what == "left alone":  # its order comes again, in a round of orders
        for paused in (True, False):
            for one in sessions:
                loop.set_paused(one, paused)
            loop.step()
    else:
        for one in sessions[1:]:
            loop.remove(one)
    while loop.live:
        loop.step()
    target.check()
    assert not loop._plain._rounds.has_failed
    assert sessions[0].tokens == alone(decoders, sessions[0], None)
    expected = alone(decoders, other, how)
    assert other.tokens == (expected if what != "freed" else expected[: len(other.tokens)])


@pytest.mark.parametrize("rule", tiered(["ratio", "match"], "ratio".__eq__))
def test_a_verify_order_in_flight_that_comes_again_after_a_round_of_drafts_counts_once(
    rule: Rule, decoders: tuple[Decoder, Decoder]
) -> None:
    """A round of orders that only drafts does not read what is in flight, and the loop has forgotten it."""
    how: tuple[str, Rule] = ("speculative", rule)
    target = Counting(decoders[0], CONTEXT)
    loop = loop_of(Serial(Verifier(target), Drafter(GpuRunner(decoders[1], CONTEXT))))
    plain = [session(number, some_tokens(10, number), max_tokens=60) for number in range(5)]
    verified, drafting = (session(number, some_tokens(10, number), how, max_tokens=40) for number in (8, 9))
    for one in (*plain, verified, drafting):
        loop.join(one, started(one, how if one not in plain else None))

    def asks_for_draft() -> bool:
        orders = loop.members[drafting.number].orders
        return orders is not None and orders.verify is None

    while verified.number not in loop._plain._rounds.verifying or not asks_for_draft():
        loop.set_paused(drafting, asks_for_draft())
        loop.step()
    loop.set_paused(drafting, False)
    for paused in (True, False):
        for one in plain:
            loop.set_paused(one, paused)
        loop.step()
    while loop.live:
        loop.step()
    target.check()
    assert not loop._plain._rounds.has_failed
    assert [one.tokens for one in (verified, drafting)] == [alone(decoders, one, how) for one in (verified, drafting)]


@pytest.mark.parametrize("which", tiered(range(4), (2).__gt__))
def test_a_launch_that_fails_with_rows_of_others_costs_a_round_and_no_text(
    which: int, decoders: tuple[Decoder, Decoder], monkeypatch: pytest.MonkeyPatch
) -> None:
    how: tuple[str, Rule] = ("speculative", "match" if which % 2 else "ratio")
    target = Counting(decoders[0], CONTEXT)
    loop = loop_of(Serial(Verifier(target), Drafter(GpuRunner(decoders[1], CONTEXT))))
    sessions = [session(number, some_tokens(10, number), max_tokens=30) for number in range(5)]
    sessions.append(session(9, some_tokens(10, 9), how, max_tokens=30))
    launch, calls = target.launcher.run_packed, iter(range(99))

    def failing(*given: Any, **named: Any) -> Any:
        if target.verified and next(calls) == which:
            raise torch.cuda.OutOfMemoryError("out of memory")
        return launch(*given, **named)

    monkeypatch.setattr(target.launcher, "run_packed", failing)
    for one in sessions:
        loop.join(one, started(one, how if one is sessions[-1] else None))
    while loop.live:
        loop.step()
    assert next(calls) > which + 5
    assert sessions[-1].tokens == alone(decoders, sessions[-1], how)
    assert [one.tokens for one in sessions[:2]] == [alone(decoders, one, None) for one in sessions[:2]]
    target.check()
