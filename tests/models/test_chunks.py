"""Prefill in chunks: cut at absolute positions, each behind all before it, and none lost by an interrupt."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from specbranch.core.pages import PAGE
from specbranch.core.runner import Feed
from specbranch.core.slots import ROOT
from specbranch.models.cache.kv_memory import gathered, put
from specbranch.models.forward.chunk_attention import attend_masked, choose_attend_chunk
from specbranch.models.forward.decoder import ChunkView, Decoder, Step
from specbranch.models.gpu.runner import GpuRunner
from specbranch.models.loading import load_native
from specbranch.models.runners.native import NativeRunner
from specbranch.models.runners.torch_runner import PREFILL_CHUNKS
from tiers import each_value
from tiny_models import GREEDY, saved, some_tokens, tiny

KINDS = {"plain": NativeRunner, "graphs": GpuRunner}


def test_the_docs_say_how_long_chunks_are_on_gpus() -> None:
    docs = Path(__file__).parents[2] / "docs" / "lossless.md"
    assert f"({PREFILL_CHUNKS['cuda']} tokens on GPUs)" in docs.read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    return load_native(
        saved(tiny("qwen3"), tmp_path_factory.mktemp("qwen3")), context_length=900, dtype="float64"
    ).decoder


@pytest.fixture(params=KINDS)
def runner(request: pytest.FixtureRequest, decoder: Decoder) -> NativeRunner:
    return KINDS[request.param](decoder, 900, pages=12)


def read(runner: NativeRunner, seq: int, tokens: Sequence[int]) -> torch.Tensor:
    """Prefill a prompt; return its KV cache [layers, 2, kv_heads, tokens, head_dim]."""
    runner.open(seq, GREEDY)
    runner.extend(seq, tokens)
    return cache(runner, seq)


def cache(runner: NativeRunner, seq: int) -> torch.Tensor:
    runner.flush()
    held = runner.sequences[seq]
    kv_slots = held.table.flat(np.arange(len(held.slots.prefix)))
    return runner.memory.data[kv_slots // PAGE, :, :, :, kv_slots % PAGE].movedim(0, 3).clone()


def steps_of(runner: NativeRunner, monkeypatch: pytest.MonkeyPatch) -> list[Step]:
    """Every chunk that is read from now on."""
    steps: list[Step] = []
    real = runner.decoder.store

    def noting(step: Step, memory: Any) -> None:
        steps.append(step)
        real(step, memory)

    monkeypatch.setattr(runner.decoder, "store", noting)
    return steps


def test_a_chunk_ends_at_multiples_of_its_runners_size_and_sees_all_before_it(
    runner: NativeRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner.prefill_chunk = 100
    steps = steps_of(runner, monkeypatch)
    tokens = some_tokens(530)
    runner.open(0, GREEDY)
    runner.extend(0, tokens[:30])
    runner.extend(0, tokens[30:])
    runner.flush()
    assert [step.positions[0].item() for step in steps] == [0, 30, 100, 200, 300, 400, 500]
    pages, flat = runner.sequences[0].table.pages, runner.sequences[0].table.flat(np.arange(530))
    for step in steps:
        (part,) = step.parts
        assert isinstance(part.sees, ChunkView)
        at = step.positions.tolist()
        assert at == list(range(at[0], part.sees.end)) and part.rows == len(at)
        assert step.tokens.tolist() == [tokens[position] for position in at]
        assert (step.kv_slots[0] * PAGE + step.kv_slots[1]).tolist() == flat[at].tolist()
        assert part.sees.pages.tolist() == pages[: -(-part.sees.end // PAGE)]


@each_value
@pytest.mark.parametrize("chunk", [7, 64, 300, 2048])
def test_chunks_of_every_size_fill_the_cache_alike(chunk: int, runner: NativeRunner) -> None:
    expected = read(runner, 0, some_tokens(700))
    runner.prefill_chunk = chunk
    found = read(runner, 1, some_tokens(700))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-11)


@each_value
@pytest.mark.parametrize("chunk", [100, PREFILL_CHUNKS["cpu"], 512])
def test_a_prompt_that_is_read_again_has_the_same_bits_in_other_pages(chunk: int, runner: NativeRunner) -> None:
    runner.prefill_chunk = chunk
    expected = read(runner, 0, some_tokens(600))
    before = list(runner.sequences[0].table.pages)
    runner.open(1, GREEDY)
    runner.demand(1, 1)
    runner.close(0)
    assert torch.equal(read(runner, 0, some_tokens(600)), expected)
    assert runner.sequences[0].table.pages != before
    runner.rewind(0, 0)
    runner.extend(0, some_tokens(600))
    assert torch.equal(cache(runner, 0), expected)


def test_bits_differ_where_a_prompt_is_cut_elsewhere(runner: NativeRunner) -> None:
    """That the test above would notice a cut that depends on what was there before."""
    expected = read(runner, 0, some_tokens(600))
    runner.prefill_chunk = 40
    assert not torch.equal(read(runner, 1, some_tokens(600)), expected)


@each_value
@pytest.mark.parametrize("chunk", [0, 2])
@pytest.mark.parametrize("when", ["before", "after"])
def test_an_interrupt_between_chunks_leaves_nothing_of_a_prompt(
    chunk: int, when: str, runner: NativeRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner.prefill_chunk = 150
    expected = read(runner, 0, some_tokens(600))
    runner.close(0)
    other, free = read(runner, 1, some_tokens(300, seed=2)), runner.pool.free
    runner.open(0, GREEDY)
    real, left = runner.decoder.store, [chunk]

    def interrupted(step: Step, memory: Any) -> None:
        if when == "after" or left[0]:
            real(step, memory)
        if not left[0]:
            raise KeyboardInterrupt
        left[0] -= 1

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(runner.decoder, "store", interrupted)
        runner.extend(0, some_tokens(600))
        runner.flush()
    runner.check()
    assert len(runner.slots(0)) == 0 and runner.pool.free == free
    runner.extend(0, some_tokens(600))
    assert torch.equal(cache(runner, 0), expected) and torch.equal(cache(runner, 1), other)


def test_kv_slots_move_before_a_chunk_is_written_over_them(decoder: Decoder) -> None:
    found = []
    for kind in KINDS.values():
        runner = kind(decoder, 900, pages=12)
        runner.open(0, GREEDY)
        runner.extend(0, some_tokens(40))
        runner.feed([Feed(0, (9, 7, 5), (ROOT, ROOT, 1))])
        runner.keep(0, (1, 2), 2)  # both move one slot down
        runner.extend(0, some_tokens(20, seed=3))
        found.append(cache(runner, 0))
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=1e-11)


def test_a_chunk_leaves_in_the_cache_what_a_whole_forward_leaves(
    runner: NativeRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = read(runner, 0, some_tokens(300))
    monkeypatch.setattr(runner.decoder, "store", runner.decoder.forward)
    assert torch.equal(read(runner, 1, some_tokens(300)), expected)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("head_dim", [3, 6, 8, 64])
def test_what_is_put_in_pages_is_gathered_in_the_order_of_a_text(head_dim: int, dtype: torch.dtype) -> None:
    side = torch.zeros(5, 3, 2, PAGE, head_dim, dtype=dtype)[:, 1]  # one layer of three
    new = torch.randn(300, 6, head_dim).to(dtype)[:, 2:4]  # keys among queries and values
    pages, at = torch.tensor([3, 1]), torch.arange(300)
    put(side, torch.stack((pages[at // PAGE], at % PAGE)), new)
    assert torch.equal(gathered(side, pages, 300), new.transpose(0, 1))
    assert not side[[0, 2, 4]].any() and not side[1, :, 300 - PAGE :].any()


def test_a_cpu_reads_short_chunks_behind_a_mask(runner: NativeRunner) -> None:
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        assert choose_attend_chunk(torch.device("cpu"), dtype, 4, 2, 64) is attend_masked
    assert runner.prefill_chunk == PREFILL_CHUNKS["cuda" if isinstance(runner, GpuRunner) else "cpu"]
