"""Plain decoding of a batch on a GPU's runner, here on the CPU: each step is launched before the one before it is read,
and no text changes."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from specbranch.config import SamplingParams, SpeculativeConfig
from specbranch.core.costs import MeasuredCosts
from specbranch.core.experience import Experience
from specbranch.core.loop import Loop
from specbranch.core.methods import METHODS
from specbranch.core.pages import PAGE, Pool
from specbranch.core.prefill_budget import RoundLimits
from specbranch.core.request import Request, Spot
from specbranch.core.runner import Verdicts, VerifyWork
from specbranch.core.scheduler import Scheduler, Ticket
from specbranch.core.session import Session
from specbranch.errors import PoolFull
from specbranch.exec.serial import Serial
from specbranch.exec.streams import Streams
from specbranch.exec.verifier import Verifier
from specbranch.models.cache.kv_memory import Table
from specbranch.models.forward.decoder import Decoder
from specbranch.models.forward.step_rows import ChunkRows, Rows
from specbranch.models.forward.transfer import Reading
from specbranch.models.gpu import asking, attention
from specbranch.models.gpu.decode_rows import WINDOW, DecodeRow, DecodeRows, VerifyRows
from specbranch.models.gpu.launching import StepLauncher
from specbranch.models.gpu.layout import CONFIDENCE, SHIFT, Bucket, Choosing, pack, views
from specbranch.models.gpu.runner import GpuRunner
from specbranch.models.gpu.step import GpuStep
from specbranch.models.loading import load_native
from specbranch.models.runners.native import NativeRunner
from tiers import tiered
from tiny_models import saved, some_tokens, tiny

pytestmark = pytest.mark.usefixtures("one_thread")
CONTEXT = 600
SHAPINGS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.9},
    {"temperature": 0.8, "top_p": 0.8},
    {"min_tokens": 3},
    {"logprobs": 2},
    {"temperature": 1.1, "logprobs": 0, "top_k": 9, "min_p": 0.02},
    {"repetition_penalty": 1.3, "logit_bias": {5: 2.0, 9: -3.0}},
    {"temperature": 0.9, "presence_penalty": 0.7, "frequency_penalty": 0.4, "logprobs": 3},
]
PLAIN = SpeculativeConfig(method="autoregressive")


class Counting(GpuRunner):
    """Counts its steps, those of plain decoding, and the trials that went with these."""

    ran = decoded = verified = 0

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        run_packed = self.launcher.run_packed

        def counted(*given: Any, **named: Any) -> Any:
            self.ran += 1
            return run_packed(*given, **named)

        self.launcher.run_packed = counted  # type: ignore[method-assign]

    def launch_decode(self, rows: DecodeRows, verify: VerifyWork | None = None) -> tuple[Reading, Verdicts | None]:
        self.decoded += 1
        self.verified += len(verify.trials) if verify else 0
        return super().launch_decode(rows, verify)


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    folder: Path = saved(tiny("llama"), tmp_path_factory.mktemp("llama"))
    return load_native(folder, context_length=CONTEXT, dtype="float64").decoder


@pytest.fixture
def chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps take rows of prompts, as they do with a GPU's kernels."""
    monkeypatch.setattr(GpuStep, "takes_chunks", True)


def session(number: int, params: SamplingParams, prompt: Sequence[int], limit: int = CONTEXT) -> Session:
    return Session(number, prompt, Request(params, number, len(prompt), eos_ids=(7,)), limit)


def started(one: Session, method: str = "autoregressive") -> Any:
    return METHODS[method].start(one, SpeculativeConfig(method=method), Experience(has_draft=False))


def alone(decoder: Decoder, one: Session) -> list[int]:
    """The text of a session by the reference; its log-probabilities are compared on the way."""
    other = Session(one.number, one.tokens[: one.request.prompt_length], one.request, one.limit)
    loop = Loop(Serial(Verifier(NativeRunner(decoder, CONTEXT, pages=8))))
    loop.join(other, started(other))
    while loop.live:
        loop.step()
    if one.request.params.logprobs is not None:
        assert len(one.logprobs) == len(one.output)
        for found, expected in zip(one.logprobs, other.logprobs, strict=False):
            assert found.logprob == pytest.approx(expected.logprob, abs=1e-6)
            assert [token for token, _ in found.top] == [token for token, _ in expected.top]
    return other.tokens


