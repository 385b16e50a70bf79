"""Options of `bench run` that other commands have, too: `bench load` and `tune`.

Owns their help texts. Invariant: an option of one name means the same in each of them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from specbranch.clock.shipped import shipped_profiles

PROFILES = [(name, "shipped; `specbranch profile` measures your own") for name in shipped_profiles()]
DATA = {"type": click.Path(path_type=Path), "metavar": "DIR", "help": "Folder of the public suites [$SPECBRANCH_DATA]."}
PROMPTS = {
    "multiple": True,
    "type": click.Path(path_type=Path),
    "metavar": "FILE",
    "help": "File of prompts in Spec-Bench's format; may be repeated.",
}
WEIGHTS_OPTION: dict[str, Any] = {
    "metavar": "TYPE",
    "help": "Storage type of the target's weight matrices: float32, bfloat16, int8, fp8, fp8-block, int4, "
    "int4-64, int4-32 or stored [stored for a quantised checkpoint, and for a quantised GGUF on a CPU].",
}
DRAFT_WEIGHTS_OPTION: dict[str, Any] = {
    "metavar": "TYPE",
    "help": "Storage type of the draft's weight matrices, likewise [as in its file if that is int8].",
}
TARGET_OPTION: dict[str, Any] = {"metavar": "MODEL", "help": "Target model, instead of a pair."}
DRAFT_OPTION: dict[str, Any] = {"metavar": "MODEL", "help": "Draft model for --target."}
TARGET_SHAPE_OPTION: dict[str, Any] = {
    "metavar": "SHAPE",
    "help": "Run the target in the shape of a larger model, see `inflate`. Examples: 7b; "
    "hidden=64,layers=3; 7b,layers=40. own keeps its shape [own].",
}
DRAFT_SHAPE_OPTION: dict[str, Any] = {
    "metavar": "SHAPE",
    "help": "Run the draft in the shape of a larger model, likewise [own].",
}
CACHE_OPTION: dict[str, Any] = {
    "metavar": "TYPE",
    "help": "Storage type of the KV cache on a CPU: float32, bfloat16 or int8 [float32].",
}
WARM_UP_OPTION: dict[str, Any] = {
    "metavar": "WHEN",
    "help": "When a GPU's kernels are compiled and its CUDA graphs captured: full, at load; lazy, when a step first "
    "occurs [full].",
}
