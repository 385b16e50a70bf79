"""The native decoder on a GPU: the same numbers as on the CPU, the same tokens with every method, and a step that can be captured."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from specbranch.core.runner import Feed, Runner
from specbranch.core.slots import ROOT
from specbranch.models.native import NativeRunner, load_native
from specbranch.models.rows import collate
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
    assert torch.allclose(rows_after(runner, tokens).double(), expected, rtol=0, atol=1e-9 * expected.abs().max().item())


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
