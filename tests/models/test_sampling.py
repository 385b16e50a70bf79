"""The sampling pipeline against transformers' processors, the shared noise against core.noise, and the laws of what
is drawn."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import chisquare
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from specbranch.config import SamplingParams
from specbranch.core import noise as core_noise
from specbranch.core.orders import Sparse
from specbranch.core.request import Request, Spot
from specbranch.core.runner import ENTROPY_WEIGHT, MOST_ENTRIES, Ask
from specbranch.core.slots import ROOT
from specbranch.models.files.head_columns import finder
from specbranch.models.sampling import sample
from specbranch.models.sampling.logit_rows import TensorRow, rows_of
from specbranch.models.sampling.noise_rows import Noise, gumbel, hashed
from specbranch.models.sampling.reductions import argmax, descending, entropy, leading, peak
from specbranch.models.sampling.sampler import TensorLaw, TorchSampler, proposed
from specbranch.models.sampling.sheet import sheet_of

CPU = torch.device("cpu")
VOCABULARY = 501
HISTORY = (3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5)
PROMPT = 4
ALMOST_ONE = 1.0 - 2.0**-53


@pytest.fixture(autouse=True)
def _one_thread() -> Any:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def _spot(
    history: Sequence[int] = HISTORY, *, seed: int = 7, rule: Any = "match", eos: tuple[int, ...] = (), **params: Any
) -> Spot:
    request = Request(SamplingParams(**params), seed, PROMPT, rule=rule, eos_ids=eos)
    return Spot(request, len(history), lambda: list(history))


def _logits(rows: int = 1, vocabulary: int = VOCABULARY, seed: int = 0) -> Tensor:
    return torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(seed)) * 4


def _never() -> Sequence[int]:
    raise AssertionError("history was read though no penalty is set")


def shape(logits: Tensor, spots: Sequence[Spot]) -> Tensor:
    width = logits.shape[-1]
    arrays = sheet_of(spots, width, finder(None, width))
    return sample.shape(logits, {name: torch.from_numpy(array) for name, array in arrays.items()})


# --- the pipeline ---


@pytest.mark.parametrize("temperature", [0.3, 1.0, 1.7])
@pytest.mark.parametrize("top_k", [None, 1, 5, 400, 10_000])
@pytest.mark.parametrize(
    ("top_p", "min_p"), [(1.0, 0.0), (0.9, 0.0), (1.0, 0.05), (0.95, 0.02), (1e-6, 1.0), (0.999999, 1e-7)]
)
def test_shaping_equals_transformers_processors(
    temperature: float, top_k: int | None, top_p: float, min_p: float
) -> None:
    params = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p, "repetition_penalty": 1.3}
    processors = [RepetitionPenaltyLogitsProcessor(1.3), TemperatureLogitsWarper(temperature)]
    processors += [TopKLogitsWarper(top_k)] if top_k else []
    processors += [TopPLogitsWarper(top_p)] if top_p < 1 else []
    processors += [MinPLogitsWarper(min_p)] if min_p > 0 else []
    logits = _logits(6)
    expected = LogitsProcessorList(processors)(torch.tensor([HISTORY] * 6), logits.clone())
    shaped = shape(logits, [_spot(**params)] * 6)
    assert torch.equal(shaped.isinf(), expected.isinf())
    torch.testing.assert_close(shaped, expected, rtol=1e-6, atol=1e-6)


def test_presence_and_frequency_penalties_count_generated_tokens_only() -> None:
    logits = _logits()
    shaped = shape(logits, [_spot(presence_penalty=0.5, frequency_penalty=0.25)])
    expected = logits[0].clone()
    for token, count in {5: 3, 9: 1, 2: 1, 6: 1, 3: 1}.items():  # 3, 1, 4, 1 are the prompt
        expected[token] -= 0.5 + 0.25 * count
    torch.testing.assert_close(shaped[0], expected)


def test_each_row_is_penalised_by_its_own_ancestors() -> None:
    logits = _logits().expand(2, -1)
    left, right = _spot((*HISTORY, 100), presence_penalty=1.0), _spot((*HISTORY, 200), presence_penalty=1.0)
    changed = (shape(logits, [left, right]) != logits).nonzero().tolist()
    shared = {2, 3, 5, 6, 9}
    assert {token for row, token in changed if row == 0} == shared | {100}
    assert {token for row, token in changed if row == 1} == shared | {200}


def test_history_is_read_only_when_a_penalty_needs_it() -> None:
    uncomputed = _spot(temperature=0.7, top_p=0.9, logit_bias={3: 1.0})._replace(history=_never)
    shape(_logits(), [uncomputed])
    with pytest.raises(AssertionError, match="history was read"):
        shape(_logits(), [_spot(repetition_penalty=1.1)._replace(history=_never)])


def test_bias_comes_before_the_repetition_penalty() -> None:
    logits = torch.zeros(1, VOCABULARY)
    assert shape(logits, [_spot(logit_bias={5: 6.0, 300: -2.0}, repetition_penalty=2.0)])[
        0, [5, 300, 301]
    ].tolist() == [3.0, -2.0, 0.0]


@pytest.mark.parametrize(("ignore_eos", "masked"), [(False, {8, 20}), (True, {8})])
def test_min_tokens_forbids_what_would_end_the_request(ignore_eos: bool, masked: set[int]) -> None:
    generated = len(HISTORY) - PROMPT
    params = {"stop_token_ids": (8,), "ignore_eos": ignore_eos}
    early, late = (shape(_logits(), [_spot(eos=(20,), min_tokens=n, **params)]) for n in (generated + 1, generated))
    assert set(early[0].isinf().nonzero().flatten().tolist()) == masked
    assert not late.isinf().any()


def test_min_tokens_keeps_greedy_decoding_from_ending() -> None:
    logits = _logits()
    best = int(logits.argmax())
    sampler = TorchSampler(VOCABULARY)
    spots = [_spot(eos=(best,), min_tokens=100), _spot(eos=(best,))]
    first, second = sampler.pick(rows_of(logits.expand(2, -1)), spots)
    assert first == int(logits[0].topk(2).indices[1])
    assert second == best


def test_shaping_leaves_the_models_logits_untouched() -> None:
    logits = _logits(3)
    before = logits.clone()
    sampler, spots = TorchSampler(VOCABULARY), _mixed()[:3]
    sampler.pick(rows_of(logits), spots)
    sampler.propose(rows_of(logits), spots, [Ask(0, ROOT, 4)] * 3)
    shape(logits, [_spot(temperature=1.0, top_k=3), _spot(), _spot()])
    assert torch.equal(logits, before)


def test_greedy_without_edits_copies_nothing() -> None:
    logits = _logits(2)
    assert shape(logits, [_spot(), _spot()]).data_ptr() == logits.data_ptr()


def test_a_row_without_filters_keeps_its_rarest_tokens_beside_a_filtered_one() -> None:
    steep = (torch.arange(VOCABULARY).float() * -1.0).expand(2, -1)
    whole, cut = shape(steep, [_spot(temperature=1.0, top_k=VOCABULARY), _spot(temperature=1.0, top_p=0.99)])
    assert not whole.isinf().any()
    assert int(cut.isfinite().sum()) == 5


def test_equal_logits_at_a_cut_are_all_kept() -> None:
    logits = torch.tensor([[5.0, 1.0, 1.0, 1.0, 0.0]])
    assert shape(logits, [_spot(temperature=1.0, top_k=2)])[0].isinf().tolist() == [False, False, False, False, True]


def test_a_tiny_temperature_decodes_greedily() -> None:
    logits = _logits(20)
    sampler = TorchSampler(VOCABULARY)
    assert sampler.pick(rows_of(logits), [_spot(temperature=1e-300)] * 20) == logits.argmax(-1).tolist()


# --- batches ---


def _mixed() -> list[Spot]:
    return [
        _spot(),
        _spot(temperature=0.8),
        _spot((*HISTORY, 17), temperature=1.0, top_p=0.9, frequency_penalty=0.7),
        _spot(temperature=1.4, top_k=20, seed=8),
        _spot(repetition_penalty=1.2, eos=(5,), min_tokens=50),
        _spot(temperature=1.0, min_p=0.1, logit_bias={4: 3.0}),
        _spot(temperature=0.8),
        _spot(temperature=1.0, rule="ratio"),
        _spot((*HISTORY, 17), temperature=1.2, top_p=0.5, top_k=30, rule="ratio"),
    ]


def test_a_batch_of_mixed_requests_equals_one_by_one() -> None:
    spots = _mixed()
    logits = _logits(len(spots), 20_011)
    together = shape(logits, spots)
    alone = torch.cat([shape(logits[i : i + 1], [spot]) for i, spot in enumerate(spots)])
    assert torch.equal(together, alone)


def test_pick_is_the_same_bit_for_bit_alone_and_in_any_batch() -> None:
    spots = _mixed() * 3
    rows = rows_of(_logits(len(spots), 20_011))
    together = TorchSampler(20_011).pick(rows, spots)
    sampler = TorchSampler(20_011)
    assert [sampler.pick([row], [spot])[0] for row, spot in zip(rows, spots, strict=True)] == together
    assert sampler.pick(rows[::-1], spots[::-1]) == together[::-1]
    assert sampler.pick(rows, spots) == together
    assert len(set(together)) > 3


def test_proposals_are_the_same_alone_and_in_any_batch() -> None:
    spots = _mixed()
    asks = [
        Ask(0, ROOT, 1 + i % 4, "top" if i % 3 else "sampled", "entropy" if i % 2 else "top") for i in range(len(spots))
    ]
    rows = rows_of(_logits(len(spots), 20_011))
    sampler = TorchSampler(20_011)
    together = sampler.propose(rows, spots, asks)
    assert together == [sampler.propose([r], [s], [a])[0] for r, s, a in zip(rows, spots, asks, strict=True)]


def test_reductions_of_a_row_do_not_depend_on_the_others() -> None:
    x = _logits(7, 30_001)
    x[3, 5:] = -torch.inf
    for reduce in (argmax, descending, peak, entropy, lambda t: leading(t, 5), lambda t: leading(t, 64)):
        assert torch.equal(reduce(x), torch.cat([reduce(x[i : i + 1]) for i in range(len(x))]))


def test_peak_and_entropy_are_those_of_the_softmax() -> None:
    x = _logits(5)
    x[1, 7:] = -torch.inf
    p = x.double().softmax(-1)
    torch.testing.assert_close(peak(x), p.amax(-1), rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(entropy(x), torch.special.entr(p).sum(-1), rtol=1e-5, atol=1e-8)


def test_ties_go_to_the_lowest_id() -> None:
    logits = torch.zeros(1, VOCABULARY)
    logits[0, [31, 77, 200]] = 2.0
    sampler = TorchSampler(VOCABULARY)
    assert sampler.pick(rows_of(logits), [_spot()]) == [31]
    assert sampler.propose(rows_of(logits), [_spot()], [Ask(0, ROOT, 2)])[0].tokens == (31, 77)
    assert sampler.propose(rows_of(logits), [_spot()], [Ask(0, ROOT, 40)])[0].tokens[:3] == (31, 77, 200)


# --- noise ---


@pytest.mark.parametrize("draw", [(0, 0, 0), (7, 3, 123_456), (2**64 - 1, 1, 5), (-5, 0, 2)])
def test_the_hash_equals_the_core_hash(draw: tuple[int, int, int]) -> None:
    key = core_noise.keys(*draw)
    bits = hashed(draw, torch.arange(4099)).long() & core_noise.MASK
    assert bits.tolist() == [core_noise.mix(token, key) for token in range(4099)]
    assert torch.equal(bits, core_noise.mix(torch.arange(4099), key))  # what other devices compute


def test_the_noise_equals_the_core_noise_to_float32() -> None:
    row = Noise().row((7, 1, 42), 4099)
    expected = torch.tensor(core_noise.gumbel_row(7, 1, 42, 4099), dtype=torch.float64)
    torch.testing.assert_close(row.double(), expected, rtol=1e-6, atol=1e-6)


def test_both_ends_of_the_noise_keep_their_precision() -> None:
    bits = [0, 1, 2, 1000, 2**24 + 1, 2**31 - 1, 2**31, 2**32 - 2**20, 2**32 - 3, 2**32 - 1]
    wrapped = torch.tensor([b - 2**32 if b >= 2**31 else b for b in bits], dtype=torch.int32)
    expected = [-math.log(core_noise.exponential(b)) for b in bits]
    torch.testing.assert_close(
        gumbel(wrapped).double(), torch.tensor(expected, dtype=torch.float64), rtol=3e-7, atol=3e-7
    )
    naive = -(-torch.log1p(-(torch.tensor(bits).float() + 0.5) * 2.0**-32)).log()
    assert naive[-1].isinf(), "the control: a plain float32 v rounds to 1"


def test_a_row_is_made_once_and_does_not_depend_on_the_vocabulary() -> None:
    noise = Noise()
    long = noise.row((1, 0, 9), 1003)
    assert noise.row((1, 0, 9), 1003).data_ptr() == long.data_ptr()
    short = noise.row((1, 0, 9), 517)
    assert short.data_ptr() == long.data_ptr()
    assert torch.equal(Noise().row((1, 0, 9), 517), short)
    assert torch.equal(noise.row((1, 0, 9), 2001)[:1003], long)


def test_kept_noise_is_bounded_in_rows_and_bytes() -> None:
    for noise, most in ((Noise(rows=5), 5), (Noise(most_bytes=4 * 100 * 3), 3)):
        rows = noise.rows([(1, 0, position) for position in range(9)], 100)
        assert len(rows) == 9
        assert len(noise._kept) == most
        assert noise.row((1, 0, 8), 100).data_ptr() == rows[8].data_ptr(), "the most recent is kept"


def test_threads_share_the_noise_of_vocabularies_of_any_length() -> None:
    """Two engines of one process: one asks for a longer vocabulary while the other makes its rows."""
    kv_slots = [(1, 0, position) for position in range(8)]
    expected = Noise().rows(kv_slots, 300)
    turns: list[bool] = []

    def ask(noise: Noise, vocabularies: range) -> None:
        for vocabulary in vocabularies:
            rows = noise.rows(kv_slots, vocabulary)
            turns.append(all(torch.equal(row, whole[:vocabulary]) for row, whole in zip(rows, expected, strict=True)))

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for _ in range(4):
            noise = Noise(rows=3)
            with ThreadPoolExecutor(3) as threads:
                for asked in [threads.submit(ask, noise, range(start, 300, 20)) for start in (1, 8, 15)]:
                    asked.result()  # raises what was raised there
    finally:
        sys.setswitchinterval(interval)
    assert len(turns) == 4 * 45 and all(turns)


def test_lanes_at_one_position_share_their_noise() -> None:
    logits = torch.zeros(2, VOCABULARY)
    assert len(set(TorchSampler(VOCABULARY).pick(rows_of(logits), [_spot(temperature=1.0)] * 2))) == 1


# --- proposals ---


def test_where_nothing_can_be_found_the_draft_is_sure_to_no_degree() -> None:
    spots = [_spot()] * 2
    nothing = np.array([[0.5, -1.0, -1.0, -math.inf, -math.inf], [math.nan, 3.0, 4.0, 0.1, 0.2]])
    for proposal in proposed(spots, [Ask(0, ROOT, 2)] * 2, nothing):
        assert proposal.tokens == () and math.isnan(proposal.confidence)


def test_match_proposes_the_targets_token_first_when_the_models_agree() -> None:
    logits = _logits(40)
    sampler, spots = TorchSampler(VOCABULARY), [_spot(temperature=1.0, seed=seed) for seed in range(40)]
    proposals = sampler.propose(rows_of(logits), spots, [Ask(0, ROOT, 3)] * 40)
    assert [p.tokens[0] for p in proposals] == sampler.pick(rows_of(logits), spots)
    assert [p.tokens[0] for p in proposals] != logits.argmax(-1).tolist()
    assert all(p.q is None and len(set(p.tokens)) == 3 for p in proposals)


@pytest.mark.parametrize("width", [1, 5, 30])
def test_match_heads_are_the_best_by_score(width: int) -> None:
    logits, spot = _logits(), _spot(temperature=0.9, seed=3)
    score = (logits[0] / 0.9).double() + torch.tensor(
        core_noise.gumbel_row(3, 0, spot.position, VOCABULARY), dtype=torch.float64
    )
    (proposal,) = TorchSampler(VOCABULARY).propose(rows_of(logits), [spot], [Ask(0, ROOT, width)])
    assert proposal.tokens == tuple(score.topk(width).indices.tolist())
    assert proposal.confidence == pytest.approx(float(score.softmax(-1).max()), rel=1e-5)


def test_greedy_confidence_is_that_of_the_penalised_logits_at_temperature_one() -> None:
    logits, spot = _logits(), _spot(repetition_penalty=1.5, top_k=1)
    p = shape(logits, [spot])[0].double().softmax(-1)
    (proposal,) = TorchSampler(VOCABULARY).propose(rows_of(logits), [spot], [Ask(0, ROOT, 3)])
    assert proposal.tokens == tuple(p.topk(3).indices.tolist())
    assert proposal.confidence == pytest.approx(float(p.max()), rel=1e-5)


@pytest.mark.parametrize("params", [{}, {"temperature": 0.8, "top_p": 0.9}, {"temperature": 1.0, "rule": "ratio"}])
def test_entropy_confidence_is_the_bound_on_the_shaped_law(params: dict[str, Any]) -> None:
    logits, spot = _logits() / 3, _spot(**params)
    p = shape(logits, [spot])[0].double().softmax(-1)
    expected = 1 - math.sqrt(ENTROPY_WEIGHT * float(torch.special.entr(p).sum()))
    (proposal,) = TorchSampler(VOCABULARY).propose(rows_of(logits), [spot], [Ask(0, ROOT, measure="entropy")])
    assert 0 < expected < 1
    assert proposal.confidence == pytest.approx(expected, rel=1e-5)


def test_entropy_confidence_never_falls_below_zero() -> None:
    (proposal,) = TorchSampler(VOCABULARY).propose(
        rows_of(torch.zeros(1, VOCABULARY)), [_spot()], [Ask(0, ROOT, measure="entropy")]
    )
    assert proposal.confidence == 0.0


def test_the_sampled_law_sums_to_one_and_covers_the_most_probable() -> None:
    logits, spot = _logits(), _spot(temperature=2.0, rule="ratio")
    (proposal,) = TorchSampler(VOCABULARY).propose(rows_of(logits), [spot], [Ask(0, ROOT, 3, "sampled")])
    p = shape(logits, [spot])[0].double().softmax(-1)
    top = p.topk(MOST_ENTRIES)
    assert proposal.q is not None
    assert proposal.q.ids == tuple(top.indices.tolist())
    assert math.fsum(proposal.q.probs) == pytest.approx(1.0, abs=1e-12)
    assert proposal.q.probs == pytest.approx((top.values / top.values.sum()).tolist(), rel=1e-6)
    assert proposal.confidence == proposal.q.probs[0]
    assert proposal.tokens[1:] == tuple(t for t in proposal.q.ids if t != proposal.tokens[0])[:2]


def test_the_sampled_law_has_no_entries_of_probability_zero() -> None:
    (filtered,) = TorchSampler(VOCABULARY).propose(
        rows_of(_logits()), [_spot(temperature=1.0, top_k=3, rule="ratio")], [Ask(0, ROOT, 5)]
    )
    assert filtered.q is not None and len(filtered.q.ids) == 3 and min(filtered.q.probs) > 0
    assert sorted(filtered.tokens) == sorted(filtered.q.ids), "a token that cannot be drawn is not proposed"
    steep = torch.arange(VOCABULARY).float().unsqueeze(0) * -400.0
    (underflown,) = TorchSampler(VOCABULARY).propose(
        rows_of(steep), [_spot(temperature=1.0, rule="ratio")], [Ask(0, ROOT)]
    )
    assert underflown.q is not None and underflown.q.ids == (0, 1) and min(underflown.q.probs) > 0


def test_fixed_heads_are_the_most_probable_and_carry_no_law() -> None:
    logits = _logits()
    spots = [_spot(temperature=1.0, rule="ratio", seed=seed) for seed in range(50)]
    rows = rows_of(logits) * 50
    fixed = TorchSampler(VOCABULARY).propose(rows, spots, [Ask(0, ROOT, 3, "top")] * 50)
    assert {p.tokens for p in fixed} == {tuple(logits[0].topk(3).indices.tolist())}
    assert all(p.q is None for p in fixed)
    sampled = TorchSampler(VOCABULARY).propose(rows, spots, [Ask(0, ROOT, 3, "sampled")] * 50)
    assert len({p.tokens[0] for p in sampled}) > 3


def test_ids_beyond_the_common_vocabulary_are_never_said() -> None:
    logits = _logits(8)
    logits[:, 400:] += 100.0
    sampler = TorchSampler(400)
    spots = [
        _spot(),
        _spot(temperature=1.0),
        _spot(temperature=1.0, rule="ratio"),
        _spot(logit_bias={450: 9.0}, frequency_penalty=1.0),
    ] * 2
    said = {t for p in sampler.propose(rows_of(logits), spots, [Ask(0, ROOT, 8)] * 8) for t in p.tokens} | set(
        sampler.pick(rows_of(logits), spots)
    )
    assert max(said) < 400
    assert sampler.law(TensorRow(logits, 1), spots[1]).draw(ALMOST_ONE) < 400


def test_a_reduced_draft_hears_the_same_noise_as_the_target() -> None:
    logits = _logits(30)
    logits[:, 400:] = -1e4
    spots = [_spot(temperature=1.0, seed=seed) for seed in range(30)]
    noise = Noise()
    proposed = TorchSampler(400, noise).propose(rows_of(logits), spots, [Ask(0, ROOT)] * 30)
    assert [p.tokens[0] for p in proposed] == TorchSampler(VOCABULARY, noise).pick(rows_of(logits), spots)


# --- laws ---


def law_of(p: Tensor) -> TensorLaw:
    return TensorLaw((p * 2.0**60).long())


SMALL = torch.tensor([[1.0, 0.0, -1.0, 2.0, 0.5, -0.5, 1.5, -2.0]])


def _p_value(tokens: Sequence[int], law: Tensor) -> float:
    counts = torch.bincount(torch.tensor(tokens), minlength=len(law)).double()
    if counts[law == 0].any():
        return 0.0
    counts, law = counts[law > 0], law[law > 0]
    return float(chisquare(counts.numpy(), (law / law.sum() * counts.sum()).numpy()).pvalue)


@pytest.fixture(scope="module")
def picked() -> list[int]:
    """10,000 picks from one row, over seeds."""
    sampler = TorchSampler(8)
    spots = [_spot(temperature=0.8, seed=seed) for seed in range(10_000)]
    rows = rows_of(SMALL) * 1000
    return [token for start in range(0, len(spots), 1000) for token in sampler.pick(rows, spots[start : start + 1000])]


@pytest.mark.slow
def test_picks_over_seeds_follow_the_softmax(picked: list[int]) -> None:
    assert _p_value(picked, (SMALL[0].double() / 0.8).softmax(-1)) > 1e-3


def test_the_chi_square_rejects_a_law_that_is_off_by_a_tenth_in_temperature(picked: list[int]) -> None:
    assert _p_value(picked, (SMALL[0].double() / 0.88).softmax(-1)) < 1e-6


@pytest.mark.slow
def test_picks_over_positions_follow_the_filtered_softmax() -> None:
    sampler, request = TorchSampler(8), _spot(temperature=1.0, top_k=4).request
    tokens = sampler.pick(rows_of(SMALL) * 20_000, [Spot(request, position, _never) for position in range(20_000)])
    assert _p_value(tokens, shape(SMALL, [_spot(temperature=1.0, top_k=4)])[0].double().softmax(-1)) > 1e-3


def test_draws_from_a_law_follow_it_and_not_another() -> None:
    spot = _spot(temperature=0.8, top_p=0.95, rule="ratio")
    law = TorchSampler(8).law(TensorRow(SMALL, 0), spot)
    tokens = [law.draw(core_noise.uniform(seed, 0, 5, "own")) for seed in range(8_000)]
    expected = shape(SMALL, [spot])[0].double().softmax(-1)
    assert _p_value(tokens, expected) > 1e-3
    assert [law.prob(token) for token in range(8)] == pytest.approx(expected.tolist(), abs=1e-12)
    assert _p_value(tokens, (SMALL[0].double() / 0.8).softmax(-1)) < 1e-6


@pytest.mark.slow
def test_sampled_heads_follow_their_own_law() -> None:
    spots = [_spot(temperature=1.0, rule="ratio", seed=seed) for seed in range(10_000)]
    proposals = TorchSampler(8).propose(rows_of(SMALL) * 10_000, spots, [Ask(0, ROOT)] * 10_000)
    law = SMALL[0].double().softmax(-1)
    assert _p_value([p.tokens[0] for p in proposals], law) > 1e-3
    assert _p_value([p.tokens[0] for p in proposals], (SMALL[0].double() / 1.1).softmax(-1)) < 1e-6


@pytest.mark.parametrize("u", [0.0, 2.0**-53, 0.25, 0.5, ALMOST_ONE])
def test_draw_never_returns_a_token_of_probability_zero(u: float) -> None:
    p = torch.tensor([0.0, 0.0, 0.25, 0.0, 0.25, 0.5 - 2.0**-50, 2.0**-50, 0.0], dtype=torch.float64)
    assert law_of(p).draw(u) == {0.0: 2, 2.0**-53: 2, 0.25: 4, 0.5: 5, ALMOST_ONE: 6}[u]
    assert law_of(torch.tensor([0.0, 1.0, 0.0], dtype=torch.float64)).draw(u) == 1


def test_the_greatest_variate_draws_the_last_possible_token() -> None:
    for seed in range(200):
        logits = _logits(1, 50, seed).double()
        logits[0, 40:45] = -torch.inf
        assert law_of(logits[0].softmax(-1)).draw(ALMOST_ONE) < 50
        assert law_of(logits[0, :45].softmax(-1)).draw(ALMOST_ONE) < 40


@pytest.mark.parametrize("width", [32, 33, 49152])
def test_where_no_token_may_follow_a_token_that_exists_is_drawn(width: int) -> None:
    """The request fails on it; until then it is an index, for log-probabilities for example."""
    nothing = torch.full((2, width), -torch.inf)
    drawn = sample.draw(sample.units(nothing), torch.tensor([0.0, ALMOST_ONE], dtype=torch.float64))
    assert ((drawn >= 0) & (drawn < width)).all()


def test_the_greedy_law_is_all_on_one_token() -> None:
    law = TorchSampler(8).law(TensorRow(SMALL, 0), _spot(rule="ratio"))
    assert [law.prob(token) for token in range(8)] == [0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0]
    assert law.draw(ALMOST_ONE) == 3


def test_the_residual_is_what_p_has_more_than_q() -> None:
    law = law_of(torch.tensor([0.1, 0.4, 0.2, 0.3], dtype=torch.float64))
    residual = law.residual(Sparse((1, 0), (0.25, 0.75)))
    assert [residual.prob(t) for t in range(4)] == pytest.approx([0.0, 0.15 / 0.65, 0.2 / 0.65, 0.3 / 0.65])
    assert law.prob(1) == 0.4, "the law itself is not changed"


def test_the_residual_of_equal_laws_is_the_law_itself() -> None:
    p = torch.tensor([0.125, 0.5, 0.375], dtype=torch.float64)
    law = law_of(p)
    assert torch.equal(law.residual(Sparse((1, 2, 0), (0.5, 0.375, 0.125))).units, law.units)


# --- logprobs, rows ---


def test_logprobs_are_those_of_the_unshaped_logits() -> None:
    logits = _logits()
    expected = logits[0].double().log_softmax(-1)
    reported = TorchSampler(VOCABULARY).logprobs(TensorRow(logits, 0), 17, 5)
    assert reported.logprob == pytest.approx(float(expected[17]), abs=1e-5)
    assert [token for token, _ in reported.top] == expected.topk(5).indices.tolist()
    assert [value for _, value in reported.top] == pytest.approx(expected.topk(5).values.tolist(), abs=1e-5)
    assert TorchSampler(VOCABULARY).logprobs(TensorRow(logits, 0), 17, 0).top == ()


def test_rows_in_half_precision_are_sampled_in_float32() -> None:
    logits = _logits(4).bfloat16()
    spots = _mixed()[:4]
    assert TorchSampler(VOCABULARY).pick(rows_of(logits), spots) == TorchSampler(VOCABULARY).pick(
        rows_of(logits.float()), spots
    )


def test_no_rows_give_no_tokens() -> None:
    assert TorchSampler(8).pick([], []) == []
    assert TorchSampler(8).propose([], [], []) == []
