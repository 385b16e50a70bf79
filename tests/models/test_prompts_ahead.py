"""Chunks of prompts, and prompts that end, go with a decode step that is launched ahead; no text changes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from specbranch.core.orders import Context, Orders, Prefill, Verify
from specbranch.exec.serial import Serial
from specbranch.exec.verifier import Verifier
from specbranch.models.forward.decoder import Decoder
from specbranch.models.gpu.runner import GpuRunner
from specbranch.models.gpu.step import GpuStep
from specbranch.models.loading import load_native
from tiers import each_value
from tiny_models import GREEDY, saved, some_tokens, tiny

torch.set_num_threads(1)
CONTEXT, TOKENS = 1000, 10
PROMPT = some_tokens(20, seed=1)
ARRIVING = {
    "one": [some_tokens(300, seed=2)],
    "two that begin alike": [some_tokens(300, seed=2)] * 2,
    "more than a step takes": [some_tokens(900, seed=4 + number) for number in range(3)],
    "many short ones": [some_tokens(2, seed=10 + number) for number in range(30)],
}


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    folder = saved(tiny("llama"), tmp_path_factory.mktemp("llama"))
    return load_native(folder, context_length=CONTEXT, dtype="float64").decoder


def executor(decoder: Decoder) -> Serial:
    return Serial(Verifier(GpuRunner(decoder, CONTEXT, pages=60)))


def plain_text(decoder: Decoder, prompt: list[int], count: int) -> list[int]:
    works, text = executor(decoder), list(prompt)
    works.open(0, replace(GREEDY, prompt_length=len(prompt)))
    for _ in range(count):
        verdict = works.run({0: Orders(verify=Verify(Context(0, tuple(text))))})[0].verdict
        assert verdict is not None
        text.append(verdict.token)
    return text


@each_value
@pytest.mark.parametrize("joins", [False, True])
@pytest.mark.parametrize("kind", ARRIVING)
def test_texts_do_not_depend_on_prompts_that_arrive(
    kind: str, joins: bool, decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = plain_text(decoder, PROMPT, TOKENS)
    arriving = ARRIVING[kind]
    others = [plain_text(decoder, prompt, 3) for prompt in arriving]
    monkeypatch.setattr(GpuStep, "takes_chunks", True)
    works, text, said = executor(decoder), list(PROMPT), [list(prompt) for prompt in arriving]
    works.open(0, replace(GREEDY, prompt_length=len(PROMPT)))
    for turn in range(TOKENS):
        orders = {0: Orders(verify=Verify(Context(0, tuple(text)), goes_on=True))}
        for number, prompt in enumerate(arriving, 1):
            if turn == 3:
                works.open(number, replace(GREEDY, prompt_length=len(prompt)))
                *before, last = prompt
                order = Prefill(Context(0, tuple(before)), len(prompt), last if joins else None)
                orders[number] = Orders(prefill=order)
            elif 3 < turn < 7:
                orders[number] = Orders(verify=Verify(Context(0, tuple(said[number - 1])), goes_on=True))
        for number, report in works.run(orders).items():
            if report.verdict is not None:
                (text if number == 0 else said[number - 1]).append(report.verdict.token)
    assert text == expected
    assert said == others
    works.target.runner.check()  # type: ignore[attr-defined]


def test_a_resumed_text_of_several_rows_is_not_overwritten_by_the_step_launched_ahead(decoder: Decoder) -> None:
    expected = plain_text(decoder, PROMPT, TOKENS)
    works, text = executor(decoder), expected[: len(PROMPT) + 5]
    works.open(0, replace(GREEDY, prompt_length=len(PROMPT)))
    while len(text) < len(expected):
        verdict = works.run({0: Orders(verify=Verify(Context(0, tuple(text)), goes_on=True))})[0].verdict
        assert verdict is not None
        text.append(verdict.token)
    assert text == expected
