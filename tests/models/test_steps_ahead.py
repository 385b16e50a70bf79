"""Plain decoding on a GPU's runner, here on the CPU: the next step is launched before it is ordered, and no text
changes."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from specbranch.config import SamplingParams, SpeculativeConfig
from specbranch.core.experience import Experience
from specbranch.core.loop import Loop
from specbranch.core.methods import find_method
from specbranch.core.orders import Context, Verify
from specbranch.core.request import Request
from specbranch.core.session import Session
from specbranch.exec.serial import Serial
from specbranch.exec.verifier import Verifier
from specbranch.models.gpu.runner import GpuRunner
from specbranch.models.loading import load_native
from specbranch.models.runners.native import NativeRunner
from tiers import tiered
from tiny_models import saved, some_tokens, tiny

torch.set_num_threads(1)
SHAPINGS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.9},
    {"temperature": 0.8, "top_p": 0.8},
    {"min_tokens": 5},
]


class Counting(GpuRunner):
    """Counts its steps, and those that were started ahead."""

    ran = 0

    def _start(self, *given: Any, **named: Any) -> Any:
        self.ran += 1
        return super()._start(*given, **named)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(tiny("llama"), tmp_path_factory.mktemp("llama"))


@pytest.fixture
def runners(folder: Path) -> tuple[NativeRunner, Counting]:
    plain = load_native(folder, context_length=600, dtype="float64")
    return plain, Counting(plain.decoder, 600)


def session(number: int, params: SamplingParams, length: int) -> Session:
    prompt = some_tokens(length, seed=number)
    return Session(number, prompt, Request(params, number, len(prompt), eos_ids=(7,)), 600)


def decode(runner: NativeRunner, sessions: list[Session], join: list[int]) -> list[list[int]]:
    """Decode plainly; session i joins before round `join[i]`."""
    loop, method, turn = Loop(Serial(Verifier(runner))), find_method("autoregressive", False), 0
    while turn <= max(join) or loop.live:
        for one, at in zip(sessions, join, strict=True):
            if at == turn:
                loop.join(one, method.start(one, SpeculativeConfig(method="autoregressive"), Experience()))
        if loop.live:
            loop.step()
        turn += 1
    return [one.tokens for one in sessions]


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_every_token_takes_one_step_and_none_is_wasted(
    temperature: float, runners: tuple[NativeRunner, Counting]
) -> None:
    params = SamplingParams(temperature=temperature, max_tokens=40, ignore_eos=True)
    texts = [decode(runner, [session(1, params, 20)], [0]) for runner in runners]
    assert texts[0] == texts[1]
    assert runners[1].ran == 40


@pytest.mark.parametrize("seed", tiered(range(6), (2).__gt__))
def test_texts_are_those_of_the_reference_whoever_joins_leaves_or_is_shaped(
    seed: int, runners: tuple[NativeRunner, Counting]
) -> None:
    rng = random.Random(seed)
    wanted = [
        (SamplingParams(**rng.choice(SHAPINGS), max_tokens=rng.randint(5, 40)), rng.choice([3, 30, 250]))
        for _ in range(5)
    ]
    join = [rng.choice([0, 0, 3, 9]) for _ in wanted]
    texts = [decode(runner, [session(at, *one) for at, one in enumerate(wanted)], join) for runner in runners]
    assert texts[0] == texts[1]
    runners[1].check()
    assert runners[1].pool.free == runners[1].pool.pages


def test_a_request_that_ends_leaves_the_step_that_is_launched_ahead_to_the_others(
    runners: tuple[NativeRunner, Counting],
) -> None:
    request, said = Request(SamplingParams(temperature=0.0), 1, 20), []
    for runner in runners:
        verifier, texts = Verifier(runner), [some_tokens(20, seed=seq) for seq in range(3)]
        for seq in range(3):
            verifier.open(seq, request)
        for turn in range(4):
            live = range(3) if turn < 2 else (0, 2)
            orders = {seq: Verify(Context(0, tuple(texts[seq])), goes_on=True) for seq in live}
            if turn == 1:
                orders[1] = replace(orders[1], goes_on=False, ends=True)
            for seq, verdict in verifier.judge(verifier.score(orders, {})[0], {}).items():
                texts[seq].append(verdict.token)
            if turn == 1:
                verifier.free(1)
        said.append(texts)
    assert said[0] == said[1]
    assert runners[1].ran == 5  # each turn launches the step of the next one, too


@pytest.mark.parametrize("what", ["another token", "the same again", "rewound", "closed"])
def test_a_step_that_was_not_asked_for_after_all_changes_nothing(
    what: str, runners: tuple[NativeRunner, Counting]
) -> None:
    request, text = Request(SamplingParams(temperature=0.0), 1, 20), some_tokens(20)
    said = []
    for runner in runners:
        verifier, sequence = Verifier(runner), list(text)
        verifier.open(0, request)
        for turn in range(6):
            order = Verify(Context(0, tuple(sequence)), goes_on=True)
            token = verifier.judge(verifier.score({0: order}, {})[0], {})[0].token
            if turn == 3 and what == "the same again":
                assert verifier.judge(verifier.score({0: order}, {})[0], {})[0].token == token
            if turn == 3 and what == "rewound":
                runner.rewind(0, 21)
            if turn == 3 and what == "closed":
                verifier.free(0)
                verifier.open(0, request)
            sequence.append((token + 1) % 131 if turn == 3 and what == "another token" else token)
        said.append(sequence)
    assert said[0] == said[1]
