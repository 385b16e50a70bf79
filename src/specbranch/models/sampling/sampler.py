"""The Sampler of all torch runners: from rows of logits to tokens, proposals and log-probabilities.

Owns the three parts of sampling: sampling parameters as arrays (`sheet.py`), arithmetic on the device (`sample.py`),
and results from the few numbers that come back. Each call is one copy up and one read; only a distribution (`law`) is
read number by number. The GPU runner calls the parts by themselves. Invariant: a row's result depends on its logits and
its Spot alone, not on the other rows of the call.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from specbranch.core.noise import uniform
from specbranch.core.orders import Sparse, TokenLogprobs
from specbranch.core.request import Spot
from specbranch.core.runner import MOST_ENTRIES, NO_TOKEN, Ask, NoNumber, Proposal
from specbranch.models.files.head_columns import Columns, finder
from specbranch.models.forward.transfer import Transfer
from specbranch.models.sampling import sample
from specbranch.models.sampling.logit_rows import TensorRow, collate, scored
from specbranch.models.sampling.noise_rows import Noise, winner
from specbranch.models.sampling.reductions import argmax
from specbranch.models.sampling.sample import Asked
from specbranch.models.sampling.sheet import Arrays, draw_keys, is_noisy, sheet_of

TINIEST_PROBABILITY = 1e-300  # a weight that is still above 0 once normalised
ScoredToken = tuple[int, float]  # token id, its score


class TorchSampler:
    """Samples from the first `vocabulary` token ids, which draft and target have in common.

    On a CPU, samplers with the same `noise` compute each of its rows once.
    """

    def __init__(self, vocabulary: int, noise: Noise | None = None, transfer: Transfer | None = None) -> None:
        self.vocabulary = vocabulary
        self._noise = noise or Noise()
        self._transfer = transfer or Transfer(torch.device("cpu"))
        self._ids = torch.arange(0)

    def pick(self, rows: Sequence[TensorRow], spots: Sequence[Spot]) -> list[int]:
        """Return the model's own token at each row: argmax(log p + noise), ties to the lowest id.

        It is NO_TOKEN if the greatest score is not finite.
        """
        if not rows:
            return []
        asked = self._sent(self.picking(spots))
        if rows[0].block.device.type == "cpu":
            shaped = sample.shape(self.logits(rows), asked)
            return [_chosen(row, spot) for row, spot in zip(shaped, spots, strict=True)]
        scores = self.scores(rows, spots, asked)[1]
        best = argmax(scores)
        top = scores.gather(-1, best[:, None])[:, 0]  # NaN if any score is
        chosen: list[int] = self._transfer.down(torch.where(top < torch.inf, best, NO_TOKEN)).tolist()
        return chosen

    def picking(self, spots: Sequence[Spot]) -> Arrays:
        """Return the arrays that `scores` needs on the device."""
        return self._asked(spots, self.vocabulary, None)

    def scores(self, rows: Sequence[TensorRow], spots: Sequence[Spot], asked: Asked) -> tuple[Tensor, Tensor]:
        """Return logits over the vocabulary, and scores: shaped logits, under the match rule with noise."""
        logits = self.logits(rows)
        return logits, self._scores(logits, spots, asked, None)[1]

    def propose(self, rows: Sequence[TensorRow], spots: Sequence[Spot], asks: Sequence[Ask]) -> list[Proposal]:
        """Return candidates for each row: by the shared noise, or under the ratio rule by the draft's distribution.

        Rows of a reduced head are not spread over the vocabulary; the result is the same.
        """
        if not rows:
            return []
        asked = self._sent(self.proposing(spots, asks, scored(rows)[1]))
        return proposed(spots, asks, self._transfer.down(self.candidates(rows, spots, asks, asked)))

    def proposing(self, spots: Sequence[Spot], asks: Sequence[Ask], columns: Columns | None) -> Arrays:
        """Return the arrays that `candidates` needs on the device."""
        arrays = self._asked(spots, self.width(columns), columns)
        by_entropy = [ask.measure == "entropy" for ask in asks]
        return {**arrays, "by_entropy": np.array(by_entropy, dtype=np.float32)} if any(by_entropy) else arrays

    def candidates(self, rows: Sequence[TensorRow], spots: Sequence[Spot], asks: Sequence[Ask], asked: Asked) -> Tensor:
        """Return numbers for each row, on its device: confidence, tokens of its best entries, their scores."""
        logits, columns = scored(rows)
        logits = logits[:, : self.width(columns)]
        shaped, scores = self._scores(logits, spots, asked, columns)
        count = max(MOST_ENTRIES if spot.request.by_ratio else ask.width for spot, ask in zip(spots, asks, strict=True))
        confidence, best, of_best = sample.candidates(shaped, scores, count, asked.get("by_entropy"))
        ids = best if columns is None else columns.ids[best]
        return torch.cat([confidence[:, None], ids.double(), of_best], dim=-1)

    def law(self, row: TensorRow, spot: Spot) -> TensorLaw:
        """Return the shaped distribution at a row, or raise NoNumber."""
        logits = self.logits([row])
        shaped = sample.shape(logits, self._sent(self._asked([spot], logits.shape[-1], None)))
        if not shaped.amax() < torch.inf:
            raise NoNumber("the logits of a row are not finite")
        if spot.request.greedy:
            return TensorLaw(torch.zeros_like(shaped[0], dtype=torch.int64).index_fill_(0, argmax(shaped), 1))
        return TensorLaw(sample.units(shaped)[0])

    def margin(self, row: TensorRow, spot: Spot, first: int, second: int) -> float:
        """Return by how many logits `first` is preferred to `second`, noise and shaping included."""
        scores = self.scores([row], [spot], self._sent(self.picking([spot])))[1][0]
        return float(scores[first] - scores[second]) * (spot.request.params.temperature or 1.0)

    def logprobs(self, row: TensorRow, token: int, top: int) -> TokenLogprobs:
        """Return the log-probability of `token` and of the `top` most likely, before any shaping."""
        logits = self.logits([row])
        ids, logs = sample.logprobs(logits, self._sent({"tokens": np.array([token])})["tokens"], top)
        return logprobs_of(self._transfer.down(torch.cat([ids.double(), logs], dim=-1))[0].tolist(), top)

    def logits(self, rows: Sequence[TensorRow]) -> Tensor:
        """Return the rows' logits over the vocabulary, before any shaping."""
        return collate(rows)[:, : self.vocabulary]

    def width(self, columns: Columns | None) -> int:
        """Return how many columns of a row may be sampled."""
        return self.vocabulary if columns is None else columns.below(self.vocabulary)

    def _asked(self, spots: Sequence[Spot], width: int, columns: Columns | None) -> Arrays:
        tokens = None if columns is None else columns.tokens[:width]
        return sheet_of(spots, width, finder(columns, width), tokens)

    def _sent(self, arrays: Arrays) -> Asked:
        return self._transfer.up(arrays)

    def _scores(
        self, logits: Tensor, spots: Sequence[Spot], asked: Asked, columns: Columns | None
    ) -> tuple[Tensor, Tensor]:
        """Return shaped logits, and the same with noise."""
        shaped = sample.shape(logits, asked)
        return shaped, sample.perturbed(shaped, asked, self._noise_of(shaped, spots, asked, columns))

    def _noise_of(self, shaped: Tensor, spots: Sequence[Spot], asked: Asked, columns: Columns | None) -> Tensor | None:
        if "noise" not in asked:
            return None
        width = shaped.shape[-1]
        if shaped.device.type != "cpu":
            return sample.noise_of(
                asked, self._first_ids(width, shaped.device) if columns is None else columns.ids[:width]
            )
        # rows without noise get any row of it: it will not be added to them
        silent = [spot.request.greedy or spot.request.by_ratio for spot in spots]
        noisy = spots[silent.index(False)]
        draws = draw_keys([noisy if is_silent else spot for is_silent, spot in zip(silent, spots, strict=True)])
        rows = (
            self._noise.rows(draws, width)
            if columns is None
            else [row[:width] for row in self._noise.rows_of(draws, columns)]
        )
        return rows[0].unsqueeze(0) if len(set(draws)) == 1 else torch.stack(rows)

    def _first_ids(self, width: int, device: torch.device) -> Tensor:
        """Return the first token ids on a GPU; each sampler has its own tensor, as others may use other streams."""
        if len(self._ids) < width or self._ids.device != device:
            self._ids = torch.arange(width, device=device)
        return self._ids[:width]


