"""Rows that score some tokens only: whatever is proposed from them is what the whole vocabulary with −∞ elsewhere
would give."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from specbranch.config import SamplingParams
from specbranch.core.request import Request, Spot
from specbranch.core.runner import MOST_ENTRIES, Ask, Feed
from specbranch.core.slots import ROOT
from specbranch.errors import ModelError
from specbranch.models.cpu.kernels import load_kernel
from specbranch.models.files.head_columns import Columns
from specbranch.models.files.locate import locate
from specbranch.models.files.weights import ReducedHead, read_weights
from specbranch.models.forward.decoder import Decoder
from specbranch.models.loading import open_model
from specbranch.models.runners.native import NativeRunner
from specbranch.models.sampling.logit_rows import TensorRow, collate, rows_of, scored
from specbranch.models.sampling.noise_rows import Noise
from specbranch.models.sampling.reductions import leading
from specbranch.models.sampling.sampler import TorchSampler
from tiers import each_pair
from tiny_models import GREEDY, saved, some_tokens, tiny

pytestmark = pytest.mark.usefixtures("one_thread")

VOCABULARY, KEPT = 5003, 811
HISTORY = (3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 17, 40, 41)


@pytest.fixture(scope="module")
def columns() -> Columns:
    ids = torch.randperm(VOCABULARY, generator=torch.Generator().manual_seed(3))[:KEPT]
    return Columns(ids.sort().values, VOCABULARY)


def spot(rule: Any = "match", seed: int = 7, **params: Any) -> Spot:
    eos = params.pop("eos", ())
    return Spot(
        Request(SamplingParams(**params), seed, 4, rule=rule, eos_ids=eos),
        len(HISTORY),
        lambda: list(HISTORY),
        attempt=2,
    )


SPOTS = {
    "greedy": {},
    "match": {"temperature": 0.8},
    "ratio": {"temperature": 0.8, "rule": "ratio"},
    "match top-k": {"temperature": 1.1, "top_k": 20},
    "match more than there are": {"temperature": 1.1, "top_k": KEPT + 1},
    "match top-p": {"temperature": 1.0, "top_p": 0.9},
    "match nearly all": {"temperature": 1.0, "top_p": 0.9999999},
    "match min-p": {"temperature": 1.3, "min_p": 0.05},
    "match all three": {"temperature": 1.3, "top_k": 300, "top_p": 0.95, "min_p": 0.001},
    "ratio top-k": {"temperature": 1.1, "top_k": 20, "rule": "ratio"},
    "ratio top-p": {"temperature": 1.0, "top_p": 0.9, "rule": "ratio"},
    "ratio min-p": {"temperature": 1.3, "min_p": 0.05, "rule": "ratio"},
    "penalties": {"temperature": 0.9, "repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.2},
    "bias": {"temperature": 0.9, "logit_bias": dict.fromkeys(range(0, 60, 3), 6.0)},
    "no end yet": {"temperature": 0.9, "min_tokens": 50, "eos": tuple(range(0, VOCABULARY, 2))},
}
ASKS = [Ask(0, ROOT), Ask(0, ROOT, 3, "top"), Ask(0, ROOT, 4, "sampled", "entropy"), Ask(0, ROOT, 30, "top", "entropy")]


def logits(rows: int, width: int = KEPT, scale: float = 3.0) -> Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(rows)) * scale


def whole(rows: Sequence[TensorRow]) -> list[TensorRow]:
    """The same rows, written out over the vocabulary."""
    return rows_of(collate(rows))


# --- proposals ---


@each_pair
@pytest.mark.parametrize("vocabulary", [VOCABULARY, 3001])
@pytest.mark.parametrize("ask", ASKS, ids=str)
@pytest.mark.parametrize("name", SPOTS)
def test_proposals_equal_those_over_the_whole_vocabulary(
    name: str, ask: Ask, vocabulary: int, columns: Columns
) -> None:
    rows = rows_of(logits(6), columns)
    spots = [spot(seed=seed, **SPOTS[name]) for seed in range(6)]
    reduced = TorchSampler(vocabulary).propose(rows, spots, [ask] * 6)
    assert reduced == TorchSampler(vocabulary).propose(whole(rows), spots, [ask] * 6)
    assert {token for proposal in reduced for token in proposal.tokens} <= set(
        columns.ids[columns.ids < vocabulary].tolist()
    )


def test_proposals_equal_those_over_the_whole_vocabulary_in_mixed_batch(columns: Columns) -> None:
    spots = [spot(**params) for params in SPOTS.values()]
    asks = [ASKS[at % len(ASKS)] for at in range(len(spots))]
    rows = rows_of(logits(len(spots)), columns)
    together = TorchSampler(VOCABULARY).propose(rows, spots, asks)
    assert together == TorchSampler(VOCABULARY).propose(whole(rows), spots, asks)
    assert together == [
        TorchSampler(VOCABULARY).propose([r], [s], [a])[0] for r, s, a in zip(rows, spots, asks, strict=True)
    ]


def test_equal_logits_are_ranked_by_id_with_and_without_the_others(columns: Columns) -> None:
    tied = logits(4).round()  # a few dozen different values among 811
    for ask in (Ask(0, ROOT, 5, "top"), Ask(0, ROOT, 20, "top"), Ask(0, ROOT, 3, "sampled")):
        for params in ({}, {"temperature": 1.0, "rule": "ratio"}, {"temperature": 1.0, "top_k": 7, "rule": "ratio"}):
            rows, sampler = rows_of(tied, columns), TorchSampler(VOCABULARY)
            spots = [spot(seed=seed, **params) for seed in range(4)]
            assert sampler.propose(rows, spots, [ask] * 4) == sampler.propose(whole(rows), spots, [ask] * 4)


def test_the_leading_entries_leave_out_the_highest_of_equals() -> None:
    x = torch.zeros(2, 1000)
    x[0, [900, 950]] = 1.0
    x[1, :500] = -torch.inf
    for row, expected in enumerate(({*range(62), 900, 950}, {*range(500, 564)})):
        assert set(leading(x, MOST_ENTRIES)[row].tolist()) == expected


@pytest.mark.parametrize("heard", [False, True], ids=["alone", "beside a target"])
def test_the_noise_of_some_tokens_is_that_of_the_whole_row(heard: bool, columns: Columns) -> None:
    kv_slots = [(7, 0, 3), (7, 0, 4), (7, 0, 3)]
    expected = Noise().rows(kv_slots, VOCABULARY)
    noise = Noise()
    if heard:
        noise.row(kv_slots[0], VOCABULARY)
    found = noise.rows_of(kv_slots, columns)
    assert all(torch.equal(some, row[columns.ids]) for some, row in zip(found, expected, strict=True))
    assert all(torch.equal(some, again) for some, again in zip(found, noise.rows_of(kv_slots, columns), strict=True))
    lengths = {len(row) for row in noise._kept.values()}
    assert lengths == ({VOCABULARY} if heard else {KEPT}), "rows are made whole only where somebody hears them whole"


def test_everything_else_a_sampler_returns_is_over_the_vocabulary(columns: Columns) -> None:
    rows, spots = rows_of(logits(3), columns), [spot(temperature=0.8, seed=seed) for seed in range(3)]
    sampler = TorchSampler(VOCABULARY)
    assert sampler.pick(rows, spots) == sampler.pick(whole(rows), spots)
    assert torch.equal(sampler.law(rows[0], spots[0]).units, sampler.law(whole(rows)[0], spots[0]).units)
    token = int(columns.ids[5])
    assert sampler.logprobs(rows[0], token, 3) == sampler.logprobs(whole(rows)[0], token, 3)


# --- rows ---


def test_rows_of_different_heads_are_spread_out_before_they_are_put_together(columns: Columns) -> None:
    other = Columns(torch.arange(0, 100, 7), VOCABULARY)
    mixed = [*rows_of(logits(2), columns), *rows_of(logits(2, len(other.ids)), other)]
    block, found = scored(mixed)
    assert found is None and torch.equal(block, collate(mixed))
    assert torch.equal(block.isfinite().sum(-1), torch.tensor([KEPT, KEPT, 15, 15]))
    proposals = TorchSampler(VOCABULARY).propose(mixed, [spot()] * 4, [Ask(0, ROOT, 2)] * 4)
    assert proposals == [TorchSampler(VOCABULARY).propose([row], [spot()], [Ask(0, ROOT, 2)])[0] for row in mixed]


@pytest.mark.parametrize("ids", [[], [3, 2], [2, 2], [0, VOCABULARY], [-1, 4]])
def test_ids_that_do_not_ascend_within_the_vocabulary_are_refused(ids: list[int]) -> None:
    with pytest.raises(ModelError, match="not ascending ids below 5003"):
        Columns(torch.tensor(ids, dtype=torch.long), VOCABULARY)


# --- the step ---


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(tiny("llama"), tmp_path_factory.mktemp("llama"))


def runner(folder: Path, ids: Sequence[int] | None, fused: bool) -> NativeRunner:
    arch, source = open_model(locate(str(folder)))
    weights = read_weights(arch, source, torch.device("cpu"), torch.float32)
    if ids is not None:
        kept = Columns(torch.tensor(ids), arch.vocabulary)
        weights = replace(weights, reduced=ReducedHead(weights.head.rows(kept.ids), kept))
    made = NativeRunner(Decoder(arch, weights, 128 + 64), 128)
    if not fused:
        made._fused = None
    return made


def fed(runner: NativeRunner) -> list[TensorRow]:
    runner.open(0, GREEDY)
    runner.extend(0, some_tokens(20))
    return runner.score([Feed(0, (1, 2, 3, 4), (ROOT, 0, 0, 1))])[0]


IDS = [*range(3, 60, 4), 99, 130]


@pytest.mark.parametrize("fused", [True, False])
def test_a_reduced_head_scores_its_tokens_as_the_whole_head_does(
    fused: bool, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if fused and load_kernel() is None:
        pytest.skip("no compiled kernels on this machine")
    monkeypatch.setenv("SPECBRANCH_LINEAR", "llvm" if fused else "torch")
    reduced = runner(folder, IDS, fused)
    assert (reduced._fused is not None) == fused
    found, expected = collate(fed(reduced)), collate(fed(runner(folder, None, fused)))
    left_out = torch.ones(found.shape[1], dtype=torch.bool).index_fill(0, torch.tensor(IDS), False)
    assert found[:, left_out].eq(-torch.inf).all()
    torch.testing.assert_close(found[:, IDS], expected[:, IDS], rtol=1e-6, atol=1e-5)


@pytest.mark.skipif(load_kernel() is None, reason="no compiled kernels on this machine")
def test_a_row_of_a_reduced_head_has_the_same_bits_alone_and_in_a_batch(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPECBRANCH_LINEAR", "llvm")
    for threads in (1, 2):
        torch.set_num_threads(threads)
        reduced = runner(folder, IDS, True)
        tree = fed(reduced)
        reduced.keep(0, (), 0)
        for node in (0, 1, 3):
            (row,) = reduced.score(
                [Feed(0, ((1, 2, 3, 4)[node],), (ROOT if node == 0 else len(reduced.slots(0).tokens) - 1,))]
            )[0]
            assert torch.equal(row.logits, tree[node].logits)
