"""A target whose weights are NaN or infinite ends its requests with a sentence, whatever the method and the rule."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from broken_weights import DAMAGE, NAN, damage
from specbranch import LLM, SamplingParams
from specbranch.config import Rule
from specbranch.core.orders import Context, Verify
from specbranch.core.request import Request
from specbranch.errors import ModelError
from specbranch.exec.verifier import Verifier
from specbranch.models.gpu.runner import GpuRunner
from specbranch.models.loading import load_native
from tiny_pair import make_pair

SAMPLED = SamplingParams(max_tokens=8, temperature=0.8, seed=1)
SHAPED = replace(SAMPLED, top_k=20, top_p=0.9, min_p=0.01, logprobs=2)


@pytest.fixture(scope="module", params=DAMAGE)
def broken(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    target, draft = make_pair(tmp_path_factory.mktemp("broken"))
    damage(Path(target), DAMAGE[request.param])
    return target, draft


@pytest.fixture(scope="module")
def engine(broken: tuple[str, str]) -> Iterator[LLM]:
    with LLM(*broken, device="cpu", method="specbranch") as llm:
        yield llm


@pytest.mark.parametrize("params", [SamplingParams(max_tokens=8), SAMPLED, SHAPED], ids=["greedy", "sampled", "shaped"])
@pytest.mark.parametrize("how", [{"method": "autoregressive"}, {"rule": "match"}, {"rule": "ratio"}], ids=str)
def test_a_broken_target_is_said(engine: LLM, how: dict[str, str], params: SamplingParams) -> None:
    with pytest.raises(ModelError, match="logits of the target are not finite"):
        engine.using(speculative={"method": "speculative", **how}).generate("one two three", params)


def test_a_broken_target_has_no_log_probabilities(engine: LLM) -> None:
    with pytest.raises(ModelError, match="logits of the target are not finite"):
        engine.score("one two three")


def test_a_broken_target_on_transformers_is_said(broken: tuple[str, str]) -> None:
    with pytest.raises(ModelError, match="are not finite"):
        LLM(broken[0], device="cpu", method="autoregressive", options={"runner": "transformers"})


@pytest.mark.parametrize("params", [SAMPLED, SHAPED], ids=["in a graph", "shaped"])
@pytest.mark.parametrize("rule", ["match", "ratio"])
def test_a_device_that_judges_by_itself_says_it_too(
    broken: tuple[str, str], rule: Rule, params: SamplingParams
) -> None:
    """The GPU's runner on a CPU: its steps choose inside, or behind themselves where logits are shaped."""
    verifier = Verifier(GpuRunner(load_native(broken[0], context_length=128).decoder, 128))
    verifier.open(0, Request(params, 0, 3, 0, rule))
    scored, _ = verifier.score({0: Verify(Context(0, (5, 6, 8)), (9, 10))}, {})
    assert verifier.judge(scored, {}) == {}


def test_a_request_beside_a_broken_one_goes_on(tmp_path: Path) -> None:
    """The embedding of one token is NaN: who reads it fails, and nobody else."""
    target, _ = make_pair(tmp_path)
    with LLM(target, device="cpu", method="autoregressive") as sound:
        expected = sound.generate([[5, 6, 8]], SamplingParams(max_tokens=4))[0]
    assert 300 not in expected.token_ids
    damage(Path(target), lambda weights: weights["model.embed_tokens.weight"][300].fill_(NAN))
    with LLM(target, device="cpu", method="autoregressive", options={"max_batch": 2}) as llm:
        answers = llm.generate([[5, 6, 8], [5, 6, 300]], SamplingParams(max_tokens=4))
    assert answers[0].token_ids == expected.token_ids
    assert answers[1].finish_reason == "error"
