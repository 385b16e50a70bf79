"""The rows of the next verify, chosen over all sessions of the forest within one budget, and the step that has them.

Owns the launches, their scratch memory, the prices on the device, and the kernels' twin in plain Python: `core.market`
decides there, and `layout.write_rows` writes. Invariants: each decoding session has the row of its last token. Rows go
to the highest reach, at the price for the whole batch; ties go to the session of the lower row. A bucket has at least
as many rows as there are sessions, and a quarter of the rows of the verify before: so all moves fit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import cast

import numpy as np
import torch
from torch import Tensor

from specbranch.core.costs import Costs
from specbranch.core.market import RowOffer, granted
from specbranch.core.noise import keys
from specbranch.core.pages import PAGE, Pool
from specbranch.core.sending import likeliest_nodes
from specbranch.core.slots import ROOT
from specbranch.core.trees import GrowingTree, Tree
from specbranch.models.cache.kv_memory import Table
from specbranch.models.forward.step_rows import Rows
from specbranch.models.gpu.forest_layout import DECODING, SECONDS_AT, SENT_ROWS, TARGET_PAGES, Forest
from specbranch.models.gpu.layout import (
    ALIGNED,
    BATCH_GROUP_ROWS,
    COUNTS_SECTION,
    GROUP_ROWS,
    MOST_STEP_ROWS,
    MOVED_COUNT,
    MOVES_SECTION,
    ROOT_ROW,
    SAMPLED_COUNT,
    SHARED_COUNT,
    Bucket,
    Choosing,
    most_moves,
    padding,
    section_of,
    sections_of,
    views,
    write_choosing,
    write_rows,
)
from specbranch.models.gpu.tree_layout import DEEPEST, NODE_FIELDS

NODE_ROW, NODE_SENT = NODE_FIELDS.index("row"), NODE_FIELDS.index("sent")


@dataclass(frozen=True, slots=True)
class Granting:
    """Scratch memory of the kernels, the prices, and the number of rows for the host."""

    reaches: Tensor  # [sessions, SENT_ROWS] float64, by falling reach; -1: no more nodes
    offered: Tensor  # [sessions, SENT_ROWS] their nodes
    depths: Tensor  # [sessions, SENT_ROWS] and their depths
    ranks: Tensor  # [sessions, SENT_ROWS] places among those of all sessions
    ranked: Tensor  # [sessions · SENT_ROWS] float64, the reaches of all in order
    now: Tensor  # [sessions, SENT_ROWS] the nodes of each session's rows
    prices: Tensor  # float64, see PRICE_SCALARS
    total: Tensor  # [1] rows of the step, in pinned memory

    def price(self, rate: float, seconds: Sequence[float], others: int = 0, most_rows: int = MOST_STEP_ROWS) -> None:
        """Set the prices; `seconds[rows - 1]` is the time of a verify of so many rows."""
        self.prices.copy_(torch.from_numpy(price_numbers(self, rate, seconds, others, most_rows)))


def price_numbers(
    granting: Granting, rate: float, seconds: Sequence[float], others: int = 0, most_rows: int = MOST_STEP_ROWS
) -> np.ndarray:
    """Return prices as an array for the device; see `Granting.price`."""
    table = np.zeros(granting.prices.shape[0])
    table[:SECONDS_AT] = rate, others, min(most_rows, len(seconds))
    table[SECONDS_AT + 1 : SECONDS_AT + 1 + len(seconds)] = seconds
    return table


def new_granting(sessions: int, device: torch.device | str = "cpu") -> Granting:
    """Return the scratch memory for a forest of so many sessions."""
    shape, is_gpu = (sessions, SENT_ROWS), torch.device(device).type == "cuda"

    def table(dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    return Granting(
        table(torch.float64), table(), table(), table(), table(torch.float64).reshape(-1), table(),
        torch.zeros(SECONDS_AT + MOST_STEP_ROWS + 1, dtype=torch.float64, device=device),
        torch.zeros(1, dtype=torch.int32, pin_memory=is_gpu),
    )  # fmt: skip


def send(forest: Forest, granting: Granting, packed: Tensor, bucket: Bucket, spare: int) -> None:
    """Choose the rows of the next verify, and write it to `packed`; `spare`: the KV slot of the pool for padding."""
    (launch_send if forest.sessions.device.type == "cuda" else send_plainly)(forest, granting, packed, bucket, spare)


def launch_send(forest: Forest, granting: Granting, packed: Tensor, bucket: Bucket, spare: int) -> None:
    """Launch the kernels."""
    from specbranch.models.gpu import grant_kernels as kernels

    step, sessions, places = views(packed, bucket), forest.sessions, forest.places[0]
    sizes = {"SESSIONS": forest.count, "OFFERS": SENT_ROWS}
    size, per_group = forest.trees.shape[1], group_rows(bucket)
    kernels.offer[(forest.count,)](
        sessions, forest.trees, granting.reaches, granting.offered, granting.depths, SIZE=size, OFFERS=SENT_ROWS,
        num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    kernels.rank[(forest.count,)](granting.reaches, granting.ranks, granting.ranked, **sizes, num_warps=4)
    kernels.grant[(1,)](
        sessions, places, granting.reaches, granting.ranks, granting.ranked, granting.depths, granting.prices,
        step.counts, granting.total, bucket.rows, **sizes, PER_GROUP=per_group, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    kernels.write[(forest.count + 1,)](
        sessions, places, forest.trees, forest.pages, forest.history, forest.moves[:, TARGET_PAGES], granting.offered,
        granting.now, packed, step.groups, step.tables, step.own, step.counts, step.moves, forest.history.shape[1],
        forest.pages.shape[2], -(-bucket.rows // ALIGNED) * ALIGNED, most_moves(bucket.rows), bucket.rows,
        bucket.groups, spare, **sizes, SIZE=size, PER_GROUP=per_group, num_warps=4,
    )  # fmt: skip


def group_rows(bucket: Bucket) -> int:
    """Return how many rows of a session read its shared positions together."""
    return GROUP_ROWS if bucket.groups < bucket.rows else BATCH_GROUP_ROWS


class _PricedByRows:
    """The costs of a verify from the table on the device, as `core.market` asks for them."""

    knows_target, knows_draft, overlap = True, False, False

    def __init__(self, prices: Tensor) -> None:
        self._seconds: list[float] = prices[SECONDS_AT:].tolist()

    def target_seconds(self, rows: int, context: float) -> float:
        """Return the seconds of a verify of so many rows."""
        return self._seconds[rows]


def send_plainly(forest: Forest, granting: Granting, packed: Tensor, bucket: Bucket, spare: int) -> None:
    """Do as the kernels do, in plain Python."""
    rate, others, most_rows = granting.prices[:SECONDS_AT].tolist()
    costs = cast(Costs, _PricedByRows(granting.prices))
    trees: dict[int, Tree] = {}
    offered: dict[int, list[int]] = {}
    offers: dict[int, RowOffer] = {}
    for row in range(forest.count):
        scalars = forest.scalars(row)
        if scalars["state"] != DECODING:
            continue
        tree, kv_slots = forest.tree(row, scalars)
        trees[row] = tree = GrowingTree(tree).tree()
        forest.plant(row, tree, kv_slots)
        forest.set(row, tail=scalars["tail"])
        offered[row] = likeliest_nodes(tree, min(scalars["limit"] - scalars["length"] - 1, DEEPEST), SENT_ROWS - 1)
        reaches = tuple(tree.nodes[n].reach for n in offered[row])
        offers[row] = RowOffer(reaches, rate if not offers else 0.0, costs, 0.0)
    grants = granted(offers, int(others), int(most_rows))
    chosen = {row: sorted(offered[row][: grant.count]) for row, grant in grants.items()}
    for row, numbers in chosen.items():
        forest.trees[row, : len(trees[row]), [NODE_ROW, NODE_SENT]] = 0.0
        forest.trees[row, numbers, NODE_ROW] = torch.arange(1.0, len(numbers) + 1, dtype=torch.float64)
        forest.trees[row, numbers, NODE_SENT] = 1.0
    parts = [_verify_rows(forest, row, trees[row], numbers) for row, numbers in chosen.items()]
    write_step(forest, list(chosen), parts, TARGET_PAGES, packed, bucket, spare)
    granting.total[0] = sum(len(part.tokens) for part, _ in parts)


def _verify_rows(forest: Forest, row: int, tree: Tree, numbers: Sequence[int]) -> tuple[Rows, Choosing]:
    """Return the rows of a session that verify some nodes, and their sampling numbers."""
    scalars = forest.scalars(row)
    start, nodes = scalars["length"] - 1, [tree.nodes[n] for n in numbers]
    row_of = {ROOT: 0, **{n: at for at, n in enumerate(numbers, start=1)}}
    parents, seen = [0, *(row_of[node.parent] for node in nodes)], [1]
    for at, parent in enumerate(parents[1:], start=1):
        seen.append(seen[parent] | 1 << at)
    tokens = [int(forest.history[row, start]), *(node.token for node in nodes)]
    rows = Rows(table_of(forest, row, TARGET_PAGES), tokens, start, start, seen)
    return rows, sampling_of(scalars, rows.positions, parents, [ROOT_ROW, *tokens[1:]])


def sampling_of(
    scalars: dict[str, int], positions: Sequence[int], parents: Sequence[int], said: Sequence[int]
) -> Choosing:
    """Return the sampling numbers of a session's rows."""
    count, noisy = len(positions), scalars["noisy"]
    halves = np.array([scalars["seed_low"], scalars["seed_high"]], dtype=np.int32).view(np.uint32).tolist()
    seed = halves[0] | halves[1] << 32
    noise = [keys(seed, scalars["sample"], position + 1) if noisy else (0, 0) for position in positions]
    first, second = np.array(noise, dtype=np.uint32).view(np.int32).T
    same = [np.full(count, number, dtype=np.int32) for number in (scalars["temperature"], noisy)]
    return Choosing(same[0], first, second, same[1], np.array(parents), np.array(said))


