"""From logits to picks, candidates and verdicts, on any device: the tensors' half of sampling.

Owns the arithmetic over rows of logits [rows, columns]; what is asked of each row comes as the tensors of a `sheet`.
Invariants: what a row gives depends on its logits and on its own entries alone, bit for bit, whatever other rows are
with it; nothing here waits for a device. Sums that decide something are of integers, hence exact in any order.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from specbranch.core.noise import mix
from specbranch.core.runner import ENTROPY_WEIGHT
from specbranch.models.sampling.noise_rows import gumbel
from specbranch.models.sampling.reductions import descending, entropy, leading, peak, weights

Asked = Mapping[str, Tensor]  # a sheet's arrays


def shape(logits: Tensor, asked: Asked) -> Tensor:
    """Return shaped logits, float32, −∞ where nothing may be drawn; to be read only, it may be `logits` itself.

    A greedy row is edited, and then left at temperature 1: no filter moves its maximum.
    """
    return _cut(_scaled(_edited(logits, asked), asked), asked)


def unscaled(logits: Tensor, asked: Asked) -> Tensor:
    """Return logits with all of their shaping but the temperature: who chooses among them divides by it."""
    edited = _edited(logits, asked)
    return (
        edited
        if "least" not in asked
        else edited.masked_fill(_cut(_scaled(edited, asked), asked) == -torch.inf, -torch.inf)
    )


def perturbed(shaped: Tensor, asked: Asked, noise: Tensor | None) -> Tensor:
    """Add the noise of its position to each row that wants it."""
    if noise is None:
        return shaped
    return shaped + noise if "noisy" not in asked else torch.where(asked["noisy"][:, None] > 0, shaped + noise, shaped)


def noise_of(asked: Asked, ids: Tensor) -> Tensor | None:
    """Make the noise of some tokens at each row's position [rows, ids]; nothing where no row wants any."""
    if "noise" not in asked:
        return None
    first, second = asked["noise"].T.unsqueeze(-1)  # each [rows, 1]
    return gumbel(mix(ids, (first, second)).int())


