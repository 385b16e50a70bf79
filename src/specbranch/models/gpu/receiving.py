"""A target that begins to verify a tree where it has grown: what is most likely sent is chosen on the device, and the
step that verifies it written out there, before the host has read the tree.

Owns the way of a tree from the draft's memory to the target's step. Two ways lead there: a Triton kernel, and
`core.sending` itself, which the kernel is compared with and which serves where there is no GPU. Invariant: a step that
was begun is taken for an order only if it reads just what is ordered; otherwise it is as if it had not been.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from specbranch.core.request import Request, Spot
from specbranch.core.sending import Sending, sent
from specbranch.core.slots import ROOT
from specbranch.core.trees import GrowingTree, Tree
from specbranch.errors import CacheFull
from specbranch.models.cache.kv_memory import Table
from specbranch.models.forward.step_rows import Rows
from specbranch.models.gpu import asking
from specbranch.models.gpu.layout import (
    ROOT_ROW,
    Bucket,
    alone_bucket,
    pack,
    power_of_four,
    views,
)
from specbranch.models.gpu.tree_layout import LANES, SHEET, TREE_MOVES
from specbranch.models.gpu.trees import DeviceTree
from specbranch.models.sampling.sheet import is_noisy, temperature_of

SCALARS = ("prefix", "token", "spare", "pages", "moves", "temperature", "noisy", "deepest", "most")
PARTS = {"scalars": len(SCALARS), "prices": LANES, "moves": 2 * TREE_MOVES}
AT = dict(zip((*PARTS, "pages"), np.cumsum([0, *PARTS.values()]).tolist(), strict=True))  # where each part begins


class DeviceReceiver:
    """Where a model's next step is written by a tree that has grown; one for all sequences."""

    def __init__(self, spare: int, step_input: Tensor, least: Bucket, capture: bool = False) -> None:
        """`spare`: the flat KV slot for padding; `step_input`: where steps are read from; `capture`: launch by graphs,
        which takes less of the host's time."""
        # how many rows there are, and of each its token and its parent
        self.read = torch.zeros(1 + LANES, 2, dtype=torch.int32, device=step_input.device)
        self.spare, self.least, self._input, self._captures = spare, least, step_input, capture
        self._sends: dict[tuple[int, int, Bucket], torch.cuda.CUDAGraph] = {}

    def bucket(self, text: Expected, nodes: int) -> Bucket:
        """The bucket of the step that verifies something of a tree of so many nodes."""
        return alone_bucket(max(power_of_four(1 + min(nodes, len(text.sending.prices))), self.least.rows))

    def sheet(self, text: Expected, table: Table, moves: np.ndarray) -> np.ndarray | None:
        """Write down all that the step needs besides the tree; nothing: that is too much to come with one."""
        spot, pages = text.spot, len(table.pages)
        if AT["pages"] + pages > SHEET:
            return None
        array = np.zeros(AT["pages"] + pages)
        array[: len(SCALARS)] = (
            text.prefix, text.token, self.spare, pages, moves.shape[1],
            int(np.float32(temperature_of(spot)).view(np.int32)), is_noisy(spot), text.sending.deepest,
            len(text.sending.prices),
        )  # fmt: skip
        array[AT["prices"] : AT["prices"] + len(text.sending.prices)] = text.sending.prices
        for side in range(2):
            array[AT["moves"] + side * TREE_MOVES :][: moves.shape[1]] = moves[side]
        array[AT["pages"] :] = table.pages
        return array

    def send(self, tree: DeviceTree, text: Expected, table: Table, moves: np.ndarray, bucket: Bucket) -> bool:
        """Choose what of a tree is sent, and write the step that verifies it.

        Returns True if the launch had to be captured first.
        """
        if self.read.device.type != "cuda":
            self._plainly(tree, text, table, moves, bucket)
            return False
        kind = tree.state.data_ptr(), tree.first, bucket
        if kind in self._sends:
            self._sends[kind].replay()
            return False
        self.capture(tree, bucket)
        return self._captures

    def capture(self, tree: DeviceTree, bucket: Bucket) -> None:
        """Run the kernel that sends a tree's step to a bucket, and capture it."""
        if self.read.device.type != "cuda":
            return
        self.launch(tree, bucket)
        if self._captures:
            kind = tree.state.data_ptr(), tree.first, bucket
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.stream(torch.cuda.Stream(self.read.device)):  # type: ignore[no-untyped-call]
                graph.capture_begin(capture_error_mode="thread_local")
                try:
                    self.launch(tree, bucket)
                finally:
                    graph.capture_end()
            self._sends[kind] = graph

    def launch(self, tree: DeviceTree, bucket: Bucket) -> None:
        """Launch the kernel that sends a tree's step to a bucket; only on a GPU."""
        from specbranch.models.gpu.send_kernels import send

        step = views(self._input, bucket)
        send[(1,)](
            tree.state, self._input, step.groups, step.tables, step.own, step.counts, step.moves, self.read,
            tree.first, bucket.rows, num_warps=1, enable_fp_fusion=False,
        )  # fmt: skip

    def _plainly(self, tree: DeviceTree, text: Expected, table: Table, moves: np.ndarray, bucket: Bucket) -> None:
        """Do the same by the code that chooses on the host."""
        growing = GrowingTree(Tree((), True))
        growing.nodes = tree.nodes_now()
        grown = growing.tree()
        numbers = sent(grown, text.sending)
        row_of = {ROOT: 0, **{n: row for row, n in enumerate(numbers, start=1)}}
        nodes = [grown.nodes[n] for n in numbers]
        parents = [0, *(row_of[node.parent] for node in nodes)]
        seen = [1]
        for row, parent in enumerate(parents[1:], start=1):
            seen.append(seen[parent] | 1 << row)
        tokens = [text.token, *(node.token for node in nodes)]
        spots = [Spot(text.request, text.prefix + one.bit_count(), list) for one in seen]
        choosing = asking.choosing_of(len(tokens), enumerate(spots))
        choosing = choosing._replace(parent=np.array(parents), said=np.array([ROOT_ROW, *tokens[1:]]))
        rows = Rows(table, tokens, text.prefix, text.prefix, seen)
        packed, _ = pack([rows], self.spare, choosing, moves if moves.size else None, bucket)
        self._input[: len(packed)] = torch.from_numpy(packed)
        read = [(len(tokens), 0), *zip(tokens, [ROOT, *parents[1:]], strict=True)]
        self.read[: len(read)] = torch.tensor(read)


