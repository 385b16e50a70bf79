"""The layout of a forest: the sessions of a batch and their draft trees as tables in device memory.

A session owns one row of every table from its admission to its end. Owns the sizes, the fields, and the tables. Does
not own what changes them round by round: `settling.py` (after a verify), `looking.py` (lookup), `granting.py` (rows of
the next verify), each with its kernels; `forest_rounds.py` makes whole rounds of them. Invariants: integers are int32;
what a tree is planned by is float64, in which integers are exact. A session's nodes have the fields of
`tree_layout.NODE_FIELDS`. A node has a KV slot only if the draft has computed all committed tokens, so KV slots of
nodes count from the session's length; a node's KV slot is higher than its parent's, and gaps are allowed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, chain
from math import exp, prod
from operator import lt
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from specbranch.core.noise import MASK
from specbranch.core.request import Request
from specbranch.core.slots import ROOT
from specbranch.core.trees import CLASSES, EDGES, NO_TREE, Chances, Node, Tree
from specbranch.models.gpu.layout import ALIGNED, ONE
from specbranch.models.gpu.tree_layout import DEEPEST, LOOKED_CELLS, NODE_FIELDS
from specbranch.models.sampling.sheet import COLDEST

VACANT, DECODING, STOPPED, LIMITED, FAILED = range(5)  # states of a session; FAILED: its logits are not finite
SENT_ROWS = 64  # rows of a session in a verify, at most: its last token and 63 nodes
STOP_IDS = 16  # tokens that end a session, at most
PATH_MOVES = DEEPEST  # moves of KV slots of a session in a round, at most: a path is no deeper
TARGET_PAGES, DRAFT_PAGES = 0, 1  # whose page table, and whose moves

# Scalars of a session. seed: its 64 bits in two halves; temperature: the bits of a float32; nodes: of its tree;
# root_scored: as in `core.trees.Tree`; draft_length: committed tokens that the draft has computed; tail: where the
# draft's next KV slot lies, behind `length`; moves: that wait for the next step of each model; drafts, looks: 1 if its
# tree grows by the draft, and by lookup.
SESSION_FIELDS = (
    "state", "length", "limit", "seed_low", "seed_high", "sample", "temperature", "noisy", "stops", "nodes",
    "root_scored", "draft_length", "tail", "target_moves", "draft_moves", "drafts", "looks",
)  # fmt: skip
# Where the rows of a session are in a step: its first row, their number, its first group, where its page table begins,
# its first move.
PLACE_FIELDS = ("first_row", "rows", "group", "table", "moved")
# What a round reports to the host: tokens and state; committed tokens that the target holds without the moves that
# wait; committed tokens that the draft holds, -1: moves wait; nodes of the tree that was verified, and whether its root
# was scored. Then the tokens.
REPORT_FIELDS = ("count", "state", "placed", "draft_length", "nodes", "root_scored")
# What trees of all sessions are weighed by: `core.trees.Chances`, with shifts as factors of odds.
CHANCE_PARTS = {
    "edges": len(EDGES), "first": CLASSES, "other": CLASSES, "looked": LOOKED_CELLS, "odds": LOOKED_CELLS,
}  # fmt: skip
CHANCE_AT = dict(zip(CHANCE_PARTS, accumulate(CHANCE_PARTS.values(), initial=0), strict=False))
# How trees grow: `core.trees.Growth` for all sessions, with the tail's KV slots; then the prices of steps.
GROWTH_SCALARS = ("worth", "least", "row_price", "children", "rows", "deepest", "most", "lanes", "tail_limit")
WANT_FIELDS = ("rows", "end", "last")  # of a session's draft step: rows, KV slots, last position
# Prices of a verify. rate: expected tokens a second of all sessions; others: rows in the same forward anyway; then,
# from SECONDS_AT on, the seconds of a verify by its rows.
PRICE_SCALARS = ("rate", "others", "most_rows")
SECONDS_AT = len(PRICE_SCALARS)
REPORT_SIZE = len(REPORT_FIELDS) + DEEPEST + 1
NODE_TYPES = (int, int, float, float, int, int, float, int, bool, bool)  # of the fields of a `Node`
Written = tuple[int, np.ndarray]  # where numbers begin in `Forest.numbers`, and what they are


def fitting_ending_ids(request: Request) -> tuple[int, ...] | None:
    """Return the tokens that end a request, or None if they are more than a row of the table takes."""
    ending = tuple(sorted(request.ending_ids))
    return ending if len(ending) <= STOP_IDS else None


@dataclass(frozen=True, slots=True)
class Forest:
    """The tables of a batch; their first dimension is the session's row, unless said otherwise.

    All integers are in one piece of memory, so that one scatter changes any of them.
    """

    numbers: Tensor  # all integers
    sessions: Tensor  # [sessions, SESSION_FIELDS]
    stops: Tensor  # [sessions, STOP_IDS]
    pages: Tensor  # [sessions, 2, pages] page tables of target and draft
    history: Tensor  # [sessions, context]
    trees: Tensor  # [sessions, nodes, NODE_FIELDS] float64
    moves: Tensor  # [sessions, 2, 2, PATH_MOVES] of target and draft: KV slots of the session, sources and targets
    places: Tensor  # [2, sessions, PLACE_FIELDS] in the verify in flight, in the draft step in flight
    reports: Tensor  # [sessions, REPORT_SIZE]

    @property
    def count(self) -> int:
        """How many rows there are, free ones included."""
        return self.sessions.shape[0]

    def scalars(self, row: int) -> dict[str, int]:
        """Return a session's scalars; only if the tables are in host memory."""
        return dict(zip(SESSION_FIELDS, self.sessions[row].tolist(), strict=True))

    def set(self, row: int, **scalars: int) -> None:
        """Write some scalars of a session."""
        for name, number in scalars.items():
            self.sessions[row, SESSION_FIELDS.index(name)] = number

    def admit(
        self, row: int, request: Request, tokens: Sequence[int], limit: int, pages: tuple[Sequence[int], Sequence[int]]
    ) -> None:
        """Give a row to a session whose text, all but its last token, the target has computed.

        `limit`: the most tokens it may have. `pages`: page tables of target and draft. Both the draft and lookup may
        work for it.
        """
        self.write(self.admission(row, request, tokens, limit, pages, {"drafts": 1, "looks": 1}))

    def admission(
        self,
        row: int,
        request: Request,
        tokens: Sequence[int],
        limit: int,
        pages: tuple[Sequence[int], Sequence[int]],
        more: Mapping[str, int],
    ) -> list[Written]:
        """Return what `admit` writes; `more`: further scalars."""
        ending = fitting_ending_ids(request)
        if ending is None:
            raise ValueError(f"a session of the forest takes {STOP_IDS} end tokens; got {len(request.ending_ids)}")
        noisy = not (request.greedy or request.by_ratio)
        temperature = np.float32(max(request.params.temperature, COLDEST)).view(np.int32)
        low, high = np.array([request.seed & MASK, request.seed >> 32 & MASK], dtype=np.uint32).view(np.int32).tolist()
        scalars = dict.fromkeys(SESSION_FIELDS, 0) | {
            "state": DECODING, "length": len(tokens), "limit": limit, "seed_low": low, "seed_high": high,
            "sample": request.sample, "temperature": ONE if request.greedy else int(temperature), "noisy": int(noisy),
            "stops": len(ending), **more,
        }  # fmt: skip
        return [
            self._written(self.sessions[row], list(scalars.values())),
            self._written(self.stops[row], ending),
            self._written(self.history[row], tokens),
            *(self._written(self.places[table, row], [0] * len(PLACE_FIELDS)) for table in (TARGET_PAGES, DRAFT_PAGES)),
            *(self._written(self.pages[row, table], held) for table, held in enumerate(pages)),
        ]

    def page_change(self, row: int, table: int, pages: Sequence[int], first: int) -> Written:
        """Return what changes a page table from its page `first` on."""
        assert len(pages) <= self.pages.shape[2], (len(pages), self.pages.shape)
        return self._written(self.pages[row, table, first:], pages[first:])

    def scalar_change(self, row: int, name: str, number: int) -> Written:
        """Return what changes a scalar of a session."""
        return self._written(self.sessions[row, SESSION_FIELDS.index(name) :], (number,))

    @staticmethod
    def _written(part: Tensor, numbers: Sequence[int]) -> Written:
        return int(part.storage_offset()), np.array(numbers, dtype=np.int32)

    def write(self, changes: Sequence[Written]) -> None:
        """Write numbers; later changes replace earlier ones."""
        self.scatter(torch.from_numpy(as_pairs(changes)).to(self.numbers.device))

    def scatter(self, pairs: Tensor) -> None:
        """Write numbers [2, count]: where they belong, and what they are."""
        self.numbers.index_copy_(0, pairs[0].long(), pairs[1])

    def first(self, count: int) -> Forest:
        """Return the tables of the first rows alone."""
        return Forest(
            self.numbers, self.sessions[:count], self.stops[:count], self.pages[:count], self.history[:count],
            self.trees[:count], self.moves[:count], self.places[:, :count], self.reports[:count],
        )  # fmt: skip

    def plant(self, row: int, tree: Tree, kv_slots: Sequence[int]) -> None:
        """Write a session's tree; `kv_slots`: the draft's, behind the committed tokens, -1 for what is not computed."""
        self.set(row, nodes=len(tree), root_scored=int(tree.root_scored), tail=max(kv_slots, default=-1) + 1)
        self.trees[row, : len(tree)] = torch.from_numpy(node_table(tree.nodes, kv_slots))

    def tree(self, row: int, scalars: Mapping[str, int] | None = None) -> tuple[Tree, list[int]]:
        """Return a session's tree and the draft's KV slots; only if the tables are in host memory.

        `scalars`: the session's at the time of the tree, if they have changed since.
        """
        scalars = scalars or self.scalars(row)
        table = self.trees[row, : scalars["nodes"]].numpy()
        return read_tree(table, bool(scalars["root_scored"])), table[:, len(Node._fields)].astype(np.int64).tolist()

    def text(self, row: int) -> list[int]:
        """Return a session's committed tokens."""
        tokens: list[int] = self.history[row, : self.scalars(row)["length"]].tolist()
        return tokens


