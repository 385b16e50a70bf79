"""Rounds of draft trees on a GPU: the device goes from verify to verify by itself, and no text changes."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from specbranch.clock.profile import CostProfile
from specbranch.config import SamplingParams, SpeculativeConfig
from specbranch.core.experience import Experience
from specbranch.core.forest import FOREST_VARIABLE
from specbranch.core.loop import Loop
from specbranch.core.methods import METHODS
from specbranch.core.prefill_budget import RoundLimits
from specbranch.core.request import Request
from specbranch.core.session import Session
from specbranch.exec.drafter import Drafter
from specbranch.exec.serial import Serial
from specbranch.exec.verifier import Verifier
from specbranch.models.gpu.runner import GpuRunner
from specbranch.models.loading import load_native
from tiny_models import some_tokens

pytestmark = pytest.mark.gpu
SIZES: dict[str, Any] = {
    "vocab_size": 301,
    "hidden_size": 384,
    "intermediate_size": 640,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
}
SIZES |= {"num_key_value_heads": 2, "max_position_embeddings": 2048, "initializer_range": 0.1}
COSTS = CostProfile(target=((1, 10.0), (512, 12.0)), draft=((1, 0.5), (512, 1.0)), host=0.1)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[GpuRunner, GpuRunner]:
    """A target, and a draft that is the target disturbed."""
    torch.manual_seed(1)
    model, folder = AutoModelForCausalLM.from_config(LlamaConfig(**SIZES)), tmp_path_factory.mktemp("pair")
    model.save_pretrained(folder / "target")
    for parameter in model.parameters():
        parameter.data.add_(torch.randn_like(parameter) * parameter.data.std() * 0.05)
    model.save_pretrained(folder / "draft")
    return loaded(folder / "target"), loaded(folder / "draft")


def loaded(folder: Path) -> GpuRunner:
    runner = load_native(folder, context_length=600, device="cuda", dtype="bfloat16", cache_tokens=300 * 256)
    assert isinstance(runner, GpuRunner)
    return runner


def session(number: int, rng: random.Random) -> Session:
    params = SamplingParams(temperature=rng.choice((0.0, 0.9)), max_tokens=rng.choice((3, 40, 90)), ignore_eos=True)
    prompt = some_tokens(rng.choice((5, 40, 300)), number % 5)
    return Session(number, prompt, Request(params, number, len(prompt)), 600)


def run(executor: Serial, sessions: list[Session], method: str, at_once: int) -> Loop:
    """Decode sessions, a new one for each that ends."""
    limits = RoundLimits(prefill_chunk=1, prompt_tokens=256, prompt_tokens_alone=executor.target.runner.most_prefill)
    loop, waiting = Loop(executor, limits=limits), list(sessions)
    config = SpeculativeConfig(method=method)
    while waiting or loop.live:
        while waiting and len(loop.members) < at_once:
            one = waiting.pop(0)
            loop.join(one, METHODS[method].start(one, config, Experience(COSTS)))
        loop.step()
    return loop


@pytest.mark.parametrize("at_once", [1, 3, 16])
def test_texts_are_those_of_plain_decoding(
    at_once: int, pair: tuple[GpuRunner, GpuRunner], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(FOREST_VARIABLE, raising=False)  # they are on by default
    sessions, plain = ([session(number, random.Random(number)) for number in range(at_once * 2 + 2)] for _ in range(2))
    works = Serial(Verifier(pair[0]), Drafter(pair[1]))
    rounds, decode = list[bool](), works.decode_forest

    def noted(*given: Any) -> Any:
        found = decode(*given)
        rounds.append(found is not None)
        return found

    works.decode_forest = noted  # type: ignore[method-assign]
    loop = run(works, sessions, "specbranch", at_once)
    assert not loop._forest._has_failed
    assert sum(rounds) > 20
    run(Serial(Verifier(pair[0])), plain, "autoregressive", 1)
    for one, other in zip(sessions, plain, strict=True):
        assert one.error is None, one.error
        assert one.tokens == other.tokens, one.number
        one.stats.check()
    assert sum(one.stats.accepted for one in sessions) > 50
    for runner in pair:
        runner.check()
