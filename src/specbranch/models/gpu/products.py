"""The matrices of a model as the Triton kernels take them, and how each product is tiled.

Owns the tables of tilings. Does not own the kernels (`product_kernels.py`), or which product a layer needs
(`kernel_step.py`). Invariant: a product's shape and a fixed table decide the order of every sum, never a measurement at
run time. The number of rows of a step only decides how many rows share a program.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from specbranch.models.cpu.linear import Linear, PlainLinear
from specbranch.models.files.architecture import Architecture
from specbranch.models.files.matrix import INT4_GROUPS, ZERO, Matrix
from specbranch.models.forward.stored_linear import StoredLinear
from specbranch.models.gpu.attention import launch
from specbranch.models.gpu.layout import power_of_two

BY_STEP = (5, 6, 10)  # forms whose loop step is a group
ROW_TILE = 16
# rows of a tile, by whether weights are the first operand; 64 rows as the first operand would use other instructions
MOST_TOGETHER = {True: 64, False: 32}
FAST_MEMORY = 200 << 10  # bytes of shared memory of a program
# plain: in the type that the model computes in; int4-zeros: with zero points, in groups of any size
Stored = Literal["plain", "int8", "int4", "int4-64", "int4-32", "int4-zeros", "fp8", "fp8-block"]
BITS: dict[Stored, int] = {"plain": 0, "int8": 8, "int4": 4, "int4-64": 5, "int4-32": 5}
BITS |= {"int4-zeros": 6, "fp8": 9, "fp8-block": 10}


@dataclass(frozen=True, slots=True)
class Cut:
    """The tiling of a product: columns of a tile, inputs of a loop step, split-K parts, True if weights come first."""

    tile: int = 64
    step: int = 128
    parts: int = 1
    swap: bool = True
    warps: int = 4
    stages: int = 4


Cuts = dict[tuple[str, int, int], Cut]  # by the product's purpose, outputs and inputs


@dataclass(frozen=True, slots=True)
class Tiles:
    """The tiling of a product for some number of rows: rows of a program, its cut, how x and w are read.

    `boxed`: by tensor descriptors. `joined`: a program computes all split-K parts, one after the other.
    """

    rows: int
    cut: Cut
    boxed: bool = False
    joined: bool = False


# Tiles for steps of more than 64 rows, the largest first. On Hopper a row has the same bits with all of them: only the
# number of parts changes bits (`tests/gpu/test_products_on_gpu.py`). Measured on one H200: at 128, 256, 512 and 2,048
# rows an 8B's products take 4.4, 6.1, 10.3 and 37.5 ms with the best of them, through cuBLAS 4.5, 5.9, 9.5 and 36.2.
WIDE_TILES = (
    Tiles(128, Cut(256, 64, 1, True, 8, 4), boxed=True),
    Tiles(128, Cut(128, 64, 1, False, 8, 5), boxed=True),
    Tiles(128, Cut(64, 128, 1, True, 4, 4), boxed=True),
    Tiles(64, Cut(128, 64, 1, True, 4, 5), boxed=True),
    Tiles(64, Cut(64, 128, 1, True, 4, 4), boxed=True),
)
WIDE_ROWS = 64  # steps with more rows take wide tiles
LEAST_PROGRAMS = 80  # with fewer, too many of an H200's 132 multiprocessors are idle
MOST_SPLIT_ROWS = 512  # rows of a step whose split-K parts are different programs, at most
WIDEST = {"out": 128, "down": 128}  # columns of a tile, at most; other products have no limit

# The fastest cuts on one H200 (`scripts/find_cuts.py`). Other shapes, and other kinds of GPU, use `safe_cut`.
PRODUCT_CUTS: Cuts = {
    ("qkv", 960, 576): Cut(32, 64, 1, False, 4, 6),
    ("gate_up", 3072, 576): Cut(32, 64, 1, False, 4, 3),
    ("down", 576, 1536): Cut(32, 128, 4, False, 4, 4),
    ("head", 49152, 576): Cut(128, 64, 1, True, 4, 3),
    ("qkv", 2048, 1536): Cut(16, 128, 1, False, 4, 6),
    ("out", 1536, 1536): Cut(64, 128, 4, True, 4, 6),
    ("down", 1536, 8960): Cut(64, 128, 5, True, 4, 6),
    ("gate_up", 17920, 1536): Cut(64, 128, 1, True, 4, 3),
    ("qkv", 3072, 2048): Cut(64, 128, 1, True, 4, 6),
    ("out", 2048, 2048): Cut(64, 128, 4, True, 4, 4),
    ("down", 2048, 8192): Cut(64, 128, 4, True, 4, 4),
    ("out", 4096, 4096): Cut(32, 128, 1, False, 4, 6),
    ("gate_up", 22016, 4096): Cut(64, 128, 1, False, 4, 3),
    ("down", 4096, 11008): Cut(64, 128, 2, True, 4, 6),
    ("qkv", 6144, 4096): Cut(64, 128, 1, True, 4, 6),
    ("gate_up", 28672, 4096): Cut(128, 128, 1, True, 4, 3),
    ("down", 4096, 14336): Cut(64, 128, 2, True, 4, 6),
    ("out", 7168, 7168): Cut(64, 128, 1, True, 4, 6),
    ("gate_up", 38400, 7168): Cut(64, 128, 1, False, 4, 3),
    ("down", 7168, 19200): Cut(64, 128, 1, True, 4, 6),
}
INT8_CUTS: Cuts = {
    ("qkv", 3072, 2048): Cut(32, 256, 1, False, 4, 3),
    ("out", 2048, 2048): Cut(32, 256, 4, False, 4, 6),
    ("gate_up", 16384, 2048): Cut(128, 256, 1, False, 4, 4),
    ("down", 2048, 8192): Cut(32, 256, 4, False, 4, 6),
    ("head", 128256, 2048): Cut(64, 256, 1, False, 4, 3),
    ("out", 4096, 4096): Cut(64, 128, 4, False, 4, 8),
    ("down", 4096, 14336): Cut(32, 256, 4, False, 4, 4),
}
INT4_CUTS: Cuts = {
    ("qkv", 3072, 2048): Cut(32, 128, 1, False, 4, 3),
    ("gate_up", 16384, 2048): Cut(32, 128, 1, False, 4, 3),
}
ROOMY: dict[tuple[str, Stored], dict[str, Any]] = {  # changes to `safe_cut` on GPUs with as much shared memory
    ("head", "plain"): {"tile": 128, "stages": 3},
    ("head", "int8"): {"tile": 128, "step": 256, "stages": 3},
    ("qkv", "int8"): {"tile": 32, "step": 256, "stages": 3},
    ("gate_up", "int8"): {"tile": 128, "step": 256, "stages": 3},
    ("down", "int8"): {"tile": 32, "step": 256},
}
PINNED: dict[Stored, Cuts] = {"plain": PRODUCT_CUTS, "int8": INT8_CUTS, "int4": INT4_CUTS}


def cut_of(purpose: str, outs: int, ins: int, stored: Stored = "plain", hopper: bool = True) -> Cut:
    """Return the tiling of a product; nothing was measured of the forms that are not in `PINNED`."""
    safe = safe_cut(purpose, outs, ins, stored)
    if not hopper or stored not in PINNED:
        return safe
    roomy = safe if ins % 256 else replace(safe, **ROOMY.get((purpose, stored), {}))
    return PINNED[stored].get((purpose, outs, ins), roomy)


def safe_cut(purpose: str, outs: int, ins: int, stored: Stored) -> Cut:
    """Return a tiling for any shape on any GPU: tiles of 64 columns, and split-K parts if there are few tiles."""
    step = 128 if ins % 128 == 0 else 64
    tiles, parts = -(-outs // 64), 1
    while purpose in ("out", "down") and parts < 4 and tiles * parts < 128 and ins >= 8 * step * parts:
        parts *= 2
    return Cut(64, step, parts, stored == "plain", 4, 4)


@dataclass(frozen=True, slots=True)
class Product:
    """A matrix for the kernels: its weights, their scales if quantised, and its tiling for few rows."""

    weight: Tensor
    bias: Tensor | None
    scale: Tensor | None
    outs: int
    ins: int
    cut: Cut
    wide: tuple[Tiles, ...] = ()  # tilings for many rows
    stored: Stored = "plain"

    def tensors(self) -> tuple[Tensor, Tensor]:
        """Return bias and scale; the weight stands in for a missing one, as a kernel needs some tensor."""
        return given_or(self.bias, self.weight), given_or(self.scale, self.weight)

    def tiles(self, rows: int) -> Tiles:
        """Return the tiling for this many rows; the weights that a program reads serve all of its rows."""
        if rows <= WIDE_ROWS or not self.wide:
            return Tiles(min(max(power_of_two(rows), ROW_TILE), MOST_TOGETHER[self.cut.swap]), self.cut)
        for tiles in self.wide:
            programs = -(-rows // tiles.rows) * -(-self.outs // tiles.cut.tile)
            if programs >= LEAST_PROGRAMS:
                return replace(tiles, joined=True)
            if programs * self.cut.parts >= LEAST_PROGRAMS and rows <= MOST_SPLIT_ROWS:
                return tiles
        return replace(self.wide[-1], joined=True)

    def operands(self, x: Tensor, tiles: Tiles, pair: bool = False) -> tuple[Any, Any]:
        """Return x and the weight as a kernel reads them; `pair`: a tile has two pieces of the weight."""
        if not tiles.boxed:
            return x, self.weight
        from triton.tools.tensor_descriptor import TensorDescriptor

        columns, step = tiles.cut.tile // 2 if pair else tiles.cut.tile, tiles.cut.step
        return (
            TensorDescriptor(x, list(x.shape), [x.stride(0), 1], [tiles.rows, step]),
            TensorDescriptor(self.weight, [self.outs, self.ins], [self.ins, 1], [columns, step]),
        )

    def how(self, rows: int, early: bool, chunks: bool = False) -> dict[str, Any]:
        """Return the kernel's constants; EVEN and FULL say that no mask is needed."""
        tiles = self.tiles(rows)
        cut, together = tiles.cut, tiles.rows
        shape = {"ROWS": together, "TILE": cut.tile, "STEP": cut.step, "PARTS": self.cut.parts, "SWAP": cut.swap}
        unit = self.cut.step if self.cut.parts > 1 else cut.step
        shape |= {"STORED": BITS[self.stored], "UNIT": unit, "CHUNKS": chunks}
        shape |= {"BOXED": tiles.boxed, "JOINED": tiles.joined}
        shape |= {"EVEN": self.ins % cut.step == 0, "FULL": self.outs % cut.tile == 0, "EARLY": early}
        stages = min(cut.stages, FAST_MEMORY // (cut.step * (cut.tile * self.weight.element_size() + together * 2)))
        return {**shape, "num_warps": cut.warps, "num_stages": stages, "enable_fp_fusion": False, **launch(early)}

    def grid(self, rows: int, outs: int | None = None) -> tuple[int, int]:
        """Return the numbers of row tiles and column tiles; `outs`: the outputs, if two columns make one."""
        tiles = self.tiles(rows)
        columns = tiles.cut.tile if outs is None else tiles.cut.tile * outs // self.outs
        return -(-rows // tiles.rows), -(-(self.outs if outs is None else outs) // columns)

    def parts(self, rows: int) -> int:
        """Return how many programs share the inputs of a tile."""
        return 1 if self.tiles(rows).joined else self.cut.parts


def product_of(name: str, linear: Linear, arch: Architecture) -> Product:
    """Make a matrix ready for the kernels."""
    assert isinstance(linear, (PlainLinear, StoredLinear))
    weight, scale = linear.weight, linear.scale if isinstance(linear, StoredLinear) else None
    stored, group = _form(linear)
    outs, ins = weight.shape[0], weight.shape[1] * (2 if weight.dtype is torch.uint8 else 1)
    if isinstance(linear, StoredLinear) and linear.scale.dim() > 1:
        scale = _by_group(linear.matrix)
    hopper = weight.device.type == "cuda" and torch.cuda.get_device_capability(weight.device)[0] == 9
    cut = cut_of(name, outs, ins, stored, hopper)
    if BITS[stored] in BY_STEP:
        cut = replace(cut, step=group)
    if name == "qkv" and arch.qk_norm:
        cut = Cut(arch.head_dim, cut.step, swap=cut.swap)  # a norm is over a whole head
    wide = wide_tiles(name, cut, arch.head_dim) if hopper and stored == "plain" else ()
    return Product(weight, linear.bias, scale, outs, ins, cut, wide, stored)


def wide_tiles(name: str, cut: Cut, head_dim: int) -> tuple[Tiles, ...]:
    """Return the tilings of a product for many rows: multiples of its cut's tile; for qkv, whole heads.

    A split-K part has whole loop steps of each of them.
    """
    least, most = (head_dim, head_dim) if name == "qkv" else (cut.tile, WIDEST.get(name, 256))
    return tuple(
        tiles
        for tiles in WIDE_TILES
        if least <= tiles.cut.tile <= most and (cut.parts == 1 or not cut.step % tiles.cut.step)
    )


def takes_matrix(linear: Linear) -> bool:
    """True if the kernels multiply by this matrix."""
    if isinstance(linear, StoredLinear):
        found = linear.matrix
        plain_zeros = found.zero is None or found.packed
        fits = found.stored in BITS and (linear.scale.dim() == 1 or found.group in INT4_GROUPS)
        return fits and plain_zeros and found.order is None and linear.weight.is_contiguous()
    return isinstance(linear, PlainLinear) and linear.weight.is_contiguous()


def _form(linear: PlainLinear | StoredLinear) -> tuple[Stored, int]:
    """Return how a matrix is stored, and how many inputs share a scale."""
    if isinstance(linear, PlainLinear):
        return "plain", 0
    if linear.matrix.zero is not None:
        return "int4-zeros", linear.matrix.group
    return next(kind for kind in BITS if kind == linear.matrix.stored), linear.matrix.group


def _by_group(matrix: Matrix) -> Tensor:
    """Return scales [groups, outputs], as a loop step reads one group of all its outputs, and zeros behind them."""
    assert matrix.scale is not None
    if matrix.zero is None:
        return matrix.scale.t().contiguous()
    return torch.cat((matrix.scale.t(), matrix.zero.t().float() - ZERO))


def alike_in(linear: PlainLinear | StoredLinear) -> tuple[torch.dtype, Stored, int]:
    """Return what must be the same of a product in all layers."""
    return linear.weight.dtype, *_form(linear)


def given_or(given: Tensor | None, other: Tensor) -> Tensor:
    """Return a tensor that a kernel needs, or another one in its place."""
    return other if given is None else given
