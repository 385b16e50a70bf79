"""Sessions that need the host share the steps of others that decode plainly on a GPU: no text changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from specbranch.config import Rule, SamplingParams, SpeculativeConfig
from specbranch.core.experience import Experience
from specbranch.core.loop import Loop
from specbranch.core.methods import METHODS
from specbranch.core.prefill_budget import RoundLimits
from specbranch.core.request import Request
from specbranch.core.runner import VerifyWork
from specbranch.core.session import Session
from specbranch.exec.drafter import Drafter
from specbranch.exec.serial import Serial
from specbranch.exec.streams import Streams
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
PLAIN = 16
HOST_BOUND: list[tuple[str, Rule]] = [
    ("autoregressive", "ratio"),
    ("speculative", "ratio"),
    ("speculative", "match"),
    ("pearl", "match"),
    ("lookup", "match"),
]
SHAPINGS: list[dict[str, Any]] = [{"temperature": 0.9}, {"temperature": 0.8, "top_p": 0.8, "logprobs": 2}]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[GpuRunner, GpuRunner]:
    """A target, and a draft that is the target disturbed."""
    torch.manual_seed(1)
    model, folder = AutoModelForCausalLM.from_config(LlamaConfig(**SIZES)), tmp_path_factory.mktemp("pair")
    model.save_pretrained(folder / "target")
    for parameter in model.parameters():
        parameter.data.add_(torch.randn_like(parameter) * parameter.data.std() * 0.1)
    model.save_pretrained(folder / "draft")
    return loaded(folder / "target"), loaded(folder / "draft")


def loaded(folder: Path) -> GpuRunner:
    runner = load_native(folder, context_length=600, device="cuda", dtype="bfloat16", cache_tokens=64 * 256)
    assert isinstance(runner, GpuRunner)
    return runner


def session(number: int, how: tuple[str, Rule] | None, shaping: dict[str, Any]) -> tuple[Session, Any]:
    params, prompt = SamplingParams(**shaping, max_tokens=60, ignore_eos=True), some_tokens(20 + number, number)
    method, rule = how or ("autoregressive", "match")
    one = Session(number, prompt, Request(params, number, len(prompt), rule=rule), 600)
    config = SpeculativeConfig(method=method, num_speculative_tokens=3)
    return one, METHODS[method].start(one, config, Experience())


@pytest.mark.parametrize("executor", [Serial, Streams])
@pytest.mark.parametrize("shaping", SHAPINGS, ids=["in graphs", "behind graphs"])
def test_texts_are_those_of_each_session_alone(
    shaping: dict[str, Any],
    executor: type[Serial],
    pair: tuple[GpuRunner, GpuRunner],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    verified, launch = list[int](), GpuRunner.launch_decode

    def watched(self: GpuRunner, rows: Any, verify: VerifyWork | None = None) -> Any:
        verified.append(verify.rows if verify else 0)
        return launch(self, rows, verify)

    monkeypatch.setattr(GpuRunner, "launch_decode", watched)
    hows = [*[None] * PLAIN, *HOST_BOUND]
    texts: list[dict[int, list[int]]] = [{}, {}]
    for at, batches in enumerate(([range(len(hows))], [[number] for number in range(len(hows))])):
        for batch in batches:
            loop = Loop(
                executor(Verifier(pair[0]), Drafter(pair[1])),
                limits=RoundLimits(prefill_chunk=1, prompt_tokens=64, prompt_tokens_alone=pair[0].most_prefill),
            )
            made = [session(number, hows[number], shaping) for number in batch]
            for one, method in made:
                loop.join(one, method)
            while loop.live:
                loop.step()
            assert not loop._plain._rounds.has_failed
            texts[at] |= {one.number: one.tokens for one, _ in made}
    assert texts[0] == texts[1]
    assert sum(rows > 0 for rows in verified) > 20
