"""Many requests on real decoders: each has the bits it has alone, in chunks, preempted, in any batch."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from specbranch import LLM, AsyncLLM, SamplingParams
from specbranch.core.orders import Context, Prefill
from specbranch.core.request import Request
from specbranch.core.runner import Feed
from specbranch.core.slots import ROOT
from specbranch.errors import SpecBranchError
from specbranch.exec.verifier import Verifier
from specbranch.exec.worker import Worker
from specbranch.models.cpu.kernels import load_kernel
from specbranch.models.runners.native import NativeRunner
from tiers import tiered

METHODS = ("autoregressive", "specbranch", "speculative", "tree", "pearl", "lookup")


def prompts(count: int, longest: int, seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(3, 400) for _ in range(rng.randint(1, longest))] for _ in range(count)]


@pytest.mark.slow
def test_chunks_and_preemptions_leave_every_bit_as_it_is(
    pair: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if load_kernel() is not None:
        monkeypatch.setenv("SPECBRANCH_LINEAR", "llvm")
    asked = prompts(12, 260)
    params = SamplingParams(temperature=0.7, seed=5, max_tokens=90, logprobs=2, ignore_eos=True)
    with LLM(*pair, device="cpu", options={"context_length": 400}) as llm:
        alone = [llm.using(METHODS[at % 6]).generate([one], params)[0] for at, one in enumerate(asked)]

    async def together() -> tuple[list[Any], Any]:
        # 5 pages: a prompt of 250 tokens and its answer take two
        async with AsyncLLM(LLM(*pair, device="cpu", options={"context_length": 400, "cache_tokens": 1280})) as engine:
            engine._llm.scheduler.ahead = 1
            waits = [engine.generate(one, params, {"method": METHODS[at % 6]}) for at, one in enumerate(asked)]
            outputs = await asyncio.gather(*waits)
            runner = engine._llm.target_runner
            assert isinstance(runner, NativeRunner)
            runner.check()
            return outputs, engine.stats()

    outputs, stats = asyncio.run(together())
    assert [one.token_ids for one in outputs] == [one.token_ids for one in alone]
    if load_kernel() is not None:
        assert [one.logprobs for one in outputs] == [one.logprobs for one in alone]
    assert stats.preemptions > 0 and stats.finished == 12 and all(one.free == one.total for one in stats.kv_slots)


@pytest.mark.slow
@pytest.mark.parametrize("runner", ["native", "transformers"])
def test_a_text_prefilled_in_chunks_is_that_prefilled_at_once(
    runner: Any, pair: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a prompt, and of an answer behind it, which is read by steps."""
    exact = runner == "native" and load_kernel() is not None
    monkeypatch.setenv("SPECBRANCH_LINEAR", "llvm" if exact else "torch")
    options = {"runner": runner, "context_length": 400, "prefix_cache": False}
    with LLM(pair[0], method="autoregressive", device="cpu", options=options) as llm:
        model, text = llm.target_runner, tuple(prompts(1, 1)[0] * 330)
        model.prefill_chunk = 64  # type: ignore[misc]
        request = Request(SamplingParams(), 0, 250)
        rows = []
        for most in (None, 1, 64, 150):
            worker = Verifier(model)
            worker.open(0, request)
            held = _read_on(worker, text, most) if most else [0]
            _, rest = worker.align(0, Context(0, text))
            model.feed([Feed(0, tuple(rest), tuple(range(ROOT, len(rest) - 1)))])
            rows.append([model.margin(0, len(rest) - 1, token, 7) for token in range(100)])
            worker.free(0)
            if most:
                assert held[-1] == len(text) - 1 and held[0] == max(most // 64, 1) * 64
                assert {at % 64 for at in held if at < 249} == {0}  # whole chunks, and all of the prompt but its last
        for found in rows[1:]:
            assert found == rows[0] if exact else found == pytest.approx(rows[0], abs=1e-4)


def _read_on(worker: Worker, text: Sequence[int], most: int) -> list[int]:
    held = [0]
    while held[-1] < len(text) - 1:
        base = held[-1]
        held.append(worker.continue_prefill(0, Prefill(Context(base, tuple(text[base:-1]), text), most)))
    return held[1:]


@pytest.mark.slow
def test_smollm2_gives_each_the_text_it_gives_alone(default_model: Path) -> None:
    asked = [
        "Why is the sky blue?",
        "def fibonacci(n):\n" * 30,
        "Once upon a time there was a branch. " * 25,
        "The capital of France is",
        "1, 2, 3, 4, 5, 6,",
        "List three colours.",
    ]
    hows: list[dict[str, Any]] = [
        {},
        {"method": "tree"},
        {"speculative": False},
        {"method": "speculative"},
        {},
        {"method": "lookup"},
    ]
    params = [SamplingParams(temperature=0.7 * (at % 2), seed=at, max_tokens=40) for at in range(6)]
    with LLM(device="cpu", options={"context_length": 1024}) as llm:
        plain = llm.using("autoregressive")
        alone = [plain.generate(prompt, one) for prompt, one in zip(asked, params, strict=True)]

    async def together() -> tuple[list[Any], Any]:
        async with AsyncLLM(LLM(device="cpu", options={"context_length": 1024, "cache_tokens": 1024})) as engine:
            engine._llm.scheduler.ahead = 1
            waits = [engine.generate(prompt, one, how) for prompt, one, how in zip(asked, params, hows, strict=True)]
            return await asyncio.gather(*waits), engine.stats()

    outputs, stats = asyncio.run(together())
    assert [one.token_ids for one in outputs] == [one.token_ids for one in alone]
    assert all(one.free == one.total for one in stats.kv_slots)


@pytest.mark.parametrize("linear", tiered(("llvm", "torch"), "llvm".__eq__))
def test_texts_depend_neither_on_the_budget_of_prompt_tokens_nor_on_packing(
    linear: str, pair: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if linear == "llvm" and load_kernel() is None:
        pytest.skip("no compiled kernels on this machine")
    monkeypatch.setenv("SPECBRANCH_LINEAR", linear)
    asked = [*prompts(6, 12), *prompts(3, 150, seed=1)]
    params = SamplingParams(temperature=0.7, seed=5, max_tokens=12, ignore_eos=True)
    texts = []
    for most, at_once in ((None, 1), (None, 9), (1, 9), (40, 9), (1000, 4)):
        options = {"context_length": 400, "max_num_batched_tokens": most, "max_batch": at_once, "prefix_cache": False}
        with LLM(*pair, method="speculative", device="cpu", options=options) as llm:
            texts.append([one.token_ids for one in llm.generate(asked, params)])
            assert isinstance(llm.target_runner, NativeRunner)
            llm.target_runner.check()
    assert all(found == texts[0] for found in texts[1:])


def test_a_prompt_longer_than_the_context_is_refused_and_the_others_are_answered(pair: tuple[str, str]) -> None:
    async def together() -> list[Any]:
        options = {"context_length": 64, "max_num_batched_tokens": 8}
        async with AsyncLLM(LLM(*pair, device="cpu", options=options)) as engine:
            params = SamplingParams(max_tokens=6, ignore_eos=True)
            asked = [engine.generate([5] * length, params) for length in (3, 80, 50)]
            return list(await asyncio.gather(*asked, return_exceptions=True))

    short, long, other = asyncio.run(together())
    assert isinstance(long, SpecBranchError) and "80 tokens" in str(long)
    assert len(short.token_ids) == len(other.token_ids) == 6
