"""A linear layer whose weight is in int8, int4 or fp8: the reference in plain torch, on any device.

GPU kernels take weight, scale and bias from it. Owns the product, not the layouts (`files/matrix.py`). Invariants: the
output has the type of the input; the wide copy of a weight lives for one product only.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional as F

from specbranch.models.files.matrix import SMALL, Matrix, Numbers


class StoredLinear:
    """Compute x·Wᵀ + b; `weight`, `scale` and `bias` have the layout of a `Matrix`."""

    def __init__(self, matrix: Matrix) -> None:
        assert matrix.scale is not None and matrix.weight.dtype in SMALL
        self.matrix = replace(matrix, weight=matrix.weight.contiguous(), scale=matrix.scale.contiguous())
        self.stored: Numbers = SMALL[matrix.weight.dtype]

    @property
    def weight(self) -> Tensor:
        """The numbers, as they are stored."""
        return self.matrix.weight

    @property
    def scale(self) -> Tensor:
        """The scales."""
        assert self.matrix.scale is not None
        return self.matrix.scale

    @property
    def bias(self) -> Tensor | None:
        """The bias."""
        return self.matrix.bias

    @property
    def outs(self) -> int:
        """How many outputs there are."""
        return self.matrix.outs

    @property
    def ins(self) -> int:
        """How many inputs there are."""
        return self.matrix.ins

    def __call__(self, x: Tensor) -> Tensor:
        """Apply the layer."""
        by_output = self.scale.dim() == 1 and self.matrix.simple
        if not by_output or x.dtype is torch.float16:  # sums of unscaled numbers would overflow float16
            return F.linear(x, self.matrix.widened(x.dtype), self.bias)
        y = F.linear(x, self.weight.to(x.dtype)) * self.scale
        return (y if self.bias is None else y + self.bias).to(x.dtype)
