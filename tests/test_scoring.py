"""How likely a given text is: what the model's own logits say of it, whoever reads it and in whatever batch."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
import torch
from transformers import AutoModelForCausalLM

from specbranch import LLM, AsyncLLM, SamplingParams
from specbranch.core.rounds import GIVEN_AT_ONCE
from specbranch.errors import BadParameter

TEXT = "If the guess was right, nothing has to be done again; if not, the other branch is at hand. " * 3


ON_GPU = pytest.param(("native", "cuda"), marks=pytest.mark.gpu, id="native on a GPU")


@pytest.fixture(scope="module", params=[("native", "cpu"), ("transformers", "cpu"), ON_GPU], ids=" on a ".join)
def llm(pair: tuple[str, str], request: pytest.FixtureRequest, nothing_kept: None) -> Iterator[LLM]:
    runner, device = request.param
    with LLM(*pair, dtype="float64", device=device, options={"context_length": 480, "runner": runner}) as loaded:
        yield loaded


def expected(target: str, ids: list[int]) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float64)
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0]
    return logits.float().log_softmax(-1)  # as log-probabilities are reported


@pytest.mark.parametrize("length", [2, GIVEN_AT_ONCE, GIVEN_AT_ONCE + 1, GIVEN_AT_ONCE + 2, 3 * GIVEN_AT_ONCE + 5])
def test_a_text_is_as_likely_as_the_models_logits_say(llm: LLM, pair: tuple[str, str], length: int) -> None:
    ids = llm.tokenizer.encode(TEXT)[:length]
    assert len(ids) == length
    reported, logs = llm.score(ids, 3), expected(pair[0], ids)
    assert len(reported) == length - 1
    for at, one in enumerate(reported):
        assert one.logprob == pytest.approx(logs[at, ids[at + 1]].item(), abs=1e-5)
        best = logs[at].topk(3)
        assert [token for token, _ in one.top] == best.indices.tolist()
        assert [logprob for _, logprob in one.top] == pytest.approx(best.values.tolist(), abs=1e-5)


def test_what_ends_an_answer_ends_no_score(llm: LLM) -> None:
    ids = [*llm.tokenizer.encode("Smile"), *llm.tokenizer.eos_ids, *llm.tokenizer.encode("and wave")]
    assert len(llm.score(ids)) == len(ids) - 1
    assert llm.score(ids[:1]) == () and len(llm.score("Smile")) == len(llm.tokenizer.encode("Smile")) - 1
    with pytest.raises(BadParameter, match="the context holds 480"):
        llm.score([5] * 480)


@pytest.mark.slow
def test_answers_and_scores_in_a_batch_are_what_they_are_alone(pair: tuple[str, str]) -> None:
    texts, params = [TEXT, TEXT[9:], "Smile"], SamplingParams(temperature=0.8, seed=1, max_tokens=30, ignore_eos=True)

    async def work() -> tuple[list[object], list[object], tuple[int, ...]]:
        async with AsyncLLM(LLM(*pair, dtype="float64", device="cpu", options={"context_length": 480})) as engine:
            answers = [engine.generate(text, params) for text in texts]
            scores = [engine.score(text, 2) for text in texts]
            both = await asyncio.gather(*answers, *scores)
            kv_slots = engine.stats().kv_slots
            assert all(one.free == one.total for one in kv_slots)
            return [one.token_ids for one in both[:3]], list(both[3:]), await engine.score([5])

    said, scored, nothing = asyncio.run(work())
    with LLM(*pair, dtype="float64", device="cpu", options={"context_length": 480}, method="autoregressive") as alone:
        assert said == [alone.generate(text, params).token_ids for text in texts]
        assert scored == [alone.score(text, 2) for text in texts] and nothing == ()
