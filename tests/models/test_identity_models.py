"""Every method gives what `autoregressive` gives, on tiny random models of each family: float64, no exception."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from specbranch.config import SamplingParams, SpeculativeConfig
from specbranch.core.loop import Loop
from specbranch.core.methods import METHODS
from specbranch.core.request import Request
from specbranch.core.runner import Runner
from specbranch.core.session import Session
from specbranch.exec.drafter import Drafter
from specbranch.exec.serial import Serial
from specbranch.exec.verifier import Verifier
from specbranch.models.loading import load_native
from specbranch.models.runners.transformers_runner import load_transformers
from tiers import each_value, tiered
from tiny_models import CONFIGS, in_double, saved, some_tokens, tiny
from toybench import PROFILE, Timeless, run_out

Load = Callable[..., Runner]
PLAIN = {"temperature": 0.0}
EVERYTHING = {
    "temperature": 0.9,
    "top_k": 40,
    "top_p": 0.95,
    "min_p": 0.01,
    "repetition_penalty": 1.2,
    "presence_penalty": 0.3,
    "frequency_penalty": 0.2,
    "logit_bias": {3: 2.0, 5: -1.0},
    "min_tokens": 9,
}
SHAPINGS = {"greedy": PLAIN, "cool": {"temperature": 0.7}, "hot": {"temperature": 1.3}, "everything": EVERYTHING}


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Path]]:
    @cache
    def make(kind: str) -> tuple[Path, Path]:
        """Save a target and a draft that is the target with its weights disturbed, so that it agrees now and then."""
        saved_to = tmp_path_factory.mktemp(kind)
        target = tiny(kind)
        saved(target, saved_to / "target")
        torch.manual_seed(5)
        for parameter in target.parameters():
            parameter.data.add_(torch.randn_like(parameter) * parameter.data.std() * 0.12)
        return saved_to / "target", saved(target, saved_to / "draft")

    return make


def executor(load: Load, target: Path, draft: Path) -> Serial:
    big, small = (load(path, context_length=256, device="cpu", dtype=torch.float64) for path in (target, draft))
    return Serial(Verifier(big), Drafter(small))


def decode(
    executor: Serial, method: str, params: SamplingParams, prompt: list[int], number: int, eos: int = 7
) -> Session:
    request = Request(params, seed=number, prompt_length=len(prompt), eos_ids=(eos,))
    session = Session(number, prompt, request, 200)
    loop = Loop(executor)
    config = SpeculativeConfig(method=method, num_speculative_tokens=4, stop_below=0.2, ngram_min=1)
    loop.join(session, METHODS[method].start(session, config, Timeless(PROFILE)))
    run_out(loop)
    session.stats.check()
    return session


def compare(load: Load, target: Path, draft: Path, shaping: dict[str, object], runs: int) -> dict[str, Session]:
    sessions: dict[str, Session] = {}
    works = executor(load, target, draft)
    for run in range(runs):
        prompt = some_tokens(5 + 20 * run, seed=run)  # the second prompt is long enough to be read in chunks
        params = SamplingParams(**shaping, max_tokens=15 + run)
        plain = decode(works, "autoregressive", params, prompt, run)
        for method in METHODS:
            sessions[method] = decode(works, method, params, prompt, run)
            assert sessions[method].tokens == plain.tokens, f"{method}, run {run}"
            assert sessions[method].finished == plain.finished
    return sessions


@each_value
@pytest.mark.parametrize("shaping", tiered(SHAPINGS, "everything".__eq__))
@pytest.mark.parametrize("kind", tiered(CONFIGS, "qwen3".__eq__))
def test_native_runner_gives_autoregressive_tokens_with_every_method(
    kind: str, shaping: str, folder: Callable[[str], tuple[Path, Path]]
) -> None:
    sessions = compare(load_native, *folder(kind), SHAPINGS[shaping], runs=2 if shaping == "cool" else 1)
    assert all(sessions[method].stats.drafted for method in METHODS if METHODS[method].needs_draft), (
        "a method drafted nothing"
    )
    assert sum(session.stats.accepted for session in sessions.values()) > 0, (
        "no draft token was ever accepted: nothing was shown"
    )
    assert sum(session.stats.rejected for session in sessions.values()) > 0, (
        "no draft token was ever rejected: nothing was shown"
    )


@pytest.mark.slow
@pytest.mark.parametrize("shaping", tiered(("greedy", "everything"), "everything".__eq__))
def test_transformers_runner_gives_autoregressive_tokens_with_every_method(
    shaping: str, folder: Callable[[str], tuple[Path, Path]]
) -> None:
    compare(load_transformers, *folder("llama"), SHAPINGS[shaping], runs=1)


@pytest.mark.slow
def test_both_runners_say_the_same(folder: Callable[[str], tuple[Path, Path]]) -> None:
    target, draft = folder("qwen3")
    params = SamplingParams(temperature=0.8, max_tokens=30)
    ours, theirs = (
        decode(executor(load, target, draft), "specbranch", params, some_tokens(9), 1)
        for load in (load_native, load_transformers)
    )
    assert ours.tokens == theirs.tokens


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_greedy_answers_equal_those_of_transformers_generate(
    kind: str, folder: Callable[[str], tuple[Path, Path]]
) -> None:
    target, draft = folder(kind)
    prompt = some_tokens(20)
    ours = decode(
        executor(load_native, target, draft), "autoregressive", SamplingParams(max_tokens=40), prompt, 0, eos=-1
    ).output
    model = in_double(AutoModelForCausalLM.from_pretrained(target))
    ending = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0, "attention_mask": torch.ones(1, len(prompt))}
    theirs = model.generate(torch.tensor([prompt]), max_new_tokens=40, **ending)[0, len(prompt) :].tolist()
    assert ours == theirs
