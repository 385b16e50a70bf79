"""The streams executor over a GPU's runners, here on the CPU, under real grammars: the twin of
`tests/gpu/test_grammar_on_gpu.py`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from schemas import SCHEMAS
from specbranch import LLM, SamplingParams, assembly
from specbranch.core.methods import METHODS
from specbranch.exec.streams import Streams
from specbranch.models import loading
from specbranch.models.gpu.runner import GpuRunner

pytest.importorskip("llguidance")
pytestmark = pytest.mark.slow  # its quick sister, with toy grammars, is test_grammar_gpu_runner.py

PROMPT = "A branch is a guess about what the large model will say next."
CONSTRAINTS: tuple[dict[str, Any], ...] = (
    {"json_schema": SCHEMAS["nested"]},
    {"json_schema": SCHEMAS["long keys"]},
    {"regex": r"[A-Z][a-z]{2,6}( [a-z]{2,5}){2,5}\."},
    {"choice": ["red", "green", "greenish", "transparent"]},
)


@pytest.fixture(scope="module")
def streams(pair: tuple[str, str], nothing_kept: None) -> Iterator[LLM]:
    def runner(decoder: Any, context_length: int, tail: int, pages: int | None = None, *_: Any) -> GpuRunner:
        return GpuRunner(decoder, context_length, tail, pages)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loading, "native_runner", runner)
        patch.setattr(assembly, "Serial", Streams)
        options = {"context_length": 300, "keep_experience": False}
        with LLM(*pair, "specbranch", dtype="float64", device="cpu", options=options) as loaded:
            yield loaded


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_every_method_gives_the_answer_of_plain_decoding(streams: LLM, method: str, temperature: float) -> None:
    for constraint in CONSTRAINTS:
        params = SamplingParams(max_tokens=190, temperature=temperature, seed=5, **constraint)
        plain = streams.using(method="autoregressive").generate(PROMPT, params)
        found = streams.using(method=method).generate(PROMPT, params)
        assert (found.token_ids, found.finish_reason) == (plain.token_ids, plain.finish_reason)


@pytest.mark.parametrize("method", ["autoregressive", "specbranch", "lookup"])
def test_a_batch_with_and_without_grammars_gives_what_each_gives_alone(streams: LLM, method: str) -> None:
    view, free = streams.using(method=method), SamplingParams(max_tokens=40, temperature=0.8, seed=1)
    asked = [*(replace(free, max_tokens=190, **one) for one in CONSTRAINTS), *(replace(free, seed=n) for n in range(4))]
    alone = [view.generate(PROMPT, params).token_ids for params in asked]
    core = streams.core
    answers = [core.make_samples(core.encode(PROMPT), params, view.decoding)[0] for params in asked]
    assert [answer.output().token_ids for answer in core.run_all(answers, len(answers))] == alone
