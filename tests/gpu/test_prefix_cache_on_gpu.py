"""The prefix cache on a GPU: a cached prefix has the bits of prefilling it.

This holds behind graphs, behind steps launched ahead, and with shared pages.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import lcm
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from specbranch.core.orders import PrefillCount
from specbranch.core.pages import PAGE
from specbranch.core.runner import Feed
from specbranch.core.slots import ROOT
from specbranch.models.gpu.runner import GpuRunner
from specbranch.models.loading import load_native
from specbranch.models.runners.native import NativeRunner
from test_prefix_cache import conversation, decoded, go_on, held_bits, read, row
from tiny_models import GREEDY

pytestmark = pytest.mark.gpu

SIZES: dict[str, Any] = {
    "vocab_size": 301,
    "hidden_size": 384,
    "intermediate_size": 640,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 8192,
    "initializer_range": 0.1,
}
CONTEXT, PAGES = 8000, 300


def tokens(count: int, seed: int = 1) -> tuple[int, ...]:
    made = torch.randint(0, SIZES["vocab_size"], (count,), generator=torch.Generator().manual_seed(seed))
    return tuple(made.tolist())


@pytest.fixture(scope="module", params=["bfloat16", "float32"])
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[NativeRunner]:
    """One that keeps what it read, and one that does not."""
    torch.manual_seed(1)
    folder = Path(tmp_path_factory.mktemp("llama"))
    AutoModelForCausalLM.from_config(LlamaConfig(**SIZES)).save_pretrained(folder)
    first = load_native(folder, context_length=CONTEXT, device="cuda", dtype=request.param, cache_tokens=PAGES * 256)
    second = GpuRunner(first.decoder, CONTEXT, pages=PAGES)
    second.prefix_cache = False
    return [first, second]


@pytest.fixture
def both(loaded: list[NativeRunner]) -> Iterator[list[NativeRunner]]:
    """Models for many tests; what was left open is closed, and nothing stays known."""
    yield loaded
    for runner in loaded:
        for seq in list(runner.sequences):
            runner.close(seq)
        runner.pool.drop(runner.pool.take(runner.pool.pages))
        runner.check()


def bits(runner: NativeRunner, seq: int) -> torch.Tensor:
    runner.flush()
    torch.cuda.synchronize()  # it was read on the runner's own stream
    return held_bits(runner, seq).cpu()


def logits(runner: NativeRunner, seq: int, token: int) -> torch.Tensor:
    return row(runner, seq, token).cpu()


def test_a_prompt_that_begins_like_another_has_the_bits_of_reading_it(both: list[NativeRunner]) -> None:
    base, chunk = tokens(7000), lcm(both[0].prefill_chunk, PAGE)
    prompts = [base[:5000], base[:5000], base[:4999], (*base[:3000], *tokens(1500, seed=2)), base[:6500], base[:20]]
    whole = [n - n % chunk for n in (0, 0, 4998, 3000, 4999, 0)]
    for seq, (prompt, known) in enumerate(zip(prompts, whole, strict=True)):
        expected = 4999 if seq == 1 else known
        assert [read(runner, seq, prompt) for runner in both] == [expected, 0]
        assert torch.equal(*(bits(runner, seq) for runner in both))
        assert torch.equal(*(logits(runner, seq, prompt[-1]) for runner in both))
        both[0].check()
        if seq % 2:
            for runner in both:
                runner.close(seq)


def test_chunks_that_are_prefilled_in_turns_are_prefilled_once(both: list[NativeRunner]) -> None:
    prompt, chunk = tokens(5001), lcm(both[0].prefill_chunk, PAGE)
    for runner in both:
        for seq in range(3):
            runner.open(seq, GREEDY)
    taken = []
    for stop in (*range(chunk, 5000, chunk), 5000):
        taken.append([go_on(both[0], seq, prompt[:stop]) for seq in range(3)])
    assert all(one[1:] == [stop, stop] for one, stop in zip(taken, (*range(chunk, 5000, chunk), 5000), strict=True))
    both[1].extend(0, prompt[:-1])
    expected = bits(both[1], 0), logits(both[1], 0, prompt[-1])
    for seq in range(3):
        assert torch.equal(bits(both[0], seq), expected[0])
        assert torch.equal(logits(both[0], seq, prompt[-1]), expected[1])
    both[0].check()


def test_a_second_turn_prefills_the_answer_the_incomplete_chunk_and_what_is_new(both: list[NativeRunner]) -> None:
    (text, found), (expected, whole) = (
        conversation(runner, [tokens(4500), tokens(700, seed=2), tokens(300, seed=3)]) for runner in both
    )
    assert text == expected
    chunk = lcm(both[0].prefill_chunk, PAGE)
    lengths, before = [4499, 5229, 5559], [0, 4499, 5229]  # the last token of each is a step
    cached = [length - length % chunk for length in before]
    assert found == [PrefillCount(length - known, known) for length, known in zip(lengths, cached, strict=True)]
    assert whole == [PrefillCount(length, 0) for length in lengths]


@pytest.mark.parametrize("method", ["autoregressive", "lookup"])
@pytest.mark.parametrize("seed", range(4))
def test_requests_that_begin_alike_say_what_they_say_without_a_cache(
    seed: int, method: str, both: list[NativeRunner]
) -> None:
    base = tokens(5000)
    prompts = [base[:300], base[:300], base[:2500], base[:4600], base[:30], tokens(30, seed=2)]
    texts = [decoded(runner, prompts, seed, method) for runner in both]
    assert texts[0] == texts[1]
    assert [runner.pool.idle > 0 for runner in both] == [True, False]


def test_samples_write_to_pages_of_their_own_while_a_step_is_under_way(both: list[NativeRunner]) -> None:
    prompt = tokens(400)
    expected = []
    for runner in both:
        said = []
        for seq in range(4):  # each comes when the one before has started to write behind the prompt
            read(runner, seq, prompt)
            said.append(runner.score([Feed(seq, (prompt[-1], seq, 5), (ROOT, 0, 0))])[0][2].logits.cpu())
            runner.keep(seq, (0, 2), 2)  # a slot moves when the runner next works
        said += [rows[0].logits.cpu() for rows in runner.score([Feed(seq, (7,), (ROOT,)) for seq in range(4)])]
        expected.append(torch.stack(said))
        runner.check()
    assert torch.equal(*expected)


def test_taking_from_the_cache_waits_for_nothing(both: list[NativeRunner]) -> None:
    runner, prompt = both[0], tokens(5000)
    read(runner, 0, prompt)
    for turn in range(2):  # the first one captures
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error" if turn else "default")
        try:
            assert read(runner, 1, prompt) == 4999
            runner.demand(1, 3)  # copies the last page, which the other one shares
            runner.feed([Feed(1, (1, 2, 3), (ROOT, 0, 0))])
        finally:
            torch.cuda.set_sync_debug_mode("default")
        runner.check()
        runner.close(1)
