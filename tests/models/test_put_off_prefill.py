"""Prefill that is put off: chunks of several sequences share a forward, and none of their bits depends on that.

Memory is taken at once, and the prefix cache serves a chunk only once it is computed. A forward that fails, and a
sequence that leaves before it, change nothing for the others.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count as count_up
from itertools import repeat
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from specbranch.config import SamplingParams
from specbranch.core.orders import Context, Orders, Prefill, Reports, Verify
from specbranch.core.pages import PAGE
from specbranch.core.request import Request
from specbranch.core.runner import Feed
from specbranch.core.slots import ROOT
from specbranch.errors import PoolFull
from specbranch.exec.serial import Serial
from specbranch.exec.verifier import Verifier
from specbranch.models.cpu.kernels import load_kernel
from specbranch.models.forward.decoder import Decoder
from specbranch.models.forward.fused_step import STEP_ROWS
from specbranch.models.forward.step_rows import Rows
from specbranch.models.gpu.runner import GpuRunner
from specbranch.models.loading import load_native
from specbranch.models.runners.native import NativeRunner
from tiers import each_value, tiered
from tiny_models import GREEDY, saved, some_tokens, tiny

CONTEXT = 1000
LENGTHS = (9, 5, 40, 1, 300, 12)  # more rows than one compiled step takes, some of them one chunk
PROMPTS = [tuple(some_tokens(length, seed=seed)) for seed, length in enumerate(LENGTHS, 3)]
LINEAR = {"compiled": "llvm", "plain": "torch", "graphs": "torch"}


@pytest.fixture(scope="module", params=LINEAR)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A function that makes runners of one kind: the compiled CPU step, plain torch, and that of GPUs."""
    if request.param == "compiled" and load_kernel() is None:
        pytest.skip("no compiled kernels on this machine")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPECBRANCH_LINEAR", LINEAR[request.param])
        folder = saved(tiny("llama"), Path(tmp_path_factory.mktemp("put_off")))
        decoder: Decoder = load_native(folder, context_length=CONTEXT).decoder

    def make(pages: int = 16) -> NativeRunner:
        runner = (GpuRunner if request.param == "graphs" else NativeRunner)(decoder, CONTEXT, pages=pages)
        assert runner.compiled == (request.param == "compiled")
        return runner

    return make


