"""A decoder's forward in six kernels a layer: near the memory's pace, and a row with the same bits in any company.

Owns the small buffers between kernels and how each product is cut up. Invariant: what a product is cut into follows from its own shape
and from a pinned table, never from the rows of a step or from a trial at run time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import rms_norm

from specbranch.models.cpu.linear import Linear, PlainLinear
from specbranch.models.decoder import Decoder
from specbranch.models.gpu.attention import begins_early, launch, triton_works
from specbranch.models.gpu.layout import MOST_ROWS, Views, power_of_two
from specbranch.models.gpu.step import GpuStep
from specbranch.models.kv import PAGE, Memory

ROW_TILE = 16


@dataclass(frozen=True, slots=True)
class Cut:
    """How a product is cut up: columns of a tile, numbers of a step, parts of its length, whether weights are the first operand."""

    tile: int = 64
    step: int = 128
    parts: int = 1
    swap: bool = True
    warps: int = 4
    stages: int = 4


# What won on one H200, by what the product is for and its shape (outputs, inputs). Anything else takes SAFE, or SAFE_SMALL.
CUTS: dict[tuple[str, int, int], Cut] = {
    ("out", 4096, 4096): Cut(32, 128, 1, False, 4, 6),
    ("gate_up", 22016, 4096): Cut(64, 128, 1, False, 4, 3),
    ("down", 4096, 11008): Cut(64, 128, 2, True, 4, 6),
    ("qkv", 6144, 4096): Cut(64, 128, 1, True, 4, 6),
    ("gate_up", 28672, 4096): Cut(128, 128, 1, True, 4, 3),
    ("down", 4096, 14336): Cut(64, 128, 2, True, 4, 6),
    ("qkv", 3072, 2048): Cut(64, 128, 1, True, 4, 6),
    ("out", 2048, 2048): Cut(64, 128, 4, True, 4, 4),
    ("down", 2048, 8192): Cut(64, 128, 4, True, 4, 4),
    ("out", 7168, 7168): Cut(64, 128, 1, True, 4, 6),
    ("gate_up", 38400, 7168): Cut(64, 128, 1, False, 4, 3),
    ("down", 7168, 19200): Cut(64, 128, 1, True, 4, 6),
}
SAFE = Cut()
SAFE_HEAD = Cut(128, 128, 1, True, 4, 3)
SAFE_SMALL = Cut(step=64)  # of a length that 128 does not divide


def cut_of(purpose: str, weight: Tensor) -> Cut:
    """Return how a product is cut up."""
    outs, ins = weight.shape
    safe = SAFE_HEAD if purpose == "head" else SAFE
    return CUTS.get((purpose, outs, ins)) or (safe if ins % safe.step == 0 else SAFE_SMALL)


class KernelStep(GpuStep):
    """The same as a `GpuStep`, but for rounding."""

    def __init__(self, decoder: Decoder, memory: Memory) -> None:
        super().__init__(decoder, memory)
        from specbranch.models.gpu import product_kernels

        self._kernels = product_kernels
        arch, device, dtype = decoder.arch, memory.data.device, memory.data.dtype
        layer = decoder.layers[0]
        self._cuts = {name: cut_of(name, _weight(getattr(layer, name))) for name in ("qkv", "out", "gate_up", "down")}
        self._cuts["head"] = cut_of("head", _weight(decoder.head))
        if layer.qk_norm is not None:
            self._cuts["qkv"] = Cut(arch.head_dim, self._cuts["qkv"].step)  # a norm is over a whole head
        wide = arch.heads * arch.head_dim
        self._stream, self._scaled = torch.zeros(2, MOST_ROWS, arch.hidden, device=device, dtype=dtype)
        self._queries = torch.zeros(MOST_ROWS, wide, device=device, dtype=dtype)
        self._early = begins_early(device)
        self._gated = torch.zeros(MOST_ROWS, arch.intermediate, device=device, dtype=dtype)
        self._squares = {name: torch.zeros(MOST_ROWS, self._norms(name), device=device) for name in ("out", "down")}
        tiles = {name: -(-arch.hidden // self._cuts[name].tile) * (MOST_ROWS // ROW_TILE) for name in ("out", "down")}
        most = max(tiles[name] * self._cuts[name].parts * self._cuts[name].tile * ROW_TILE for name in tiles)
        self._parts = torch.zeros(most, device=device)
        self._arrived = torch.zeros(max(tiles.values()), device=device, dtype=torch.int32)
        self._scored = torch.zeros(MOST_ROWS, _weight(decoder.head).shape[0], device=device)

    def forward(self, step: Views, tapped: int = 0) -> tuple[Tensor, Tensor | None]:
        """Run all layers, writing the pages; see `GpuStep.forward`."""
        decoder, seen, rows = self.decoder, list[Tensor](), len(step.tokens)
        untapped = len(decoder.layers) - tapped + 1
        self._embed(step, rows)
        for index, layer in enumerate(decoder.layers):
            if tapped and index >= untapped:
                seen.append(self._stream[:rows].clone())
            self._add("out", layer.out, self._attended(index, step, rows), layer.mlp_norm, rows)
            self._gate(layer.gate_up, rows)
            self._add("down", layer.down, self._gated, self._next_norms[index], rows)
        logits = self._score(rows)
        if not tapped:
            return logits, None
        last = rms_norm(self._stream[:rows], (decoder.arch.hidden,), decoder.norm, decoder.arch.rms_eps)
        return logits, torch.cat((*seen, last), -1)

    def _norms(self, name: str) -> int:
        """How many sums of squares a product leaves for each row."""
        return power_of_two(-(-self.decoder.arch.hidden // self._cuts[name].tile))

    def _embed(self, step: Views, rows: int) -> None:
        hidden, norm = self.decoder.arch.hidden, self.decoder.layers[0].attention_norm
        self._kernels.embed[(rows,)](
            step.tokens, self.decoder.embedding, norm, self._stream, self._scaled, self._squares["down"], hidden,
            WIDTH=power_of_two(hidden), NORMS=self._norms("down"), EARLY=self._early, num_warps=8, **launch(self._early),
        )  # fmt: skip

    def _attended(self, index: int, step: Views, rows: int) -> Tensor:
        arch, layer, (keys, values) = self.decoder.arch, self.decoder.layers[index], self._sides[index]
        weight, bias = _weight(layer.qkv), _bias(layer.qkv)
        cut, norm = self._cuts["qkv"], layer.qk_norm
        self._kernels.qkv[(_row_tiles(rows), weight.shape[0] // cut.tile)](
            self._scaled, weight, _or(bias, weight), self._squares["down"], _or(norm, weight), self.decoder.cos, self.decoder.sin,
            step.positions, step.slots, self._queries, keys, values, keys.stride(0), arch.rms_eps, rows, arch.hidden,
            HEADS=arch.heads, KV_HEADS=arch.kv_heads, DIM=arch.head_dim, PAGE=PAGE, BIASED=bias is not None, NORMED=norm is not None,
            NORMS=self._norms("down"), **self._how(cut, weight),
        )  # fmt: skip
        queries = self._queries[:rows].view(rows, arch.heads, arch.head_dim)
        return self.attend(queries, keys, values, step)

    def _add(self, name: str, linear: Linear, x: Tensor, norm: Tensor, rows: int) -> None:
        weight, bias, cut = _weight(linear), _bias(linear), self._cuts[name]
        outs, ins = weight.shape
        self._kernels.added[(_row_tiles(rows), -(-outs // cut.tile), cut.parts)](
            x, weight, _or(bias, weight), self._stream, self._scaled, norm, self._squares[name], self._parts, self._arrived, rows, outs,
            ins, BIASED=bias is not None, NORMS=self._norms(name), PARTS=cut.parts, **self._how(cut, weight),
        )  # fmt: skip

    def _gate(self, linear: Linear, rows: int) -> None:
        weight, bias, cut = _weight(linear), _bias(linear), self._cuts["gate_up"]
        outs, ins = weight.shape[0] // 2, weight.shape[1]
        self._kernels.gated[(_row_tiles(rows), -(-outs // (cut.tile // 2)))](
            self._scaled, weight, _or(bias, weight), self._squares["out"], self._gated, self.decoder.arch.rms_eps, rows, outs, ins,
            BIASED=bias is not None, NORMS=self._norms("out"), **self._how(cut, weight),
        )  # fmt: skip

    def _how(self, cut: Cut, weight: Tensor) -> dict[str, Any]:
        """What a kernel is told of a product: whether tiles and steps come out even, so that nothing has to be masked."""
        outs, ins = weight.shape
        shape = {"TILE": cut.tile, "STEP": cut.step, "SWAP": cut.swap, "EARLY": self._early}
        shape |= {"EVEN": ins % cut.step == 0, "FULL": outs % cut.tile == 0}
        return {**shape, "num_warps": cut.warps, "num_stages": cut.stages, **launch(self._early)}

    def _score(self, rows: int) -> Tensor:
        weight, cut = _weight(self.decoder.head), self._cuts["head"]
        outs, ins = weight.shape
        out = self._scored[:rows]
        self._kernels.scored[(_row_tiles(rows), -(-outs // cut.tile))](
            self._scaled, weight, self._squares["down"], out, self.decoder.arch.rms_eps, rows, outs, ins,
            NORMS=self._norms("down"), **self._how(cut, weight),
        )  # fmt: skip
        return out


def kernels_fit(decoder: Decoder, memory: Memory) -> bool:
    """Whether the kernels are made for this model: half precision, plain matrices, heads of a power of two, and Triton at work."""
    arch, device, dtype = decoder.arch, memory.data.device, memory.data.dtype
    linears = [decoder.head, *(getattr(layer, name) for layer in decoder.layers for name in ("qkv", "out", "gate_up", "down"))]
    suits = dtype in (torch.bfloat16, torch.float16) and arch.head_dim in (64, 128) and arch.hidden % 64 == 0 == arch.intermediate % 64
    plain = all(isinstance(linear, PlainLinear) and linear.weight.is_contiguous() for linear in linears)
    return suits and plain and triton_works(device, dtype, arch.heads, arch.kv_heads, arch.head_dim)


def step_of(decoder: Decoder, memory: Memory) -> GpuStep:
    """Return the step that suits a model: by kernels where they are made for it."""
    return KernelStep(decoder, memory) if kernels_fit(decoder, memory) else GpuStep(decoder, memory)


def _row_tiles(rows: int) -> int:
    return -(-rows // ROW_TILE)


def _weight(linear: Linear) -> Tensor:
    assert isinstance(linear, PlainLinear)
    return linear.weight


def _bias(linear: Linear) -> Tensor | None:
    return linear.bias if isinstance(linear, PlainLinear) else None


def _or(given: Tensor | None, other: Tensor) -> Tensor:
    """A kernel wants some tensor, also where it reads none."""
    return other if given is None else given