def candidates(shaped: Tensor, scores: Tensor, count: int, by_entropy: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return each row's confidence [rows], the columns of its best entries, surely with its argmax, and their
    scores."""
    best = leading(scores, count)
    confidence = peak(scores)
    if by_entropy is not None:
        confidence = torch.where(by_entropy > 0, entropy_bound(shaped), confidence)
    return confidence, best, scores.gather(-1, best).double()


def entropy_bound(shaped: Tensor) -> Tensor:
    """Return AdaEDL's bound (arXiv 2410.18351) on how likely each row's token is taken [rows], float64."""
    return (1.0 - (ENTROPY_WEIGHT * entropy(shaped).clamp_(min=0.0)).sqrt_()).clamp_(min=0.0)


def units(shaped: Tensor) -> Tensor:
    """Return each row's law in whole units [rows, columns], int64."""
    wide = shaped.double()
    return weights(wide, wide.amax(dim=-1, keepdim=True))


def draw(law: Tensor, u: Tensor) -> Tensor:
    """Draw from laws in whole units by inversion, each with a variate in [0, 1) [rows]; what has no unit is never
    drawn."""
    through = law.cumsum(dim=-1)
    # below the total: u ≤ 1 − 2⁻⁵³, and a total of up to 2⁶⁰ times that rounds to less than the total
    mark = (through[:, -1:].double() * u[:, None]).long()
    return torch.searchsorted(through, mark, right=True)[:, 0]


def residual(law: Tensor, ids: Tensor, probs: Tensor) -> Tensor:
    """Return (p − q)+ in whole units, q by its entries [rows, entries]; where nothing remains, p (only rounding
    leads there)."""
    total = law.sum(dim=-1, keepdim=True)
    rest = law.scatter_add(-1, ids, -(probs * total.double()).round_().long()).clamp_(min=0)
    return torch.where(rest.sum(dim=-1, keepdim=True) > 0, rest, law)


def decide(law: Tensor, asked: Asked) -> tuple[Tensor, Tensor]:
    """Try each row's sampled candidates one after the other (Leviathan et al. 2023); returns which was taken, −1 for
    none, and the token.

    `tried` [rows, attempts] are the candidates' columns, −1 where there is no such attempt; `tried_q` the probabilities
    they were drawn with, `accept` the variates, `q_ids` and `q_probs` [rows, attempts, entries] their laws, `last` the
    variate for what remains.
    """
    rows, attempts = asked["tried"].shape
    took = torch.full((rows,), -1, dtype=torch.int64, device=law.device)
    token = torch.zeros_like(took)
    for attempt in range(attempts):
        tried = asked["tried"][:, attempt]
        wanted = (tried >= 0) & (took < 0)
        mass = law.gather(-1, tried.clamp(min=0)[:, None])[:, 0].double() / law.sum(dim=-1).double()
        # u*q < p rather than u < p/q: q may be tiny
        taken = wanted & (asked["accept"][:, attempt] * asked["tried_q"][:, attempt] < mass)
        took, token = torch.where(taken, attempt, took), torch.where(taken, tried, token)
        law = torch.where(
            (wanted & ~taken)[:, None], residual(law, asked["q_ids"][:, attempt], asked["q_probs"][:, attempt]), law
        )
    return took, torch.where(took < 0, draw(law, asked["last"]), token)


def walk(chosen: Tensor, ancestors: Tensor) -> Tensor:
    """Return which rows the target comes to [rows]: those all of whose ancestors were chosen, themselves included
    [rows, rows]."""
    return ~(ancestors & ~chosen).any(dim=-1)


def logprobs(logits: Tensor, tokens: Tensor, top: int) -> tuple[Tensor, Tensor]:
    """Return columns, `tokens` first [rows] and then the `top` most likely, and their log-probabilities before any
    shaping, float64."""
    logs = logits.float().log_softmax(dim=-1)
    ids = torch.cat([tokens[:, None], leading(logs, top)], dim=-1) if top else tokens[:, None]
    return ids, logs.gather(-1, ids).double()


def _edited(logits: Tensor, asked: Asked) -> Tensor:
    if not any(name in asked for name in ("bias", "forbid", "repeat", "less", "allowed")):
        return logits.float()
    edited = logits.to(torch.float32, copy=True)
    for name in ("bias", "forbid", "repeat", "less"):
        if name in asked:
            rows, columns, numbers = asked[name]
            at, by = (rows.long(), columns.long()), numbers.float()
            edited[at] = _changed(name, edited[at], by)
    if "allowed" in asked:
        column = torch.arange(edited.shape[-1], device=edited.device)
        edited.masked_fill_((asked["allowed"][:, column // 8] >> (column % 8).to(torch.uint8)) & 1 == 0, -torch.inf)
    return edited


def _changed(name: str, values: Tensor, by: Tensor) -> Tensor:
    if name == "repeat":
        # divide what is positive, multiply what is negative (Keskar et al. 2019): both make a token less likely
        return torch.where(values < 0, values * by, values / by)
    return by if name == "forbid" else values - by if name == "less" else values + by


def _scaled(logits: Tensor, asked: Asked) -> Tensor:
    # by a column even where all are equal: division by a scalar may be turned into a product by its inverse
    return logits / asked["temperature"][:, None] if "temperature" in asked else logits


def _cut(logits: Tensor, asked: Asked) -> Tensor:
    """Put −∞ where top_k, top_p or min_p exclude; what equals the last one kept is kept too, however equals are
    sorted."""
    if "least" not in asked:
        return logits
    top = logits.amax(dim=-1, keepdim=True)
    least = top + asked["least"][:, None]
    if "rank" in asked:
        ordered = descending(logits)
        kth = ordered.gather(-1, asked["rank"][:, None])
        least = torch.maximum(least, kth)
        if "share" in asked:
            least = torch.maximum(least, _nucleus_end(ordered, top, kth, asked["share"]))
    return logits.masked_fill(logits < least, -torch.inf)


def _nucleus_end(ordered: Tensor, top: Tensor, kth: Tensor, share: Tensor) -> Tensor:
    """Return the value at which the sum from the top reaches its share of the values down to `kth` [rows, 1]
    (Holtzman et al. 2020)."""
    through = weights(ordered, top).cumsum(dim=-1)  # integers: exact, and never falling
    last = ((ordered >= kth).sum(dim=-1, keepdim=True) - 1).clamp_(min=0)  # nothing is ≥ NaN
    total = through.gather(-1, last)
    enough = (total.double() * share[:, None]).ceil().long()
    return ordered.gather(-1, torch.searchsorted(through, enough).clamp_(max=ordered.shape[-1] - 1))