def loop_of(runner: GpuRunner, executor: type[Serial] = Serial, budget: int = 48) -> Loop:
    chunk = runner.prefill_chunk
    limits = RoundLimits(prefill_chunk=chunk, prompt_tokens=max(budget, chunk), prompt_tokens_alone=runner.most_prefill)
    return Loop(executor(Verifier(runner)), limits=limits)


def test_a_packed_decode_step_is_that_of_the_same_rows() -> None:
    rng = random.Random(0)
    for _ in range(60):
        pool, count = Pool(600), rng.choice([1, 2, 3, 16, 17, 40])
        positions = [rng.choice([0, 1, 31, 32, 63, 64, 255, 256, 257, 300, 511, 700]) for _ in range(count)]
        tokens = [rng.randrange(-count, 100) for _ in range(count)]
        rows = [
            DecodeRow(_table(pool, at + 1 + rng.choice([0, 300])), _request(number, rng.choice([0.0, 0.7, 1e-9])))
            for number, at in enumerate(positions)
        ]
        prompts = [
            ChunkRows(_table(pool, start + size), [5] * size, start)
            for start, size in [(rng.choice([0, 40, 256]), rng.randint(1, 90)) for _ in range(rng.choice([0, 0, 1, 3]))]
        ]
        work = [Rows(row.table, [token], at, at, [1]) for row, token, at in zip(rows, tokens, positions, strict=True)]
        spots = [Spot(row.request, at + 1, list) for row, at in zip(rows, positions, strict=True)]
        least = rng.choice([Bucket(1, 1), Bucket(16, 1)])
        expected, bucket = pack(work, 9999, asking.choosing_of(count, enumerate(spots)), None, least, prompts, 16)
        step = DecodeRows(rows, positions, tokens)
        made = step.pack(9999, least, prompts, 16)
        _check_same(expected, bucket, *made, count)
        others = [_chain(pool, rng.choice([0, 40, 255]), rng.randint(1, 9)) for _ in range(rng.choice([1, 2]))]
        spots += [Spot(rows[0].request, 5, list)] * sum(len(part.tokens) for part in others)
        choosing = asking.choosing_of(len(spots), enumerate(spots))
        for row in range(count + 1, count + len(others[0].tokens)):
            choosing.parent[row], choosing.said[row] = row - 1, 5
        behind = Choosing(*(numbers[count:].copy() for numbers in choosing))
        behind.parent[:] -= count
        expected, bucket = pack([*work, *others], 9999, choosing, None, least, prompts, 16)
        made = step.pack(9999, least, prompts, 16, VerifyRows(others, behind))
        _check_same(expected, bucket, *made, len(spots))
        positions = [at + 1 for at in positions]
        for row, at in zip(rows, positions, strict=True):
            row.table.reach(at + 1)
        work = [Rows(row.table, [-1 - n], at, at, [1]) for n, (row, at) in enumerate(zip(rows, positions, strict=True))]
        spots = [Spot(row.request, at + 1, list) for row, at in zip(rows, positions, strict=True)]
        expected, bucket = pack(work, 9999, asking.choosing_of(count, enumerate(spots)), None, least)
        step.advance([*range(count)])
        _check_same(expected, bucket, *step.pack(9999, least), count)


