"""A stored matrix: in floats, or in int8, int4 or fp8 with a scale for each output or for each group of inputs.

Owns these layouts and the quantisation to them, on the matrix's device. Invariants: scales are float32, and a weight is
`(number - zero) · scale` in every precision. Quantisation here is symmetric; only files have other zeros than 0.

int4 packs two numbers into a byte, each as the number plus 8. A group of 128 inputs has 64 bytes: byte j has input j in
its low nibble and input j + 64 in its high nibble. Groups of 64 and 32 inputs have 32 and 16 bytes, in the same way.
fp8 is e4m3, the format without infinities. Its blocks of 128 outputs by 128 inputs are held as groups of 128 inputs:
each output has its own copy of a block's scales. So any outputs can be taken out, or put below others.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from specbranch.config import WeightsName

INT4_GROUP = 128  # inputs that share a scale in int4, unless its name says another number
INT4_GROUPS = (128, 64, 32)  # groups of int4, the largest first
FP8_BLOCK = 128  # outputs, and inputs, of a block of fp8
SCALE_BYTES = 4  # of a scale in float32
ZERO = 8  # the nibble that stands for zero
FP8 = torch.float8_e4m3fn
LARGEST = {"int8": 127, "int4": 7, "fp8": 448}
# Scales that are tried for a group, relative to the one that reaches its greatest number. Smaller ones reduce the
# squared error by a fifth.
SCALE_SHARES = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75)
TINY = torch.finfo(torch.float32).tiny  # smallest scale: rows of zeros have one, too
NUMBERS_AT_ONCE = 1 << 24  # numbers that are rounded at a time, in float32
Numbers = Literal["int8", "int4", "fp8"]
SMALL: dict[torch.dtype, Numbers] = {torch.int8: "int8", torch.uint8: "int4", FP8: "fp8"}
INT4_KINDS: dict[str, int] = {"int4": INT4_GROUP, "int4-64": 64, "int4-32": 32}  # their groups
ROUNDED_KINDS: tuple[WeightsName, ...] = ("int8", "fp8", "fp8-block", "int4", "int4-64", "int4-32")


@dataclass(frozen=True, slots=True)
class Matrix:
    """The weight [out, in] of a linear map and its bias [out].

    Numbers of int8 and fp8 have a scale [out], or one for each group of inputs [out, groups]. An int4 weight is packed
    [out, in/2] and has a scale [out, groups]. A bfloat16 weight has a scale of ones if the product is computed in
    float32.
    """

    weight: Tensor
    bias: Tensor | None = None
    scale: Tensor | None = None
    zero: Tensor | None = None  # [out, groups]: the number that stands for zero, as it is stored; None: the usual one
    order: Tensor | None = None  # [in]: the column of `weight` that holds each input; None: its own

    @property
    def stored(self) -> str:
        """The storage's name: float32, bfloat16, int8, int4, int4-64, fp8, fp8-block … ."""
        numbers = SMALL.get(self.weight.dtype)
        if numbers is None:
            return str(self.weight.dtype).removeprefix("torch.")
        if self.scale is None or self.scale.dim() == 1 or (numbers == "int4" and self.group == INT4_GROUP):
            return numbers
        return "fp8-block" if numbers == "fp8" else f"{numbers}-{self.group}"

    @property
    def group(self) -> int:
        """How many inputs share a scale."""
        return self.ins if self.scale is None or self.scale.dim() == 1 else self.ins // self.scale.shape[1]

    @property
    def simple(self) -> bool:
        """True if weights are `number · scale`, with their inputs in order."""
        return self.zero is None and self.order is None

    def stored_as(self, kind: WeightsName) -> Matrix:
        """Return the nearest matrix of a kind; int8 or fp8 if the inputs are not whole groups of the kind.

        Numbers that came from this kind before come out unchanged. If the kind is a float type, only the storage
        changes: the product is computed in float32.
        """
        kind = fitting(kind, self.ins)
        if kind == self.stored:
            return self
        if self.scale is not None:
            return Matrix(self.widened(torch.float32), self.bias).stored_as(kind)
        if kind in ROUNDED_KINDS:
            return self._rounded(_rounding(kind), FP8_BLOCK if kind == "fp8-block" else 1)
        weight = self.weight.to(getattr(torch, kind))
        return Matrix(weight, self.bias, torch.ones(weight.shape[0], device=weight.device))

    def rows(self, ids: Tensor) -> Matrix:
        """Return some of the outputs, stored in the same way."""
        bias, scale, zero = (
            None if part is None else part.index_select(0, ids) for part in (self.bias, self.scale, self.zero)
        )
        return Matrix(self.weight.index_select(0, ids), bias, scale, zero, self.order)

    def split(self, count: int) -> tuple[Matrix, ...]:
        """Return `count` matrices of equally many outputs each, which share this one's memory."""
        size = self.outs // count
        found = []
        for at in range(0, count * size, size):
            bias, scale, zero = (_some(part, at, size) for part in (self.bias, self.scale, self.zero))
            found.append(Matrix(self.weight[at : at + size], bias, scale, zero, self.order))
        return tuple(found)

    def widened(self, dtype: torch.dtype) -> Tensor:
        """Return the weight [out, in] in floats; each product with a scale is rounded once."""
        if self.scale is None:
            return self.weight.to(dtype)
        if self.scale.dim() == 1 and self.simple:
            return (self.weight.to(torch.promote_types(dtype, torch.float32)) * self.scale.unsqueeze(-1)).to(dtype)
        numbers = self._numbers(dtype)  # exact in every float type, as zeros are
        if self.zero is not None:
            numbers.sub_(self.zero.to(dtype).sub_(ZERO if self.packed else 0).unsqueeze(-1))
        wide = numbers.mul_(self.scale.view(self.outs, -1, 1)).flatten(1)
        return wide if self.order is None else wide.index_select(1, self.order)

    def in_floats(self, dtype: torch.dtype) -> Matrix:
        """Return the matrix in floats without a scale, for products in this precision."""
        return Matrix(self.widened(dtype), self.bias)

    @property
    def packed(self) -> bool:
        """True if a byte of the weight holds two numbers."""
        return self.weight.dtype is torch.uint8

    @property
    def outs(self) -> int:
        """How many outputs there are."""
        return self.weight.shape[0]

    @property
    def ins(self) -> int:
        """How many inputs there are."""
        return self.weight.shape[1] * (2 if self.packed else 1)

    def in_groups(self, size: int) -> Matrix:
        """Return the same matrix with smaller groups, each with a copy of its scale; int4 is packed anew."""
        if self.scale is None or self.group == size:
            return self
        assert self.group % size == 0
        times = self.group // size
        finer = [
            None if part is None else part.view(self.outs, -1).repeat_interleave(times, 1)
            for part in (self.scale, self.zero)
        ]
        weight = packed(unpacked(self.weight, self.group, torch.uint8), size) if self.packed else self.weight
        return replace(self, weight=weight, scale=finer[0], zero=finer[1])

    def _numbers(self, dtype: torch.dtype) -> Tensor:
        """Return the stored numbers [out, groups, group]; those of int4 minus 8."""
        if self.packed:
            return unpacked(self.weight, self.group, dtype).sub_(ZERO)
        return self.weight.to(dtype).view(self.outs, -1, self.group)

    def _rounded(self, rounding: Callable[[Tensor], tuple[Tensor, Tensor]], unit: int) -> Matrix:
        """Quantise some rows at a time, a multiple of `unit`, so that few exist in float32."""
        some = torch.split(self.weight, max(NUMBERS_AT_ONCE // self.ins // unit, 1) * unit)
        weight, scale = (torch.cat(part) for part in zip(*(rounding(rows.float()) for rows in some), strict=True))
        return Matrix(weight, self.bias, scale)


def _some(part: Tensor | None, start: int, count: int) -> Tensor | None:
    return None if part is None else part[start : start + count]


def fitting(kind: WeightsName, ins: int) -> WeightsName:
    """Return the kind that a matrix of this many inputs gets: another one if they are not whole groups."""
    if kind in INT4_KINDS and ins % INT4_KINDS[kind]:
        return "int8"
    return "fp8" if kind == "fp8-block" and block_group(ins) < min(INT4_GROUPS) else kind


def block_group(ins: int) -> int:
    """Return the inputs that share a copy of a block's scale: a divisor of the inputs, as the last block may be cut."""
    return math.gcd(FP8_BLOCK, ins)


def unpacked(weight: Tensor, group: int, dtype: torch.dtype) -> Tensor:
    """Return the nibbles of an int4 matrix [out, groups, group], from 0 to 15."""
    halves = weight.view(weight.shape[0], -1, group // 2)
    return torch.cat((halves & 15, halves >> 4), -1).to(dtype)


def packed(nibbles: Tensor, group: int) -> Tensor:
    """Pack nibbles, uint8 [out, ...], into bytes [out, in/2]."""
    low, high = nibbles.reshape(nibbles.shape[0], -1, 2, group // 2).unbind(2)
    return (low | high << 4).flatten(1)


def _rounding(kind: WeightsName) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    """Return the function that quantises some rows, float32 [out, in], to numbers and scales."""
    if kind in INT4_KINDS:
        return lambda rows: _in_int4(rows, INT4_KINDS[kind])
    return {"int8": _in_int8, "fp8": _in_fp8, "fp8-block": _in_fp8_blocks}[kind]


def _in_int8(rows: Tensor) -> tuple[Tensor, Tensor]:
    scale = _scale(rows, LARGEST["int8"])
    return (rows / scale).round_().to(torch.int8), scale.squeeze(-1)


def _in_fp8(rows: Tensor) -> tuple[Tensor, Tensor]:
    scale = _scale(rows, LARGEST["fp8"])
    return _nearest_fp8(rows, scale), scale.squeeze(-1)


def _in_fp8_blocks(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise with one scale for each block; each row gets a copy of it for each group of inputs."""
    group = block_group(rows.shape[1])
    scale = torch.cat([_block_scales(some).expand(len(some), -1) for some in torch.split(rows, FP8_BLOCK)])
    numbers = _nearest_fp8(rows, scale.repeat_interleave(FP8_BLOCK, 1)[:, : rows.shape[1]])
    return numbers, scale.repeat_interleave(FP8_BLOCK // group, 1)[:, : rows.shape[1] // group].contiguous()


def _block_scales(rows: Tensor) -> Tensor:
    """Return the scales of one row of blocks [1, blocks]."""
    return torch.cat([_scale(block.reshape(1, -1), LARGEST["fp8"]) for block in torch.split(rows, FP8_BLOCK, 1)], 1)


def _nearest_fp8(rows: Tensor, scale: Tensor) -> Tensor:
    # The clamp catches a quotient just above the largest number, which would become NaN.
    return (rows / scale).clamp_(-LARGEST["fp8"], LARGEST["fp8"]).to(FP8)


def _in_int4(rows: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """Quantise each group with the scale that has the least squared error.

    A smaller scale clips the greatest number and is finer for the others.
    """
    groups = rows.view(rows.shape[0], -1, group)
    whole, least = _scale(groups, LARGEST["int4"]), groups.new_full((*groups.shape[:-1], 1), torch.inf)
    scale = whole
    for share in SCALE_SHARES:
        tried = whole * share
        error = (_nearest(groups, tried).mul_(tried) - groups).square_().sum(-1, keepdim=True)
        scale, least = torch.where(error < least, tried, scale), torch.minimum(error, least)
    numbers = _nearest(groups, scale).add_(ZERO).to(torch.uint8)
    return packed(numbers, group), scale.squeeze(-1)


def _nearest(groups: Tensor, scale: Tensor) -> Tensor:
    return (groups / scale).round_().clamp_(-LARGEST["int4"], LARGEST["int4"])


def _scale(numbers: Tensor, largest: int) -> Tensor:
    """Return the scale at which the greatest number becomes `largest`."""
    return (numbers.abs().amax(-1, keepdim=True) / largest).clamp_(min=TINY)
