"""The layout of a draft tree in device memory: sizes, scalars, the fields of a node, where each part begins.

Owns these numbers, which `trees.py` and the kernels share. Invariant: nodes come last, so a growing tree moves nothing.
"""

from __future__ import annotations

import numpy as np

from specbranch.core.trees import CLASSES, EDGES, LOOKS, STANDINGS, Node
from specbranch.models.forward.step_rows import GROUP_POSITIONS
from specbranch.models.gpu.layout import GROUP_ROWS, most_moves

DEVICE_NODES = 1024  # nodes of a tree, at most
LANES = GROUP_ROWS  # nodes of a step, at most
ENTRIES = 8  # best tokens in a row of results
TREE_MOVES = most_moves(LANES)  # moves of KV slots before the first step, at most
NO_MOVES = np.zeros((2, 0), dtype=np.int64)
DEEPEST = GROUP_POSITIONS  # depth of a tree, at most: up to it a row's position decides where its own path begins
SHEET = 1024  # numbers that a target may add to a tree's copy

TREE_SCALARS = (
    "count", "fed", "spent", "width", "tail", "prefix", "asked", "step", "spare", "pages", "moves", "temperature",
    "noisy", "worth", "least", "free_time", "target_delay", "draft_delay", "row_price", "children", "rows", "deepest",
    "most", "lanes", "room", "planted",
)  # fmt: skip
# Fields of a node. kv_slot: in the tail, once it is computed; known: sum of its children's probabilities; row: its row
# in the step that verifies it.
NODE_FIELDS = (*Node._fields, "kv_slot", "known", "row")
LOOKED_CELLS = LOOKS * STANDINGS
TREE_PARTS = {
    "scalars": len(TREE_SCALARS), "now": LANES, "step": LANES, "edges": len(EDGES), "first": CLASSES, "other": CLASSES,
    "looked": LOOKED_CELLS, "odds": LOOKED_CELLS, "keys": 2 * (DEEPEST + 1), "moves": 2 * TREE_MOVES,
    "sheet": SHEET,
}  # fmt: skip
# Where each part begins; nodes come last.
TREE_AT = dict(zip((*TREE_PARTS, "pages"), np.cumsum([0, *TREE_PARTS.values()]).tolist(), strict=True))