def bits(runner: NativeRunner, seq: int) -> torch.Tensor:
    """What the cache holds of a sequence, without computing what was put off."""
    held = runner.sequences[seq]
    kv_slots = held.table.flat(np.arange(len(held.slots.prefix)))
    return runner.memory.data[kv_slots // PAGE, :, :, :, kv_slots % PAGE].clone()


def begin(runner: NativeRunner, prompts: Sequence[tuple[int, ...]], first: int = 0) -> None:
    for seq, prompt in enumerate(prompts, first):
        runner.open(seq, GREEDY)
        runner.extend(seq, prompt)


def logits(runner: NativeRunner, seq: int) -> torch.Tensor:
    found = runner.score([Feed(seq, (7,), (ROOT,))])[0][0].logits.clone()
    runner.keep(seq, (), 0)
    return found


def alone(made: Any, prompt: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    runner = made()
    begin(runner, [prompt])
    runner.flush()
    return bits(runner, 0), logits(runner, 0)


def check_all(runner: NativeRunner, made: Any, prompts: dict[int, tuple[int, ...]]) -> None:
    runner.check()
    for seq, prompt in prompts.items():
        expected = alone(made, prompt)
        assert torch.equal(bits(runner, seq), expected[0]) and torch.equal(logits(runner, seq), expected[1])


def test_prompts_packed_into_common_forwards_have_the_bits_of_each_alone(made: Any) -> None:
    runner = made()
    begin(runner, PROMPTS)
    runner.check()
    runner.flush()
    check_all(runner, made, dict(enumerate(PROMPTS)))


@pytest.mark.parametrize("how", ["feed", "score", "propose", "verify"])
def test_the_next_forward_computes_what_was_put_off_first(how: str, made: Any) -> None:
    runner, prompt = made(), PROMPTS[2]
    begin(runner, [PROMPTS[0], prompt])
    arguments = () if how in ("feed", "score") else ((),)
    getattr(runner, how)([Feed(0, (7,), (ROOT,))], *arguments)
    assert torch.equal(bits(runner, 1), alone(made, prompt)[0])
    assert not runner.sequences.pending


def test_the_compiled_step_takes_chunks_of_several_sequences_in_one_call(
    made: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner, calls = made(), list[int]()
    if not runner.compiled:
        pytest.skip("only the compiled step takes several")
    assert runner._fused is not None
    real = runner._fused.store

    def counting(work: Sequence[Rows]) -> None:
        calls.append(sum(len(rows.tokens) for rows in work))
        real(work)

    monkeypatch.setattr(runner._fused, "store", counting)
    begin(runner, [PROMPTS[0]] * 3 + [PROMPTS[1]])
    assert not calls
    runner.flush()
    assert calls == [3 * 9 + 5]
    begin(runner, [tuple(some_tokens(60, seed=1)), tuple(some_tokens(20, seed=2))], first=10)
    runner.flush()
    assert max(calls) <= STEP_ROWS and sum(calls[1:]) == 80


@pytest.mark.parametrize("chunk", [1, 17, 64])
def test_the_compiled_step_gives_a_prompt_the_same_bits_wherever_it_is_cut(chunk: int, made: Any) -> None:
    expected = alone(made, PROMPTS[4])
    runner = made()
    if not runner.compiled:
        pytest.skip("torch's products depend on the number of rows")
    runner.prefill_chunk = chunk
    begin(runner, PROMPTS)
    runner.flush()
    assert torch.equal(bits(runner, 4), expected[0]) and torch.equal(logits(runner, 4), expected[1])


def test_a_sequence_without_pages_leaves_and_the_others_are_computed(made: Any) -> None:
    runner = made(pages=3)
    begin(runner, [PROMPTS[0], PROMPTS[4]])
    runner.open(2, GREEDY)
    with pytest.raises(PoolFull, match=r"Need 1 more cache pages of 256 tokens, 0 free \(of 3\)"):
        runner.extend(2, PROMPTS[2])
    assert len(runner.slots(2)) == 0
    runner.flush()
    check_all(runner, made, {0: PROMPTS[0], 1: PROMPTS[4]})


def test_a_forward_that_fails_rolls_back_its_own_sequences_alone(made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = made()
    if isinstance(runner, GpuRunner):
        pytest.skip("it puts nothing off")
    begin(runner, [PROMPTS[2]])
    runner.flush()
    begin(runner, [PROMPTS[0], PROMPTS[4]], first=1)
    runner.extend(0, PROMPTS[1])  # behind what is computed

    def failing(*given: Any) -> None:
        raise RuntimeError("no memory on the device")

    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="no memory"):
        patch.setattr(runner, "_store_chunks", failing)
        runner.feed([Feed(0, (7,), (ROOT,))])
    assert [len(runner.slots(seq)) for seq in range(3)] == [len(PROMPTS[2]), 0, 0]
    for seq, prompt in ((1, PROMPTS[0]), (2, PROMPTS[4])):
        runner.extend(seq, prompt)
    runner.flush()
    check_all(runner, made, {0: PROMPTS[2], 1: PROMPTS[0], 2: PROMPTS[4]})


def test_what_is_rolled_back_or_closed_is_not_computed(made: Any) -> None:
    runner = made()
    begin(runner, PROMPTS[:5])
    free = runner.pool.free
    runner.rewind(4, 64)
    runner.rewind(0, 0)
    runner.close(2)
    runner.check()
    assert runner.pool.free == free + 3
    runner.open(2, GREEDY)
    runner.extend(2, PROMPTS[5])
    runner.extend(0, PROMPTS[3])
    runner.check()
    runner.flush()
    check_all(runner, made, {0: PROMPTS[3], 1: PROMPTS[1], 2: PROMPTS[5], 3: PROMPTS[3], 4: PROMPTS[4][:64]})


def test_the_prefix_cache_serves_nothing_that_is_not_computed(made: Any) -> None:
    runner, prompt = made(), tuple(some_tokens(600))
    begin(runner, [prompt])
    if not runner.sequences.pending:
        pytest.skip("it puts nothing off")
    runner.close(0)
    assert runner.pool.idle == 0
    runner.open(1, GREEDY)
    assert runner.recall(1, prompt) == 0


def test_a_prompt_waits_only_for_pending_chunks_that_serve_it(made: Any) -> None:
    runner, prompt = made(), tuple(some_tokens(600))
    others = (*prompt[:255], 1, *prompt[:50]), (*prompt[:20], 3)
    begin(runner, [prompt])
    if not runner.sequences.pending:
        pytest.skip("it puts nothing off")
    for seq, other in enumerate(others, 1):
        runner.open(seq, GREEDY)
        assert runner.recall(seq, other) == 0
    assert runner.sequences.pending
    for seq, (asked, known) in enumerate([(prompt, 600), ((*prompt[:300], 1), 256), (prompt[:40], 0)], 3):
        runner.open(seq, GREEDY)
        assert runner.recall(seq, asked) == known
    assert not runner.sequences.pending
    expected = alone(made, prompt)[0]
    assert torch.equal(bits(runner, 3), expected) and torch.equal(bits(runner, 4), expected[:256])


def test_a_shared_page_is_copied_while_chunks_of_both_are_pending(made: Any) -> None:
    runner, prompt = made(), tuple(some_tokens(300))
    begin(runner, [prompt])
    runner.flush()
    runner.open(1, GREEDY)
    assert runner.recall(1, prompt) == 300
    for seq, more in enumerate((PROMPTS[0], PROMPTS[2])):
        runner.extend(seq, more)
    runner.check()
    runner.flush()
    for seq, more in enumerate((PROMPTS[0], PROMPTS[2])):
        apart = made()
        begin(apart, [prompt])
        apart.extend(0, more)
        apart.flush()
        assert torch.equal(bits(runner, seq), bits(apart, 0))


def rounds(executor: Serial, texts: dict[int, list[int]], interrupted: Callable[[], Any]) -> list[list[int]]:
    """Decode a session while the prompts of others are prefilled, then decode all; repeat what is interrupted."""

    def run(orders: dict[int, Orders]) -> dict[int, Reports]:
        while True:
            try:
                with interrupted():
                    return executor.run(orders)
            except KeyboardInterrupt:
                runner = executor.target.runner
                assert isinstance(runner, NativeRunner)
                runner.check()

    def verify(session: int) -> Orders:
        return Orders(verify=Verify(Context(0, tuple(texts[session]))))

    held = dict.fromkeys(texts, 0)
    texts[0].append(run({0: verify(0)})[0].verdict.token)  # type: ignore[union-attr]
    for _ in range(3):
        orders = {0: verify(0)}
        for session in (1, 2):
            text = texts[session]
            prefill = Prefill(Context(held[session], tuple(text[held[session] : -1]), text), 64)
            orders[session] = Orders(prefill=prefill)
        reports = run(orders)
        held |= {session: reports[session].reached or 0 for session in (1, 2)}
        texts[0].append(reports[0].verdict.token)  # type: ignore[union-attr]
    for _ in range(3):
        reports = run({session: verify(session) for session in texts})
        for session, report in reports.items():
            texts[session].append(report.verdict.token)  # type: ignore[union-attr]
    return list(texts.values())


@each_value
@pytest.mark.parametrize("name", ["_store_chunks", "_forward", "sequences.publish", "sequences.reserve"])
def test_rounds_that_are_interrupted_anywhere_and_repeated_give_the_same_texts(name: str, made: Any) -> None:
    def decoded(interrupts: Iterator[bool]) -> tuple[list[list[int]], int]:
        runner, count = made(), 0
        part, _, method = name.rpartition(".")
        owner = getattr(runner, part) if part else runner
        real = getattr(owner, method)

        def interrupted(*given: Any) -> Any:
            nonlocal count
            if next(interrupts):
                count += 1
                raise KeyboardInterrupt
            return real(*given)

        @contextmanager
        def patched() -> Iterator[None]:
            setattr(owner, method, interrupted)
            try:
                yield
            finally:
                setattr(owner, method, real)

        verifier = Verifier(runner)
        texts = {seq: list(PROMPTS[at]) for seq, at in enumerate((0, 4, 2))}
        for seq, text in texts.items():
            verifier.open(seq, Request(SamplingParams(temperature=0.7), seq, len(text)))
        return rounds(Serial(verifier), texts, patched), count

    expected, _ = decoded(repeat(False))
    interrupts = 0
    for seed in range(4):
        rng = random.Random(seed)
        found, count = decoded(rng.random() < 0.3 for _ in count_up())
        interrupts += count
        assert found == expected
    assert interrupts > 1 or isinstance(made(), GpuRunner)


class Twins:
    """The same random work on a runner that puts prefill off, and on one that computes it at once.

    `drops`: chunks are dropped before they are computed; then the prefix cache never serves them, and may differ.
    """

    def __init__(self, made: Any, seed: int, drops: bool) -> None:
        pages = 60 if drops else 6
        self.rng, self.runners, self.drops = random.Random(seed), (made(pages), made(pages)), drops
        self.base, self.other = tuple(some_tokens(700, seed=1)), tuple(some_tokens(700, seed=2))
        self.open: list[int] = []
        self.numbers = iter(count_up())
        self.full = self.known = self.put_off = 0

    def run(self, steps: int) -> None:
        for _ in range(steps):
            what = self.rng.choice((self.ask, self.ask, self.more, self.rewind, self.decode, self.close))
            what() if self.open else self.ask()
            self.runners[1].flush()
            self.put_off += bool(self.runners[0].sequences.pending)
            for runner in self.runners:
                runner.check()
            if self.rng.random() < 0.2:
                self.compare()
        self.compare()

    def both(self, act: Callable[[NativeRunner], Any]) -> Any:
        """Do the same on both; what it returns, and whether it finds pages, is the same."""
        found = []
        for runner in self.runners:
            try:
                found.append(act(runner))
            except PoolFull as error:
                found.append(str(error))
                self.full += 1
            self.runners[1].flush()
        assert self.drops or found[0] == found[1]
        return found[0]

    def ask(self) -> None:
        seq = next(self.numbers)
        shared, new = self.rng.choice((0, 20, 256, 300, 520)), self.rng.choice((1, 9, 30, 200))
        text = (*self.base[:shared], *self.other[:new])

        def act(runner: NativeRunner) -> int:
            runner.open(seq, GREEDY)
            known = runner.recall(seq, text)
            runner.extend(seq, text[known:])
            return known

        found = self.both(act)
        self.known += bool(found) and isinstance(found, int)
        self.open.append(seq)

    def more(self) -> None:
        seq, tokens = self.rng.choice(self.open), self.other[: self.rng.choice((3, 70))]
        self.both(lambda runner: runner.extend(seq, tokens))

    def rewind(self) -> None:
        seq, runner = self.rng.choice(self.open), self.runners[0]
        chunks = len(runner.slots(seq).prefix) // runner.prefill_chunk
        length = self.rng.randint(0, chunks) * runner.prefill_chunk
        self.before_drop()
        self.both(lambda runner: runner.rewind(seq, length))

    def decode(self) -> None:
        work = [Feed(seq, (3, 4, 5), (ROOT, ROOT, 1)) for seq in self.rng.sample(self.open, 1)]

        def act(runner: NativeRunner) -> None:
            for feed in work:
                runner.demand(feed.seq, 3)
            runner.feed(work)
            for feed in work:
                runner.keep(feed.seq, (1, 2), 2)

        self.both(act)

    def close(self) -> None:
        seq = self.open.pop(self.rng.randrange(len(self.open)))
        self.before_drop()
        self.both(lambda runner: runner.close(seq))

    def before_drop(self) -> None:
        if not self.drops:
            self.runners[0].flush()

    def compare(self) -> None:
        for runner in self.runners:
            runner.flush()
            if isinstance(runner, GpuRunner):
                runner.launcher.up({})
        for seq in self.open:
            assert self.runners[0].slots(seq).prefix == self.runners[1].slots(seq).prefix
            assert torch.equal(bits(self.runners[0], seq), bits(self.runners[1], seq))
        assert self.drops or self.runners[0].pool.free == self.runners[1].pool.free


@each_value
@pytest.mark.parametrize("drops", [False, True])
@pytest.mark.parametrize("seed", tiered(range(4), (0).__eq__))
def test_prefill_that_is_put_off_leaves_what_prefill_at_once_leaves(seed: int, drops: bool, made: Any) -> None:
    twins = Twins(made, seed, drops)
    twins.run(60)
    assert twins.known > 2 and (twins.full > 2) != drops
    assert twins.put_off > 5 or isinstance(twins.runners[0], GpuRunner)