@pytest.mark.parametrize("seed", range(3))
def test_each_further_step_is_packed_as_the_same_rows_anew(seed: int) -> None:
    """Paths and page tables are kept from step to step, also where pages begin, are copied, or a step is left out."""
    rng, pool, count = random.Random(seed), Pool(600), 12
    positions = [rng.choice([0, 5, 30, 31, 62, 63, 200, 255, 256, 500]) for _ in range(count)]
    rows = [DecodeRow(_table(pool, at + 1), _request(n, rng.choice([0.0, 0.9]))) for n, at in enumerate(positions)]
    step = DecodeRows(rows, positions, [7] * count)
    step.pack(9999)
    for _ in range(90):
        positions, changed = [at + 1 for at in positions], list[int]()
        for number, (row, at) in enumerate(zip(rows, positions, strict=True)):
            if copied := rng.random() < 0.02:  # on write: another sequence shares the page
                row.table.pages[at - 1 >> SHIFT] = pool.take(1)[0]
            if copied or not row.table.is_writable(at):
                row.table.reach(at + 1)
                changed.append(number)
        step.advance(changed)
        if rng.random() < 0.1:
            continue
        work = [Rows(row.table, [-1 - n], at, at, [1]) for n, (row, at) in enumerate(zip(rows, positions, strict=True))]
        spots = [Spot(row.request, at + 1, list) for row, at in zip(rows, positions, strict=True)]
        expected, bucket = pack(work, 9999, asking.choosing_of(count, enumerate(spots)))
        made, made_bucket = step.pack(9999)
        _check_same(expected, bucket, made, made_bucket, count)
        _check_behind_paths(made, bucket, rows, positions)


def _check_behind_paths(packed: np.ndarray, bucket: Bucket, rows: list[DecodeRow], positions: list[int]) -> None:
    """What lies behind a path is masked, but still multiplied: it has to be a KV slot that was written."""
    own = views(torch.from_numpy(packed), bucket).own
    for row, (one, at) in enumerate(zip(rows, positions, strict=True)):
        written = one.table.flat(np.arange(at + 1))
        assert np.isin(own[row, :WINDOW].numpy(), written).all(), (row, at)


def _table(pool: Pool, kv_slots: int) -> Table:
    table = Table(pool)
    table.reach(kv_slots)
    return table


def _chain(pool: Pool, prefix: int, count: int) -> Rows:
    return Rows(_table(pool, prefix + count), [5] * count, prefix, prefix, [(2 << row) - 1 for row in range(count)])


def _request(seed: int, temperature: float) -> Request:
    return Request(SamplingParams(temperature=temperature), seed, 1)


def _check_same(expected: np.ndarray, bucket: Bucket, made: np.ndarray, made_bucket: Bucket, count: int) -> None:
    assert bucket == made_bucket and len(expected) == len(made)
    one, other = views(torch.from_numpy(expected), bucket), views(torch.from_numpy(made), bucket)
    for name in ("tokens", "positions", "slots", "shared", "own_count", "groups", "tables", "choosing", "counts"):
        assert torch.equal(getattr(one, name), getattr(other, name)), name
    assert (one.tiles is None and other.tiles is None) or torch.equal(one.tiles, other.tiles)
    for row in range(count):  # what lies behind a path has no meaning
        assert torch.equal(one.own[row, : one.own_count[row]], other.own[row, : one.own_count[row]])
    assert torch.equal(one.own[count:], other.own[count:])


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_every_token_takes_one_step_and_none_is_wasted(temperature: float, decoder: Decoder) -> None:
    runner, params = Counting(decoder, CONTEXT), SamplingParams(temperature=temperature, max_tokens=40, ignore_eos=True)
    loop, one = Loop(Serial(Verifier(runner))), session(1, params, some_tokens(20))
    loop.join(one, started(one))
    while loop.live:
        loop.step()
    assert one.tokens == alone(decoder, one)
    assert (runner.ran, runner.decoded) == (40, 39)
    assert one.stats.target_forwards == 39 and one.stats.emitted == 40


