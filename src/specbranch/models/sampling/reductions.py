"""Reductions over rows of logits: argmax, the greatest entries, sorted values, sums of exponentials.

Owns how these are computed on each device. Invariant: a row's result depends on that row alone, bit for bit. A float
sum changes with the order of its terms, and that order changes with the shape. So these sums are sums of integers,
which are exact. On a CPU numpy computes maxima and sorts, 10 to 20 times faster than torch.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

UNIT = 2.0**40  # integer weight of the most likely token: a million others still sum without overflow
FEW_MAXIMA = 16  # on a CPU, up to this many repeated maxima are faster than one partial sort


def argmax(x: Tensor) -> Tensor:
    """Return the index of each row's greatest entry [rows], the lowest among equals."""
    if x.device.type == "cpu":
        return torch.from_numpy(x.numpy().argmax(axis=-1))
    return x.argmax(dim=-1)


def leading(x: Tensor, count: int) -> Tensor:
    """Return the indices of each row's `count` greatest entries, in any order.

    The argmax is always among them, so an index may occur twice. Among equal entries a CPU returns the lowest indices.
    """
    count = min(count, x.shape[-1])
    if x.device.type != "cpu":
        return torch.cat([argmax(x).unsqueeze(-1), x.topk(count, dim=-1).indices], dim=-1)
    if count > FEW_MAXIMA:
        return torch.cat([argmax(x).unsqueeze(-1), torch.from_numpy(_most(x.numpy(), count))], dim=-1)
    return _peel(x, count)


def _most(x: np.ndarray, count: int) -> np.ndarray:
    """Return the indices of each row's `count` greatest entries; among equal ones the lowest indices."""
    most = np.argpartition(x, x.shape[-1] - count, axis=-1)[:, -count:]
    least = np.take_along_axis(x, most, axis=-1).min(axis=-1, keepdims=True)
    crowded = ((x >= least).sum(axis=-1) > count) & np.isfinite(least[:, 0])  # entries of −∞ do not matter
    for row in np.flatnonzero(crowded):
        above, equal = np.flatnonzero(x[row] > least[row]), np.flatnonzero(x[row] == least[row])
        most[row] = np.concatenate([above, equal[: count - len(above)]])
    return most


def _peel(x: Tensor, count: int) -> Tensor:
    found = [argmax(x).unsqueeze(-1)]
    if count == 1:
        return found[0]
    rest = x.clone()
    while len(found) < count:
        rest.scatter_(-1, found[-1], -torch.inf)
        found.append(argmax(rest).unsqueeze(-1))
    return torch.cat(found, dim=-1)


def descending(x: Tensor) -> Tensor:
    """Return each row's values, greatest first."""
    if x.device.type == "cpu":
        return torch.from_numpy(np.sort(-x.numpy(), axis=-1)).neg_()
    return x.sort(dim=-1, descending=True).values


def weights(x: Tensor, top: Tensor) -> Tensor:
    """Return exp(x − top) in integer units of 1/UNIT [rows, entries], int64; `top`: each row's maximum [rows, 1]."""
    return (x - top).exp_().mul_(UNIT).long()


def peak(x: Tensor) -> Tensor:
    """Return the greatest probability of each row's softmax [rows], float64."""
    total = weights(x, x.amax(dim=-1, keepdim=True)).sum(dim=-1)
    return UNIT / total.double()


def entropy(x: Tensor) -> Tensor:
    """Return the entropy in nats of each row's softmax [rows], float64."""
    below = (x - x.amax(dim=-1, keepdim=True)).clamp_(min=-60.0)  # exp(−60) has no weight; this avoids 0·∞
    weight = below.exp()
    total = (weight * UNIT).long().sum(dim=-1).double()
    return total.div(UNIT).log() - (weight.mul_(below) * UNIT).long().sum(dim=-1).double() / total
