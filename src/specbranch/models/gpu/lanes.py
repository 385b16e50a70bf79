"""Lanes that are drafted without waiting: the rows of each step, before the host knows their tokens.

Owns the nodes of the lanes in the sequence. Invariant: the sequence has only nodes whose tokens the host has read, so a
step that was started in vain has no effect.
"""

from __future__ import annotations

from collections.abc import Sequence

from specbranch.core.request import Spot
from specbranch.core.runner import Ask, Lanes
from specbranch.core.slots import Slots
from specbranch.models.cache.kv_memory import Table
from specbranch.models.forward.step_rows import Rows
from specbranch.models.gpu.asking import choosing_of
from specbranch.models.gpu.layout import Choosing


class LaneSteps:
    """The steps of some lanes, in order."""

    def __init__(self, table: Table, slots: Slots, lanes: Lanes, spots: Sequence[Spot]) -> None:
        """`spots`: those of the tokens after each lane's first row."""
        self.lanes, self.spots, self._table, self._slots = lanes, spots, table, slots
        self.width, self._first = len(lanes.feed.tokens), len(slots.tokens)
        self.asks = [Ask(lanes.feed.seq, self._first + lane, measure=lanes.measure) for lane in range(self.width)]
        self._seen = [sum(1 << node for node in slots.path(parent)) for parent in lanes.feed.parents]
        self._read = list(lanes.feed.tokens)

    def step(self, number: int) -> tuple[list[Rows], Choosing]:
        """Return the rows of the next step; from the second on, each has the token that its lane sampled before."""
        nodes = self._nodes(number)
        self._seen = [seen | 1 << node for seen, node in zip(self._seen, nodes, strict=True)]
        tokens = self._read if number == 0 else [-1 - lane for lane in range(self.width)]
        rows = Rows(self._table, tokens, self._slots.slot_of(nodes.start), len(self._slots.prefix), self._seen)
        spots = [spot._replace(position=spot.position + number) for spot in self.spots]
        return [rows], choosing_of(self.width, enumerate(spots))

    def heard(self, number: int, said: Sequence[int]) -> None:
        """Append the nodes of a step, whose tokens are known now; `said`: the tokens of the next step."""
        parents = self.lanes.feed.parents if number == 0 else tuple(self._nodes(number - 1))
        self._slots.grow(self._read, parents)
        self._read = list(said)

    def _nodes(self, number: int) -> range:
        first = self._first + number * self.width
        return range(first, first + self.width)
