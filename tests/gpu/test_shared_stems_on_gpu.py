"""Requests whose prompts share beginnings, on a GPU, in any order: none says anything else than alone.

Also when pages run short while prompts are computed, and when a prompt is cancelled midway.
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from shared_stems import (
    STEM_CONTEXT,
    Asked,
    cancel_in_prefill,
    compare_texts,
    crossing_pages,
    random_requests,
    texts_alone,
    texts_preempted,
    texts_together,
)
from specbranch import LLM, SamplingParams
from specbranch.config import ExecutorName
from specbranch.core.pages import PAGE
from specbranch.models.gpu.kernel_step import KernelStep
from tiny_pair import KERNEL_SIZES, VOCABULARY, make_pair

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def stems_pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    return make_pair(tmp_path_factory.mktemp("stems"), positions=16_384, sizes=KERNEL_SIZES)


def load(pair: tuple[str, str], executor: ExecutorName = "serial", dtype: str = "bfloat16", **options: Any) -> LLM:
    given = {"context_length": STEM_CONTEXT, "keep_experience": False, **options}
    llm = LLM(*pair, device="cuda", dtype=dtype, executor=executor, options=given)
    assert isinstance(llm.target_runner.graphs.step, KernelStep) == (dtype != "float32")  # type: ignore[attr-defined]
    return llm


@pytest.mark.parametrize(
    ("count", "executor", "dtype"),
    [(300, "serial", "bfloat16"), (100, "serial", "float16"), (100, "streams", "bfloat16"), (60, "serial", "float32")],
)
def test_prompts_that_begin_alike_say_what_each_says_alone(
    count: int, executor: ExecutorName, dtype: str, stems_pair: tuple[str, str]
) -> None:
    asked = random_requests(count, seed=count, vocabulary=VOCABULARY)
    with load(stems_pair, dtype=dtype, prefix_cache=False) as llm:
        alone = texts_alone(llm, asked)
    texts, stats = texts_together(load(stems_pair, executor, dtype), asked, max_batch=16)
    assert compare_texts(asked, alone, texts) >= 0.8 * count
    assert stats.failed == 0


def test_requests_that_are_preempted_for_want_of_pages_say_the_same(stems_pair: tuple[str, str]) -> None:
    asked = crossing_pages(24)
    with load(stems_pair, prefix_cache=False) as llm:
        alone = texts_alone(llm, asked)
    llm = load(stems_pair, cache_tokens=7 * PAGE)
    llm.scheduler.ahead = 1
    texts, stats = texts_together(llm, asked, max_batch=16)
    assert compare_texts(asked, alone, texts) == len(asked)
    assert stats.preemptions > 0 and stats.failed == 0


def test_a_prompt_that_is_preempted_while_it_is_read_says_the_same(stems_pair: tuple[str, str]) -> None:
    some = random_requests(40, seed=9, vocabulary=VOCABULARY, cancelled=0.0)
    asked = [one for one in some if len(one.prompt) > PAGE][:16]
    asked[0] = replace(asked[0], params=replace(asked[0].params, max_tokens=100))
    with load(stems_pair, prefix_cache=False) as llm:
        alone = texts_alone(llm, asked)
    with load(stems_pair) as llm:
        texts, _ = texts_preempted(llm, asked, max_batch=8)
    assert compare_texts(asked, alone, texts) == len(asked)


@pytest.mark.parametrize("rounds", [1, 3])
def test_a_prompt_cancelled_midway_leaves_the_others_alone(rounds: int, stems_pair: tuple[str, str]) -> None:
    """How much of the prompt a round computes follows from costs, so it may be all of it; the pages are free anyway."""
    others = [
        replace(one, params=replace(one.params, max_tokens=100))
        for one in random_requests(60, seed=7, vocabulary=VOCABULARY)
        if len(one.prompt) < PAGE
    ][:12]
    rng, context = random.Random(rounds), 16_000
    prompt = [rng.randrange(3, VOCABULARY) for _ in range(context - 100)]
    with load(stems_pair, prefix_cache=False, context_length=context) as llm:
        alone = texts_alone(llm, others)
        again = Asked(prompt, SamplingParams(max_tokens=8), "autoregressive")
        expected = texts_alone(llm, [again])
    with load(stems_pair, context_length=context) as llm:
        texts, _ = cancel_in_prefill(llm, others, prompt, rounds)
        assert [tuple(text) for text in texts] == alone
        found = llm.using("specbranch").generate([prompt], again.params)[0].token_ids  # what is cached is right
    assert [tuple(found)] == expected