class Expected:
    """What a tree will be verified behind: a sequence of which all but the last token is committed."""

    def __init__(self, request: Request, prefix: int, token: int, sending: Sending) -> None:
        self.request, self.prefix, self.token, self.sending = request, prefix, token, sending
        self.spot = Spot(request, prefix + 1, list)

    @property
    def kv_slots(self) -> int:
        """How many KV slots the sequence has at the most, with what is sent."""
        return self.prefix + 1 + len(self.sending.prices)


Launch = Callable[[DeviceTree, int], None]


class TreeReceiver:
    """Is given one tree; `expect` makes ready for it, if that is possible: it tells what is brought up with the tree,
    and how to begin with it."""

    def __init__(self, expect: Callable[[], tuple[np.ndarray, Launch] | None]) -> None:
        self._expect = expect
        self._launch: Launch | None = None

    def prepare(self) -> np.ndarray | None:
        """Get ready; returns what is to be brought up with the tree."""
        try:
            expected = self._expect()
        except CacheFull:  # there may be room for less
            return None
        if expected is None:
            return None
        sheet, self._launch = expected
        return sheet

    def take(self, tree: DeviceTree, nodes: int) -> None:
        """Begin with what of a tree of so many nodes will most likely be verified."""
        if self._launch is not None:
            self._launch(tree, nodes)