@pytest.mark.usefixtures("chunks")
@pytest.mark.parametrize("executor", tiered((Serial, Streams), lambda kind: kind is Serial))
@pytest.mark.parametrize("seed", tiered(range(10), (0).__eq__))
def test_texts_are_those_of_the_reference_whoever_joins_leaves_or_is_shaped(
    seed: int, executor: type[Serial], decoder: Decoder
) -> None:
    """Prompts that share pages arrive, some are cancelled or paused, some methods plan, the pool may be small."""
    rng = random.Random(seed)
    runner = Counting(decoder, CONTEXT, pages=rng.choice([5, 12, 40]))
    scheduler = Scheduler(loop_of(runner, executor, budget=rng.choice([8, 48, 300])), most=rng.choice([3, 8]))
    text, left, tickets = some_tokens(PAGE + 90, seed=seed), 10, list[Ticket]()
    cancelled: list[Session] = []
    while left or scheduler.tickets:
        if left and rng.random() < 0.2:
            left -= 1
            prompt = [*text[: rng.choice([2, 30, 250, PAGE + 1])], *some_tokens(rng.randint(1, 40), seed=left % 3)]
            params = SamplingParams(**rng.choice([*SHAPINGS[:2] * 2, *SHAPINGS]), max_tokens=rng.randint(3, 24))
            one = session(left, params, prompt)
            method = "auto" if rng.random() < 0.4 else "autoregressive"
            tickets.append(scheduler.submit(one, partial(started, one, method)))
        for ticket in tickets:
            if ticket.state != "over" and rng.random() < 0.004:
                scheduler.cancel(ticket)
                cancelled.append(ticket.session)
            elif ticket.state != "over" and rng.random() < 0.04:
                scheduler.set_paused(ticket, not ticket.paused)
        scheduler.step()
        if not scheduler.busy:
            for ticket in tickets:
                if ticket.state != "over" and ticket.paused:
                    scheduler.set_paused(ticket, False)
        runner.check()
    for ticket in tickets:
        one, expected = ticket.session, alone(decoder, ticket.session)
        assert one.tokens == (expected if one not in cancelled else expected[: len(one.tokens)])
        one.stats.check()
        assert one.stats.emitted == len(one.output)
        if one.stats.arms.by_name:
            assert sum(one.stats.arms.tokens.values()) == one.stats.emitted - 1
            assert sum(arm.rounds for arm in one.stats.arms.by_name.values()) == one.stats.target_forwards
    assert runner.decoded > 20 and runner.pool.free == runner.pool.pages


@pytest.mark.usefixtures("chunks")
def test_prompts_go_with_the_step_launched_ahead_and_decode_from_the_next_round_on(decoder: Decoder) -> None:
    runner, params = Counting(decoder, CONTEXT), SamplingParams(max_tokens=30, ignore_eos=True)
    loop, first, second = loop_of(runner), session(1, params, some_tokens(20)), session(2, params, some_tokens(40, 5))
    loop.join(first, started(first))
    for _ in range(4):
        loop.step()
    ran = runner.ran
    loop.join(second, started(second))
    for _ in range(3):
        loop.step()
    assert runner.ran == ran + 3 and len(first.output) == 7 and len(second.output) == 2
    while loop.live:
        loop.step()
    assert [first.tokens, second.tokens] == [alone(decoder, first), alone(decoder, second)]


@pytest.mark.parametrize("what", ["another token", "the same again", "rewound", "closed"])
def test_a_step_that_was_not_asked_for_after_all_changes_nothing(what: str, decoder: Decoder) -> None:
    runner, text = GpuRunner(decoder, CONTEXT), some_tokens(20)
    request = Request(SamplingParams(), 1, 20)

    def opened() -> None:
        runner.open(0, request)
        runner.extend(0, text[:-1])
        runner.flush()

    opened()
    for turn in range(6):
        step = runner.decode({0: text}, {0})
        assert step is not None
        token = step.sampled()[0]
        if turn == 3 and what == "the same again":
            runner.rewind(0, len(text) - 1)
            again = runner.decode({0: text}, {0})
            assert again is not None and again.sampled()[0] == token and not again.ahead
        if turn == 3 and what == "rewound":
            runner.rewind(0, 20)
            runner.extend(0, text[20:])
            runner.flush()
        if turn == 3 and what == "closed":
            runner.close(0)
            text = [*text, token]
            opened()
            continue
        text = [*text, (token + 1) % 131 if turn == 3 and what == "another token" else token]
    expected = session(0, SamplingParams(max_tokens=40, ignore_eos=True), some_tokens(20))
    known = alone(decoder, expected)
    if what == "another token":
        changed = session(0, SamplingParams(max_tokens=2, ignore_eos=True), text[:24])
        assert text[:23] == known[:23] and text == alone(decoder, changed)
    else:
        assert text == known[: len(text)]
    runner.check()