def new_forest(sessions: int, context: int, nodes: int, pages: int, device: torch.device | str = "cpu") -> Forest:
    """Return the tables of a batch of at most `sessions` sessions, all rows free.

    `nodes`: of a tree, at most. `pages`: of the longest page table. Both numbers and `sessions` are powers of two.
    """
    if any(number & (number - 1) for number in (sessions, nodes)):
        raise ValueError(f"a forest has powers of two of sessions and of nodes; got {sessions} and {nodes}")

    shapes = (
        (sessions, len(SESSION_FIELDS)), (sessions, STOP_IDS), (sessions, 2, pages), (sessions, context),
        (sessions, 2, 2, PATH_MOVES), (2, sessions, len(PLACE_FIELDS)), (sessions, REPORT_SIZE),
    )  # fmt: skip
    ends = list(accumulate([-(-prod(shape) // ALIGNED) * ALIGNED for shape in shapes], initial=0))
    numbers = torch.zeros(ends[-1], dtype=torch.int32, device=device)
    tables = [numbers[at : at + prod(shape)].view(shape) for at, shape in zip(ends, shapes, strict=False)]
    trees = torch.zeros(sessions, nodes, len(NODE_FIELDS), dtype=torch.float64, device=device)
    sessions_, stops, held, history, moves, places, reports = tables
    return Forest(numbers, sessions_, stops, held, history, trees, moves, places, reports)


def as_pairs(changes: Sequence[Written]) -> np.ndarray:
    """Return changes of numbers as one array [2, count]: where they belong, and what they are."""
    where = np.concatenate([np.arange(at, at + len(numbers), dtype=np.int32) for at, numbers in changes])
    what = np.concatenate([numbers for _, numbers in changes])
    last = len(where) - 1 - np.unique(where[::-1], return_index=True)[1]  # of several changes the last one counts
    return np.stack([where[last], what[last]])


class Weights(NamedTuple):
    """What trees of all sessions are weighed by, and the same as an array for the device."""

    chances: Chances
    table: Tensor  # float64, see CHANCE_AT


def weights_of(chances: Chances, device: torch.device | str = "cpu") -> Weights:
    """Return chances with their array."""
    return Weights(chances, torch.from_numpy(chance_numbers(chances)).to(device))


def chance_numbers(chances: Chances) -> np.ndarray:
    """Return chances as an array, see CHANCE_AT."""
    return np.array((*EDGES, *chances.first, *chances.other, *chances.looked, *map(exp, chances.shifts)))


def node_table(nodes: Sequence[Node], kv_slots: Sequence[int]) -> np.ndarray:
    """Return nodes as numbers [nodes, NODE_FIELDS]."""
    count, fields = len(nodes), len(Node._fields)
    known = [0.0] * (count + 1)  # the root's is the last
    for node in nodes:
        known[node.parent] += node.chance
    table = np.zeros((count, len(NODE_FIELDS)))
    table[:, :fields] = np.fromiter(chain.from_iterable(nodes), np.float64, count * fields).reshape(count, fields)
    table[:, fields], table[:, fields + 1] = kv_slots, known[:count]
    return table


# `Node._make` does the same by a call in Python for each node
_as_node: Callable[[tuple[Any, ...]], Node] = partial(tuple.__new__, Node)


def read_tree(table: np.ndarray, root_scored: bool) -> Tree:
    """Return the tree of a table of nodes."""
    if not len(table):
        return Tree((), True) if root_scored else NO_TREE
    columns = [column.astype(kind).tolist() for column, kind in zip(table.T, NODE_TYPES, strict=False)]
    nodes = tuple(map(_as_node, zip(*columns, strict=True)))
    assert min(columns[1]) >= ROOT and all(map(lt, columns[1], range(len(nodes)))), columns[1]  # parents come first
    return Tree(nodes, root_scored)
