"""The arithmetic of sampling on any device: from logits to tokens, candidates and verdicts.

Owns the operations over rows of logits [rows, columns]. The sampling parameters of each row come as tensors (`Asked`,
from `sheet.py`). Invariants: a row's result depends on its own logits and parameters alone, bit for bit; nothing here
waits for a device. Sums that decide something are sums of integers, which are exact in any order.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from specbranch.core.noise import mix
from specbranch.core.runner import ENTROPY_WEIGHT
from specbranch.models.sampling.noise_rows import gumbel
from specbranch.models.sampling.reductions import descending, entropy, leading, peak, weights

Asked = Mapping[str, Tensor]  # the arrays of `sheet_of`, on the device


def shape(logits: Tensor, asked: Asked) -> Tensor:
    """Apply all sampling parameters: returns float32 logits, −∞ at tokens that must not be drawn.

    The result may be `logits` itself, so callers must not change it. A greedy row keeps temperature 1 and gets no
    filter, as no filter moves its maximum.
    """
    return filtered(edited(logits, asked), asked)


def filtered(logits: Tensor, asked: Asked) -> Tensor:
    """Apply the temperature and the filters top_k, top_p and min_p to edited logits."""
    return _cut(_scaled(logits, asked), asked)


def uncut(logits: Tensor, asked: Asked) -> Tensor:
    """Apply the filters top_k, top_p and min_p to edited logits, without the temperature, which they depend on."""
    if "least" not in asked:
        return logits
    return logits.masked_fill(filtered(logits, asked) == -torch.inf, -torch.inf)


def perturbed(shaped: Tensor, asked: Asked, noise: Tensor | None) -> Tensor:
    """Add noise to each row that is sampled with noise."""
    if noise is None:
        return shaped
    return shaped + noise if "noisy" not in asked else torch.where(asked["noisy"][:, None] > 0, shaped + noise, shaped)


def noise_of(asked: Asked, ids: Tensor) -> Tensor | None:
    """Return the noise of some tokens at each row's position [rows, ids]; None if no row uses noise."""
    if "noise" not in asked:
        return None
    first, second = asked["noise"].T.unsqueeze(-1)  # each [rows, 1]
    return gumbel(mix(ids, (first, second)).int())


