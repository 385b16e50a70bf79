"""The growth of a tree on the device: whether it fits, the copy up, its steps, and the tree that comes back.

Owns the order of a growth. `trees.py` owns the tree's layout on the device, the runner the KV cache and the launches.
Invariants: the host waits for the device only to learn the width of the next step, and for the tree at the end. Nodes
of a growth that was broken off are not in the sequence.
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
from specbranch.models.gpu.tree_layout import DEEPEST, DEVICE_NODES, ENTRIES, LANES
from specbranch.models.gpu.trees import GROWTH_STEPS, DeviceTree, NoiseKeys, growing_bucket
from specbranch.models.sampling.sheet import is_noisy, temperature_of


@dataclass(frozen=True, slots=True)
class TextRead:
    """A text that was computed ahead; the device has sampled what follows it."""

    seq: int
    length: int
    results: Tensor  # valid until another step runs
    row: int  # of its last token
    begun: DeviceMoment

    def ends(self, growing: Growing, length: int) -> bool:
        """True if a tree is to grow behind this text and needs no other input."""
        return (
            growing.seq == self.seq
            and length == self.length
            and not growing.uncomputed
            and not growing.tree.root_scored
        )


class TreeGrower:
    """Grows one tree at a time on its model's device."""

    def __init__(self, graphs: Graphs, most_pages: int, spare: int, transfer: Transfer) -> None:
        """`most_pages`: the longest page table; `spare`: the KV slot of the pool for padding."""
        self._graphs, self._transfer = graphs, transfer
        self.tree = graphs.tree = DeviceTree(most_pages, transfer.device, spare)

    def room(self, growing: Growing, slots: Slots, request: Request, read: TextRead | None = None) -> int:
        """Return how many nodes of a tree may be computed on the device; 0: grow the tree step by step.

        `read`: its text, if that was computed ahead.
        """
        growth, uncomputed = growing.growth, len(growing.uncomputed)
        # the draft samples what follows the text in this growth, or has sampled it before
        text_answered = uncomputed > 0 or growing.tree.root_scored or read is not None
        fits = len(growth.step) <= LANES and growth.children <= ENTRIES and uncomputed <= self._graphs.step.most_rows
        if not text_answered or not fits or not asking.is_chosen_in_graph(_spot(request, slots, uncomputed)):
            return 0
        parents = (DEVICE_NODES - len(growing.tree)) // growth.children - 1  # that may have children
        return max(min(slots.room - uncomputed, growth.most, parents), 0)

    def bucket(self) -> Bucket:
        """Return the bucket of all steps of a tree."""
        return growing_bucket(self._graphs.step.least)

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
        """Copy a tree to the device; its first step makes the moves, unless its text was computed ahead."""
        uncomputed = len(growing.uncomputed)
        asked = -1 if growing.tree.root_scored else uncomputed - 1 if read is None else read.row
        if growing.growth.deepest > DEEPEST:
            growing = replace(growing, growth=replace(growing.growth, deepest=DEEPEST))
        spot = _spot(request, slots, uncomputed)
        tail = 0 if uncomputed else len(slots.tokens)
        array = self.tree.planted(growing, asked, spot.position, tail, room, table.pages, _noise(spot), moves)
        self._transfer.into(self.tree.state, array)

    def bring_sheet(self, sheet: np.ndarray | None) -> None:
        """Copy the receiver's array, if there is one, next to the tree."""
        if sheet is not None:
            self._transfer.into(self.tree.sheet, sheet)

    def choose(self, bucket: Bucket, read: TextRead | None = None) -> None:
        """Let the device choose the first step of a tree whose text is computed already."""
        self.tree.grow(None if read is None else read.results, self._graphs.input, bucket)

    def warm_up(self) -> None:
        """Compile `choose`, on no tree; without a GPU there is nothing to compile."""
        if self._transfer.device.type != "cuda":
            return
        before = self.tree.state.clone()
        self.tree.clear()
        self.choose(self.bucket())
        self.tree.state.copy_(before)
        self.tree.forget_reported()

    def steps(self, bucket: Bucket, done: Done, launch: Callable[[Bucket], None]) -> tuple[list[int], int]:
        """Launch the steps that the device chooses; returns the nodes of each, and the nodes of the tree at the end."""
        widths: list[int] = []
        count, width = self.tree.reported(0)
        while width and len(widths) < GROWTH_STEPS and not done():
            launch(bucket)
            widths.append(width)
            count, width = self.tree.reported(len(widths))
        return widths, count

    def grown(self, growing: Growing, slots: Slots, steps: list[int], count: int, read: TextRead | None = None) -> Tree:
        """Read the tree back, and append its computed nodes to the sequence."""
        nodes, kv_slots = self.tree.nodes(self._transfer.down(self.tree.held(count)))
        _add_read(nodes, kv_slots, slots)
        tree = GrowingTree(growing.tree)
        tree.nodes, tree.root_scored = nodes, True
        text = len(growing.uncomputed) if read is None else read.row + 1
        tree.steps = [text, *steps] if text else steps
        return tree.tree()


def _spot(request: Request, slots: Slots, uncomputed: int) -> Spot:
    """Return the spot of the first token of a tree."""
    return Spot(request, len(slots.prefix) + uncomputed, list)


def _noise(spot: Spot) -> NoiseKeys:
    """Return the temperature, and the noise keys of all positions that a tree may have."""
    request, temperature = spot.request, int(np.float32(temperature_of(spot)).view(np.int32))
    if not is_noisy(spot):
        return temperature, ()
    positions = range(spot.position, spot.position + DEEPEST + 1)
    return temperature, [key for position in positions for key in keys(request.seed, request.sample, position)]


def _add_read(nodes: list[Node], kv_slots: list[int], slots: Slots) -> None:
    """Append the computed nodes of a tree to the tail, in the order of their KV slots."""
    new = sorted((kv_slot, n) for n, kv_slot in enumerate(kv_slots) if nodes[n].scored and kv_slot >= len(slots.tokens))
    above = [nodes[n].parent for _, n in new]
    slots.grow([nodes[n].token for _, n in new], [ROOT if parent == ROOT else kv_slots[parent] for parent in above])
