"""Settling a verify of the forest: each session commits the path that the target accepted, and keeps the tree below it.

Owns the launch, and the kernel's twin in plain Python, which uses `core`'s own functions and serves without a GPU.
Does not own how a step is judged row by row (`choice.py`). Invariants: a session's tokens and its end are those of
`core.session.Session.commit`. After this, a session has no rows in flight, its last token is the only one that the
target has not computed, and the moves that bring accepted nodes into place wait for the next step of each model.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from specbranch.core.orders import Context, Verify
from specbranch.core.slots import ROOT
from specbranch.core.trees import NO_TREE, Tree, below
from specbranch.core.verify import accept_match
from specbranch.models.gpu.forest_layout import (
    DECODING,
    DRAFT_PAGES,
    FAILED,
    LIMITED,
    PLACE_FIELDS,
    REPORT_FIELDS,
    SENT_ROWS,
    STOPPED,
    TARGET_PAGES,
    Forest,
)
from specbranch.models.gpu.layout import ALIGNED, CONFIDENCE, Bucket, views

_FIRST, _COUNTED = PLACE_FIELDS.index("first_row"), PLACE_FIELDS.index("rows")


def settle(forest: Forest, packed: Tensor, bucket: Bucket, picks: Tensor, results: Tensor) -> None:
    """Commit what the verify in flight has accepted; `picks` and `results` are what the step sampled."""
    if forest.sessions.device.type != "cuda":
        settle_plainly(forest, packed, bucket, picks, results)
        return
    launch_settle(forest, packed, bucket, picks, results)


def launch_settle(forest: Forest, packed: Tensor, bucket: Bucket, picks: Tensor, results: Tensor) -> None:
    """Launch the kernel."""
    from specbranch.models.gpu import settle_kernels

    settle_kernels.settle[(forest.count,)](
        forest.sessions, forest.stops, forest.history, forest.trees, forest.moves, forest.reports,
        forest.places[0], packed, picks, results, forest.history.shape[1],
        -(-bucket.rows // ALIGNED) * ALIGNED, results.shape[1], SIZE=forest.trees.shape[1], ROWS=SENT_ROWS,
        num_warps=1, enable_fp_fusion=False,
    )  # fmt: skip


def settle_plainly(forest: Forest, packed: Tensor, bucket: Bucket, picks: Tensor, results: Tensor) -> None:
    """Do as the kernel does, in plain Python."""
    for row in range(forest.count):
        scalars = forest.scalars(row)
        if scalars["state"] == DECODING and forest.places[0, row, _COUNTED] > 0:
            _settle_one(forest, row, scalars, packed, bucket, picks, results)
        else:
            forest.reports[row, :2] = torch.tensor([0, scalars["state"]])
            forest.reports[row, 2 : len(REPORT_FIELDS)] = 0
        forest.places[0, row, _COUNTED] = 0


def _settle_one(
    forest: Forest, row: int, scalars: dict[str, int], packed: Tensor, bucket: Bucket, picks: Tensor, results: Tensor
) -> None:
    step, (first, rows) = views(packed, bucket), forest.places[0, row, [_FIRST, _COUNTED]].tolist()
    assert step.choosing is not None
    there = slice(first, first + rows)
    said, parents = step.choosing[-1, there].tolist(), (step.choosing[-2, there] - first).tolist()
    chosen, sure = picks[there].tolist(), results[there, CONFIDENCE].tolist()
    order = Verify(Context(0, (), []), tuple(said[1:]), tuple(parent - 1 for parent in parents[1:]))
    path, bonus = accept_match(order, chosen)
    accepted = [said[node + 1] for node in path] + [bonus]
    tokens, ended = _committed(forest, row, scalars, accepted, [sure[node + 1] for node in (ROOT, *path)])
    old = scalars["length"]
    forest.history[row, old : old + len(tokens)] = torch.tensor(tokens, dtype=torch.int32)
    placed = 1 + next((at for at, node in enumerate(path) if node != at), len(path))
    forest.set(row, state=ended, length=old + len(tokens), nodes=0, root_scored=0, tail=0)
    forest.set(row, target_moves=0, draft_moves=0)
    if ended == DECODING:
        slots = [(old - 1 + node + 1, old - 1 + at) for at, node in enumerate(path, start=1) if node + 1 != at]
        _note_moves(forest, row, TARGET_PAGES, slots, 0)
        _keep_tree(forest, row, scalars, tokens)
    after = forest.scalars(row)
    draft_length = -1 if after["draft_moves"] else after["draft_length"]
    said_of_it = [len(tokens), ended, min(placed, len(tokens)), draft_length, scalars["nodes"], scalars["root_scored"]]
    report = torch.tensor([*said_of_it, *tokens], dtype=torch.int32)
    forest.reports[row, : len(report)] = report


def _committed(
    forest: Forest, row: int, scalars: dict[str, int], accepted: Sequence[int], sure: Sequence[float]
) -> tuple[list[int], int]:
    """Return the tokens up to a session's end, and its state then; see `Session.commit`."""
    ending = set(forest.stops[row, : scalars["stops"]].tolist())
    tokens: list[int] = []
    for token, confidence in zip(accepted, sure, strict=True):
        if np.isnan(confidence):
            return tokens, FAILED
        tokens.append(token)
        if token in ending:
            return tokens, STOPPED
        if scalars["length"] + len(tokens) >= scalars["limit"]:
            return tokens, LIMITED
    return tokens, DECODING


def _keep_tree(forest: Forest, row: int, scalars: dict[str, int], tokens: Sequence[int]) -> None:
    """Keep the tree below the last committed token; the draft's KV slots of the path before it move into place."""
    (tree, kv_slots), here = forest.tree(row, scalars), ROOT
    path: list[int] = []
    for token in tokens:
        found = tree.child(here, token)
        if found is None:
            break
        path.append(found)
        here = found
    computed = [kv_slots[n] for n in path if tree.nodes[n].scored]
    advance, whole = len(computed), len(path) == len(tokens)
    rest, numbers = (below(tree, path[-1]), _numbers_below(tree, path[-1])) if whole else (NO_TREE, [])
    left = [kv_slots[n] - advance if kv_slots[n] >= 0 else -1 for n in numbers]
    forest.plant(row, rest, left)
    forest.set(row, draft_length=scalars["draft_length"] + advance)
    old = scalars["length"]
    slots = [(old + kv_slot, old + at) for at, kv_slot in enumerate(computed) if kv_slot != at]
    _note_moves(forest, row, DRAFT_PAGES, slots, scalars["draft_moves"])


def _numbers_below(tree: Tree, root: int) -> list[int]:
    """Return the numbers of the nodes below one, in order."""
    inside = {root}
    for n, node in enumerate(tree.nodes):
        if node.parent in inside:
            inside.add(n)
    return sorted(inside - {root})


def _note_moves(forest: Forest, row: int, table: int, slots: Sequence[tuple[int, int]], waiting: int) -> None:
    """Note moves of KV slots of a session for the next step of a model, behind those that wait already.

    They fit: until the draft's next step all of them are on one path of one tree.
    """
    for at, both in enumerate(slots, waiting):
        forest.moves[row, table, :, at] = torch.tensor(both, dtype=torch.int32)
    name = ("target_moves", "draft_moves")[table]
    forest.set(row, **{name: waiting + len(slots)})
