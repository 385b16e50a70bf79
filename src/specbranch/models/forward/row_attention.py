"""Attention of tail rows one by one, for layers that no compiled step runs: a row's bits do not depend on others.

Owns the order of products. Torch's products depend on the number of rows, so each row has its own. Invariants: the
shapes of a row's products follow from its position and the window alone, and keys before its window are not read.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specbranch.core.pages import PAGE
from specbranch.models.cache.kv_memory import widened
from specbranch.models.families.operations import Attention
from specbranch.models.forward.arithmetic import shares


def attend_row(
    query: Tensor, keys: Tensor, values: Tensor, seen: list[tuple[int, int, int]], own: Tensor, attention: Attention,
    sinks: Tensor | None,
) -> Tensor:  # fmt: skip
    """Attend from one row [heads, head_dim] to parts of pages, then to the KV slots of its own path.

    `seen`: page, and first and last position within it. Returns [heads·head_dim].
    """
    kv_heads, head_dim = keys.shape[1], query.shape[-1]
    grouped = query.view(kv_heads, -1, head_dim) * (attention.scale or head_dim**-0.5)
    at = own // PAGE, own % PAGE
    key_parts, value_parts = (
        [
            *(widened(side[page, :, start:end], query.dtype) for page, start, end in seen),
            widened(side[at[0], :, at[1]].transpose(0, 1).contiguous(), query.dtype),
        ]
        for side in (keys, values)
    )
    scores = torch.cat([grouped @ part.mT for part in key_parts], -1)  # [kv_heads, group, keys]
    last = None if sinks is None else sinks.view(kv_heads, -1, 1)
    found = shares(scores, scores.new_zeros((), dtype=torch.bool), attention.softcap, last).to(query.dtype)
    split = torch.split(found, [part.shape[1] for part in key_parts], -1)
    return sum_of([share @ part for share, part in zip(split, value_parts, strict=True)]).reshape(-1)


def ranges_seen(attention: Attention, end: int) -> list[tuple[int, int]]:
    """Return the ranges of positions that the row at `end` - 1 sees, in order: two if its window hides some."""
    left = 0 if attention.window is None else max(end - attention.window, 0)
    return [(0, end)] if left <= attention.first else [(0, attention.first), (left, end)]


def parts_seen(pages: list[int], first: int, end: int) -> list[tuple[int, int, int]]:
    """Return the parts of pages that hold the positions from `first` to `end`; none if there are no such positions."""
    if first >= end:
        return []
    return [
        (pages[at], max(first - at * PAGE, 0), min(end - at * PAGE, PAGE))
        for at in range(first // PAGE, -(-end // PAGE))
    ]


def sum_of(parts: list[Tensor]) -> Tensor:
    """Add tensors in their order."""
    total, *others = parts
    for part in others:
        total = total + part
    return total
