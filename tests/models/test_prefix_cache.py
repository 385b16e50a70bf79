"""The prefix cache: a cached prefix is not prefilled again, and nothing else changes.

The cache has the same bits, the logits behind it are the same, no page is lost and none has two meanings. This holds
whatever is opened, prefilled, rolled back, copied, closed or interrupted.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specbranch.config import SamplingParams, SpeculativeConfig
from specbranch.core import pages
from specbranch.core.experience import Experience
from specbranch.core.loop import Loop
from specbranch.core.methods import find_method
from specbranch.core.orders import Context, PrefillCount, Verify
from specbranch.core.pages import PAGE
from specbranch.core.request import Request
from specbranch.core.runner import Feed
from specbranch.core.session import Session
from specbranch.core.slots import ROOT
from specbranch.errors import CacheFull
from specbranch.exec.serial import Serial
from specbranch.exec.verifier import Verifier
from specbranch.models.cpu.kernels import load_kernel
from specbranch.models.forward.decoder import Decoder
from specbranch.models.gpu.runner import GpuRunner
from specbranch.models.loading import load_native
from specbranch.models.runners import native, pending_prefill, sequences
from specbranch.models.runners.native import NativeRunner
from tiers import each_value, tiered
from tiny_models import GREEDY, saved, some_tokens, tiny

pytestmark = pytest.mark.skipif(load_kernel() is None, reason="no compiled kernels on this machine")

KINDS = {
    "plain": NativeRunner,
    "graphs": GpuRunner,
    "int8": partial(NativeRunner, cache_dtype=torch.int8),  # keys and values rounded
}
CONTEXT = 1000
CHUNKS = (32, 64, 100, 256, 512)
BASES = [tuple(some_tokens(900, seed=seed)) for seed in (1, 2)]


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPECBRANCH_LINEAR", "llvm")
        folder = saved(tiny("llama"), Path(tmp_path_factory.mktemp("cached")))
        return load_native(folder, context_length=CONTEXT).decoder


def made(kind: str, decoder: Decoder, chunk: int = 256, pages: int = 16) -> NativeRunner:
    runner = KINDS[kind](decoder, CONTEXT, pages=pages)
    runner.prefill_chunk = chunk
    return runner


def held_bits(runner: NativeRunner, seq: int) -> torch.Tensor:
    """All that is in the cache of a sequence's prefix."""
    runner.flush()
    held = runner.sequences[seq]
    kv_slots = held.table.flat(np.arange(len(held.slots.prefix)))
    return runner.memory.data[kv_slots // PAGE, :, :, :, kv_slots % PAGE].clone()


def read(runner: NativeRunner, seq: int, prompt: tuple[int, ...]) -> int:
    """Prefill a prompt except its last token, as a worker does; return how much of it was cached."""
    runner.open(seq, GREEDY)
    known = go_on(runner, seq, prompt[:-1])
    runner.flush()
    return known


def go_on(runner: NativeRunner, seq: int, text: tuple[int, ...]) -> int:
    """Read the rest of a text."""
    known = runner.recall(seq, text)
    runner.extend(seq, text[known:])
    return known


def row(runner: NativeRunner, seq: int, token: int) -> torch.Tensor:
    """The logits behind one more token, which is dropped again."""
    found = runner.score([Feed(seq, (token,), (ROOT,))])[0][0].logits.clone()
    runner.keep(seq, (), 0)
    return found


class Reference:
    """What a runner gives that never knew anything of a prompt."""

    def __init__(self, kind: str, decoder: Decoder, chunk: int) -> None:
        self.runner = made(kind, decoder, chunk, pages=5)
        self.runner.prefix_cache = False
        self.of = cache(self._of)

    def _of(self, prompt: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
        assert read(self.runner, 0, prompt) == 0
        found = held_bits(self.runner, 0), row(self.runner, 0, prompt[-1])
        self.runner.close(0)
        assert self.runner.pool.idle == 0
        return found


@each_value
@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_prompt_that_begins_like_another_has_the_bits_of_reading_it(kind: str, chunk: int, decoder: Decoder) -> None:
    runner, reference = made(kind, decoder, chunk), Reference(kind, decoder, chunk)
    base = BASES[0]
    prompts = [base[:600], base[:600], base[:599], (*base[:300], *BASES[1][:300]), base[:850], base[:20], base[:20]]
    whole = {32: (256, 512), 64: (256, 512), 256: (256, 512), 512: (0, 512), 100: (0, 0)}[chunk]
    known = [0, 599, whole[1], whole[0], whole[1], 0, 19]
    for seq, (prompt, expected) in enumerate(zip(prompts, known, strict=True)):
        assert read(runner, seq, prompt) == expected
        bits, logits = reference.of(prompt)
        assert torch.equal(held_bits(runner, seq), bits) and torch.equal(row(runner, seq, prompt[-1]), logits)
        runner.check()
        if seq % 2:
            runner.close(seq)
    for seq in list(runner.sequences):
        runner.close(seq)
    runner.check()
    assert runner.pool.free == runner.pool.pages and runner.pool.idle > 0


@pytest.mark.parametrize("kind", tiered(KINDS, "graphs".__ne__))
def test_what_steps_wrote_is_read_again(kind: str, decoder: Decoder) -> None:
    runner, text = made(kind, decoder, 64), BASES[0][:700]
    read(runner, 0, text[:200])
    for start in range(199, 640, 20):
        runner.feed([Feed(0, text[start : start + 20], tuple(range(ROOT, 19)))])
        runner.keep(0, range(20), 20)
    runner.rewind(0, 400)
    runner.extend(0, text[400:650])  # and what is read behind steps, too
    runner.close(0)
    assert read(runner, 1, text) == 0
    bits, logits = Reference(kind, decoder, 64).of(text)
    assert torch.equal(held_bits(runner, 1), bits) and torch.equal(row(runner, 1, text[-1]), logits)


def conversation(runner: NativeRunner, asked: list[tuple[int, ...]]) -> tuple[list[int], list[PrefillCount]]:
    """Turns of a chat, each the text so far and the next question; returns the whole text, and what was read of each
    prompt."""
    text, found = list[int](), list[PrefillCount]()
    for number, words in enumerate(asked):
        text += words
        verifier, base = Verifier(runner), 0
        verifier.open(number, Request(SamplingParams(temperature=0.8), number, len(text)))
        for _ in range(30):
            scored, failed = verifier.score({number: Verify(Context(base, tuple(text[base:]), text))})
            base = len(text)
            text.append(verifier.judge(scored, {})[number].token)
            assert not failed
        found.append(verifier.prefill_counts()[number])
        verifier.free(number)
        runner.check()
    return text, found


@pytest.mark.parametrize("kind", tiered(KINDS, "int8".__eq__))
def test_a_second_turn_prefills_the_answer_the_incomplete_chunk_and_what_is_new(kind: str, decoder: Decoder) -> None:
    runners = [made(kind, decoder, 128) for _ in range(2)]
    runners[1].prefix_cache = False
    asked = [BASES[0][:500], BASES[1][:200], BASES[1][200:300]]
    (text, read), (expected, whole) = (conversation(runner, asked) for runner in runners)
    assert text == expected
    # prompts of 500, 730 and 860 tokens, the last of them a step; the first has whole chunks of 384, whole pages of 256
    assert read == [PrefillCount(499, 0), PrefillCount(473, 256), PrefillCount(347, 512)]
    assert whole == [PrefillCount(499, 0), PrefillCount(729, 0), PrefillCount(859, 0)]


def decoded(
    runner: NativeRunner, prompts: list[tuple[int, ...]], seed: int, method: str = "autoregressive"
) -> list[int]:
    """Decode requests that join and leave at any time, some with a common prefix; return their texts."""
    rng, loop, sessions = random.Random(seed), Loop(Serial(Verifier(runner))), list[Session]()
    for number in range(12):
        prompt = rng.choice(prompts)
        params = SamplingParams(temperature=rng.choice((0.0, 0.9)), max_tokens=rng.randint(2, 40), ignore_eos=True)
        one = Session(number, prompt, Request(params, number, len(prompt)), runner.context_length)
        loop.join(one, find_method(method, False).start(one, SpeculativeConfig(method=method), Experience()))
        sessions.append(one)
        for _ in range(rng.choice((0, 1, 7)) if loop.live else 0):
            loop.step()
            runner.check()
        if rng.random() < 0.2:
            loop.remove(rng.choice(sessions))
    while loop.live:
        loop.step()
    assert not any(one.error for one in sessions)
    return [token for one in sessions for token in one.tokens]


@each_value
@pytest.mark.parametrize("method", ["autoregressive", "lookup"])
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kind", tiered(KINDS, "graphs".__ne__))
def test_requests_that_begin_alike_say_what_they_say_without_a_cache(
    kind: str, seed: int, method: str, decoder: Decoder
) -> None:
    """On a GPU's runner steps are started ahead, in pages that others come to share meanwhile."""
    prompts = [BASES[0][:300], BASES[0][:300], BASES[0][:520], BASES[0][:30], BASES[1][:30]]
    runners = [made(kind, decoder, 64, pages=60) for _ in range(2)]
    runners[1].prefix_cache = False
    texts = [decoded(runner, prompts, seed, method) for runner in runners]
    assert texts[0] == texts[1]
    assert [runner.pool.idle > 0 for runner in runners] == [True, False]


@pytest.mark.parametrize("kind", KINDS)
def test_samples_of_one_prompt_share_it_and_write_to_pages_of_their_own(kind: str, decoder: Decoder) -> None:
    runner, prompt = made(kind, decoder), BASES[0][:400]
    reference = Reference(kind, decoder, 256).of(prompt)
    assert [read(runner, seq, prompt) for seq in range(4)] == [0, 399, 399, 399]
    assert runner.pool.pages - runner.pool.free == 2
    for turn in range(3):  # each goes another way
        work = [Feed(seq, (prompt[-1] if turn == 0 else seq,), (ROOT,)) for seq in range(4)]
        rows = [made[0].logits.clone() for made in runner.score(work)]
        for seq in range(4):
            runner.keep(seq, (0,), 1)
        assert turn or all(torch.equal(found, reference[1]) for found in rows)
        runner.check()
    assert runner.pool.pages - runner.pool.free == 5
    assert all(torch.equal(held_bits(runner, seq)[:399], reference[0]) for seq in range(4))
    assert read(runner, 4, prompt) == 399
    assert torch.equal(row(runner, 4, prompt[-1]), reference[1])


def test_nothing_is_kept_where_that_is_switched_off(decoder: Decoder) -> None:
    runner = made("plain", decoder)
    runner.prefix_cache = False
    for seq in range(2):
        assert read(runner, seq, BASES[0][:600]) == 0
    runner.close(0)
    assert runner.pool.idle == 0


def test_kv_slots_that_only_cache_a_prompt_count_as_free(decoder: Decoder) -> None:
    runner = made("plain", decoder, pages=4)
    assert (runner.kv_slots, runner.kv_slots_free) == (1024, 1024)
    read(runner, 0, BASES[0][:600])
    assert runner.kv_slots_free == 256
    runner.close(0)
    assert (runner.kv_slots_free, runner.pool.idle) == (1024, 3)
    read(runner, 1, BASES[1][:900])
    assert (runner.kv_slots_free, runner.pool.idle) == (0, 0)
    runner.open(2, GREEDY)
    assert runner.recall(2, BASES[0][:600]) == 0
    with pytest.raises(CacheFull, match=r"Need 3 more cache pages of 256 tokens, 0 free \(of 4\)"):
        runner.extend(2, BASES[0][:600])
    runner.check()


class Interrupts:
    """Raises KeyboardInterrupt before the n-th line that is run in the files that keep account of pages."""

    FILES = (pages.__file__, native.__file__, sequences.__file__, pending_prefill.__file__)

    def __init__(self) -> None:
        self.left = 0

    @contextmanager
    def after(self, lines: int) -> Iterator[None]:
        self.left, before = lines, sys.gettrace()
        sys.settrace(self._called)
        try:
            yield
        finally:
            sys.settrace(before)

    def _called(self, frame: FrameType, event: str, given: Any) -> Any:
        return self._line if frame.f_code.co_filename in self.FILES else None

    def _line(self, frame: FrameType, event: str, given: Any) -> Any:
        if event == "line":
            self.left -= 1
            if self.left == 0:
                raise KeyboardInterrupt
        return self._line


def extend(runner: NativeRunner) -> None:
    runner.extend(1, BASES[1][256:640])


def flush(runner: NativeRunner) -> None:
    """Chunks of two sequences, one of which writes to a shared page."""
    runner.extend(1, BASES[1][256:640])
    runner.extend(3, BASES[1][:9])
    runner.flush()


def drop(runner: NativeRunner) -> None:
    """Chunks that are dropped, in part or whole, before they are computed."""
    runner.extend(1, BASES[1][256:640])
    runner.extend(2, BASES[1][:300])
    runner.rewind(1, 400)
    runner.rewind(2, 0)


def recall(runner: NativeRunner) -> None:
    runner.recall(1, (*BASES[1][:256], *BASES[0][256:500]))
    runner.recall(2, BASES[0][:599])


def feed(runner: NativeRunner) -> None:
    runner.feed([Feed(3, (5, 6), (ROOT, 0)), Feed(1, (5,), (ROOT,))])


def demand(runner: NativeRunner) -> None:
    runner.demand(3, 100)


def rewind(runner: NativeRunner) -> None:
    runner.recall(2, BASES[0][:599])
    runner.rewind(2, 300)


@pytest.mark.slow
@pytest.mark.parametrize("doing", [extend, flush, drop, recall, feed, demand, rewind], ids=lambda what: what.__name__)
@pytest.mark.parametrize("kind", ["plain", "graphs"])
def test_an_interrupt_at_any_line_leaves_pages_in_order_and_nothing_wrong_known(
    kind: str, doing: Callable[[NativeRunner], None], decoder: Decoder
) -> None:
    references = Reference(kind, decoder, 256)
    for lines in range(1, 1000):
        runner = made(kind, decoder, pages=10)
        read(runner, 0, BASES[0][:600])
        read(runner, 3, BASES[0][:600])  # shares the last page, too
        runner.open(1, GREEDY)
        runner.extend(1, BASES[1][:256])
        runner.flush()
        runner.open(2, GREEDY)
        interrupts = Interrupts()
        try:
            with interrupts.after(lines):
                doing(runner)
        except KeyboardInterrupt:
            if doing in (rewind, drop):  # it leaves the counting to who fails next
                runner.sequences.recount_pages()
            runner.check()
        else:
            assert interrupts.left > 0
            break
        finally:
            for seq, prompt in ((0, BASES[0][:600]), (3, BASES[0][:600])):
                assert torch.equal(held_bits(runner, seq)[:599], references.of(prompt)[0])
        if len(runner.slots(2)):
            runner.rewind(2, 0)
        for seq in (1, 3):
            runner.close(seq)
        go_on(runner, 2, BASES[1][:599])  # another text than the one that was interrupted
        assert torch.equal(held_bits(runner, 2), references.of(BASES[1][:600])[0])
        runner.close(2)
        for prompt in (BASES[0][:600], BASES[1][:641], (*BASES[1][:256], *BASES[0][256:501])):
            read(runner, 1, prompt)
            bits, logits = references.of(prompt)
            assert torch.equal(held_bits(runner, 1), bits) and torch.equal(row(runner, 1, prompt[-1]), logits)
            runner.close(1)
            runner.check()
    assert lines > 20


class Exercise:
    """Random work on a runner with a tight pool. After every chunk of it pages are in order, and what each open
    sequence holds is what was last written there."""

    def __init__(self, kind: str, decoder: Decoder, reference: Reference, rng: random.Random) -> None:
        self.runner = made(kind, decoder, reference.runner.prefill_chunk, pages=9)
        self.reference, self.rng = reference, rng
        self.bits: dict[int, torch.Tensor] = {}
        self.numbers = iter(range(1 << 30))
        self.known = self.full = self.interrupted = self.evicted = 0

    def run(self, steps: int) -> None:
        for _ in range(steps):
            idle = self.runner.pool.idle
            others = (self.step, self.rewind, self.write, self.fork, self.close, self.close)
            what = self.rng.choice((self.ask, *others))
            seq = self.rng.choice(list(self.bits)) if self.bits else None
            try:
                if seq is None or what == self.ask:
                    seq = next(self.numbers)
                    self.ask(seq)
                else:
                    what(seq)
            except CacheFull:
                self.full += 1
            if seq in self.runner.sequences:
                self.bits[seq] = held_bits(self.runner, seq)
            self.evicted += self.runner.pool.idle < idle and what in (self.step, self.write)
            self.check()
        for seq in list(self.bits):
            self.close(seq)
        self.check()
        assert self.runner.pool.free == self.runner.pool.pages

    def check(self) -> None:
        self.runner.check()
        for seq, bits in self.bits.items():
            assert torch.equal(held_bits(self.runner, seq), bits)

    def ask(self, seq: int) -> None:
        """Prefill a prompt that begins like others, in whole chunks; it has the bits of prefilling it alone."""
        base, other = self.rng.sample(BASES, 2)
        shared, new = self.rng.choice((0, 20, 256, 300, 512, 600)), self.rng.choice((1, 30, 256))
        prompt = (*base[:shared], *other[:new], self.rng.randrange(2))
        self.runner.open(seq, GREEDY)
        self.bits[seq] = held_bits(self.runner, seq)
        chunk, end = self.runner.prefill_chunk, len(prompt) - 1
        while (held := len(self.runner.slots(seq).prefix)) < end:
            stop = min((held // chunk + self.rng.choice((1, 2, 9))) * chunk, end)
            with self.interrupts():
                self.known += go_on(self.runner, seq, prompt[: self.rng.choice((stop, end))]) > held
                self.runner.flush()
            self.check_interrupted(seq)
        bits, logits = self.reference.of(prompt)
        assert torch.equal(held_bits(self.runner, seq), bits)
        self.bits[seq] = bits
        assert torch.equal(row(self.runner, seq, prompt[-1]), logits)

    @contextmanager
    def interrupts(self) -> Iterator[None]:
        """Now and then have the next copy, or one of the next chunks, interrupted."""
        runner, left = self.runner, [self.rng.randrange(4)]
        real = {name: getattr(runner, name) for name in ("_store_chunks", "copy_pages")}

        def interrupted(name: str, *given: Any) -> None:
            left[0] -= 1
            if left[0] == 0:
                raise KeyboardInterrupt
            real[name](*given)

        try:
            if self.rng.random() < 0.3:
                for name in real:
                    setattr(runner, name, lambda *given, name=name: interrupted(name, *given))
            yield
        except KeyboardInterrupt:
            self.interrupted += 1
        finally:
            for name, function in real.items():
                setattr(runner, name, function)

    def check_interrupted(self, seq: int) -> None:
        self.bits[seq] = held_bits(self.runner, seq)
        self.check()

    def step(self, seq: int) -> None:
        """Read a small tree, and keep a line of it that has to move."""
        self.runner.feed([Feed(seq, (3, 4, 5, 6), (ROOT, ROOT, 1, 1))])
        self.runner.keep(seq, (1, 3), 2)
        self.settle_moves()

    def write(self, seq: int) -> None:
        """Read more as a prompt, wherever that begins."""
        with self.interrupts():
            self.runner.extend(seq, self.rng.choice(BASES)[: self.rng.choice((5, 100))])
            self.runner.flush()

    def rewind(self, seq: int) -> None:
        self.runner.rewind(seq, self.rng.randint(0, len(self.runner.slots(seq).prefix)))

    def fork(self, seq: int) -> None:
        """Another sequence that shares the beginning of this one, wherever that ends."""
        length, other = self.rng.randint(0, len(self.runner.slots(seq).prefix)), next(self.numbers)
        self.runner.open(other, GREEDY)
        held = self.runner.sequences[other]
        held.slots.extend(self.runner.slots(seq).prefix[:length])
        held.table.pages = self.runner.sequences[seq].table.fork(length).pages
        self.bits[other] = held_bits(self.runner, other)

    def close(self, seq: int) -> None:
        self.runner.close(seq)
        del self.bits[seq]

    def settle_moves(self) -> None:
        """A GPU's runner moves KV slots when it next works; this one checks them before."""
        if isinstance(self.runner, GpuRunner):
            self.runner.launcher.up({})


@pytest.fixture(scope="module")
def references(decoder: Decoder) -> dict[tuple[str, int], Reference]:
    return {(kind, chunk): Reference(kind, decoder, chunk) for kind in KINDS for chunk in CHUNKS}


@settings(max_examples=3, deadline=None)
@given(st.integers(0, 1 << 30), st.sampled_from(sorted(KINDS)), st.sampled_from(CHUNKS))
def test_every_recalled_prefix_has_the_bits_of_reading_it_and_no_page_is_lost(
    references: dict[tuple[str, int], Reference], seed: int, kind: str, chunk: int
) -> None:
    reference = references[kind, chunk]
    Exercise(kind, reference.runner.decoder, reference, random.Random(seed)).run(30)


@pytest.mark.slow
def test_the_exercise_recalls_evicts_overflows_and_is_interrupted(
    references: dict[tuple[str, int], Reference],
) -> None:
    reference = references["plain", 64]
    exercise = Exercise("plain", reference.runner.decoder, reference, random.Random(4))
    exercise.run(150)
    assert exercise.known > 8 and exercise.full > 8 and exercise.interrupted > 3 and exercise.evicted > 2
