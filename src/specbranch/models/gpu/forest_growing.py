"""Growing the trees of the forest by draft steps: what the last step proposed is added, the next step is written.

Owns the launches, their scratch memory, and the kernels' twin in plain Python, which is `core.trees.GrowingTree`.
A session whose text the draft has not computed yet has rows of its text first; then its rows are nodes. All sessions
share one `Growth`, without free time: the target waits. Invariants: the lanes of a growth times the sessions fit into
the bucket of the step. A step's rows are in a session's order of nodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from specbranch.core.slots import ROOT, TAIL
from specbranch.core.trees import GrowingTree, Growth, Tree
from specbranch.models.forward.step_rows import Rows, rows_of_chunk
from specbranch.models.gpu.forest_layout import (
    DECODING,
    DRAFT_PAGES,
    GROWTH_SCALARS,
    PLACE_FIELDS,
    WANT_FIELDS,
    Forest,
    Weights,
    weights_of,
)
from specbranch.models.gpu.granting import group_rows, sampling_of, table_of, write_step
from specbranch.models.gpu.layout import ALIGNED, ROOT_ROW, Bucket, Choosing, most_moves, views
from specbranch.models.gpu.tree_layout import DEEPEST, LANES
from specbranch.models.gpu.trees import _candidates, _seen

_FIRST, _COUNTED = PLACE_FIELDS.index("first_row"), PLACE_FIELDS.index("rows")


@dataclass(frozen=True, slots=True)
class ForestGrowth:
    """How trees grow, as a value and as an array for the device, and what is between two steps."""

    growth: Growth
    table: Tensor  # float64: GROWTH_SCALARS, then the prices of steps
    weights: Weights
    now: Tensor  # [sessions, LANES] the nodes of the step in flight; ROOT first: rows of the text
    wants: Tensor  # [sessions, WANT_FIELDS]
    total: Tensor  # [1] rows of the step, in pinned memory
    tail_limit: int = TAIL  # KV slots behind the committed tokens


def new_growth(growth: Growth, sessions: int, device: torch.device | str = "cpu") -> ForestGrowth:
    """Return the tables by which so many sessions grow; `growth` has no free time."""
    within, numbers = growth_numbers(growth)
    table = torch.from_numpy(numbers).to(device)
    now, wants = (torch.zeros(sessions, n, dtype=torch.int32, device=device) for n in (LANES, len(WANT_FIELDS)))
    total = torch.zeros(1, dtype=torch.int32, pin_memory=torch.device(device).type == "cuda")
    return ForestGrowth(within, table, weights_of(growth.chances, device), now, wants, total)


def growth_numbers(growth: Growth) -> tuple[Growth, np.ndarray]:
    """Return a growth within the bounds of a forest, and the same as an array for the device."""
    if growth.free_time or min(growth.lanes, len(growth.step)) > LANES:
        raise ValueError(f"trees of a forest grow while the target waits, by {LANES} nodes at a time at most")
    within = replace(growth, deepest=min(growth.deepest, DEEPEST), lanes=min(growth.lanes, len(growth.step)))
    scalars = [float(getattr(within, name)) for name in GROWTH_SCALARS if name != "tail_limit"]
    return within, np.array([*scalars, TAIL, *growth.step])


def grow(
    forest: Forest, growth: ForestGrowth, results: Tensor, packed: Tensor, bucket: Bucket, spare: int, last: bool
) -> None:
    """Add what the last step's `results` propose, and write the next step to `packed`; `last`: there is none."""
    work = launch_grow if forest.sessions.device.type == "cuda" else grow_plainly
    work(forest, growth, results, packed, bucket, spare, last)


