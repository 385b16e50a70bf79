"""The native decoder on a GPU: the same numbers as on the CPU, the same tokens with every method, and a step that can be captured."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from specbranch.core.runner import Feed, Runner
from specbranch.core.slots import ROOT, Slots
from specbranch.models.native import NativeRunner, load_native
from specbranch.models.rows import collate
from specbranch.models.steps import rows_of_nodes
from test_identity_models import SHAPINGS, compare
from tiny_models import CONFIGS, in_double, logits_of, saved, some_tokens, tiny

pytestmark = pytest.mark.gpu


def on_gpu(path: Path, *, context_length: int, device: str, dtype: torch.dtype) -> Runner:
    return load_native(path, context_length=context_length, device="cuda", dtype=dtype)


def rows_after(runner: NativeRunner, tokens: list[int]) -> torch.Tensor:
    runner.open(1)
    runner.extend(1, tokens[:-3])
    rows = runner.feed([Feed(1, tuple(tokens[-3:]), (ROOT, 0, 1))])[0]
    runner.close(1)
    return collate(rows).cpu()


@pytest.mark.parametrize("kind", CONFIGS)
def test_logits_on_a_gpu_equal_those_of_transformers(kind: str, tmp_path: Path) -> None:
    model, tokens = tiny(kind), some_tokens(300)
    runner = load_native(saved(model, tmp_path), context_length=512, device="cuda", dtype=torch.float64)
    expected = logits_of(in_double(model), tokens)[-3:]
    assert torch.allclose(rows_after(runner, tokens).double(), expected, rtol=0, atol=1e-9 * expected.abs().max().item())


@pytest.mark.parametrize("shaping", SHAPINGS)
def test_every_method_gives_autoregressive_tokens_on_a_gpu(shaping: str, tmp_path: Path) -> None:
    target = tiny("llama-llama3")
    saved(target, tmp_path / "target")
    torch.manual_seed(5)
    for parameter in target.parameters():
        parameter.data.add_(torch.randn_like(parameter) * parameter.data.std() * 0.12)
    compare(on_gpu, tmp_path / "target", saved(target, tmp_path / "draft"), SHAPINGS[shaping], runs=2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_step_can_be_captured_in_a_graph_and_replayed_on_other_tokens(dtype: torch.dtype, tmp_path: Path) -> None:
    runner = load_native(saved(tiny("qwen3"), tmp_path), context_length=256, device="cuda", dtype=dtype)
    cache = runner._new_cache(256)
    slots = Slots(256)

    def step(tokens: list[int]):  # type: ignore[no-untyped-def]
        slots.truncate(0)
        return runner._planner.step([rows_of_nodes(cache, slots, slots.grow(tokens, [ROOT, 0, 1, 0]))])

    with torch.inference_mode():
        captured = step([1, 2, 3, 4])
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            runner.decoder.logits(runner.decoder.forward(captured))  # warm up before the capture
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            logits = runner.decoder.logits(runner.decoder.forward(captured))
        captured.tokens.copy_(torch.tensor([9, 8, 7, 6]))
        graph.replay()
        torch.cuda.synchronize()
        replayed = logits.clone()
        eager = runner.decoder.logits(runner.decoder.forward(step([9, 8, 7, 6])))
    assert torch.equal(replayed, eager)


def test_bfloat16_is_the_default_on_a_gpu(tmp_path: Path) -> None:
    runner = load_native(saved(tiny("llama"), tmp_path), context_length=64, device="cuda")
    assert runner.dtype == torch.bfloat16
    assert rows_after(runner, some_tokens(20)).isfinite().all()
