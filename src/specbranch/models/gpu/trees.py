"""A draft tree that grows on the device: the device chooses the next nodes, and packs the step that computes them.

Owns the tree in device memory: one float64 array, in which integers are exact, so one copy brings it up and one read
brings it back. There are two implementations: a Triton kernel, and `core.trees.GrowingTree` itself, which serves
without a GPU and which the kernel is compared with. Invariant: both grow the same tree from the same proposals,
operation by operation.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from itertools import chain
from math import exp

import numpy as np
import torch
from torch import Tensor

from specbranch.core.pages import Pool
from specbranch.core.runner import Growing
from specbranch.core.slots import ROOT
from specbranch.core.trees import EDGES, NO_TREE, GrowingTree, Growth, Node
from specbranch.models.cache.kv_memory import Table
from specbranch.models.forward.step_rows import Rows
from specbranch.models.gpu.layout import (
    ALIGNED,
    BEFORE,
    CONFIDENCE,
    ROOT_ROW,
    Bucket,
    Choosing,
    alone_bucket,
    pack,
    views,
)
from specbranch.models.gpu.tree_layout import (
    DEVICE_NODES,
    ENTRIES,
    LANES,
    NODE_FIELDS,
    SHEET,
    TREE_AT,
    TREE_MOVES,
    TREE_SCALARS,
)

GROWTH_STEPS = 64  # steps of one growth, at most
SILENT_SECONDS = 10.0  # seconds without a report from the device before the host synchronises to see an error
SLOT = NODE_FIELDS.index("kv_slot")
NODE_KINDS = (np.int64, np.int64, np.float64, np.float64, np.int64, np.int64, np.float64, np.int64, np.bool_, np.bool_)

# the bits of the temperature, and two noise keys for each position from the end of the text on; empty: no noise
NoiseKeys = tuple[int, Sequence[int]]


class DeviceTree:
    """The tree that grows on a model's device, one at a time, and the code that grows it by a step."""

    def __init__(self, pages: int, device: torch.device, spare: int) -> None:
        """`pages`: the longest page table; `spare`: the KV slot of the pool for padding."""
        self._device, self._spare, self.first = device, spare, TREE_AT["pages"] + pages  # where nodes begin
        self.state = torch.zeros(self.first + DEVICE_NODES * len(NODE_FIELDS), dtype=torch.float64, device=device)
        self.sheet = self.state[TREE_AT["sheet"] : TREE_AT["sheet"] + SHEET]
        # The device's report after each step: nodes of the tree times 32, plus nodes of the next step.
        self._reported = torch.full((GROWTH_STEPS + 1,), -1, dtype=torch.int32, pin_memory=device.type == "cuda")
        self._growth: Growth | None = None

    def planted(
        self,
        growing: Growing,
        asked: int,
        prefix: int,
        tail: int,
        room: int,
        pages: Sequence[int],
        noise: NoiseKeys,
        moves: np.ndarray,
    ) -> np.ndarray:
        """Return a tree as an array for the device, behind `prefix` tokens and `tail` nodes, with `room` for more.

        `asked`: the row of results that proposes what follows the text; negative: that is known.
        """
        growth, nodes, uncomputed = growing.growth, growing.tree.nodes, len(growing.uncomputed)
        spent = growth.seconds(0.0, min(uncomputed, len(growth.step))) if uncomputed else 0.0
        array = np.zeros(self.first + len(nodes) * len(NODE_FIELDS))
        array[: len(TREE_SCALARS)] = (
            len(nodes), sum(node.scored for node in nodes), spent, asked >= 0, tail, prefix, asked, 0, self._spare,
            len(pages), moves.shape[1], noise[0], bool(noise[1]), growth.worth, growth.least, growth.free_time,
            growth.target_delay, growth.draft_delay, growth.row_price, growth.children, growth.rows, growth.deepest,
            growth.most, len(growth.step), room, len(nodes),
        )  # fmt: skip
        array[TREE_AT["now"]] = ROOT
        chances = growth.chances
        tables = (*EDGES, *chances.first, *chances.other, *chances.looked, *map(exp, chances.shifts))
        for name, part in (
            ("step", growth.step),
            ("edges", tables),
            ("keys", noise[1]),
            ("moves", moves[0]),
            ("pages", pages),
        ):
            array[TREE_AT[name] : TREE_AT[name] + len(part)] = part
        array[TREE_AT["moves"] + TREE_MOVES : TREE_AT["moves"] + TREE_MOVES + moves.shape[1]] = moves[1]
        if nodes:
            array[self.first :] = _numbers(nodes, growing.held)
        if self._growth is not None:  # a growth that was broken off may still report
            self.forget_reported()
        self._growth = growth
        self._reported.numpy().fill(-1)
        return array

    def clear(self) -> None:
        """Remove the tree, so that nothing grows."""
        self.state.zero_()

    def forget_reported(self) -> None:
        """Forget the reports, once no step is in flight."""
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()
        self._reported.fill_(-1)

    def grow(self, results: Tensor | None, packed: Tensor, bucket: Bucket) -> None:
        """Add the proposals of the last step, choose the nodes of the next one, and write that step to `packed`."""
        (self._by_kernel if self._device.type == "cuda" else self._plainly)(results, packed, bucket)

    def reported(self, step: int) -> tuple[int, int]:
        """Wait for a step; returns the nodes of the tree, and the nodes of the next step."""
        said = wait_for(self._reported.numpy(), step, self._device)
        return said >> 5, said & 31

    def held(self, count: int) -> Tensor:
        """Return the part of the array that has to be read back for a tree of `count` nodes."""
        return self.state[: self.first + count * len(NODE_FIELDS)]

    def nodes(self, read: np.ndarray) -> tuple[list[Node], list[int]]:
        """Return the nodes of an array that was read back, and their KV slots in the tail."""
        self._growth = None
        return self._nodes(read)

    def nodes_now(self) -> list[Node]:
        """Return the current nodes; only if the array is in host memory."""
        state = self.state.numpy()
        return self._nodes(state[: self.first + int(state[TREE_SCALARS.index("count")]) * len(NODE_FIELDS)])[0]

    def _nodes(self, read: np.ndarray) -> tuple[list[Node], list[int]]:
        columns = read[self.first :].reshape(-1, len(NODE_FIELDS)).T
        numbers = [columns[at].astype(kind).tolist() for at, kind in enumerate(NODE_KINDS)]
        kv_slots: list[int] = columns[SLOT].astype(np.int64).tolist()
        return list(map(Node._make, zip(*numbers, strict=True))), kv_slots

    def _by_kernel(self, results: Tensor | None, packed: Tensor, bucket: Bucket) -> None:
        from specbranch.models.gpu.tree_kernels import grow

        step = views(packed, bucket)
        assert step.counts is not None and step.moves is not None and bucket.rows == LANES
        across = 0 if results is None else results.shape[1]
        grow[(1,)](
            self.state, self.state if results is None else results, packed, step.groups, step.tables, step.own,
            step.counts, step.moves, self._reported, across, -(-bucket.rows // ALIGNED) * ALIGNED, self.first,
            num_warps=1, enable_fp_fusion=False,
        )  # fmt: skip

    def _plainly(self, results: Tensor | None, packed: Tensor, bucket: Bucket) -> None:
        """Do as `grow` with `GrowingTree`, on the host."""
        state, growth = self.state.numpy(), self._growth
        assert growth is not None
        now = dict(zip(TREE_SCALARS, state[: len(TREE_SCALARS)].tolist(), strict=True))
        count, width, tail, step, room = (int(now[name]) for name in ("count", "width", "tail", "step", "room"))
        nodes, kv_slots = self._nodes(state[: self.first + count * len(NODE_FIELDS)])
        growing = _growing_tree(nodes)
        read = state[TREE_AT["now"] : TREE_AT["now"] + width].astype(int).tolist()
        if read and read != [ROOT]:
            growing.feed(read)
        for row, n in enumerate(read):
            assert results is not None
            growing.add_candidates(
                n, growth, *_candidates(results[int(now["asked"]) if n == ROOT else row].tolist(), growth.children)
            )
        open_nodes = growing.open_nodes(growth)[:room]
        chosen = growth.pace(now["spent"], [gain for _, gain in open_nodes])
        nexts = sorted(n for n, _ in open_nodes[:chosen])
        kv_slots += [-1] * (len(growing.nodes) - count)
        for kv_slot, n in enumerate(nexts, tail):
            kv_slots[n] = kv_slot
        if nexts:
            self._pack(packed, bucket, growing.nodes, nexts, kv_slots, now, with_moves=step == 0 and results is None)
        now |= {
            "count": len(growing.nodes),
            "fed": sum(node.scored for node in growing.nodes),
            "width": chosen,
            "tail": tail + chosen,
        }
        now |= {"step": step + 1, "room": room - chosen}
        now["spent"] += growth.seconds(now["spent"], chosen) if chosen else 0.0
        state[: len(TREE_SCALARS)] = [now[name] for name in TREE_SCALARS]
        state[TREE_AT["now"] : TREE_AT["now"] + chosen] = nexts
        table = _numbers(growing.nodes, dict(enumerate(kv_slots)))
        state[self.first : self.first + len(table)] = table
        self._reported[step] = 32 * len(growing.nodes) + chosen

    def _pack(
        self, packed: Tensor, bucket: Bucket, nodes: Sequence[Node], nexts: list[int], kv_slots: list[int],
        now: Mapping[str, float], with_moves: bool,
    ) -> None:  # fmt: skip
        """Pack the step that computes some nodes."""
        state, prefix, count = self.state.numpy(), int(now["prefix"]), len(nexts)
        table = Table(Pool(0), state[TREE_AT["pages"] : TREE_AT["pages"] + int(now["pages"])].astype(int).tolist())
        rows = Rows(
            table,
            [nodes[n].token for n in nexts],
            prefix + int(now["tail"]),
            prefix,
            [_seen(nodes, kv_slots, n) for n in nexts],
        )
        keys = (
            state[TREE_AT["keys"] : TREE_AT["moves"]].astype(np.int64).astype(np.uint32).view(np.int32).reshape(-1, 2)
        )
        noise = keys[[nodes[n].depth for n in nexts]].T if now["noisy"] else np.zeros((2, count), dtype=np.int32)
        same = [np.full(count, int(now[name]), dtype=np.int32) for name in ("temperature", "noisy")]
        own, top = np.arange(count, dtype=np.int32), np.full(count, ROOT_ROW, dtype=np.int32)
        choosing = Choosing(same[0], noise[0], noise[1], same[1], own, top)
        moves = (
            state[TREE_AT["moves"] : TREE_AT["moves"] + 2 * TREE_MOVES]
            .reshape(2, TREE_MOVES)[:, : int(now["moves"])]
            .astype(np.int32)
        )
        array, _ = pack([rows], self._spare, choosing, moves if with_moves and moves.size else None, bucket)
        packed[: len(array)] = torch.from_numpy(array)


def wait_for(numbers: np.ndarray, at: int, device: torch.device) -> int:
    """Wait until a device replaces a negative number in host memory, and return the new one."""
    begun = None
    while (said := int(numbers[at])) < 0:
        begun = begun or time.monotonic()
        if time.monotonic() - begun > SILENT_SECONDS:
            torch.cuda.synchronize(device)  # raises the device's error, if there is one
            if int(numbers[at]) < 0:
                raise RuntimeError("the device did not say what it reads next")
    return said


def growing_bucket(least: Bucket) -> Bucket:
    """Return the bucket of all steps of a growing tree."""
    return alone_bucket(max(LANES, least.rows))


def _growing_tree(nodes: list[Node]) -> GrowingTree:
    growing = GrowingTree(NO_TREE)
    growing.nodes = nodes
    return growing


def _seen(nodes: Sequence[Node], kv_slots: Sequence[int], n: int) -> int:
    """Return the nodes of the tail that a node sees, itself included, as bits."""
    bits = 0
    while n != ROOT:
        bits |= 1 << kv_slots[n]
        n = nodes[n].parent
    return bits


def _candidates(result: list[float], children: int) -> tuple[list[int], list[float]]:
    """Return the tokens that a row of results proposes, and the draft's probability of each."""
    confidence, tokens, scores = result[CONFIDENCE], result[BEFORE : BEFORE + ENTRIES], result[BEFORE + ENTRIES :]
    possible = [(int(token), score) for token, score in zip(tokens, scores, strict=True) if score > -np.inf][:children]
    return [token for token, _ in possible], [confidence * exp(score - scores[0]) for _, score in possible]


def _numbers(nodes: Sequence[Node], kv_slots: Mapping[int, int]) -> np.ndarray:
    """Return nodes as numbers, with their KV slots and the sums of their children's probabilities."""
    count, fields = len(nodes), len(Node._fields)
    known = [0.0] * count
    for node in nodes:
        if node.parent != ROOT:
            known[node.parent] += node.chance
    table = np.empty((count, len(NODE_FIELDS)))
    table[:, :fields] = np.fromiter(chain.from_iterable(nodes), np.float64, count * fields).reshape(count, fields)
    table[:, fields] = [kv_slots.get(n, -1) for n in range(count)]
    table[:, fields + 1], table[:, fields + 2] = known, 0
    return table.reshape(-1)