def table_of(forest: Forest, row: int, table: int) -> Table:
    """Return a page table of a session."""
    return Table(Pool(0), forest.pages[row, table].tolist())


def write_step(
    forest: Forest, rows: Sequence[int], parts: Sequence[tuple[Rows, Choosing]], model: int, packed: Tensor,
    bucket: Bucket, spare: int,
) -> None:  # fmt: skip
    """Write a step that has some rows of each of these sessions, with the moves that wait for the model.

    Also notes the place of each session's rows.
    """
    work = [part for part, _ in parts]
    tables = [part.table.pages[: -(-(part.start + len(part.tokens)) // PAGE)] for part in work]
    begins = list(accumulate(map(len, tables), initial=0))
    array = np.concatenate([padding(bucket, spare), *(np.array(one, dtype=np.int32) for one in tables)])
    name = ("target_moves", "draft_moves")[model]
    moved = [forest.scalars(row)[name] for row in rows]
    places = forest.places[model]
    places.zero_()
    if work:
        write_rows(work, array, bucket, begins)
        each = [np.concatenate([getattr(one, field) for _, one in parts]) for field in Choosing._fields]
        firsts = list(accumulate([len(part.tokens) for part in work], initial=0))
        parents = np.concatenate([one.parent + first for (_, one), first in zip(parts, firsts, strict=False)])
        write_choosing(Choosing(*each)._replace(parent=parents), array, bucket)
        counts = section_of(array, bucket, COUNTS_SECTION)
        counts[SHARED_COUNT] = sections_of(array, bucket)[1][0, : firsts[-1]].max()
        counts[SAMPLED_COUNT], counts[MOVED_COUNT] = firsts[-1], sum(moved)
        at_move, moves, at_group = 0, section_of(array, bucket, MOVES_SECTION), 0
        for row, part, first, begin, count in zip(rows, work, firsts, begins, moved, strict=False):
            places[row] = torch.tensor([first, len(part.tokens), at_group, begin, at_move], dtype=torch.int32)
            # Pages may have been copied since the moves were noted.
            moves[:, at_move : at_move + count] = part.table.flat(forest.moves[row, model, :, :count].numpy())
            forest.set(row, **{name: 0})
            at_move, at_group = at_move + count, at_group + -(-len(part.tokens) // group_rows(bucket))
    packed[: len(array)] = torch.from_numpy(array)
