"""The native decoder on a GPU: the numbers of the CPU, the same tokens with every method, and a step that can be
captured."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from specbranch.config import SamplingParams
from specbranch.core.orders import Context, Verify
from specbranch.core.request import Request
from specbranch.core.runner import Ask, Feed, Runner, Trial
from specbranch.core.slots import ROOT
from specbranch.models.loading import load_native
from specbranch.models.runners.native import NativeRunner
from specbranch.models.sampling.logit_rows import collate
from test_identity_models import SHAPINGS, compare
from tiny_models import CONFIGS, GREEDY, in_double, logits_of, saved, some_tokens, tiny

pytestmark = pytest.mark.gpu


def on_gpu(path: Path, *, context_length: int, device: str, dtype: torch.dtype) -> Runner:
    return load_native(path, context_length=context_length, device="cuda", dtype=dtype)


def rows_after(runner: NativeRunner, tokens: list[int]) -> torch.Tensor:
    runner.open(1, GREEDY)
    runner.extend(1, tokens[:-3])
    rows = runner.score([Feed(1, tuple(tokens[-3:]), (ROOT, 0, 1))])[0]
    runner.close(1)
    return collate(rows).cpu()


@pytest.mark.parametrize("kind", CONFIGS)
def test_logits_on_a_gpu_equal_those_of_transformers(kind: str, tmp_path: Path) -> None:
    model, tokens = tiny(kind), some_tokens(300)
    runner = load_native(saved(model, tmp_path), context_length=512, device="cuda", dtype=torch.float64)
    expected = logits_of(in_double(model), tokens)[-3:]
    assert torch.allclose(
        rows_after(runner, tokens).double(), expected, rtol=0, atol=1e-9 * expected.abs().max().item()
    )


@pytest.mark.parametrize("shaping", SHAPINGS)
def test_every_method_gives_autoregressive_tokens_on_a_gpu(shaping: str, tmp_path: Path) -> None:
    target = tiny("llama-llama3")
    saved(target, tmp_path / "target")
    torch.manual_seed(5)
    for parameter in target.parameters():
        parameter.data.add_(torch.randn_like(parameter) * parameter.data.std() * 0.12)
    compare(on_gpu, tmp_path / "target", saved(target, tmp_path / "draft"), SHAPINGS[shaping], runs=2)


def test_bfloat16_is_the_default_on_a_gpu(tmp_path: Path) -> None:
    runner = load_native(saved(tiny("llama"), tmp_path), context_length=64, device="cuda")
    assert runner.dtype == torch.bfloat16
    assert rows_after(runner, some_tokens(20)).isfinite().all()


def test_questions_wait_for_nothing_but_their_one_read(tmp_path: Path) -> None:
    runner = load_native(saved(tiny("qwen3"), tmp_path), context_length=300, device="cuda")
    requests = [
        Request(SamplingParams(**shaping), 1, 4, rule=rule)
        for shaping in SHAPINGS.values()
        for rule in ("match", "ratio")
    ]
    for turn in range(2):  # the first one captures, and makes buffers as large as they have to be
        for seq, request in enumerate(requests):
            runner.open(seq, request)
            runner.extend(seq, some_tokens(40, seed=seq))
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error" if turn else "default")
        try:
            _ask_everything(runner, len(requests))
        finally:
            torch.cuda.set_sync_debug_mode("default")
        for seq in range(len(requests)):
            runner.close(seq)
    runner.check()


def _ask_everything(runner: NativeRunner, sequences: int) -> None:
    work = [Feed(seq, (1, 2, 3), (ROOT, 0, 0)) for seq in range(sequences)]
    runner.propose(work, [Ask(seq, node, 3) for seq in range(sequences) for node in range(3)])
    for seq in range(sequences):
        runner.keep(seq, (0, 2), 1)  # moves a slot
    orders = [Verify(Context(0, ()), (4, 5), (ROOT, ROOT)) for _ in range(sequences)]
    feeds = [Feed(seq, (7, 4, 5), (0, 1, 1)) for seq in range(sequences)]
    trials = [Trial(seq, order, 1, (2, 3), logprobs=2) for seq, order in enumerate(orders)]
    assert len(runner.verify(feeds, trials)()) == sequences


def test_memory_is_flat_over_many_requests(tmp_path: Path) -> None:
    runner = load_native(saved(tiny("llama"), tmp_path), context_length=600, device="cuda")
    used: list[int] = []
    for number in range(120):
        runner.open(0, Request(SamplingParams(), number, 4))
        runner.extend(0, some_tokens(20 + 9 * (number % 40), seed=number))
        for _ in range(3):
            runner.propose([Feed(0, (1, 2), (ROOT, 0))], [Ask(0, 1)])
            runner.keep(0, (0, 1), 2)
        runner.close(0)
        used.append(torch.cuda.memory_reserved())
    runner.check()
    assert runner.pool.free == runner.pool.pages and used[-1] <= used[40]
