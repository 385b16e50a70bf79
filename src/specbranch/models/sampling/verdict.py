"""Verification on a device: decides all rows at once, then finds the accepted path of each trial.

Owns the arrays that the device needs for trials, and the verdicts made of its results. A trial's rows are that of its
root and then those of its nodes. Each decision depends on its own row and the variates of its position only. So the
outcome equals that of `core/verify.py`, which decides row by row down the tree. Invariant: nothing here waits for the
device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from specbranch.core import noise
from specbranch.core.orders import Sparse
from specbranch.core.request import Spot
from specbranch.core.runner import NO_TOKEN, Judged, Trial
from specbranch.core.slots import ROOT
from specbranch.models.sampling import sample
from specbranch.models.sampling.sample import Asked
from specbranch.models.sampling.sampler import logprobs_of
from specbranch.models.sampling.sheet import Arrays


@dataclass(frozen=True, slots=True)
class Tried:
    """A drawn candidate: its token, its distribution q, and the index of its node; None: a head, which has none."""

    token: int
    q: Sparse
    index: int | None


def judging(trials: Sequence[Trial], spots: Sequence[Spot]) -> Arrays:
    """Return the arrays that `decided` needs beside the sampling parameters; `spots`: one for each row."""
    nodes = [(trial, index) for trial in trials for index in range(ROOT, len(trial.nodes))]
    firsts = [row + 1 for row, (_, index) in enumerate(nodes) if index == ROOT]  # the row of each trial's first node
    above = [index if index == ROOT else trial.order.parent(index) for trial, index in nodes]
    parents = [
        first + up
        for first, up in zip(np.repeat(firsts, [len(trial.nodes) + 1 for trial in trials]).tolist(), above, strict=True)
    ]
    arrays: Arrays = {
        "parent": np.array(parents),
        "said": np.array([-1 if index == ROOT else trial.order.tokens[index] for trial, index in nodes]),
        "eligible": np.array([index == ROOT or _is_first(trial, index) for trial, index in nodes]),
        "ancestors": _ancestors(parents),
    }
    return arrays | _by_ratio(nodes, spots) if any(spot.request.by_ratio for spot in spots) else arrays


def _is_first(trial: Trial, index: int) -> bool:
    """True if no earlier sibling that was not drawn carries the same token."""
    order, drawn = trial.order, trial.order.q or (None,) * len(trial.order.tokens)
    siblings = [n for n in range(index) if order.parent(n) == order.parent(index) and drawn[n] is None]
    return all(order.tokens[n] != order.tokens[index] for n in siblings)


def _ancestors(parents: Sequence[int]) -> np.ndarray:
    """Return the ancestors of each row, itself included [rows, rows]."""
    found = np.eye(len(parents), dtype=np.bool_)
    for row, parent in enumerate(parents):
        found[row] |= found[parent]
    return found


def _by_ratio(nodes: Sequence[tuple[Trial, int]], spots: Sequence[Spot]) -> Arrays:
    """Return the drawn candidates of each row, in order, and the variates that decide; the match rule has none."""
    tried = [
        _tried(trial, index) if spot.request.by_ratio else [] for (trial, index), spot in zip(nodes, spots, strict=True)
    ]
    shape, entries = (
        (len(nodes), max(map(len, tried))),
        max((len(one.q.ids) for some in tried for one in some), default=1),
    )
    arrays: Arrays = {
        "by_ratio": np.array([spot.request.by_ratio for spot in spots]),
        "tried": np.full(shape, -1),
        "tried_q": np.zeros(shape),
        "accept": np.zeros(shape),
        "q_ids": np.zeros((*shape, entries), dtype=np.int64),
        "q_probs": np.zeros((*shape, entries)),
        "last": np.zeros(len(nodes)),
        "attempt": np.full(len(nodes), -1),
    }
    for row, ((_, index), spot, some) in enumerate(zip(nodes, spots, tried, strict=True)):
        draw = spot.request.seed, spot.request.sample, spot.position
        arrays["last"][row] = noise.uniform(*draw, "residual" if some else "own")
        for attempt, one in enumerate(some):
            arrays["tried"][row, attempt], arrays["tried_q"][row, attempt] = one.token, one.q.prob(one.token)
            arrays["accept"][row, attempt] = noise.uniform(*draw, "accept", attempt)
            arrays["q_ids"][row, attempt, : len(one.q.ids)], arrays["q_probs"][row, attempt, : len(one.q.ids)] = (
                one.q.ids,
                one.q.probs,
            )
            if one.index is not None:
                arrays["attempt"][row + one.index - index] = attempt
    return arrays


def _tried(trial: Trial, parent: int) -> list[Tried]:
    order, head = trial.order, trial.head
    children = [n for n in range(parent + 1, len(order.tokens)) if order.parent(n) == parent]
    found = [Tried(order.tokens[n], q, n) for n in children if order.q and (q := order.q[n]) is not None]
    return [*found, Tried(head.token, head.q, None)] if head is not None and head.node == parent else found


def decided(tokens: Tensor, edited: Tensor, asked: Asked) -> tuple[Tensor, Tensor]:
    """Return each row's token [rows], and which rows are on the accepted path [rows].

    `tokens`: the rows' tokens under the match rule; `edited`: their logits, see `sample.edited`. A row that is not
    finite gets NO_TOKEN.
    """
    finite = edited.amax(dim=-1) < torch.inf  # no comparison holds for NaN
    if "tried" not in asked:
        tokens = torch.where(finite, tokens, NO_TOKEN)
        chosen = asked["eligible"] & (tokens[asked["parent"]] == asked["said"])
    else:
        took, drawn = sample.decide(sample.units(sample.filtered(edited, asked)), asked)
        took = torch.where(finite, took, -1)
        tokens = torch.where(finite, torch.where(asked["by_ratio"], drawn, tokens), NO_TOKEN)
        above = took[asked["parent"]]
        carried = asked["eligible"] & (above < 0) & (tokens[asked["parent"]] == asked["said"])
        chosen = torch.where(asked["attempt"] >= 0, above == asked["attempt"], carried)
    return tokens, sample.walk(chosen | (asked["said"] < 0), asked["ancestors"])


def results(logits: Tensor, tokens: Tensor, reached: Tensor, top: int | None, said: Tensor | None) -> Tensor:
    """Pack the results of each row [rows, numbers]: token, 1 if reached, log-probabilities, the probe's output."""
    parts = [tokens.double()[:, None], reached.double()[:, None]]
    if top is not None:
        ids, logs = sample.logprobs(logits, tokens.clamp(min=0), top)
        parts += [ids.double(), logs]
    return torch.cat([*parts, said.double()] if said is not None else parts, dim=-1)


