"""The sampling parameters of some rows as small arrays: the host's half of sampling.

Owns the conversion from requests to arrays, and the order of shaping: logit_bias, min_tokens, repetition penalty,
presence and frequency penalties, allowed tokens, temperature, top_k, top_p, min_p. Does not own the arithmetic
(`sample.py`). Invariants: a row's numbers depend on its own request and ancestors alone; the arrays hold all that
sampling needs, so one copy brings them to a device.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np

from specbranch.config import SamplingParams
from specbranch.core.grammar import Mask, allowed_by
from specbranch.core.noise import keys
from specbranch.core.request import Spot
from specbranch.models.files.head_columns import Find

# Lowest temperature. Below it noise cannot change any difference that float32 logits can express, and a division could
# overflow.
COLDEST = 1e-6
EVERYTHING = 2.0  # a top_p that cuts nothing, not even tokens whose probability rounds to 0
Arrays = dict[str, np.ndarray]  # by name


def sheet_of(spots: Sequence[Spot], width: int, find: Find, tokens: np.ndarray | None = None) -> Arrays:
    """Return the sampling parameters of rows of `width` columns, by name; parameters that no row uses are left out.

    `tokens`: the token of each column; None: a column is its own token. `bias`, `forbid`, `repeat` and `less` are
    triples of row, column and number.
    """
    arrays = {**_edits(spots, find), **masks_of(spots, width, find, tokens), **_cuts(spots, width)}
    temperatures = [temperature_of(spot) for spot in spots]
    if any(temperature != 1.0 for temperature in temperatures):
        arrays["temperature"] = np.array(temperatures, dtype=np.float32)
    noisy = [is_noisy(spot) for spot in spots]
    if any(noisy):
        arrays["noise"] = np.array([keys(*key) for key in draw_keys(spots)], dtype=np.int64)
        if not all(noisy):
            arrays["noisy"] = np.array(noisy, dtype=np.float32)
    return arrays


def temperature_of(spot: Spot) -> float:
    """Return the number that a row's logits are divided by."""
    return 1.0 if spot.request.greedy else max(spot.request.params.temperature, COLDEST)


def is_noisy(spot: Spot) -> bool:
    """True if noise is added to a row's logits: neither to greedy rows nor under the ratio rule."""
    return not (spot.request.greedy or spot.request.by_ratio)


def draw_keys(spots: Sequence[Spot]) -> list[tuple[int, int, int]]:
    """Return seed, sample and position of each row, which its noise depends on."""
    return [(spot.request.seed, spot.request.sample, spot.position) for spot in spots]


def _edits(spots: Sequence[Spot], find: Find) -> Arrays:
    """Return the changes to single logits: bias, forbidden end tokens, penalties of tokens that occurred."""
    edits: dict[str, list[tuple[int, int, float]]] = {"bias": [], "forbid": [], "repeat": [], "less": []}
    for row, spot in enumerate(spots):
        params = spot.request.params
        edits["bias"] += [
            (row, column, bias) for token, bias in params.logit_bias.items() if (column := find(token)) is not None
        ]
        if spot.position - spot.request.prompt_length < params.min_tokens:
            edits["forbid"] += [(row, column, -math.inf) for column in _found(spot.request.ending_ids, find)]
        if is_penalised(params):
            history = spot.history()
            if params.repetition_penalty != 1.0:
                edits["repeat"] += [(row, column, params.repetition_penalty) for column in set(_found(history, find))]
            counts = Counter(_found(history[spot.request.prompt_length :], find))
            edits["less"] += [
                (row, column, params.frequency_penalty * n + params.presence_penalty) for column, n in counts.items()
            ]
    return {name: _triples(found) for name, found in edits.items() if found}


def _triples(edits: list[tuple[int, int, float]]) -> np.ndarray:
    """Return rows, columns and numbers [3, edits]; float64 holds each of them exactly."""
    return np.array(edits, dtype=np.float64).T.copy()


def is_shaped(spot: Spot) -> bool:
    """True if any sampling parameter but the temperature changes a row's logits."""
    masked = spot.allowed is not None or spot.request.is_constrained  # later positions of a request have masks, too
    return masked or is_edited(spot)


def is_edited(spot: Spot) -> bool:
    """True if any sampling parameter but the temperature and a mask changes a row's logits."""
    params, request = spot.request.params, spot.request
    cut = not request.greedy and (params.top_k is not None or params.top_p < 1.0 or params.min_p > 0.0)
    forbids = spot.position - request.prompt_length < params.min_tokens
    return cut or forbids or is_penalised(params) or bool(params.logit_bias)


def is_penalised(params: SamplingParams) -> bool:
    """True if tokens that occurred are less likely."""
    return params.repetition_penalty != 1.0 or params.presence_penalty != 0.0 or params.frequency_penalty != 0.0


def _found(tokens: Iterable[int], find: Find) -> list[int]:
    """Return the columns of tokens, without tokens that have none."""
    return [column for token in tokens if (column := find(token)) is not None]


def masks_of(spots: Sequence[Spot], width: int, find: Find, tokens: np.ndarray | None) -> Arrays:
    """Return a mask of the allowed tokens, one bit for each column [rows, bytes]; a grammar computes them now."""
    if all(spot.allowed is None for spot in spots):
        return {}
    found = np.full((len(spots), (width + 7) // 8), 255, dtype=np.uint8)
    for row, spot in zip(found, spots, strict=True):
        allowed = allowed_by(spot.allowed)
        if isinstance(allowed, Mask):
            row[:] = _packed(allowed, len(row), tokens)
        elif allowed is not None:
            bits = np.zeros(8 * len(row), dtype=np.bool_)
            bits[_found(allowed, find)] = True
            row[:] = np.packbits(bits, bitorder="little")
    return {"allowed": found}


def _packed(mask: Mask, size: int, tokens: np.ndarray | None) -> np.ndarray:
    """Return a mask over the vocabulary as one over columns [size]; tokens that it does not reach are forbidden."""
    bits = np.frombuffer(mask.bits, dtype=np.uint8)
    if tokens is None:
        return bits[:size] if len(bits) >= size else np.concatenate([bits, np.zeros(size - len(bits), dtype=np.uint8)])
    whole = np.zeros(max(8 * len(bits), int(tokens[-1]) + 1), dtype=np.bool_)
    whole[: 8 * len(bits)] = np.unpackbits(bits, bitorder="little")
    columns = np.packbits(whole[tokens], bitorder="little")
    return np.concatenate([columns, np.zeros(size - len(columns), dtype=np.uint8)])


def _cuts(spots: Sequence[Spot], width: int) -> Arrays:
    """Return the limits of top_k, top_p and min_p; they mean the same as in transformers, in that order."""
    params = [None if spot.request.greedy else spot.request.params for spot in spots]
    arrays: Arrays = {}
    if any(p is not None and (p.top_k is not None or p.top_p < 1.0 or p.min_p > 0.0) for p in params):
        arrays["least"] = np.array(
            [math.log(p.min_p) if p and p.min_p else -math.inf for p in params], dtype=np.float32
        )
    if any(p is not None and (p.top_k is not None or p.top_p < 1.0) for p in params):
        arrays["rank"] = np.array([min((p.top_k if p else None) or width, width) - 1 for p in params], dtype=np.int64)
    if any(p is not None and p.top_p < 1.0 for p in params):
        arrays["share"] = np.array([p.top_p if p and p.top_p < 1.0 else EVERYTHING for p in params], dtype=np.float64)
    return arrays