@dataclass(frozen=True, slots=True, eq=False)
class TensorLaw:
    """A distribution over the vocabulary in integer units, on the device of its logits."""

    units: Tensor  # [vocabulary], int64

    def prob(self, token: int) -> float:
        """Return p(token)."""
        return float(self.units[token].double() / self.units.sum().double())

    def draw(self, u: float) -> int:
        """Draw by inversion with one uniform variate in [0, 1); a token of probability 0 is never drawn."""
        return int(sample.draw(self.units[None], torch.tensor([u], dtype=torch.float64, device=self.units.device)))

    def residual(self, q: Sparse) -> TensorLaw:
        """Return norm((p − q)+); if nothing remains, which only rounding can cause, p itself."""
        ids = torch.tensor([q.ids], device=self.units.device)
        return TensorLaw(
            sample.residual(
                self.units[None], ids, torch.tensor([q.probs], dtype=torch.float64, device=self.units.device)
            )[0]
        )


def proposed(spots: Sequence[Spot], asks: Sequence[Ask], results: np.ndarray) -> list[Proposal]:
    """Make proposals of the numbers that `candidates` returned."""
    return [_proposal(spot, ask, result) for spot, ask, result in zip(spots, asks, results.tolist(), strict=True)]


def logprobs_of(result: list[float], top: int) -> TokenLogprobs:
    """Make log-probabilities of one row of `sample.logprobs`: ids, then their values."""
    first, *rest = _entries_of(result)
    return TokenLogprobs(first[1], tuple(_ranked(rest)[:top]))