def launch_grow(
    forest: Forest, growth: ForestGrowth, results: Tensor, packed: Tensor, bucket: Bucket, spare: int, last: bool
) -> None:
    """Launch the kernels."""
    from specbranch.models.gpu import forest_grow_kernels as kernels

    step, sessions, places, size = views(packed, bucket), forest.sessions, forest.places[1], forest.trees.shape[1]
    kernels.grow[(forest.count,)](
        sessions, places, growth.table, growth.weights.table, forest.trees, growth.now, growth.wants, results,
        results.shape[1], SIZE=size, LAST=last, num_warps=1, enable_fp_fusion=False,
    )  # fmt: skip
    if last:
        return
    sizes = {"SESSIONS": forest.count, "PER_GROUP": group_rows(bucket), "num_warps": 4}
    kernels.place_drafts[(1,)](sessions, places, growth.wants, step.counts, growth.total, bucket.rows, **sizes)
    kernels.write_drafts[(forest.count + 1,)](
        sessions, places, forest.trees, forest.pages, forest.history, forest.moves[:, DRAFT_PAGES], growth.now, packed,
        step.groups, step.tables, step.own, step.counts, step.moves, forest.history.shape[1], forest.pages.shape[2],
        -(-bucket.rows // ALIGNED) * ALIGNED, most_moves(bucket.rows), bucket.rows, bucket.groups, spare, SIZE=size,
        **sizes,
    )  # fmt: skip


def grow_plainly(
    forest: Forest, growth: ForestGrowth, results: Tensor, packed: Tensor, bucket: Bucket, spare: int, last: bool
) -> None:
    """Do as the kernels do, in plain Python."""
    parts: dict[int, tuple[Rows, Choosing]] = {}
    for row in range(forest.count):
        scalars = forest.scalars(row)
        if scalars["state"] != DECODING or not scalars["drafts"]:
            continue
        _add_proposals(forest, growth, row, results)
        if last:
            forest.places[1, row, _COUNTED] = 0
        elif (part := _next_rows(forest, growth, row)) is not None:
            parts[row] = part
    waiting = 0
    for row in list(parts):  # a step makes four moves a row; a session beyond that waits for the next one
        waiting += forest.scalars(row)["draft_moves"]
        if waiting > most_moves(bucket.rows):
            del parts[row]
    if not last:
        write_step(forest, list(parts), list(parts.values()), DRAFT_PAGES, packed, bucket, spare)
        growth.total[0] = sum(len(part.tokens) for part, _ in parts.values())


def _add_proposals(forest: Forest, growth: ForestGrowth, row: int, results: Tensor) -> None:
    """Add what a session's rows of the last step propose."""
    scalars, (first, rows) = forest.scalars(row), forest.places[1, row, [_FIRST, _COUNTED]].tolist()
    now: list[int] = growth.now[row, :rows].tolist()
    if not rows:
        return
    is_text = now[0] == ROOT
    draft_length = scalars["draft_length"] + (rows if is_text else 0)
    forest.set(row, draft_length=draft_length)
    if is_text and draft_length < scalars["length"]:
        return
    tree, kv_slots = forest.tree(row, scalars)
    growing = GrowingTree(tree)
    asked = [(ROOT, first + rows - 1)] if is_text else [(n, first + at) for at, n in enumerate(now)]
    if not is_text:
        growing.feed(now)
    for n, at in asked:
        growing.add_candidates(n, growth.growth, *_candidates(results[at].tolist(), growth.growth.children))
    del growing.nodes[forest.trees.shape[1] :]  # there is no room for them
    _put(forest, row, growing, kv_slots, scalars["tail"])


def _put(forest: Forest, row: int, growing: GrowingTree, kv_slots: Sequence[int], tail: int) -> None:
    """Write a tree that is being extended; reaches stay as they are."""
    tree = Tree(tuple(growing.nodes), growing.root_scored)
    forest.plant(row, tree, [*kv_slots, *[-1] * (len(tree) - len(kv_slots))])
    forest.set(row, tail=tail)


def _next_rows(forest: Forest, growth: ForestGrowth, row: int) -> tuple[Rows, Choosing] | None:
    """Choose a session's rows of the next step."""
    scalars, lanes = forest.scalars(row), growth.growth.lanes
    length, start = scalars["length"], scalars["draft_length"]
    table = table_of(forest, row, DRAFT_PAGES)
    if start < length:
        growth.now[row, 0] = ROOT
        return _proposing(scalars, rows_of_chunk(table, forest.text(row)[start : min(length, start + lanes)], start))
    (tree, kv_slots), room = forest.tree(row), scalars["limit"] - length
    growing, within = GrowingTree(tree), replace(growth.growth, deepest=min(growth.growth.deepest, room - 1))
    most = min(growth.tail_limit - scalars["tail"], (forest.trees.shape[1] - len(tree)) // within.children)
    open_nodes = growing.open_nodes(within)[: max(most, 0)]
    count = within.pace(0.0, [gain for _, gain in open_nodes])
    if not count:
        return None
    numbers = sorted(n for n, _ in open_nodes[:count])
    for at, n in enumerate(numbers, scalars["tail"]):
        kv_slots[n] = at
    _put(forest, row, growing, kv_slots, scalars["tail"] + count)
    growth.now[row, :count] = torch.tensor(numbers, dtype=torch.int32)
    tokens, seen = [tree.nodes[n].token for n in numbers], [_seen(tree.nodes, kv_slots, n) for n in numbers]
    return _proposing(scalars, Rows(table, tokens, length + scalars["tail"], length, seen))


def _proposing(scalars: dict[str, int], rows: Rows) -> tuple[Rows, Choosing]:
    """Return rows with the sampling numbers of rows that propose: each is a root."""
    count = len(rows.tokens)
    return rows, sampling_of(scalars, rows.positions, np.arange(count).tolist(), [ROOT_ROW] * count)
