"""Position and prompt length alone decide which code computes a token, so recomputed text has the same bits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from specbranch.config import SamplingParams
from specbranch.core.orders import Context, Verify
from specbranch.core.request import Request
from specbranch.exec.verifier import Verifier
from specbranch.models.cpu.kernels import load_kernel
from specbranch.models.loading import load_native
from specbranch.models.runners.native import NativeRunner
from tiny_models import saved, some_tokens, tiny

pytestmark = pytest.mark.skipif(load_kernel() is None, reason="no compiled kernels on this machine")

PROMPTS = (5, 17, 40, 256, 257, 300, 530)  # short ones, around a chunk's end, several chunks
ANSWER = 90


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> NativeRunner:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPECBRANCH_LINEAR", "llvm")
        return load_native(saved(tiny("llama"), Path(tmp_path_factory.mktemp("recovery"))), context_length=1000)


def opened(runner: NativeRunner, prompt: int) -> Verifier:
    """A worker with a session 0 and nothing read of it."""
    if 0 in runner.sequences:
        runner.close(0)
    verifier = Verifier(runner)
    verifier.open(0, Request(SamplingParams(), 0, prompt))
    return verifier


def row_behind(verifier: Verifier, base: int, tokens: list[int]) -> torch.Tensor:
    """The logits behind a text of which the worker holds the first `base` tokens."""
    scored, failed = verifier.score({0: Verify(Context(base, tuple(tokens[base:]), tokens))})
    assert not failed
    assert isinstance(verifier.runner, NativeRunner)
    row = verifier.runner._rows[0][scored.judged[0].root].logits.clone()
    verifier.judge(scored, {})
    return row


@pytest.mark.parametrize("prompt", PROMPTS)
def test_a_worker_that_prefills_a_text_anew_has_the_same_bits(runner: NativeRunner, prompt: int) -> None:
    text = some_tokens(prompt + ANSWER)
    worker = opened(runner, prompt)
    for length in range(prompt, len(text) + 1):
        expected = row_behind(worker, length - 1 if length > prompt else 0, text[:length])
    for lost in (1, 2, 16, 17, 40, 89, 90):
        fresh = opened(runner, prompt)
        row_behind(fresh, 0, text[: len(text) - lost])
        assert torch.equal(row_behind(fresh, len(text) - lost, text), expected), f"{lost} tokens unread"


@pytest.mark.parametrize("prompt", PROMPTS)
def test_a_worker_that_goes_back_has_the_same_bits(runner: NativeRunner, prompt: int) -> None:
    text = some_tokens(prompt + ANSWER)
    worker = opened(runner, prompt)
    expected = row_behind(worker, 0, text)
    for back in (prompt, prompt + 1, prompt + 30, len(text) - 1):
        row_behind(worker, back, text[:back])
        assert torch.equal(row_behind(worker, back, text), expected), f"went back to {back} of {len(text)}"
    for parting in (1, prompt // 2):  # another prompt: it is read whole
        row_behind(worker, 0, [*text[:parting], *some_tokens(len(text) - parting, seed=5)])
        assert torch.equal(row_behind(worker, 0, text), expected)
