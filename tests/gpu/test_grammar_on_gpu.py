"""Answers that follow a grammar, on a GPU: every method gives the tokens of plain decoding, alone and among others."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from schema_check import matches
from schemas import SCHEMAS
from specbranch import LLM, SamplingParams
from specbranch.config import ExecutorName
from specbranch.core.methods import METHODS
from tiny_pair import KERNEL_SIZES, make_pair

pytestmark = pytest.mark.gpu
pytest.importorskip("llguidance")

PROMPT = "A branch is a guess about what the large model will say next."
CONSTRAINTS: tuple[dict[str, Any], ...] = (
    {"json_schema": SCHEMAS["nested"]},
    {"json_schema": SCHEMAS["long keys"]},
    {"regex": r"[A-Z][a-z]{2,6}( [a-z]{2,5}){2,5}\."},
    {"choice": ["red", "green", "greenish", "transparent"]},
)


@pytest.fixture(scope="module", params=["serial", "streams"])
def llm(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    executor: ExecutorName = request.param
    pair = make_pair(tmp_path_factory.mktemp("pair"), sizes=KERNEL_SIZES)
    options = {"context_length": 400, "keep_experience": False}
    with LLM(*pair, "specbranch", dtype="bfloat16", device="cuda", executor=executor, options=options) as loaded:
        yield loaded


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_every_method_gives_the_answer_of_plain_decoding(llm: LLM, temperature: float) -> None:
    for constraint in CONSTRAINTS:
        params = SamplingParams(max_tokens=200, temperature=temperature, seed=5, **constraint)
        plain = llm.using(method="autoregressive").generate(PROMPT, params)
        if "json_schema" in constraint and plain.finish_reason == "stop":
            assert matches(json.loads(plain.text), constraint["json_schema"])
        for method in METHODS:
            found = llm.using(method=method).generate(PROMPT, params)
            assert (found.token_ids, found.finish_reason) == (plain.token_ids, plain.finish_reason), method


@pytest.mark.parametrize("method", ["autoregressive", "specbranch", "lookup"])
def test_a_batch_with_and_without_grammars_gives_what_each_gives_alone(llm: LLM, method: str) -> None:
    view, free = llm.using(method=method), SamplingParams(max_tokens=60, temperature=0.8, seed=1)
    asked = [*(replace(free, max_tokens=200, **one) for one in CONSTRAINTS), *(replace(free, seed=n) for n in range(6))]
    alone = [view.generate(PROMPT, params).token_ids for params in asked]
    answers = [llm.core.make_samples(llm.core.encode(PROMPT), params, view.decoding)[0] for params in asked]
    found = [answer.output().token_ids for answer in llm.core.run_all(answers, len(answers))]
    assert found == alone