def judged(
    trials: Sequence[Trial], found: np.ndarray, top: int | None, width: int, probed: Sequence[bool]
) -> list[Judged]:
    """Make verdicts of the packed results.

    `width`: how many numbers of the probe end each result. `probed`: rows that had hidden states for the probe.
    """
    results = [[*result, own] for result, own in zip(found.tolist(), probed, strict=True)]
    ends = np.cumsum([len(trial.nodes) + 1 for trial in trials]).tolist()
    return [
        _judged(trial, results[end - len(trial.nodes) - 1 : end], top, width)
        for trial, end in zip(trials, ends, strict=True)
    ]


def _judged(trial: Trial, found: list[list[float]], top: int | None, width: int) -> Judged:
    path = tuple(index for index, result in enumerate(found[1:]) if result[1])
    ends = [found[0], *(found[index + 1] for index in path)]
    logprobs = None
    if trial.logprobs is not None and top is not None:
        logprobs = tuple(
            logprobs_of(_cut(result[2 : len(result) - width - 1], trial.logprobs), trial.logprobs) for result in ends
        )
    *last, is_probed = ends[-1]
    said = tuple(last[len(last) - width :]) if trial.wants_forecast and is_probed else None
    return Judged(path, int(ends[-1][0]), logprobs, said)


def _cut(result: list[float], top: int) -> list[float]:
    """Cut a result to the token's own id and value if `top` is 0; another trial may have asked for more."""
    return result if top else [result[0], result[len(result) // 2]]
