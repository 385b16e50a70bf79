"""Rows of logits to tokens: the Sampler of every runner whose rows are tensors.

Owns picking, proposing and the target's law as a tensor; shaping and noise are its neighbours. Invariant: what a row gives depends on its
logits and its Spot alone, whatever other rows are asked for with it; one transfer to the host a call.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specbranch.core.noise import uniform
from specbranch.core.orders import Sparse, TokenLogprobs
from specbranch.core.request import Spot
from specbranch.core.runner import ENTROPY_WEIGHT, MOST_ENTRIES, Ask, Proposal
from specbranch.models.columns import Columns
from specbranch.models.noise import Noise
from specbranch.models.reductions import argmax, entropy, leading, peak
from specbranch.models.rows import TensorRow, collate, scored
from specbranch.models.shaping import shape

FINE = 2.0**60  # units of probability in a draw: integers sum exactly, in any order
LEAST = 1e-300  # a weight that is still above 0 once normalised
Entry = tuple[int, float]  # token id, its score


class TorchSampler:
    """Samples over the first `vocabulary` token ids, those that draft and target have in common; the others are never said.

    Samplers given the same `noise` make each row of it once between them.
    """

    def __init__(self, vocabulary: int, noise: Noise | None = None) -> None:
        self.vocabulary = vocabulary
        self._noise = noise or Noise()

    def pick(self, rows: Sequence[TensorRow], spots: Sequence[Spot]) -> list[int]:
        """Return the model's own token at each row: argmax(log p + noise), ties to the lowest id."""
        if not rows:
            return []
        shaped = shape(self._logits(rows), spots)
        chosen: list[int] = argmax(self._perturb(shaped, spots, [not spot.request.greedy for spot in spots])).tolist()
        return chosen

    def propose(self, rows: Sequence[TensorRow], spots: Sequence[Spot], asks: Sequence[Ask]) -> list[Proposal]:
        """Return candidates for each row: by the shared noise, or under the ratio rule by the draft's own law.

        Rows of a reduced head are worked on as they are; what they give is what they would give over the whole vocabulary.
        """
        if not rows:
            return []
        logits, columns = self._scored(rows)
        shaped = shape(logits, spots, columns)
        scores = self._perturb(shaped, spots, [not (spot.request.greedy or spot.request.by_ratio) for spot in spots], columns)
        best = leading(scores, max(_entries(spot, ask) for spot, ask in zip(spots, asks, strict=True)))
        ids = best if columns is None else columns.ids[best]
        packed = torch.cat([_confidence(shaped, scores, asks), ids.double(), scores.gather(-1, best).double()], dim=-1).tolist()
        return [_proposal(spot, ask, line) for spot, ask, line in zip(spots, asks, packed, strict=True)]

    def law(self, row: TensorRow, spot: Spot) -> TensorLaw:
        """Return the shaped distribution at a row."""
        shaped = shape(self._logits([row]), [spot])
        if spot.request.greedy:
            return TensorLaw(torch.zeros_like(shaped[0], dtype=torch.float64).index_fill_(0, argmax(shaped), 1.0))
        return TensorLaw(shaped[0].double().softmax(dim=-1))

    def margin(self, row: TensorRow, spot: Spot, first: int, second: int) -> float:
        """Return by how many logits `first` is preferred to `second`, noise and shaping included."""
        scores = self._perturb(shape(self._logits([row]), [spot]), [spot], [not spot.request.greedy])[0]
        return float(scores[first] - scores[second]) * (spot.request.params.temperature or 1.0)

    def logprobs(self, row: TensorRow, token: int, top: int) -> TokenLogprobs:
        """Return the log-probability of `token` and of the `top` most likely, before any shaping."""
        logs = self._logits([row]).float().log_softmax(dim=-1)
        asked = torch.tensor([[token]], device=logs.device)
        ids = torch.cat([asked, leading(logs, top)], dim=-1) if top else asked
        first, *rest = _entries_of(torch.cat([ids.double(), logs.gather(-1, ids).double()], dim=-1)[0].tolist())
        return TokenLogprobs(first[1], tuple(_ranked(rest)[:top]))

    def _logits(self, rows: Sequence[TensorRow]) -> Tensor:
        return collate(rows)[:, : self.vocabulary]

    def _scored(self, rows: Sequence[TensorRow]) -> tuple[Tensor, Columns | None]:
        logits, columns = scored(rows)
        return logits[:, : self.vocabulary if columns is None else columns.below(self.vocabulary)], columns

    def _perturb(self, shaped: Tensor, spots: Sequence[Spot], noisy: Sequence[bool], columns: Columns | None = None) -> Tensor:
        """Add the noise of its position to each noisy row."""
        chosen = [row for row, is_noisy in enumerate(noisy) if is_noisy]
        if not chosen:
            return shaped
        places = [(spots[row].request.seed, spots[row].request.sample, spots[row].position) for row in chosen]
        width = shaped.shape[-1]
        noise = (
            self._noise.rows(places, width, shaped.device)
            if columns is None
            else [row[:width] for row in self._noise.rows_of(places, columns)]
        )
        added = noise[0].unsqueeze(0) if len(set(places)) == 1 else torch.stack(noise)
        if len(chosen) == len(noisy):
            return shaped + added
        return shaped.index_put((torch.tensor(chosen, device=shaped.device),), shaped[chosen] + added)


