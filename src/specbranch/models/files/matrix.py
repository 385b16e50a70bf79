"""A stored matrix: in floats, in int8 with a scale for each output, or in int4 with a scale for each group of inputs.

Owns these layouts and the quantisation to them, on the matrix's device. Invariant: integers are symmetric around zero
and scales are float32, so a weight is `number · scale` in every precision.

int4 packs two numbers into a byte, each as the number plus 8. A group of 128 inputs has 64 bytes: byte j has input j in
its low nibble and input j + 64 in its high nibble.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from specbranch.config import WeightsName

INT4_GROUP = 128  # inputs that share a scale in int4
SCALE_BYTES = 4  # of a scale in float32
HALF = INT4_GROUP // 2
ZERO = 8  # the nibble that stands for zero
LARGEST = {"int8": 127, "int4": 7}
# Scales that are tried for a group, relative to the one that reaches its greatest number. Smaller ones reduce the
# squared error by a fifth.
SCALE_SHARES = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75)
TINY = torch.finfo(torch.float32).tiny  # smallest scale: rows of zeros have one, too
NUMBERS_AT_ONCE = 1 << 24  # numbers that are rounded at a time, in float32
SMALL: dict[torch.dtype, Literal["int8", "int4"]] = {torch.int8: "int8", torch.uint8: "int4"}


@dataclass(frozen=True, slots=True)
class Matrix:
    """The weight [out, in] of a linear map and its bias [out].

    An int8 weight has a scale [out]; an int4 weight is packed [out, in/2] and has a scale [out, in/128]. A bfloat16
    weight has a scale of ones if the product is computed in float32.
    """

    weight: Tensor
    bias: Tensor | None = None
    scale: Tensor | None = None

    @property
    def stored(self) -> str:
        """The storage's name: float32, bfloat16, int8, int4 … ."""
        return SMALL.get(self.weight.dtype) or str(self.weight.dtype).removeprefix("torch.")

    def stored_as(self, kind: WeightsName) -> Matrix:
        """Return the nearest matrix of a kind; int8 instead of int4 if the inputs are not whole groups.

        Numbers that came from this kind before come out unchanged. If the kind is a float type, only the storage
        changes: the product is computed in float32.
        """
        kind = "int8" if kind == "int4" and not fits_int4(self.ins) else kind
        if kind == self.stored:
            return self
        if self.scale is not None:
            return Matrix(self.widened(torch.float32), self.bias).stored_as(kind)
        if kind in ("int8", "int4"):
            return self._rounded(_in_int8 if kind == "int8" else _in_int4)
        weight = self.weight.to(getattr(torch, kind))
        return Matrix(weight, self.bias, torch.ones(weight.shape[0], device=weight.device))

    def rows(self, ids: Tensor) -> Matrix:
        """Return some of the outputs, stored in the same way."""
        parts = [None if part is None else part.index_select(0, ids) for part in (self.weight, self.bias, self.scale)]
        assert parts[0] is not None
        return Matrix(parts[0], *parts[1:])

    def split(self, count: int) -> tuple[Matrix, ...]:
        """Return `count` matrices of equally many outputs each, which share this one's memory."""
        size = self.outs // count
        return tuple(
            Matrix(self.weight[at : at + size], _some(self.bias, at, size), _some(self.scale, at, size))
            for at in range(0, count * size, size)
        )

    def widened(self, dtype: torch.dtype) -> Tensor:
        """Return the weight [out, in] in floats; each product with a scale is rounded once."""
        if self.scale is None:
            return self.weight.to(dtype)
        if self.stored == "int4":
            return unpacked(self.weight, dtype).mul_(self.scale.unsqueeze(-1)).flatten(1)
        return (self.weight.to(torch.promote_types(dtype, torch.float32)) * self.scale.unsqueeze(-1)).to(dtype)

    def in_floats(self, dtype: torch.dtype) -> Matrix:
        """Return the matrix in floats without a scale, for products in this precision."""
        return replace(self, weight=self.widened(dtype), scale=None)

    @property
    def outs(self) -> int:
        """How many outputs there are."""
        return self.weight.shape[0]

    @property
    def ins(self) -> int:
        """How many inputs there are."""
        return self.weight.shape[1] * (2 if self.stored == "int4" else 1)

    def _rounded(self, rounding: Callable[[Tensor], tuple[Tensor, Tensor]]) -> Matrix:
        """Quantise some rows at a time, so that few exist in float32."""
        some = torch.split(self.weight, max(NUMBERS_AT_ONCE // self.ins, 1))
        weight, scale = (torch.cat(part) for part in zip(*(rounding(rows.float()) for rows in some), strict=True))
        return Matrix(weight, self.bias, scale)


def _some(part: Tensor | None, start: int, count: int) -> Tensor | None:
    return None if part is None else part[start : start + count]


def fits_int4(ins: int) -> bool:
    """True if this many inputs are whole groups."""
    return ins % INT4_GROUP == 0


def unpacked(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the numbers of an int4 matrix [out, groups, INT4_GROUP], from -7 to 7."""
    halves = weight.view(weight.shape[0], -1, HALF)
    return torch.cat((halves & 15, halves >> 4), -1).to(dtype).sub_(ZERO)


def _in_int8(rows: Tensor) -> tuple[Tensor, Tensor]:
    scale = _scale(rows, LARGEST["int8"])
    return (rows / scale).round_().to(torch.int8), scale.squeeze(-1)


def _in_int4(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise each group with the scale that has the least squared error.

    A smaller scale clips the greatest number and is finer for the others.
    """
    groups = rows.view(rows.shape[0], -1, INT4_GROUP)
    whole, least = _scale(groups, LARGEST["int4"]), groups.new_full((*groups.shape[:-1], 1), torch.inf)
    scale = whole
    for share in SCALE_SHARES:
        tried = whole * share
        error = (_nearest(groups, tried).mul_(tried) - groups).square_().sum(-1, keepdim=True)
        scale, least = torch.where(error < least, tried, scale), torch.minimum(error, least)
    numbers = _nearest(groups, scale).add_(ZERO).to(torch.uint8)
    return (numbers[..., :HALF] | numbers[..., HALF:] << 4).flatten(1), scale.squeeze(-1)


def _nearest(groups: Tensor, scale: Tensor) -> Tensor:
    return (groups / scale).round_().clamp_(-LARGEST["int4"], LARGEST["int4"])


def _scale(numbers: Tensor, largest: int) -> Tensor:
    """Return the scale at which the greatest number becomes `largest`."""
    return (numbers.abs().amax(-1, keepdim=True) / largest).clamp_(min=TINY)