def _chosen(shaped: Tensor, spot: Spot) -> int:
    """Return the token of one row on a CPU [vocabulary]; NO_TOKEN if any score is NaN or the greatest infinite."""
    token = winner(shaped, *draw_keys([spot])) if is_noisy(spot) else int(shaped.numpy().argmax())
    return token if shaped[token] < torch.inf else NO_TOKEN


def _proposal(spot: Spot, ask: Ask, packed: list[float]) -> Proposal:
    confidence, entries = packed[0], _entries_of(packed[1:])
    ranked = _ranked(entries)
    if not ranked and ask.allowed is not None and not any(math.isnan(score) for _, score in entries):
        return Proposal((), 0.0)  # the model has a score for none of the allowed tokens
    # A NaN logit is always among the best entries. If all are NaN, a device may return no entry at all.
    if math.isnan(sum(packed)) or not (ranked or ask.allowed is not None):
        return Proposal((), math.nan)
    if not spot.request.by_ratio:
        best = ranked[: ask.width]
        return Proposal(
            tuple(token for token, _ in best), confidence, odds=tuple(math.exp(score - best[0][1]) for _, score in best)
        )
    q = _sparse(ranked[:MOST_ENTRIES])
    if ask.measure == "top":
        confidence = q.probs[0]
    if ask.heads == "top":
        return Proposal(q.ids[: ask.width], confidence, odds=tuple(prob / q.probs[0] for prob in q.probs[: ask.width]))
    drawn = _draw(q, spot)
    others = tuple(token for token in q.ids if token != drawn)
    return Proposal((drawn, *others[: ask.width - 1]), confidence, q)


def _entries_of(packed: list[float]) -> list[ScoredToken]:
    """Unpack one row of floats: ids first, then their scores."""
    half = len(packed) // 2
    return [(int(token), score) for token, score in zip(packed[:half], packed[half:], strict=True)]


def _ranked(entries: list[ScoredToken]) -> list[ScoredToken]:
    """Return the distinct entries above −∞, best first, ties to the lowest id."""
    possible = {token: score for token, score in entries if score > -math.inf}
    return sorted(possible.items(), key=lambda entry: (-entry[1], entry[0]))


def _sparse(ranked: list[ScoredToken]) -> Sparse:
    """Return the softmax of some logits, without entries that round to 0."""
    weights = [
        (token, weight) for token, logit in ranked if (weight := math.exp(logit - ranked[0][1])) > TINIEST_PROBABILITY
    ]
    total = math.fsum(weight for _, weight in weights)
    return Sparse(tuple(token for token, _ in weights), tuple(weight / total for _, weight in weights))


def _draw(q: Sparse, spot: Spot) -> int:
    """Draw the draft's token at a position by inversion."""
    left = uniform(spot.request.seed, spot.request.sample, spot.position, "draft", spot.attempt)
    for token, probability in zip(q.ids, q.probs, strict=True):
        left -= probability
        if left < 0.0:
            return token
    return q.ids[0]  # only rounding of the sum leads here
