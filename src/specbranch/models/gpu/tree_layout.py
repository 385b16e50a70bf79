"""How a draft tree lies in its device's memory: sizes, scalars, the fields of a node, where each part begins.

Owns these numbers, which the host's half (`trees`) and the kernels share. Invariant: nodes come last, so a tree that
grows moves nothing.
"""

from __future__ import annotations

import numpy as np

from specbranch.core.trees import CLASSES, EDGES, LOOKS, STANDINGS, Node
from specbranch.models.forward.step_rows import GROUP_POSITIONS
from specbranch.models.gpu.layout import GROUP_ROWS, most_moves

DEVICE_NODES = 1024  # at most in a tree
LANES = GROUP_ROWS  # read at a time, at most
ENTRIES = 8  # best tokens of a row that its choice tells
TREE_MOVES = most_moves(LANES)  # KV slots that may have to move before the first step
DEEPEST = GROUP_POSITIONS  # below the text: so far a row's own path begins where its position says
SHEET = 1024  # numbers that a target may have brought up with a tree

TREE_SCALARS = (
    "count", "fed", "spent", "width", "tail", "prefix", "asked", "step", "spare", "pages", "moves", "temperature",
    "noisy", "worth", "least", "free_time", "target_delay", "draft_delay", "row_price", "children", "rows", "deepest",
    "most", "lanes", "room", "planted",
)  # fmt: skip
# of a node; KV slot: in the tail, once it was read; known: the chances of its children, summed; row: of the step that
# verifies it
NODE_FIELDS = (*Node._fields, "kv_slot", "known", "row")
LOOKED_CELLS = LOOKS * STANDINGS
TREE_PARTS = {
    "scalars": len(TREE_SCALARS), "now": LANES, "step": LANES, "edges": len(EDGES), "first": CLASSES, "other": CLASSES,
    "looked": LOOKED_CELLS, "odds": LOOKED_CELLS, "keys": 2 * (DEEPEST + 1), "moves": 2 * TREE_MOVES,
    "sheet": SHEET,
}  # fmt: skip
# where each part begins; nodes come last
TREE_AT = dict(zip((*TREE_PARTS, "pages"), np.cumsum([0, *TREE_PARTS.values()]).tolist(), strict=True))
