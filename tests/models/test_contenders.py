"""Tokens that can still win: picking among them gives what picking from the whole vocabulary gives."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from specbranch.config import SamplingParams
from specbranch.core.noise import keys
from specbranch.core.request import Request, Spot
from specbranch.models.cpu.contenders import contenders
from specbranch.models.sampling import noise_rows
from specbranch.models.sampling.logit_rows import rows_of
from specbranch.models.sampling.noise_rows import Noise, winner
from specbranch.models.sampling.reductions import argmax
from specbranch.models.sampling.sampler import TorchSampler
from tiers import each_value

needs_scan = pytest.mark.skipif(
    contenders(torch.zeros(4).numpy(), 0, (1, 2)) is None, reason="no scan can be compiled on this machine"
)
FILTERS: list[dict[str, Any]] = [
    {},
    {"top_k": 5},
    {"top_p": 0.9},
    {"min_p": 0.05},
    {"top_k": 40, "top_p": 0.7, "min_p": 0.01, "presence_penalty": 0.5, "repetition_penalty": 1.2},
    {"logit_bias": {3: 7.0, 9: -100.0}},
]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def _logits(rows: int, vocabulary: int, spread: float = 4.0, seed: int = 0) -> Tensor:
    return torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(seed)) * spread


def _spot(position: int, seed: int = 7, **params: Any) -> Spot:
    history = [position % 7, 3, 1, *range(position)]
    return Spot(Request(SamplingParams(**params), seed, 2, rule="match"), position, lambda: history)


def _from_whole_rows(sampler: TorchSampler, logits: Tensor, spots: list[Spot]) -> list[int]:
    """The same choice with the noise of the whole vocabulary."""
    asked = sampler._sent(sampler.picking(spots))
    return argmax(sampler.scores(rows_of(logits), spots, asked)[1]).tolist()


@each_value
@pytest.mark.parametrize("params", FILTERS)
@pytest.mark.parametrize("temperature", [0.05, 0.8, 1.0, 3.0])
def test_few_contenders_give_the_token_of_whole_rows(temperature: float, params: dict[str, Any]) -> None:
    for vocabulary in (1, 31, 257, 2049):
        logits, sampler = _logits(48, vocabulary, seed=vocabulary), TorchSampler(vocabulary)
        kept = {**params, "logit_bias": {t: b for t, b in params.get("logit_bias", {}).items() if t < vocabulary}}
        spots = [_spot(3 + row, seed=row * 977, temperature=temperature, **kept) for row in range(48)]
        assert sampler.pick(rows_of(logits), spots) == _from_whole_rows(sampler, logits, spots)


@pytest.mark.parametrize("spread", [0.0, 1e-3, 1.0, 30.0, 1e6, 1e30])
def test_spreads_of_logits_from_none_to_huge_give_the_token_of_whole_rows(spread: float) -> None:
    kept = Noise()
    for position in range(60):
        row = _logits(1, 1023, spread, seed=position)[0]
        expected = int((row + kept.row((5, 1, position), 1023)).numpy().argmax())
        assert winner(row, (5, 1, position)) == expected


def test_rows_made_of_nothing_but_near_ties_give_the_token_of_whole_rows() -> None:
    differs = 0
    for position in range(200):
        noise_row = Noise().row((11, 0, position), 515)
        row = 3.0 - noise_row  # with their noise all tokens are 3, up to the last bits
        expected = int((row + noise_row).numpy().argmax())
        assert winner(row, (11, 0, position)) == expected
        exact = [x - math.log(e) for x, e in zip(row.tolist(), noise_row.neg().exp().tolist(), strict=True)]
        differs += expected != max(range(515), key=exact.__getitem__)
    assert differs > 100, "the control: float32 decides these, not the real numbers"


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_no_number_or_infinite_is_picked_as_from_whole_rows(value: float) -> None:
    for row in (torch.full((300,), value), torch.where(torch.arange(300) % 37 == 36, value, _logits(1, 300)[0])):
        assert winner(row, (1, 0, 2)) == int((row + Noise().row((1, 0, 2), 300)).numpy().argmax())


def test_greedy_rows_beside_noisy_ones_keep_their_argmax() -> None:
    logits, sampler = _logits(3, 400), TorchSampler(400)
    spots = [_spot(4, temperature=1.0), _spot(5), _spot(6, temperature=0.7, top_p=0.8)]
    assert sampler.pick(rows_of(logits), spots) == _from_whole_rows(sampler, logits, spots)


@needs_scan
def test_no_token_that_reaches_the_best_is_left_out() -> None:
    for position in range(100):
        row = _logits(1, 4096, spread=1.0 + position % 5, seed=position)[0]
        ids = contenders(row.numpy(), int(row.argmax()), keys(3, 0, position))
        noisy = row + Noise().row((3, 0, position), 4096)
        assert ids is not None and ids.tolist() == sorted(ids.tolist())
        assert set((noisy >= noisy.max()).nonzero()[:, 0].tolist()) <= set(ids.tolist())


@needs_scan
def test_tokens_that_cannot_win_get_no_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    real = noise_rows.gumbel
    monkeypatch.setattr(noise_rows, "gumbel", lambda bits: (made.append(len(bits)), real(bits))[1])
    logits, sampler = _logits(20, 49152), TorchSampler(49152)
    sampler.pick(rows_of(logits), [_spot(row, temperature=0.8) for row in range(20)])
    assert sum(made) < 20 * 49152 // 100


def test_without_a_compiler_the_same_token_is_picked(monkeypatch: pytest.MonkeyPatch) -> None:
    row = _logits(1, 3000)[0]
    found = [winner(row, (9, 0, position)) for position in range(30)]
    monkeypatch.setattr(noise_rows, "contenders", lambda *given: None)
    assert [winner(row, (9, 0, position)) for position in range(30)] == found
