"""What is asked of the rows of a step, as the numbers a device chooses by.

Owns the way from questions to `layout.Choosing`, for rows that are chosen among inside a graph: nothing shapes them but
a temperature, and their tokens follow the match rule. Invariant: which way a row goes hangs on its own request and
position alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np

from specbranch.core.noise import keys
from specbranch.core.request import Spot
from specbranch.core.runner import Ask, Feed, Trial
from specbranch.core.slots import ROOT
from specbranch.models.gpu.choice import COUNTS
from specbranch.models.gpu.layout import NO_ROW, ONE, ROOT_ROW, Choosing
from specbranch.models.sheet import is_noisy, is_shaped, temperature_of

RowOf = Callable[[int, int], int | None]  # sequence and node: the row of a step that reads it


def is_chosen_in_graph(spot: Spot) -> bool:
    """Whether a row's token needs nothing but its temperature and noise."""
    return not spot.request.by_ratio and not is_shaped(spot)


def are_chosen_in_graph(spots: Sequence[Spot]) -> bool:
    """Whether none of some rows' tokens needs more."""
    # what is wanted of the first tokens is not wanted less later
    of_requests = {id(spot.request): spot for spot in reversed(spots)}
    return all(map(is_chosen_in_graph, of_requests.values())) and not any(spot.allowed is not None for spot in spots)


def rows_in(work: Sequence[Feed], first_nodes: Sequence[int]) -> RowOf:
    """Return the way from nodes to the rows of a step that reads `work`, whose first nodes are these."""
    starts: dict[int, tuple[int, int, int]] = {}
    row = 0
    for feed, node in zip(work, first_nodes, strict=True):
        starts[feed.seq] = row, node, len(feed.tokens)
        row += len(feed.tokens)

    def found(seq: int, node: int) -> int | None:
        at, first, count = starts.get(seq, (0, 0, 0))
        return at + node - first if 0 <= node - first < count else None

    return found


def entries_of(asks: Sequence[Ask], spots: Sequence[Spot]) -> int | None:
    """How many best entries answer all that is asked; nothing: these questions are not answered inside a graph."""
    if not all(is_chosen_in_graph(spot) and ask.measure == "top" for ask, spot in zip(asks, spots, strict=True)):
        return None
    return next((count for count in COUNTS if count >= max(ask.width for ask in asks)), None)


def choosing_of(rows: int, spots: Iterable[tuple[int, Spot]]) -> Choosing:
    """Write down what is asked of some rows of a step; the others are chosen among as they are."""
    table = np.zeros((len(Choosing._fields), rows), dtype=np.int32)
    table[0], table[4], table[5] = ONE, np.arange(rows), ROOT_ROW
    asked = [(row, spot) for row, spot in spots if not spot.request.greedy]  # those are chosen among as they are, too
    if asked:
        at = [row for row, _ in asked]
        table[0, at] = np.array([temperature_of(spot) for _, spot in asked], dtype=np.float32).view(np.int32)
        noisy = [
            (row, keys(spot.request.seed, spot.request.sample, spot.position)) for row, spot in asked if is_noisy(spot)
        ]
        table[1:3, [row for row, _ in noisy]] = (
            np.array([both for _, both in noisy], dtype=np.uint32).view(np.int32).reshape(-1, 2).T
        )
        table[3, [row for row, _ in noisy]] = 1
    return Choosing(*table)


def lead(choosing: Choosing, trials: Sequence[Trial], places: Sequence[Sequence[int]]) -> None:
    """Write down which token leads to each node of the trials, whose rows lie here; of siblings with the same token,
    to the first."""
    for trial, rows in zip(trials, places, strict=True):
        seen: set[tuple[int, int]] = set()
        for index, token in enumerate(trial.order.tokens):
            parent = trial.order.parent(index)
            row = rows[index + 1]
            choosing.parent[row] = rows[parent + 1]
            choosing.said[row] = NO_ROW if (parent, token) in seen else token
            seen.add((parent, token))


def trial_rows(trials: Sequence[Trial], row_of: RowOf) -> list[list[int]] | None:
    """The rows of each trial, its root's first; nothing where one of them is not in the step."""
    found = [[row_of(trial.seq, trial.node(index)) for index in range(ROOT, len(trial.nodes))] for trial in trials]
    known = [[row for row in rows if row is not None] for rows in found]
    return known if all(len(some) == len(rows) for some, rows in zip(known, found, strict=True)) else None
