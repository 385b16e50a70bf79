"""A linear layer whose weight is in int8 or int4: the reference in plain torch, on any device.

GPU kernels take weight, scale and bias from it. Owns the product, not the layouts (`files/matrix.py`). Invariants: the
output has the type of the input; the wide copy of a weight lives for one product only.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from specbranch.models.files.matrix import SMALL, Matrix


class StoredLinear:
    """Compute x·Wᵀ + b; `weight`, `scale` and `bias` have the layout of a `Matrix`."""

    def __init__(self, matrix: Matrix) -> None:
        assert matrix.scale is not None and matrix.weight.dtype in SMALL
        self.weight, self.scale, self.bias = matrix.weight.contiguous(), matrix.scale.contiguous(), matrix.bias
        self.stored: Literal["int8", "int4"] = SMALL[matrix.weight.dtype]

    @property
    def outs(self) -> int:
        """How many outputs there are."""
        return self.weight.shape[0]

    @property
    def ins(self) -> int:
        """How many inputs there are."""
        return self.weight.shape[1] * (2 if self.stored == "int4" else 1)

    def __call__(self, x: Tensor) -> Tensor:
        """Apply the layer."""
        if self.stored == "int4" or x.dtype is torch.float16:  # sums of unscaled integers would overflow float16
            return F.linear(x, Matrix(self.weight, None, self.scale).widened(x.dtype), self.bias)
        y = F.linear(x, self.weight.to(x.dtype)) * self.scale
        return (y if self.bias is None else y + self.bias).to(x.dtype)
