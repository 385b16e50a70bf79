"""Requests whose prompts share beginnings, in any order: none says anything else than alone.

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
from specbranch.core.pages import PAGE
from specbranch.models import loading
from specbranch.models.cpu.kernels import load_kernel
from specbranch.models.gpu.runner import GpuRunner
from tiny_pair import VOCABULARY, make_pair

SLOW_DTYPES = [pytest.param(name, marks=pytest.mark.slow) for name in ("float64", "graphs")]


@pytest.fixture(scope="module")
def stems_pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    return make_pair(tmp_path_factory.mktemp("stems"), positions=2048)


@pytest.fixture(params=[*SLOW_DTYPES, "compiled"])
def dtype(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str | None:
    """Of a computation in which a text does not depend on the batch; "graphs": by a GPU's runner, in plain torch."""
    if request.param == "graphs":
        monkeypatch.setattr(loading, "NativeRunner", lambda *given: GpuRunner(*given[:4]))
    if request.param != "compiled":
        return "float64"
    if load_kernel() is None:
        pytest.skip("no compiled kernels on this machine")
    monkeypatch.setenv("SPECBRANCH_LINEAR", "llvm")
    return None


def load(pair: tuple[str, str], dtype: str | None, **options: Any) -> LLM:
    given = {"context_length": STEM_CONTEXT, "keep_experience": False, **options}
    return LLM(*pair, device="cpu", dtype=dtype, options=given)


@pytest.mark.parametrize(
    ("count", "dtype"),
    [
        (16, "compiled"),
        pytest.param(16, "graphs", marks=pytest.mark.slow),
        pytest.param(300, "compiled", marks=pytest.mark.slow),
        pytest.param(100, "graphs", marks=pytest.mark.slow),
        pytest.param(100, "float64", marks=pytest.mark.slow),
    ],
    indirect=["dtype"],
)
def test_prompts_that_begin_alike_say_what_each_says_alone(
    count: int, stems_pair: tuple[str, str], dtype: str | None
) -> None:
    asked = random_requests(count, seed=count, vocabulary=VOCABULARY)
    with load(stems_pair, dtype, prefix_cache=False) as llm:
        alone = texts_alone(llm, asked)
    texts, stats = texts_together(load(stems_pair, dtype), asked, max_batch=16)
    assert compare_texts(asked, alone, texts) >= 0.8 * count
    assert stats.failed == 0


@pytest.mark.parametrize("dtype", [*SLOW_DTYPES, "compiled"], indirect=True)
def test_requests_that_are_preempted_for_want_of_pages_say_the_same(
    stems_pair: tuple[str, str], dtype: str | None
) -> None:
    asked = crossing_pages(8)
    with load(stems_pair, dtype, prefix_cache=False) as llm:
        alone = texts_alone(llm, asked)
    llm = load(stems_pair, dtype, cache_tokens=7 * PAGE)
    llm.scheduler.ahead = 1
    texts, stats = texts_together(llm, asked, max_batch=16)
    assert compare_texts(asked, alone, texts) == len(asked)
    assert stats.preemptions > 0 and stats.failed == 0


@pytest.mark.slow
def test_a_prompt_that_is_preempted_while_it_is_read_says_the_same(
    stems_pair: tuple[str, str], dtype: str | None
) -> None:
    some = random_requests(40, seed=9, vocabulary=VOCABULARY, cancelled=0.0)
    asked = [one for one in some if len(one.prompt) > PAGE][:8]
    asked[0] = replace(asked[0], params=replace(asked[0].params, max_tokens=100))
    with load(stems_pair, dtype, prefix_cache=False) as llm:
        alone = texts_alone(llm, asked)
    with load(stems_pair, dtype) as llm:
        texts, preemptions = texts_preempted(llm, asked, max_batch=8)
    assert compare_texts(asked, alone, texts) == len(asked) and preemptions > 0


@pytest.mark.parametrize("rounds", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_a_prompt_cancelled_midway_leaves_the_others_alone(
    rounds: int, stems_pair: tuple[str, str], dtype: str | None
) -> None:
    others = [
        replace(one, params=replace(one.params, max_tokens=40))
        for one in random_requests(30, seed=7, vocabulary=VOCABULARY)
        if len(one.prompt) < PAGE
    ][:5]
    rng = random.Random(rounds)
    prompt = [rng.randrange(3, VOCABULARY) for _ in range(STEM_CONTEXT - 100)]
    with load(stems_pair, dtype, prefix_cache=False) as llm:
        alone = texts_alone(llm, others)
    with load(stems_pair, dtype) as llm:
        texts, midway = cancel_in_prefill(llm, others, prompt, rounds)
        assert midway and [tuple(text) for text in texts] == alone
        again = Asked(prompt, SamplingParams(max_tokens=8), "autoregressive")  # of what is cached nothing is wrong
        found = llm.using("specbranch").generate([prompt], again.params)[0].token_ids
    with load(stems_pair, dtype, prefix_cache=False) as llm:
        assert texts_alone(llm, [again]) == [tuple(found)]


def test_a_text_that_differs_is_named() -> None:
    asked = random_requests(3, seed=1, vocabulary=VOCABULARY, cancelled=0.0)
    texts = [(1, 2), (3,), (4, 5)]
    assert compare_texts(asked, texts, texts) == 3
    with pytest.raises(AssertionError, match="1 texts differ from the same request alone"):
        compare_texts(asked, texts, [(1, 2), (7,), (4, 5)])
    with pytest.raises(AssertionError):  # nobody cancelled it
        compare_texts(asked, texts, [(1, 2), None, (4, 5)])