def test_a_request_finishes_in_a_pool_of_one_page(decoder: Decoder) -> None:
    runner = Counting(decoder, CONTEXT, pages=1)
    scheduler = Scheduler(loop_of(runner))
    sessions = [session(n, SamplingParams(max_tokens=24, ignore_eos=True), some_tokens(150, n)) for n in range(3)]
    for one in sessions:
        scheduler.submit(one, partial(started, one))
    while scheduler.tickets:
        scheduler.step()
    assert [one.tokens for one in sessions] == [alone(decoder, one) for one in sessions]
    assert scheduler.snapshot().finished == 3


def test_a_sequence_that_finds_no_page_is_told_and_the_others_go_on(decoder: Decoder) -> None:
    runner = GpuRunner(decoder, CONTEXT, pages=2)
    texts = {seq: some_tokens(PAGE, seq) for seq in range(2)}
    for seq, text in texts.items():
        runner.open(seq, Request(SamplingParams(), seq, PAGE))
        runner.extend(seq, text[:-1])
    runner.flush()
    step = runner.decode(texts, {0, 1})
    assert step is not None and not step.failed and step.launched == frozenset()  # neither finds a second page
    for seq, token in step.sampled().items():
        texts[seq] = [*texts[seq], token]
    late = runner.decode(texts, {0, 1})
    assert late is not None and late.failed.keys() == {0, 1} and not late.sampled()
    assert all(isinstance(error, PoolFull) for error in late.failed.values())
    runner.close(1)
    after = runner.decode({0: texts[0]}, set())
    assert after is not None and after.sampled().keys() == {0}
    runner.check()


