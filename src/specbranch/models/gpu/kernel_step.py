"""A decoder's forward in six Triton kernels a layer, near memory bandwidth; a row has the same bits in any batch.

Owns the buffers between kernels, and the tiling of each product. Does not own the kernels (`product_kernels.py`).
Invariant: a product's shape and a fixed table decide the order of every sum, never a measurement at run time. The
number of rows of a step only decides how many rows share a program.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.functional import rms_norm

from specbranch.core.pages import PAGE
from specbranch.models.cache.kv_memory import Memory
from specbranch.models.cpu.linear import Linear, PlainLinear
from specbranch.models.files.architecture import Architecture
from specbranch.models.forward.decoder import Decoder
from specbranch.models.forward.stored_linear import StoredLinear
from specbranch.models.gpu.attention import begins_early, launch, triton_works
from specbranch.models.gpu.layout import MOST_STEP_ROWS, Views, power_of_two
from specbranch.models.gpu.small import PLAIN_FUNCTIONS
from specbranch.models.gpu.step import GpuStep

ROW_TILE = 16
# rows of a tile, by whether weights are the first operand; 64 rows as the first operand would use other instructions
MOST_TOGETHER = {True: 64, False: 32}
FAST_MEMORY = 200 << 10  # bytes of shared memory of a program
PRODUCT_NAMES = ("qkv", "out", "gate_up", "down")
Stored = Literal["plain", "int8", "int4"]  # plain: in the type that the model computes in
BITS: dict[Stored, int] = {"plain": 0, "int8": 8, "int4": 4}


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
    """The tiling of a product of many rows: rows of a program, its cut, and the least number of programs."""

    rows: int
    cut: Cut
    programs: int = 80  # with fewer, too many of an H200's 132 multiprocessors are idle


# Tiles for steps of 64 rows and more, the largest first. On Hopper a row has the same bits with all of them: only the
# number of parts changes bits (`tests/gpu/test_products_on_gpu.py`).
WIDE_TILES = (
    Tiles(128, Cut(256, 64, 1, False, 8, 4)),
    Tiles(128, Cut(128, 64, 1, False, 8, 5)),
    Tiles(64, Cut(256, 64, 1, False, 4, 4)),
    Tiles(64, Cut(128, 64, 1, True, 8, 5)),
    Tiles(64, Cut(64, 128, 1, True, 4, 4), 64),
)
WIDEST = {"qkv": 128, "out": 128, "down": 128}  # columns of a tile, at most; other products have no limit

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
    """Return the tiling of a product."""
    safe = safe_cut(purpose, outs, ins, stored)
    if not hopper:
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

    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return weight, bias and scale; the weight stands in for a missing one, as a kernel needs some tensor."""
        return self.weight, _or(self.bias, self.weight), _or(self.scale, self.weight)

    def tiles(self, rows: int) -> Tiles:
        """Return the tiling for this many rows; the weights that a program reads serve all of its rows."""
        for tiles in self.wide:
            if tiles.rows <= rows and self._programs(tiles, rows) >= tiles.programs:
                return tiles
        return Tiles(min(max(power_of_two(rows), ROW_TILE), MOST_TOGETHER[self.cut.swap]), self.cut)

    def how(self, rows: int, early: bool) -> dict[str, Any]:
        """Return the kernel's constants; EVEN and FULL say that no mask is needed."""
        tiles = self.tiles(rows)
        cut, together = tiles.cut, tiles.rows
        shape = {"ROWS": together, "TILE": cut.tile, "STEP": cut.step, "PARTS": self.cut.parts, "SWAP": cut.swap}
        shape["STORED"] = BITS[stored_as(self.weight)]
        shape |= {"EVEN": self.ins % cut.step == 0, "FULL": self.outs % cut.tile == 0, "EARLY": early}
        stages = min(cut.stages, FAST_MEMORY // (cut.step * (cut.tile * self.weight.element_size() + together * 2)))
        return {**shape, "num_warps": cut.warps, "num_stages": stages, "enable_fp_fusion": False, **launch(early)}

    def grid(self, rows: int, outs: int | None = None) -> tuple[int, int]:
        """Return the numbers of row tiles and column tiles; `outs`: the outputs, if two columns make one."""
        tiles = self.tiles(rows)
        columns = tiles.cut.tile if outs is None else tiles.cut.tile * outs // self.outs
        return -(-rows // tiles.rows), -(-(self.outs if outs is None else outs) // columns)

    def _programs(self, tiles: Tiles, rows: int) -> int:
        return -(-rows // tiles.rows) * -(-self.outs // tiles.cut.tile) * self.cut.parts


class KernelStep(GpuStep):
    """A `GpuStep` by Triton kernels; results differ by rounding only."""

    lasting = True
    moves = True

    def __init__(self, decoder: Decoder, memory: Memory) -> None:
        # the small functions are not used here, and compiled ones take seconds to import
        super().__init__(decoder, memory, small=PLAIN_FUNCTIONS)
        from specbranch.models.gpu import product_kernels

        self._kernels = product_kernels
        arch, device, dtype = decoder.arch, memory.data.device, memory.data.dtype
        self._early = begins_early(device)
        self._products = [
            {name: product_of(name, getattr(layer, name), arch) for name in PRODUCT_NAMES} for layer in decoder.layers
        ]
        self._head = product_of("head", decoder.head, arch)
        wide = arch.heads * arch.head_dim
        self._stream, self._scaled = torch.zeros(2, MOST_STEP_ROWS, arch.hidden, device=device, dtype=dtype)
        self._queries = torch.zeros(MOST_STEP_ROWS, wide, device=device, dtype=dtype)
        self._gated = torch.zeros(MOST_STEP_ROWS, arch.intermediate, device=device, dtype=dtype)
        cuts = {name: self._products[0][name].cut for name in ("out", "down")}
        self._norms = {name: power_of_two(-(-arch.hidden // cut.tile)) for name, cut in cuts.items()}
        self._squares = {name: torch.zeros(MOST_STEP_ROWS, count, device=device) for name, count in self._norms.items()}
        widest = -(-arch.hidden // WIDEST["out"]) * WIDEST["out"]
        self._parts = torch.zeros(MOST_STEP_ROWS * widest * max(cut.parts for cut in cuts.values()), device=device)
        self._arrived = torch.zeros(
            MOST_STEP_ROWS // ROW_TILE * max(-(-arch.hidden // cut.tile) for cut in cuts.values()), device=device
        ).int()
        self._scored: dict[int, Tensor] = {}  # by rows

    def pin(self, pages: int) -> None:
        """Do nothing: no sum depends on the size of a step."""

    def forward(self, step: Views, tapped: int = 0) -> tuple[Tensor, Tensor | None]:
        """Run all layers and write keys and values; see `GpuStep.forward`."""
        decoder, seen, rows = self.decoder, list[Tensor](), len(step.tokens)
        untapped = len(decoder.layers) - tapped + 1
        self._embed(step, rows)
        for index, (layer, products) in enumerate(zip(decoder.layers, self._products, strict=True)):
            if tapped and index >= untapped:
                seen.append(self._stream[:rows].clone())
            self._add("out", products["out"], self._attended(index, products["qkv"], step, rows), layer.mlp_norm, rows)
            self._gate(products["gate_up"], rows)
            self._add("down", products["down"], self._gated, self._next_norms[index], rows)
        logits = self._score(rows)
        if not tapped:
            return logits, None
        last = rms_norm(self._stream[:rows], (decoder.arch.hidden,), decoder.norm, decoder.arch.rms_eps)
        return logits, torch.cat((*seen, last), -1)

    def _embed(self, step: Views, rows: int) -> None:
        arch, norm, memory = self.decoder.arch, self.decoder.layers[0].attention_norm, self.memory.data
        counts, moves = (
            (step.tokens, step.tokens[None]) if step.counts is None or step.moves is None else (step.counts, step.moves)
        )
        side = arch.kv_heads * arch.head_dim
        self._kernels.embed[(rows + (0 if step.moves is None else 2 * arch.layers),)](
            step.tokens, self.picks, counts, moves, self.decoder.embedding, norm, self._stream, self._scaled,
            self._squares["down"], memory, rows, arch.hidden, moves.stride(0), memory.stride(0),
            WIDTH=power_of_two(arch.hidden), NORMS=self._norms["down"], PIECE=power_of_two(side), SIDE=side, PAGE=PAGE,
            DIM=arch.head_dim, EARLY=self._early, num_warps=8, **launch(self._early),
        )  # fmt: skip

    def _attended(self, index: int, product: Product, step: Views, rows: int) -> Tensor:
        arch, (keys, values) = self.decoder.arch, self._sides[index]
        norm = self.decoder.layers[index].qk_norm
        self._kernels.qkv[product.grid(rows)](
            self._scaled, *product.tensors(), self._squares["down"], _or(norm, product.weight), self.decoder.cos,
            self.decoder.sin, step.positions, step.slots, self._queries, keys, values, keys.stride(0), arch.rms_eps,
            rows, arch.hidden, HEADS=arch.heads, KV_HEADS=arch.kv_heads, DIM=arch.head_dim, PAGE=PAGE,
            BIASED=product.bias is not None, NORMED=norm is not None, NORMS=self._norms["down"],
            **product.how(rows, self._early),
        )  # fmt: skip
        queries = self._queries[:rows].view(rows, arch.heads, arch.head_dim)
        return self.attend(queries, keys, values, step)

    def _add(self, name: str, product: Product, x: Tensor, norm: Tensor, rows: int) -> None:
        self._kernels.added[(*product.grid(rows), product.cut.parts)](
            x, *product.tensors(), self._stream, self._scaled, norm, self._squares[name], self._parts, self._arrived,
            rows, product.outs, product.ins, BIASED=product.bias is not None, NORMS=self._norms[name],
            NORM_TILE=product.cut.tile, **product.how(rows, self._early),
        )  # fmt: skip

    def _gate(self, product: Product, rows: int) -> None:
        outs = product.outs // 2
        self._kernels.gated[product.grid(rows, outs)](
            self._scaled, *product.tensors(), self._squares["out"], self._gated, self.decoder.arch.rms_eps, rows, outs,
            product.ins, BIASED=product.bias is not None, NORMS=self._norms["out"], **product.how(rows, self._early),
        )  # fmt: skip

    def _score(self, rows: int) -> Tensor:
        product = self._head
        if rows not in self._scored:
            self._scored[rows] = torch.zeros(-(-rows // ROW_TILE) * ROW_TILE, product.outs, device=self._stream.device)[
                :rows
            ]
        out, (weight, _, scale) = self._scored[rows], product.tensors()
        self._kernels.scored[product.grid(rows)](
            self._scaled, weight, scale, self._squares["down"], out, self.decoder.arch.rms_eps, rows, product.outs,
            product.ins, NORMS=self._norms["down"], **product.how(rows, self._early),
        )  # fmt: skip
        return out


def product_of(name: str, linear: Linear, arch: Architecture) -> Product:
    """Make a matrix ready for the kernels."""
    assert isinstance(linear, (PlainLinear, StoredLinear))
    weight, scale = linear.weight, linear.scale if isinstance(linear, StoredLinear) else None
    stored = stored_as(weight)
    outs, ins = weight.shape[0], weight.shape[1] * (2 if stored == "int4" else 1)
    if scale is not None and stored == "int4":
        scale = scale.t().contiguous()  # a loop step reads one group of all its outputs
    hopper = weight.device.type == "cuda" and torch.cuda.get_device_capability(weight.device)[0] == 9
    cut = cut_of(name, outs, ins, stored, hopper)
    if name == "qkv" and arch.qk_norm:
        cut = Cut(arch.head_dim, cut.step, swap=cut.swap)  # a norm is over a whole head
    wide = wide_tiles(name, cut, arch.head_dim) if hopper and stored == "plain" else ()
    return Product(weight, linear.bias, scale, outs, ins, cut, wide)


def wide_tiles(name: str, cut: Cut, head_dim: int) -> tuple[Tiles, ...]:
    """Return the tilings of a product for many rows: multiples of its cut's tile; for qkv, parts of a head."""
    widest = min(WIDEST.get(name, 256), head_dim if name == "qkv" else 256)
    return tuple(tiles for tiles in WIDE_TILES if cut.tile <= tiles.cut.tile <= widest)


def kernels_fit(decoder: Decoder, memory: Memory) -> bool:
    """True if the kernels support this model: half precision, known matrices, head sizes of a power of two, Triton."""
    arch, device, dtype = decoder.arch, memory.data.device, memory.data.dtype
    linears = [decoder.head, *(getattr(layer, name) for layer in decoder.layers for name in PRODUCT_NAMES)]
    suits = (
        dtype in (torch.bfloat16, torch.float16)
        and arch.head_dim in (64, 128)
        and arch.hidden % 64 == 0 == arch.intermediate % 64
    )
    known = all(isinstance(linear, (PlainLinear, StoredLinear)) and linear.weight.is_contiguous() for linear in linears)
    alike = (
        all(len({getattr(layer, name).weight.dtype for layer in decoder.layers}) == 1 for name in PRODUCT_NAMES)
        if known
        else False
    )
    return suits and alike and triton_works(device, dtype, arch.heads, arch.kv_heads, arch.head_dim)


def step_of(decoder: Decoder, memory: Memory) -> GpuStep:
    """Return the step of a model: by Triton kernels if they support it, else in torch."""
    return KernelStep(decoder, memory) if kernels_fit(decoder, memory) else GpuStep(decoder, memory)


def stored_as(weight: Tensor) -> Stored:
    """Return how a matrix is stored."""
    return "int8" if weight.dtype is torch.int8 else "int4" if weight.dtype is torch.uint8 else "plain"


def _or(given: Tensor | None, other: Tensor) -> Tensor:
    return other if given is None else given
