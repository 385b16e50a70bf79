"""Rows of logits to tokens: the Sampler of every runner whose rows are tensors.

Owns the way from a question about rows to its answer, in three parts: what is asked as arrays (`sheet`), the arithmetic
on the device (`sample`), and what is made of the few numbers that come back. Invariant: what a row gives depends on its
logits and its Spot alone, whatever other rows are asked for with it. A GPU's runner uses the parts by themselves, so
that a question is one copy up and one read; picking and proposing are that here too, while a law is read number by
number.
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
from specbranch.models import sample
from specbranch.models.columns import Columns, finder
from specbranch.models.noise import Noise, winner
from specbranch.models.reductions import argmax
from specbranch.models.rows import TensorRow, collate, scored
from specbranch.models.sample import Asked
from specbranch.models.sheet import Arrays, draw_keys, is_noisy, sheet_of
from specbranch.models.transfer import Transfer

LEAST = 1e-300  # a weight that is still above 0 once normalised
ScoredToken = tuple[int, float]  # token id, its score


class TorchSampler:
    """Samples over the first `vocabulary` token ids, those that draft and target have in common; the others are never
    said.

    Samplers given the same `noise` make each row of it once between them, on a CPU.
    """

    def __init__(self, vocabulary: int, noise: Noise | None = None, transfer: Transfer | None = None) -> None:
        self.vocabulary = vocabulary
        self._noise = noise or Noise()
        self._transfer = transfer or Transfer(torch.device("cpu"))
        self._ids = torch.arange(0)

    def pick(self, rows: Sequence[TensorRow], spots: Sequence[Spot]) -> list[int]:
        """Return the model's own token at each row: argmax(log p + noise), ties to the lowest id; NO_TOKEN if the
        greatest score is not finite."""
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
        """Return what has to be on the device for `scores`."""
        return self._asked(spots, self.vocabulary, None)

    def scores(self, rows: Sequence[TensorRow], spots: Sequence[Spot], asked: Asked) -> tuple[Tensor, Tensor]:
        """Return logits over the vocabulary, and what is preferred among them: shaped, by the match rule with the
        noise of their draws."""
        logits = self.logits(rows)
        return logits, self._scores(logits, spots, asked, None)[1]

    def propose(self, rows: Sequence[TensorRow], spots: Sequence[Spot], asks: Sequence[Ask]) -> list[Proposal]:
        """Return candidates for each row: by the shared noise, or under the ratio rule by the draft's own law.

        Rows of a reduced head are worked on as they are; what they give is what they would give over the whole
        vocabulary.
        """
        if not rows:
            return []
        asked = self._sent(self.proposing(spots, asks, scored(rows)[1]))
        return proposed(spots, asks, self._transfer.down(self.candidates(rows, spots, asks, asked)))

    def proposing(self, spots: Sequence[Spot], asks: Sequence[Ask], columns: Columns | None) -> Arrays:
        """Return what has to be on the device for `candidates`."""
        arrays = self._asked(spots, self.width(columns), columns)
        by_entropy = [ask.measure == "entropy" for ask in asks]
        return {**arrays, "by_entropy": np.array(by_entropy, dtype=np.float32)} if any(by_entropy) else arrays

    def candidates(self, rows: Sequence[TensorRow], spots: Sequence[Spot], asks: Sequence[Ask], asked: Asked) -> Tensor:
        """Return a row of numbers for each row, on its device: confidence, then the tokens of its best entries,
        then their scores."""
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
        """The rows' logits over the vocabulary, before any shaping."""
        return collate(rows)[:, : self.vocabulary]

    def width(self, columns: Columns | None) -> int:
        """How many columns there are to choose from."""
        return self.vocabulary if columns is None else columns.below(self.vocabulary)

    def _asked(self, spots: Sequence[Spot], width: int, columns: Columns | None) -> Arrays:
        return sheet_of(spots, width, finder(columns, width))

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
        # what such a row gets is not added to it
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
        """The first token ids on a GPU: this sampler's own, as others may be at work there on other streams."""
        if len(self._ids) < width or self._ids.device != device:
            self._ids = torch.arange(width, device=device)
        return self._ids[:width]


@dataclass(frozen=True, slots=True, eq=False)
class TensorLaw:
    """A distribution over the vocabulary in whole units, on the device where it was made."""

    units: Tensor  # [vocabulary], int64

    def prob(self, token: int) -> float:
        """Return p(token)."""
        return float(self.units[token].double() / self.units.sum().double())

    def draw(self, u: float) -> int:
        """Draw by inversion with one uniform variate in [0, 1); a token of probability 0 is never drawn."""
        return int(sample.draw(self.units[None], torch.tensor([u], dtype=torch.float64, device=self.units.device)))

    def residual(self, q: Sparse) -> TensorLaw:
        """Return norm((p − q)+); where nothing remains, p itself (only rounding leads there)."""
        ids = torch.tensor([q.ids], device=self.units.device)
        return TensorLaw(
            sample.residual(
                self.units[None], ids, torch.tensor([q.probs], dtype=torch.float64, device=self.units.device)
            )[0]
        )


def proposed(spots: Sequence[Spot], asks: Sequence[Ask], results: np.ndarray) -> list[Proposal]:
    """Make proposals of what `candidates` says."""
    return [_proposal(spot, ask, result) for spot, ask, result in zip(spots, asks, results.tolist(), strict=True)]


def logprobs_of(result: list[float], top: int) -> TokenLogprobs:
    """Make log-probabilities of the ids and values that `sample.logprobs` gives for a row, one behind the other."""
    first, *rest = _entries_of(result)
    return TokenLogprobs(first[1], tuple(_ranked(rest)[:top]))


def _chosen(shaped: Tensor, spot: Spot) -> int:
    """Return the token of one row on a CPU [vocabulary], NO_TOKEN if its score is not finite, as NaN comes first."""
    token = winner(shaped, *draw_keys([spot])) if is_noisy(spot) else int(shaped.numpy().argmax())
    return token if shaped[token] < torch.inf else NO_TOKEN


def _proposal(spot: Spot, ask: Ask, packed: list[float]) -> Proposal:
    confidence, ranked = packed[0], _ranked(_entries_of(packed[1:]))
    # Where one logit is no number, it is among the best entries; where all are none, a device may find no entry at all.
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
    """Undo the packing of ids and their scores into one row of floats."""
    half = len(packed) // 2
    return [(int(token), score) for token, score in zip(packed[:half], packed[half:], strict=True)]


def _ranked(entries: list[ScoredToken]) -> list[ScoredToken]:
    """Return the distinct possible entries, best first, ties to the lowest id."""
    possible = {token: score for token, score in entries if score > -math.inf}
    return sorted(possible.items(), key=lambda entry: (-entry[1], entry[0]))


def _sparse(ranked: list[ScoredToken]) -> Sparse:
    """Return the law of some logits, without the entries that round to 0."""
    weights = [(token, weight) for token, logit in ranked if (weight := math.exp(logit - ranked[0][1])) > LEAST]
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
