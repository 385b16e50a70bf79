"""A program of its own for test_product_kernels: runs the products in Triton's interpreter, or compiles them.

It needs Triton, but no GPU. The interpreter replaces Triton's functions for the whole process.
"""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from specbranch.models.cpu.linear import PlainLinear
from specbranch.models.files.matrix import Matrix
from specbranch.models.forward.stored_linear import StoredLinear
from specbranch.models.gpu.products import BITS, Product, Stored, product_of

NO_NORM: Any = SimpleNamespace(qk_norm=False, head_dim=64)
CONSTANTS = {"BIASED": True, "NORMED": False, "HEADS": 4, "KV_HEADS": 2, "DIM": 64, "PAGE": 64, "NORMS": 1}
FLOAT32 = ("scale", "squares", "sums", "out")


def linear_of(stored: Stored, weight: Tensor) -> PlainLinear | StoredLinear:
    """A matrix in one form."""
    if stored == "plain":
        return PlainLinear(weight, None)
    if stored != "int4-zeros":
        return StoredLinear(Matrix(weight).stored_as(stored))
    small = Matrix(weight).stored_as("int4-64")
    assert small.scale is not None
    return StoredLinear(replace(small, zero=torch.randint(0, 16, small.scale.shape, dtype=torch.uint8)))


def interpret(stored: Stored) -> None:
    """Compare the kernels with products in float32, and a row's bits alone with those among others.

    In float16: the interpreter multiplies bfloat16 wrongly.
    """
    os.environ["TRITON_INTERPRET"] = "1"
    import triton.language as tl

    tl.core.tensor.__index__ = lambda self: self.handle.data.item()  # the interpreter's ranges need it
    from specbranch.models.gpu import product_kernels

    product_kernels.cuda_capability_geq = lambda *_: False  # it has no PTX
    torch.manual_seed(0)
    outs, ins = (128 if stored.startswith("fp8") else 100), 384  # the interpreter masks no fp8
    weight = (torch.randn(outs, ins) * ins**-0.5).to(torch.float16)
    x = (torch.randn(33, ins) * torch.exp(torch.randn(33, ins))).to(torch.float16)
    linear = linear_of(stored, weight)
    wide = weight.float() if isinstance(linear, PlainLinear) else linear.matrix.widened(torch.float32)
    expected, product = x.float() @ wide.T, product_of("head", linear, NO_NORM)
    found = {rows: scored(product_kernels, product, x[:rows]) for rows in (1, 17, 33)}
    assert (found[33] - expected).abs().max() < 1e-4 * x.float().norm(dim=1).max()
    for rows, some in found.items():
        assert torch.equal(some, found[33][:rows]), f"bits of {rows} rows differ from those among 33"
    print(stored, check_parts(product_kernels, linear_of(stored, (torch.randn(64, 1024) / 32).to(torch.float16))))


def scored(kernels: Any, product: Product, x: Tensor) -> Tensor:
    """x·Wᵀ by the head's kernel."""
    rows, grid = len(x), product.grid(len(x))
    held = torch.zeros(grid[0] * product.tiles(rows).rows, product.ins, dtype=x.dtype)
    held[:rows] = x
    squares, out = torch.full((len(held), 1), float(product.ins)), torch.zeros(len(held), product.outs)
    how = without_options(product.how(rows, False))
    kernels.scored[grid](
        held, product.weight, product.tensors()[1], squares, out, 0.0, rows, product.outs, product.ins, NORMS=1, **how
    )
    return out[:rows]


def check_parts(kernels: Any, linear: PlainLinear | StoredLinear) -> int:
    """Add a product of several split-K parts to a residual stream of zeros; returns how many parts."""
    product = product_of("down", linear, NO_NORM)
    rows, (across, down) = 3, (product.outs, product.ins)
    x = torch.randn(16, down).to(torch.float16)
    stream, scaled = torch.zeros(2, 16, across, dtype=torch.float16)
    grid, how = (*product.grid(rows), product.parts(rows)), without_options(product.how(rows, False))
    sums = torch.zeros(16 * product.cut.tile * product.cut.parts * grid[1])
    weight, (_, scale) = product.weight, product.tensors()
    kernels.added[grid](
        x, weight, weight, scale, stream, scaled, torch.ones(across, dtype=torch.float16), torch.zeros(16, 1), sums,
        torch.zeros(64, dtype=torch.int32), torch.zeros(16, dtype=torch.int32), rows, across, down, BIASED=False,
        NORMS=1, NORM_TILE=product.cut.tile, **how,
    )  # fmt: skip
    wide = linear.matrix.widened(torch.float32) if isinstance(linear, StoredLinear) else weight.float()
    expected = x[:rows].float() @ wide.T
    assert (stream[:rows].float() - expected).abs().max() < 0.01 * expected.abs().max()
    return product.cut.parts


def without_options(how: dict[str, Any]) -> dict[str, Any]:
    """The kernel's constants alone."""
    options = ("num_warps", "num_stages", "enable_fp_fusion", "launch_pdl")
    return {name: value for name, value in how.items() if name not in options}


def compile_all(stored: Stored) -> None:
    """Compile the kernels of one form for an H100 or H200."""
    from specbranch.models.gpu import product_kernels

    product = product_of("head", linear_of(stored, torch.randn(256, 256, dtype=torch.bfloat16)), NO_NORM)
    for kernel in (product_kernels.scored, product_kernels.gated, product_kernels.added, product_kernels.qkv):
        compile_one(kernel, product, stored)


def compile_one(kernel: Any, product: Product, stored: Stored) -> None:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    how = product.how(16, False)
    options = {name: how[name] for name in ("num_warps", "num_stages", "enable_fp_fusion")}
    sizes = {**CONSTANTS, "NORM_TILE": product.cut.tile, **without_options(how)}
    names = kernel.arg_names
    weights = {0: "*bf16", 8: "*i8", 4: "*u8", 5: "*u8", 6: "*u8", 9: "*fp8e4nv", 10: "*fp8e4nv"}[BITS[stored]]
    whole = {"rows": "i32", "N": "i32", "K": "i32", "page_stride": "i32", "eps": "fp32", "w": weights}
    whole |= {name: "*fp32" for name in FLOAT32 if name != "out" or kernel.__name__ == "scored"}
    whole |= dict.fromkeys(("positions", "slots", "counts", "arrived"), "*i32")
    kinds = {name: "constexpr" if name in sizes else whole.get(name, "*bf16") for name in names}
    known = {(names.index(name),): size for name, size in sizes.items() if name in names}
    source = ASTSource(fn=kernel, signature=kinds, constexprs=known)
    done = compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    print(kernel.__name__, "wgmma" in done.asm["ptx"], "mma" in done.asm["ptx"])


if __name__ == "__main__":
    form = next(kind for kind in BITS if kind == sys.argv[2])
    (compile_all if sys.argv[1] == "compile" else interpret)(form)
