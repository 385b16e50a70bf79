"""A program of its own for test_forest: runs the kernels of the forest in Triton's interpreter, or compiles them.

It needs Triton, but no GPU. The interpreter replaces Triton's functions for the whole process.
"""

from __future__ import annotations

import os
import sys
from typing import Any

NUMBERS = ("context", "held", "per", "across", "wide", "all_groups", "spare")
FLOATS = ("trees", "reaches", "ranked", "prices", "chances", "growth")
KINDS = {**dict.fromkeys(FLOATS, "*fp64"), "results": "*fp32", **dict.fromkeys(NUMBERS, "i32")}


def interpret(seed: int, sessions: int) -> None:
    """Compare kernels and twins on a random forest."""
    os.environ["TRITON_INTERPRET"] = "1"
    import triton.language as tl

    tl.core.tensor.__index__ = lambda self: self.handle.data.item()  # the interpreter's ranges need it
    from forests import compare_rounds

    compare_rounds(seed, sessions, "cpu", nodes=32, rounds=1 if sessions > 1 else 2)


def compile_all() -> None:
    """Compile all kernels for an H100 or H200."""
    from specbranch.models.gpu import forest_grow_kernels, grant_kernels, look_kernels, settle_kernels

    shared = {"SIZE": 64, "OFFERS": 64, "SESSIONS": 4, "ROWS": 64, "PER_GROUP": 4, "LONGEST": 4, "SHORTEST": 1}
    for kernel in (
        settle_kernels.settle, look_kernels.look, grant_kernels.offer, grant_kernels.rank, grant_kernels.grant,
        grant_kernels.write, forest_grow_kernels.grow, forest_grow_kernels.place_drafts,
        forest_grow_kernels.write_drafts,
    ):  # fmt: skip
        compile_one(kernel, {**shared, "BLOCK": 128, "LAST": 0})


def compile_one(kernel: Any, sizes: dict[str, int]) -> None:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    names = kernel.arg_names
    kinds = {name: "constexpr" if name in sizes else KINDS.get(name, "*i32") for name in names}
    known = {(names.index(name),): size for name, size in sizes.items() if name in names}
    source = ASTSource(fn=kernel, signature=kinds, constexprs=known)
    compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4, "enable_fp_fusion": False})
    print(kernel.__name__)


if __name__ == "__main__":
    if sys.argv[1] == "compile":
        compile_all()
    else:
        interpret(int(sys.argv[1]), int(sys.argv[2]))