def candidates(shaped: Tensor, scores: Tensor, count: int, by_entropy: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return each row's confidence [rows], the columns of its best entries, and their scores.

    The best entries always include the argmax. `by_entropy`: rows whose confidence is the entropy bound.
    """
    best = leading(scores, count)
    confidence = peak(scores)
    if by_entropy is not None:
        confidence = torch.where(by_entropy > 0, entropy_bound(shaped), confidence)
    return confidence, best, scores.gather(-1, best).double()


def entropy_bound(shaped: Tensor) -> Tensor:
    """Return AdaEDL's lower bound (arXiv 2410.18351) on the acceptance of each row's token [rows], float64."""
    return (1.0 - (ENTROPY_WEIGHT * entropy(shaped).clamp_(min=0.0)).sqrt_()).clamp_(min=0.0)


def units(shaped: Tensor) -> Tensor:
    """Return each row's distribution in integer units [rows, columns], int64."""
    wide = shaped.double()
    return weights(wide, wide.amax(dim=-1, keepdim=True))


def draw(law: Tensor, u: Tensor) -> Tensor:
    """Draw from distributions in integer units by inversion, with a variate in [0, 1) for each row [rows].

    A token without a unit is never drawn. Where none has any, the token has no meaning, but exists.
    """
    through = law.cumsum(dim=-1)
    # below the total: u ≤ 1 − 2⁻⁵³, and a total of up to 2⁶⁰ times that rounds to less than the total
    mark = (through[:, -1:].double() * u[:, None]).long()
    return torch.searchsorted(through, mark, right=True)[:, 0].clamp_(max=law.shape[-1] - 1)


def residual(law: Tensor, ids: Tensor, probs: Tensor) -> Tensor:
    """Return (p − q)+ in integer units; `ids`, `probs`: the entries of q [rows, entries].

    If nothing remains, which only rounding can cause, returns p.
    """
    total = law.sum(dim=-1, keepdim=True)
    rest = law.scatter_add(-1, ids, -(probs * total.double()).round_().long()).clamp_(min=0)
    return torch.where(rest.sum(dim=-1, keepdim=True) > 0, rest, law)


def decide(law: Tensor, asked: Asked) -> tuple[Tensor, Tensor]:
    """Accept or reject each row's sampled candidates in turn (Leviathan et al. 2023).

    Returns which attempt was accepted, −1 for none, and the token. `asked` has `tried` [rows, attempts], the
    candidates' columns, −1 if there is no such attempt. `tried_q` are the probabilities they were drawn with, `accept`
    the variates, `q_ids` and `q_probs` [rows, attempts, entries] their distributions, `last` the variate of the
    residual.
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
    """Return which rows are on the accepted path [rows]: those that are chosen with all their ancestors.

    `ancestors` [rows, rows]: each row's ancestors, itself included.
    """
    return ~(ancestors & ~chosen).any(dim=-1)


def logprobs(logits: Tensor, tokens: Tensor, top: int) -> tuple[Tensor, Tensor]:
    """Return columns and their log-probabilities before any shaping, float64.

    The first column is that of `tokens` [rows]; then come the `top` most likely ones.
    """
    logs = logits.float().log_softmax(dim=-1)
    ids = torch.cat([tokens[:, None], leading(logs, top)], dim=-1) if top else tokens[:, None]
    return ids, logs.gather(-1, ids).double()


def edited(logits: Tensor, asked: Asked) -> Tensor:
    """Change single logits: bias, forbidden tokens, penalties, allowed tokens; returns float32."""
    if not any(name in asked for name in ("bias", "forbid", "repeat", "less", "allowed")):
        return logits.float()
    edits = [name for name in ("bias", "forbid", "repeat", "less") if name in asked]
    found = logits.to(torch.float32, copy=True) if edits else logits.float()
    for name in edits:
        rows, columns, numbers = asked[name]
        at, by = (rows.long(), columns.long()), numbers.float()
        found[at] = _changed(name, found[at], by)
    return _masked(found, asked["allowed"]) if "allowed" in asked else found


def _masked(logits: Tensor, allowed: Tensor) -> Tensor:
    """Return float32 logits, −∞ at tokens whose bit is not set; `allowed`: packed bits [rows, bytes]."""
    width = logits.shape[-1]
    if logits.device.type == "cpu":  # numpy unpacks bits 20 times as fast as torch can
        bits = np.unpackbits(allowed.numpy(), axis=1, count=width, bitorder="little").view(np.bool_)
        return torch.from_numpy(np.where(bits, logits.numpy(), np.float32(-np.inf)))
    return logits.masked_fill(forbidden(allowed, width), -torch.inf)


def forbidden(allowed: Tensor, width: int) -> Tensor:
    """Return which columns are forbidden by packed bits [rows, width]; few operations, each over bytes."""
    bits = allowed[:, :, None] >> torch.arange(8, dtype=torch.uint8, device=allowed.device)
    return (bits & 1 == 0).flatten(1)[:, :width]


def _changed(name: str, values: Tensor, by: Tensor) -> Tensor:
    if name == "repeat":
        # divide what is positive, multiply what is negative (Keskar et al. 2019): both make a token less likely
        return torch.where(values < 0, values * by, values / by)
    return by if name == "forbid" else values - by if name == "less" else values + by


def _scaled(logits: Tensor, asked: Asked) -> Tensor:
    # by a tensor even if all are equal: torch may turn division by a scalar into a product with its inverse
    return logits / asked["temperature"][:, None] if "temperature" in asked else logits


def _cut(logits: Tensor, asked: Asked) -> Tensor:
    """Set logits that top_k, top_p or min_p exclude to −∞.

    Entries equal to the last one kept are kept, too, so the result does not depend on how equal ones are sorted.
    """
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
    """Return the smallest logit that top_p keeps [rows, 1] (Holtzman et al. 2020).

    There the sum from the top reaches its share of the sum of all values down to `kth`.
    """
    through = weights(ordered, top).cumsum(dim=-1)  # integers: exact, and never falling
    last = ((ordered >= kth).sum(dim=-1, keepdim=True) - 1).clamp_(min=0)  # nothing is ≥ NaN
    total = through.gather(-1, last)
    enough = (total.double() * share[:, None]).ceil().long()
    return ordered.gather(-1, torch.searchsorted(through, enough).clamp_(max=ordered.shape[-1] - 1))