def test_scores_that_are_no_number_end_their_own_request_only(
    decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner, params = GpuRunner(decoder, CONTEXT), SamplingParams(max_tokens=20, ignore_eos=True)
    sessions, loop = [session(n, params, some_tokens(10, n)) for n in range(3)], loop_of(runner)
    for one in sessions:
        loop.join(one, started(one))
    while min(len(one.output) for one in sessions) < 5:
        loop.step()
    launch = GpuRunner.launch_decode

    def spoiled(self: GpuRunner, rows: DecodeRows, verify: VerifyWork | None = None) -> tuple[Reading, None]:
        assert verify is None
        results = launch(self, rows)[0]()
        results[[row.request.seed == 1 for row in rows.rows], CONFIDENCE] = np.nan
        return Reading(lambda: results, lambda: True), None

    monkeypatch.setattr(GpuRunner, "launch_decode", spoiled)
    while loop.live:
        loop.step()
    assert sessions[1].finished == "error" and "not finite" in str(sessions[1].error)
    assert [one.tokens for one in sessions[::2]] == [alone(decoder, one) for one in sessions[::2]]
    assert sessions[1].tokens == alone(decoder, sessions[1])[: len(sessions[1].tokens)]


@pytest.mark.parametrize("which", [3, 4])
def test_a_launch_that_fails_costs_a_round_and_no_text(
    which: int, decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner, params = GpuRunner(decoder, CONTEXT), SamplingParams(max_tokens=20, ignore_eos=True)
    sessions, loop, calls = [session(n, params, some_tokens(10, n)) for n in range(3)], loop_of(runner), iter(range(99))
    launch = GpuRunner.launch_decode

    def failing(self: GpuRunner, *given: Any) -> Any:
        if next(calls) == which:
            raise torch.cuda.OutOfMemoryError("out of memory")
        return launch(self, *given)

    monkeypatch.setattr(GpuRunner, "launch_decode", failing)
    for one in sessions:
        loop.join(one, started(one))
    while loop.live:
        loop.step()
    assert next(calls) > 15
    assert [one.tokens for one in sessions] == [alone(decoder, one) for one in sessions]
    runner.check()


@pytest.mark.slow
def test_a_step_never_exceeds_the_memory_of_partial_results(decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts grow, and a long one decodes among short ones: then rounds are ordered, and split into steps."""
    arch, sizes = decoder.arch, list[bool]()
    each = (arch.head_dim * 8 + 8) * arch.heads
    monkeypatch.setattr(attention, "PARTIAL_BYTES", each * (1 + -(-100 // attention.WIDE_BLOCK)) * 32)
    runner, launch = GpuRunner(decoder, CONTEXT), StepLauncher.launch_decode

    def watched(self: StepLauncher, rows: DecodeRows, *given: Any) -> Any:
        sizes.append(self.fits_one_step(len(rows), int(rows.positions.max()) + 1))
        return launch(self, rows, *given)

    monkeypatch.setattr(StepLauncher, "launch_decode", watched)
    params, loop = SamplingParams(max_tokens=16, ignore_eos=True), loop_of(runner)
    sessions = [session(n, params, some_tokens(400 if n == 20 else 88, n)) for n in range(21)]
    for one in sessions[:20]:
        loop.join(one, started(one))
    while min(len(one.output) for one in sessions[:20]) < 4:
        loop.step()
    loop.join(sessions[20], started(sessions[20]))
    while loop.live:
        loop.step()
    assert sizes and all(sizes)
    assert [one.tokens for one in sessions[::5]] == [alone(decoder, one) for one in sessions[::5]]


def test_rows_of_earlier_steps_are_let_go(decoder: Decoder) -> None:
    runner, params = GpuRunner(decoder, CONTEXT), SamplingParams(max_tokens=6, ignore_eos=True)
    loop = loop_of(runner)
    for number in range(12):
        one = session(number, params, some_tokens(10, number))
        loop.join(one, started(one))
        loop.step()
        loop.step()
    assert runner.plain._flight is not None
    assert runner.plain._flight.rows.before is None and not runner.plain._flight.rows.sources


def test_watchers_of_plain_rounds_see_each_token(decoder: Decoder) -> None:
    loop, seen = loop_of(GpuRunner(decoder, CONTEXT)), list[tuple[bool, int, int]]()
    one = session(1, SamplingParams(max_tokens=9, ignore_eos=True), some_tokens(10))
    one.on_round = lambda orders, reports, added: seen.append(
        (orders.verify is not None, -1 if reports.verdict is None else reports.verdict.token, added)
    )
    loop.join(one, started(one))
    while loop.live:
        loop.step()
    assert [token for has_verify, token, added in seen if has_verify and added == 1] == one.output


@pytest.mark.usefixtures("chunks")
def test_costs_never_take_prompt_tokens_for_decode_rows(decoder: Decoder) -> None:
    costs, runner = MeasuredCosts(), GpuRunner(decoder, CONTEXT)
    limits = RoundLimits(prefill_chunk=1, prompt_tokens=64, prompt_tokens_alone=256)
    loop = Loop(Serial(Verifier(runner)), costs=costs, limits=limits)
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    for number in range(6):
        one = session(number, params, some_tokens(100, number))
        loop.join(one, started(one))
        for _ in range(3):
            loop.step()
    while loop.live:
        loop.step()
    assert costs.target.points and max(costs.target.points) <= 6


def test_a_reduced_head_is_sampled_in_the_graph_alone(decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = GpuRunner(decoder, CONTEXT)
    for number, params in enumerate(({}, {"min_tokens": 3}, {"logprobs": 1}, {"top_k": 3, "temperature": 0.5})):
        runner.open(number, Request(SamplingParams(**params), number, 5))
        assert runner.decodes(number, 400)
    monkeypatch.setattr(runner.decoder, "columns", object())
    assert [runner.decodes(number, 400) for number in range(4)] == [True, False, False, False]