@dataclass(frozen=True, slots=True, eq=False)
class TensorLaw:
    """A distribution over the vocabulary, float64, on the device where it was made."""

    probabilities: Tensor  # [vocabulary], sums to 1

    def prob(self, token: int) -> float:
        """Return p(token)."""
        return float(self.probabilities[token])

    def draw(self, u: float) -> int:
        """Draw by inversion with one uniform variate in [0, 1); a token of probability 0 is never drawn."""
        through = (self.probabilities * FINE).long().cumsum(dim=-1)
        mark = (through[-1:].double() * u).long()  # below the total: u ≤ 1 − 2⁻⁵³, and near 2⁶⁰ that is half a step of float64 or more
        return int(torch.searchsorted(through, mark, right=True))

    def residual(self, q: Sparse) -> TensorLaw:
        """Return norm((p − q)+); where nothing remains, p itself (only rounding leads there)."""
        rest = self.probabilities.clone()
        rest[torch.tensor(q.ids, device=rest.device)] -= torch.tensor(q.probs, dtype=torch.float64, device=rest.device)
        total = float(rest.clamp_(min=0.0).sum())
        return TensorLaw(rest / total) if total > 0.0 else self


def _entries(spot: Spot, ask: Ask) -> int:
    """How many of a row's best entries a proposal is made from."""
    return MOST_ENTRIES if spot.request.by_ratio else ask.width


def _confidence(shaped: Tensor, scores: Tensor, asks: Sequence[Ask]) -> Tensor:
    """Return each row's confidence by its measure [rows, 1], float64; "entropy" is AdaEDL's bound (arXiv 2410.18351), on the law itself."""
    by_entropy = [ask.measure == "entropy" for ask in asks]
    if not any(by_entropy):
        return peak(scores).unsqueeze(-1)
    bound = (1.0 - (ENTROPY_WEIGHT * entropy(shaped).clamp_(min=0.0)).sqrt_()).clamp_(min=0.0)
    if not all(by_entropy):
        bound = torch.where(torch.tensor(by_entropy, device=bound.device), bound, peak(scores))
    return bound.unsqueeze(-1)


def _proposal(spot: Spot, ask: Ask, packed: list[float]) -> Proposal:
    confidence, ranked = packed[0], _ranked(_entries_of(packed[1:]))
    if not spot.request.by_ratio:
        best = ranked[: ask.width]
        return Proposal(tuple(token for token, _ in best), confidence, odds=tuple(math.exp(score - best[0][1]) for _, score in best))
    q = _sparse(ranked[:MOST_ENTRIES])
    if ask.measure == "top":
        confidence = q.probs[0]
    if ask.heads == "top":
        return Proposal(q.ids[: ask.width], confidence, odds=tuple(prob / q.probs[0] for prob in q.probs[: ask.width]))
    drawn = _draw(q, spot)
    others = tuple(token for token in q.ids if token != drawn)
    return Proposal((drawn, *others[: ask.width - 1]), confidence, q)


def _entries_of(packed: list[float]) -> list[Entry]:
    """Undo the packing of ids and their scores into one row of floats."""
    half = len(packed) // 2
    return [(int(token), score) for token, score in zip(packed[:half], packed[half:], strict=True)]


def _ranked(entries: list[Entry]) -> list[Entry]:
    """Return the distinct possible entries, best first, ties to the lowest id."""
    possible = {token: score for token, score in entries if score > -math.inf}
    return sorted(possible.items(), key=lambda entry: (-entry[1], entry[0]))


def _sparse(ranked: list[Entry]) -> Sparse:
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
