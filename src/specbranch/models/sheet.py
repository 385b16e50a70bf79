"""What the requests of some rows ask of their logits, as small arrays: the host's half of sampling.

Owns the way from requests to numbers, and the one order of shaping, which is: logit_bias, min_tokens, repetition
penalty, presence and frequency penalties, allowed tokens, temperature, top_k, top_p, min_p. Invariants: a row's numbers
come of its own request and its own ancestors; what a sheet holds is all that sampling needs to know, so one copy brings
it to a device.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np

from specbranch.config import SamplingParams
from specbranch.core.noise import keys
from specbranch.core.request import Spot
from specbranch.models.columns import Find

# below this no noise can turn a difference that float32 logits can express, and a division would overflow
COLDEST = 1e-6
EVERYTHING = 2.0  # a top_p that cuts nothing, not even what rounds to probability 0
Arrays = dict[str, np.ndarray]  # by name


def sheet_of(spots: Sequence[Spot], width: int, find: Find) -> Arrays:
    """Write down what is asked of rows of `width` columns; what nothing is asked of is left out. An edit is rows,
    columns, numbers."""
    arrays = {**_edits(spots, find), **_allowed(spots, width, find), **_cuts(spots, width)}
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
    """What a row's logits are divided by."""
    return 1.0 if spot.request.greedy else max(spot.request.params.temperature, COLDEST)


def is_noisy(spot: Spot) -> bool:
    """Whether a row's token is chosen with noise: by the ratio rule tokens are drawn, or not perturbed."""
    return not (spot.request.greedy or spot.request.by_ratio)


def draw_keys(spots: Sequence[Spot]) -> list[tuple[int, int, int]]:
    """Seed, sample and position of each row: what its noise depends on."""
    return [(spot.request.seed, spot.request.sample, spot.position) for spot in spots]


def _edits(spots: Sequence[Spot], find: Find) -> Arrays:
    """What is added, forbidden, and made less likely because it was said before."""
    edits: dict[str, list[tuple[int, int, float]]] = {"bias": [], "forbid": [], "repeat": [], "less": []}
    for row, spot in enumerate(spots):
        params = spot.request.params
        edits["bias"] += [
            (row, column, bias) for token, bias in params.logit_bias.items() if (column := find(token)) is not None
        ]
        if spot.position - spot.request.prompt_length < params.min_tokens:
            edits["forbid"] += [(row, column, -math.inf) for column in _found(spot.request.ending_ids, find)]
        if _is_penalised(params):
            history = spot.history()
            if params.repetition_penalty != 1.0:
                edits["repeat"] += [(row, column, params.repetition_penalty) for column in set(_found(history, find))]
            counts = Counter(_found(history[spot.request.prompt_length :], find))
            edits["less"] += [
                (row, column, params.frequency_penalty * n + params.presence_penalty) for column, n in counts.items()
            ]
    return {name: _triples(found) for name, found in edits.items() if found}


def _triples(edits: list[tuple[int, int, float]]) -> np.ndarray:
    """Rows and columns, then numbers, one below the other [3, edits]; float64 holds each of them exactly."""
    return np.array(edits, dtype=np.float64).T.copy()


def is_shaped(spot: Spot) -> bool:
    """Whether anything but a temperature is asked of a row's logits before its token is chosen."""
    params, request = spot.request.params, spot.request
    cut = not request.greedy and (params.top_k is not None or params.top_p < 1.0 or params.min_p > 0.0)
    forbids = spot.position - request.prompt_length < params.min_tokens
    return cut or forbids or _is_penalised(params) or bool(params.logit_bias) or spot.allowed is not None


def _is_penalised(params: SamplingParams) -> bool:
    return params.repetition_penalty != 1.0 or params.presence_penalty != 0.0 or params.frequency_penalty != 0.0


def _found(tokens: Iterable[int], find: Find) -> list[int]:
    """Return the places in a row of the tokens that have one."""
    return [column for token in tokens if (column := find(token)) is not None]


def _allowed(spots: Sequence[Spot], width: int, find: Find) -> Arrays:
    """The tokens that may be said, a bit a column [rows, bytes]."""
    if all(spot.allowed is None for spot in spots):
        return {}
    bits = np.ones((len(spots), width), dtype=np.bool_)
    for row, spot in zip(bits, spots, strict=True):
        if spot.allowed is not None:
            row[:] = False
            row[_found(spot.allowed, find)] = True
    return {"allowed": np.packbits(bits, axis=1, bitorder="little")}


def _cuts(spots: Sequence[Spot], width: int) -> Arrays:
    """Where top_k, top_p and min_p end a law; they mean what transformers' warpers of these names mean, in that
    order."""
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
