"""The sampling parameters and tree edges of a step's rows, as the numbers that a GPU samples by.

Owns the conversion from asks and trials to `layout.Choosing`, for rows that are sampled inside a graph: under the match
rule, with no parameter but the temperature. Invariant: a row's own request and position alone decide whether it is
sampled inside a graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache

import numpy as np

from specbranch.core.noise import keys
from specbranch.core.request import Request, Spot
from specbranch.core.runner import Ask, Feed, Proposal, Trial
from specbranch.models.gpu.choice import ENTRY_COUNTS
from specbranch.models.gpu.layout import BOUND, CONFIDENCE, NO_ROW, ONE, ROOT_ROW, Choosing
from specbranch.models.sampling.sampler import proposed
from specbranch.models.sampling.sheet import is_edited, is_noisy, is_shaped, temperature_of

RowOf = Callable[[int, int], int | None]  # from sequence and node to the row of a step; None: not in the step


def is_chosen_in_graph(spot: Spot) -> bool:
    """True if a row's token depends on logits, temperature and noise only."""
    return not spot.request.by_ratio and not is_shaped(spot)


def are_chosen_in_graph(spots: Sequence[Spot]) -> bool:
    """True if `is_chosen_in_graph` holds for all rows."""
    # a request's first position decides for its later ones: parameters never begin to apply later
    of_requests = {id(spot.request): spot for spot in reversed(spots)}
    return all(map(is_chosen_in_graph, of_requests.values())) and not any(spot.allowed is not None for spot in spots)


def rows_in(work: Sequence[Feed], first_nodes: Sequence[int]) -> RowOf:
    """Return the mapping from nodes to the rows of a step over `work`; `first_nodes`: the first node of each feed."""
    starts: dict[int, tuple[int, int, int]] = {}
    row = 0
    for feed, node in zip(work, first_nodes, strict=True):
        starts[feed.seq] = row, node, len(feed.tokens)
        row += len(feed.tokens)

    def found(seq: int, node: int) -> int | None:
        at, first, count = starts.get(seq, (0, 0, 0))
        return at + node - first if 0 <= node - first < count else None

    return found


def entries_of(asks: Sequence[Ask], spots: Sequence[Spot], masked: bool = False) -> int | None:
    """Return how many best entries per row answer all asks; None: a graph cannot answer them.

    `masked`: it chooses from logits to which the masks of grammars have been applied.
    """
    changed = is_edited if masked else is_shaped
    if any(spot.request.by_ratio or changed(spot) for spot in spots):
        return None
    least = max(ask.width if ask.measure == "top" else 2 for ask in asks)
    return next((count for count in ENTRY_COUNTS if count >= least), None)


def answers(asks: Sequence[Ask], spots: Sequence[Spot], results: np.ndarray) -> list[Proposal]:
    """Make proposals of the results of the asked rows."""
    numbers = results[:, CONFIDENCE:].copy()
    numbers[:, 1] = np.where([ask.measure == "entropy" for ask in asks], results[:, BOUND], results[:, CONFIDENCE])
    return proposed(spots, asks, numbers[:, 1:])


def choosing_of(rows: int, spots: Iterable[tuple[int, Spot]]) -> Choosing:
    """Return the sampling numbers of a step; rows without a spot are sampled greedily."""
    table = _nothing_asked(rows).copy()
    at: list[int] = []
    noise: list[int] = []
    temperatures: list[float] = []
    request: Request | None = None
    for row, spot in spots:
        if spot.request is not request:  # rows of one request are consecutive
            request, greedy, temperature, noisy = (
                spot.request,
                spot.request.greedy,
                temperature_of(spot),
                is_noisy(spot),
            )
        if not greedy:  # greedy rows keep the default numbers
            at.append(row)
            temperatures.append(temperature)
            noise += (*keys(request.seed, request.sample, spot.position), 1) if noisy else (0, 0, 0)
    if at:
        where = _span(at)
        table[0, where] = np.array(temperatures, dtype=np.float32).view(np.int32)
        table[1:4, where] = np.array(noise, dtype=np.uint32).view(np.int32).reshape(-1, 3).T
    return Choosing(*table)


def _span(rows: list[int]) -> slice | list[int]:
    """Return rows as an index: a slice if they are consecutive, which is several times faster in numpy."""
    first, end = rows[0], rows[0] + len(rows)
    return slice(first, end) if rows == [*range(first, end)] else rows


@cache
def _nothing_asked(rows: int) -> np.ndarray:
    table = np.zeros((len(Choosing._fields), rows), dtype=np.int32)
    table[0], table[4], table[5] = ONE, np.arange(rows), ROOT_ROW
    return table


def lead(choosing: Choosing, trials: Sequence[Trial], row_numbers: Sequence[Sequence[int]]) -> None:
    """Write parent row and token of each node of the trials; `row_numbers`: their rows in the step.

    Of siblings with the same token only the first can be accepted.
    """
    at: list[int] = []
    above: list[int] = []
    said: list[int] = []
    for trial, (root, *rows) in zip(trials, row_numbers, strict=True):
        tokens, parents = trial.order.tokens, trial.order.parents or range(-1, len(trial.order.tokens) - 1)
        at += rows
        above += [root if parent < 0 else rows[parent] for parent in parents]
        edges = list(zip(parents, tokens, strict=True))
        said += tokens if len(set(edges)) == len(edges) else _first_said(edges)
    if at:
        where = _span(at)
        choosing.parent[where], choosing.said[where] = above, said  # type: ignore[assignment]


def _first_said(edges: Sequence[tuple[int, int]]) -> Iterator[int]:
    """Yield the token of each edge; NO_ROW if an earlier sibling has the same token."""
    seen: set[tuple[int, int]] = set()
    for edge in edges:
        yield NO_ROW if edge in seen else edge[1]
        seen.add(edge)


def trial_rows(trials: Sequence[Trial], row_of: RowOf) -> list[list[int]] | None:
    """Return the rows of each trial, its root's first; None if one of them is not in the step."""
    found: list[list[int]] = []
    for trial in trials:
        rows = [row_of(trial.seq, node) for node in (trial.root, *trial.nodes)]
        found.append([row for row in rows if row is not None])
        if len(found[-1]) < len(rows):
            return None
    return found
