"""A tree's way to the device and back: whether it can grow there, what is brought up, its steps, what has grown.

Owns the order of a growth; the layout of the tree there is `trees`', the cache and what is launched the runner's.
Invariants: the host waits for the device only to hear how wide the next step is, and for the tree at the end; what a
growth that is broken off has read is not in the sequence.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from torch import Tensor

from specbranch.core.noise import keys
from specbranch.core.request import Request, Spot
from specbranch.core.runner import Done, Growing
from specbranch.core.slots import ROOT, Slots
from specbranch.core.trees import GrowingTree, Node, Tree
from specbranch.models.cache.kv_memory import Table
from specbranch.models.forward.transfer import Transfer
from specbranch.models.gpu import asking
from specbranch.models.gpu.layout import Bucket
from specbranch.models.gpu.step import Graphs
from specbranch.models.gpu.stream_clock import DeviceMoment
from specbranch.models.gpu.tree_layout import DEEPEST, DEVICE_NODES, ENTRIES, LANES, TREE_MOVES
from specbranch.models.gpu.trees import GROWTH_STEPS, DeviceTree, NoiseKeys, growing_bucket
from specbranch.models.sampling.sheet import is_noisy, temperature_of

NO_MOVES = np.zeros((2, 0), dtype=np.int64)


@dataclass(frozen=True, slots=True)
class TextRead:
    """A text that was read before anybody asked what follows it, which is chosen by now."""

    seq: int
    length: int
    results: Tensor  # as long as nothing else was run
    row: int  # of its last token
    begun: DeviceMoment

    def ends(self, growing: Growing, length: int) -> bool:
        """Whether a tree is to grow behind it, of which that is all it needs to know."""
        return (
            growing.seq == self.seq
            and length == self.length
            and not growing.uncomputed
            and not growing.tree.root_scored
        )


class TreeGrower:
    """Grows one tree at a time where its model is."""

    def __init__(self, graphs: Graphs, most_pages: int, spare: int, transfer: Transfer) -> None:
        """`most_pages`: at most in a sequence's table; `spare`: the flat KV slot for padding."""
        self._graphs, self._transfer = graphs, transfer
        self.tree = graphs.tree = DeviceTree(most_pages, transfer.device, spare)

    def room(self, growing: Growing, slots: Slots, request: Request, read: TextRead | None = None) -> int:
        """How many nodes of a tree may be read where its model is; 0: the tree is to be grown step by step. `read`:
        its text was read ahead."""
        growth, uncomputed = growing.growth, len(growing.uncomputed)
        # the draft says what follows the text, or has said it before
        text_answered = uncomputed > 0 or growing.tree.root_scored or read is not None
        fits = len(growth.step) <= LANES and growth.children <= ENTRIES and uncomputed <= self._graphs.step.most_rows
        if not text_answered or not fits or not asking.is_chosen_in_graph(_spot(request, slots, uncomputed)):
            return 0
        parents = (DEVICE_NODES - len(growing.tree)) // growth.children - 1  # that may have children
        return max(min(slots.room - uncomputed, growth.most, parents), 0)

    def bucket(self, kv_slots: int) -> Bucket:
        """The bucket of all steps of a tree behind so many KV slots."""
        return growing_bucket(kv_slots, self._graphs.step.least)

    def carries(self, moves: np.ndarray) -> bool:
        """Whether the first step of a tree can make these moves."""
        return self._graphs.step.moves and moves.shape[1] <= TREE_MOVES

    def plant(
        self,
        growing: Growing,
        slots: Slots,
        request: Request,
        table: Table,
        room: int,
        moves: np.ndarray,
        read: TextRead | None = None,
    ) -> None:
        """Bring a tree to the device; its first step makes the moves, unless its text was read ahead."""
        uncomputed = len(growing.uncomputed)
        asked = -1 if growing.tree.root_scored else uncomputed - 1 if read is None else read.row
        if growing.growth.deepest > DEEPEST:
            growing = replace(growing, growth=replace(growing.growth, deepest=DEEPEST))
        spot = _spot(request, slots, uncomputed)
        tail = 0 if uncomputed else len(slots.tokens)
        array = self.tree.planted(growing, asked, spot.position, tail, room, table.pages, _noise(spot), moves)
        self._transfer.into(self.tree.state, array)

    def bring_sheet(self, sheet: np.ndarray | None) -> None:
        """Bring what a receiver needs, if it does, to where it finds it beside the tree."""
        if sheet is not None:
            self._transfer.into(self.tree.sheet, sheet)

    def choose(self, bucket: Bucket, read: TextRead | None = None) -> None:
        """Have the first step chosen, of a tree whose text was read before."""
        self.tree.grow(None if read is None else read.results, self._graphs.input, bucket)

    def steps(self, bucket: Bucket, done: Done, launch: Callable[[Bucket], None]) -> tuple[list[int], int]:
        """Launch the steps that the device chooses; returns how many nodes each read, and how many there are in the
        end."""
        widths: list[int] = []
        count, width = self.tree.reported(0)
        while width and len(widths) < GROWTH_STEPS and not done():
            launch(bucket)
            widths.append(width)
            count, width = self.tree.reported(len(widths))
        return widths, count

    def grown(self, growing: Growing, slots: Slots, steps: list[int], count: int, read: TextRead | None = None) -> Tree:
        """Read the tree back, and add to the sequence what was read of it."""
        nodes, kv_slots = self.tree.nodes(self._transfer.down(self.tree.held(count)))
        _add_read(nodes, kv_slots, slots)
        tree = GrowingTree(growing.tree)
        tree.nodes, tree.root_scored = nodes, True
        text = len(growing.uncomputed) if read is None else read.row + 1
        tree.steps = [text, *steps] if text else steps
        return tree.tree()


def _spot(request: Request, slots: Slots, uncomputed: int) -> Spot:
    """Where the first token of a tree will stand."""
    return Spot(request, len(slots.prefix) + uncomputed, list)


def _noise(spot: Spot) -> NoiseKeys:
    """The temperature, and the keys of a position and of those a tree may reach behind it."""
    request, temperature = spot.request, int(np.float32(temperature_of(spot)).view(np.int32))
    if not is_noisy(spot):
        return temperature, ()
    positions = range(spot.position, spot.position + DEEPEST + 1)
    return temperature, [key for position in positions for key in keys(request.seed, request.sample, position)]


def _add_read(nodes: list[Node], kv_slots: list[int], slots: Slots) -> None:
    """Add the nodes that were read of a tree to the tail, each at its KV slot."""
    new = sorted((kv_slot, n) for n, kv_slot in enumerate(kv_slots) if nodes[n].scored and kv_slot >= len(slots.tokens))
    above = [nodes[n].parent for _, n in new]
    slots.grow([nodes[n].token for _, n in new], [ROOT if parent == ROOT else kv_slots[parent] for parent in above])
