"""Prompts on a GPU: the flash kernel gives what the masked way gives, the same bits each time, and the host waits
for nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from specbranch.core.pages import PAGE
from specbranch.core.runner import Feed
from specbranch.core.slots import ROOT
from specbranch.models.forward.chunk_attention import attend_by_flash, attend_masked, choose_attend_chunk
from specbranch.models.loading import load_native
from specbranch.models.runners.native import NativeRunner
from specbranch.models.runners.torch_runner import PREFILL_CHUNKS
from tiny_models import GREEDY

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda")
SHAPES = {"mha": (8, 8, 128), "gqa": (16, 4, 128), "narrow": (14, 2, 64), "odd": (10, 2, 80), "one": (16, 1, 128)}
TOLERATED = {torch.float16: 3e-3, torch.bfloat16: 2e-2}  # of numbers about 1, and as a share of larger ones
SIZES: dict[str, Any] = {
    "vocab_size": 301,
    "hidden_size": 384,
    "intermediate_size": 640,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
}
SIZES |= {"num_key_value_heads": 2, "max_position_embeddings": 8192, "initializer_range": 0.1}


@pytest.fixture(autouse=True)
def inference():  # type: ignore[no-untyped-def]
    with torch.inference_mode():
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(1)
    folder = Path(tmp_path_factory.mktemp("llama"))
    AutoModelForCausalLM.from_config(LlamaConfig(**SIZES)).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def runner(folder: Path) -> NativeRunner:
    return load_native(folder, context_length=8000, device="cuda")


def tokens(count: int, seed: int = 1) -> list[int]:
    return torch.randint(0, SIZES["vocab_size"], (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def read(runner: NativeRunner, seq: int, text: list[int]) -> torch.Tensor:
    """Prefill a prompt; return its KV cache [tokens, layers, 2, kv_heads, head_dim]."""
    runner.open(seq, GREEDY)
    runner.extend(seq, text)
    runner.flush()
    kv_slots = runner.sequences[seq].table.flat(np.arange(len(text)))
    torch.cuda.synchronize()  # it was read on the runner's own stream
    return runner.memory.data[torch.from_numpy(kv_slots // PAGE), :, :, :, torch.from_numpy(kv_slots % PAGE)].cpu()


@pytest.mark.parametrize("dtype", TOLERATED, ids=str)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
@pytest.mark.parametrize("offset", [0, 1, 255, 2048, 5000])
def test_flash_gives_what_the_masked_way_gives(offset: int, shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    heads, kv_heads, head_dim = shape
    assert choose_attend_chunk(DEVICE, dtype, *shape) is attend_by_flash
    for rows in (1, 2, 77, 300, 2048 - offset % 2048):
        torch.manual_seed(rows)
        qkv = torch.randn(rows, heads + 2 * kv_heads, head_dim).to(DEVICE, dtype)
        keys, values = torch.randn(2, kv_heads, offset + rows + 9, head_dim).to(DEVICE, dtype)[:, :, : offset + rows]
        found, expected = (attend(qkv[:, :heads], keys, values).double() for attend in (attend_by_flash, attend_masked))
        torch.testing.assert_close(found, expected, rtol=TOLERATED[dtype], atol=TOLERATED[dtype])


def test_a_row_that_saw_its_successor_would_be_noticed() -> None:
    torch.manual_seed(0)
    queries, (keys, values) = torch.randn(50, 8, 64), torch.randn(2, 8, 101, 64)
    queries, keys, values = (x.to(DEVICE, torch.bfloat16) for x in (queries, keys, values))
    shifted = attend_by_flash(queries, keys, values) - attend_masked(queries, keys[:, :100], values[:, :100])
    assert shifted.abs().max() > 5 * TOLERATED[torch.bfloat16]


def test_chunks_are_a_gpus_and_flash_runs_where_it_can(runner: NativeRunner, folder: Path) -> None:
    assert runner.prefill_chunk == 1 and runner.decoder.attend_chunk is attend_by_flash
    wide = load_native(folder, context_length=3000, device="cuda", dtype=torch.float32, cache_tokens=4000)
    assert wide.prefill_chunk == PREFILL_CHUNKS["cuda"] and wide.decoder.attend_chunk is attend_masked
    # the kernel takes heads of at most 256
    assert choose_attend_chunk(DEVICE, torch.bfloat16, 4, 2, 512) is attend_masked


def test_a_prompt_that_is_read_again_has_the_same_bits(runner: NativeRunner) -> None:
    expected = read(runner, 0, tokens(3000))
    read(runner, 1, tokens(700, seed=2))
    runner.close(0)
    read(runner, 2, tokens(400, seed=3))
    assert torch.equal(read(runner, 0, tokens(3000)), expected)
    runner.rewind(0, 0)
    runner.close(1)
    runner.extend(0, tokens(3000))
    runner.flush()
    runner.close(0)
    assert torch.equal(read(runner, 0, tokens(3000)), expected)
    assert not torch.equal(read(runner, 1, [5, *tokens(3000)[1:]]), expected)
    for seq in range(3):
        runner.close(seq)
    runner.check()


def test_logits_behind_a_long_prompt_are_those_of_the_masked_way(runner: NativeRunner, folder: Path) -> None:
    exact = load_native(folder, context_length=8000, device="cuda", dtype=torch.float64, cache_tokens=9000)
    rows = []
    for one in (exact, runner):
        one.open(0, GREEDY)
        one.extend(0, tokens(5000))
        rows.append(one.score([Feed(0, (1, 2, 3), (ROOT, 0, 1))])[0][2].logits.double())
        one.close(0)
    assert (rows[1] - rows[0]).abs().max() <= 0.1 * rows[0].abs().max()


def test_reading_a_prompt_waits_for_nothing(runner: NativeRunner) -> None:
    for turn in range(2):  # the first one makes buffers as large as they have to be
        runner.open(0, GREEDY)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error" if turn else "default")
        try:
            runner.extend(0, tokens(7000))
            runner.flush()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        runner.close(0)


def test_an_interrupt_between_chunks_leaves_nothing_of_a_prompt(
    runner: NativeRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = read(runner, 0, tokens(6000))
    runner.close(0)
    runner.open(0, GREEDY)
    real, left = runner.graphs.run_brought, [1]  # type: ignore[attr-defined]

    def interrupted(*given: Any) -> None:
        real(*given)
        if not left[0]:
            raise KeyboardInterrupt
        left[0] -= 1

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(runner.graphs, "run_brought", interrupted)  # type: ignore[attr-defined]
        runner.extend(0, tokens(6000))
        runner.flush()
    runner.check()
    assert len(runner.slots(0)) == 0 and runner.pool.free == runner.pool.pages
    other = read(runner, 1, tokens(500, seed=4))  # while the device may still be at work on what was given up
    runner.close(0)
    assert torch.equal(read(runner, 0, tokens(6000)), expected)
    runner.close(1)
    assert torch.equal(read(runner, 1, tokens(500, seed=4)), other)
    for seq in range(2):
        runner.close(seq)
