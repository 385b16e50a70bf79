"""From a model's logits to the law that is sampled: one pipeline for target and draft.

Owns the order of the steps, which is: logit_bias, min_tokens, repetition penalty, presence and frequency penalties, temperature, top_k,
top_p, min_p. The last four mean what transformers' warpers of these names mean, in that order; entries equal to the last one kept are kept
too, so that a cut never depends on how equals were sorted. Invariant: a row is shaped by its own request and its own ancestors, and the
other rows of the batch do not change a bit of it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from specbranch.config import SamplingParams
from specbranch.core.request import Spot
from specbranch.models.columns import Columns, Find, finder
from specbranch.models.reductions import descending, weights

COLDEST = 1e-6  # below this no noise can turn a difference that float32 logits can express, and a division would overflow
EVERYTHING = 2.0  # a top_p that cuts nothing, not even what rounds to probability 0


def shape(logits: Tensor, spots: Sequence[Spot], columns: Columns | None = None) -> Tensor:
    """Return shaped logits [rows, vocabulary], float32, −∞ where nothing may be drawn; to be read only, it may be `logits` itself.

    With `columns` the logits are those of the first of them, and nothing else may be drawn.
    A greedy row is edited by bias, min_tokens and penalties, and then left at temperature 1: no filter moves its maximum.
    """
    edited = _edit(logits, spots, finder(columns, logits.shape[-1]))
    scaled = _scale(edited, [1.0 if spot.request.greedy else spot.request.params.temperature for spot in spots])
    return _cut(scaled, [None if spot.request.greedy else spot.request.params for spot in spots])


def _edit(logits: Tensor, spots: Sequence[Spot], find: Find) -> Tensor:
    touched = [row for row, spot in enumerate(spots) if _is_edited(spot)]
    if not touched:
        return logits.float()
    edited = logits.to(torch.float32, copy=True)
    for row in touched:
        _bias(edited[row], spots[row].request.params, find)
        _forbid_ending(edited[row], spots[row], find)
        _penalise(edited[row], spots[row], find)
    return edited


def _is_edited(spot: Spot) -> bool:
    return bool(spot.request.params.logit_bias) or _too_early_to_end(spot) or _is_penalised(spot.request.params)


def _too_early_to_end(spot: Spot) -> bool:
    return spot.position - spot.request.prompt_length < spot.request.params.min_tokens


def _is_penalised(params: SamplingParams) -> bool:
    return params.repetition_penalty != 1.0 or params.presence_penalty != 0.0 or params.frequency_penalty != 0.0


def _bias(row: Tensor, params: SamplingParams, find: Find) -> None:
    known = {place: bias for token, bias in params.logit_bias.items() if (place := find(token)) is not None}
    if known:
        row[_places(row, known)] += torch.tensor(list(known.values()), device=row.device)


def _forbid_ending(row: Tensor, spot: Spot, find: Find) -> None:
    if _too_early_to_end(spot):
        row[_places(row, _found(spot.request.ending_ids, find))] = -torch.inf


def _penalise(row: Tensor, spot: Spot, find: Find) -> None:
    params = spot.request.params
    if not _is_penalised(params):
        return
    history = spot.history()
    if params.repetition_penalty != 1.0:
        _penalise_repetition(row, set(_found(history, find)), params.repetition_penalty)
    counts = Counter(_found(history[spot.request.prompt_length :], find))
    if counts and (params.presence_penalty or params.frequency_penalty):
        penalties = [params.frequency_penalty * count + params.presence_penalty for count in counts.values()]
        row[_places(row, counts)] -= torch.tensor(penalties, device=row.device)


def _penalise_repetition(row: Tensor, seen: set[int], penalty: float) -> None:
    """Divide what is positive and multiply what is negative (Keskar et al. 2019): both make a seen token less likely."""
    places = _places(row, seen)
    row[places] = torch.where(row[places] < 0, row[places] * penalty, row[places] / penalty)


def _found(tokens: Iterable[int], find: Find) -> list[int]:
    """Return the places in a row of the tokens that have one."""
    return [place for token in tokens if (place := find(token)) is not None]


def _places(row: Tensor, places: Iterable[int]) -> Tensor:
    return torch.tensor(list(places), dtype=torch.long, device=row.device)


def _scale(logits: Tensor, temperatures: list[float]) -> Tensor:
    if all(temperature == 1.0 for temperature in temperatures):
        return logits
    # by a column even where all are equal: division by a scalar may be turned into a product by its inverse
    return logits / _column([max(temperature, COLDEST) for temperature in temperatures], logits)


def _cut(logits: Tensor, params: list[SamplingParams | None]) -> Tensor:
    """Put −∞ where top_k, top_p or min_p exclude; None leaves a row alone."""
    filtered = {row: p for row, p in enumerate(params) if p is not None and (p.top_k is not None or p.top_p < 1.0 or p.min_p > 0.0)}
    if not filtered:
        return logits
    whole = len(filtered) == len(params)
    chosen = logits if whole else logits[list(filtered)]
    kept = chosen.masked_fill(chosen < _lowest_kept(chosen, list(filtered.values())), -torch.inf)
    return kept if whole else logits.index_copy(0, torch.tensor(list(filtered), device=logits.device), kept)


def _lowest_kept(logits: Tensor, params: list[SamplingParams]) -> Tensor:
    """Return the least logit that each row's filters keep [rows, 1]."""
    top = logits.amax(dim=-1, keepdim=True)
    least = top + _column([math.log(p.min_p) if p.min_p else -math.inf for p in params], logits)
    if all(p.top_k is None and p.top_p == 1.0 for p in params):
        return least
    ordered = descending(logits)
    ranks = [min(p.top_k or logits.shape[-1], logits.shape[-1]) - 1 for p in params]
    kth = ordered.gather(-1, torch.tensor(ranks, device=logits.device).unsqueeze(-1))
    least = torch.maximum(least, kth)
    if all(p.top_p == 1.0 for p in params):
        return least
    return torch.maximum(least, _nucleus_end(ordered, top, kth, [p.top_p if p.top_p < 1.0 else EVERYTHING for p in params]))


def _nucleus_end(ordered: Tensor, top: Tensor, kth: Tensor, shares: list[float]) -> Tensor:
    """Return the value at which the sum from the top reaches its share of the values down to `kth` [rows, 1] (Holtzman et al. 2020)."""
    through = weights(ordered, top).cumsum(dim=-1)  # integers: exact, and never falling
    total = through.gather(-1, (ordered >= kth).sum(dim=-1, keepdim=True) - 1)
    share = torch.tensor(shares, dtype=torch.float64, device=ordered.device).unsqueeze(-1)
    enough = (total.double() * share).ceil().long()
    return ordered.gather(-1, torch.searchsorted(through, enough).clamp_(max=ordered.shape[-1] - 1))


def _column(values: list[float], like: Tensor) -> Tensor:
    return torch.tensor(values, dtype=torch.float32, device=like.device).unsqueeze(-1)
