"""Lookup in the forest: what followed the last words of a session's text earlier on becomes a path of its tree.

Owns the launch, and the kernel's twin in plain Python: `core.lookup.Ngrams` finds, `core.trees.GrowingTree` grafts.
Invariant: a path ends where the tree's table is full, and nowhere else sooner than LOOKED.
"""

from __future__ import annotations

from specbranch.core.lookup import Ngrams
from specbranch.core.planner import LOOKED
from specbranch.core.trees import GrowingTree
from specbranch.models.gpu.forest_layout import DECODING, Forest, Weights

SCAN_BLOCK = 1024  # positions that are compared at a time


def look(forest: Forest, weights: Weights, longest: int, shortest: int) -> None:
    """Add looked-up tokens to the trees of all sessions; n-grams have `shortest` to `longest` tokens."""
    (launch_look if forest.sessions.device.type == "cuda" else look_plainly)(forest, weights, longest, shortest)


def launch_look(forest: Forest, weights: Weights, longest: int, shortest: int) -> None:
    """Launch the kernel."""
    from specbranch.models.gpu import look_kernels

    look_kernels.look[(forest.count,)](
        forest.sessions, forest.history, forest.trees, weights.table, forest.history.shape[1],
        SIZE=forest.trees.shape[1], LONGEST=longest, SHORTEST=shortest, BLOCK=SCAN_BLOCK, num_warps=4,
        enable_fp_fusion=False,
    )  # fmt: skip


def look_plainly(forest: Forest, weights: Weights, longest: int, shortest: int) -> None:
    """Do as the kernel does, in plain Python."""
    for row in range(forest.count):
        scalars = forest.scalars(row)
        if scalars["state"] != DECODING or not scalars["looks"]:
            continue
        words, tokens = Ngrams(forest.text(row), longest, shortest).find(LOOKED)
        if not tokens:
            continue
        tree, kv_slots = forest.tree(row, scalars)
        count, size = len(tree), forest.trees.shape[1]
        for length in range(len(tokens), -1, -1):  # what fits
            growing = GrowingTree(tree)
            growing.graft(tokens[:length], words, weights.chances)
            if len(growing.nodes) <= size and (length == 0 or count < size):
                break
        grown = growing.tree()
        forest.plant(row, grown, kv_slots + [-1] * (len(grown) - count))
        forest.set(row, tail=scalars["tail"])
