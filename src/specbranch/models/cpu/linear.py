"""Linear layers that are fast from 1 to 16 rows on a CPU: our kernel where it can be compiled, else torch.

Owns the choice and the callables; `kernels.py` owns the machine code. Invariant: one implementation serves a layer at
every row count up to `PRODUCT_ROWS`. So with "llvm", and with no other kind, a row has the same bits alone and among
others; that is why the choice is not measured. Torch computes calls with more rows (prefill). The compiled step calls
the kernels directly, and so keeps the invariant at any row count.

`scripts/measure_linear.py` prints the cost of each kind on this machine.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache
from typing import Literal, get_args

import torch
from torch import Tensor
from torch.nn import functional as F

from specbranch.errors import unknown
from specbranch.models.cpu.kernels import Kernel, WeightBits, load_kernel, outputs_at_a_time, whole_numbers

LinearKind = Literal["torch", "onednn", "llvm"]
Linear = Callable[[Tensor], Tensor]

PRODUCT_ROWS = 16
LINEAR_VARIABLE = "SPECBRANCH_LINEAR"  # environment variable that forces a kind
PACKED_ROWS = 4  # rows that oneDNN packs a weight for
STORED_AS: dict[WeightBits, torch.dtype] = {"float32": torch.float32, "bfloat16": torch.bfloat16, "int8": torch.int8}


def choose_linear(weight: Tensor, bias: Tensor | None = None) -> Linear:
    """Return x ↦ x·Wᵀ + b in the kind that the environment forces, else with our kernel if it runs here.

    The layer uses the weight in place: it must not be moved or replaced, but new values may be written into it. Only
    "onednn", which must be forced, has a packed copy.
    """
    forced = forced_kind()
    if not _suits(weight, bias):
        return PlainLinear(weight, bias)
    if forced == "onednn" and onednn_works():
        return PackedLinear(weight, bias)
    kernel = load_kernel() if forced in (None, "llvm") else None
    return KernelLinear(kernel, weight, bias, PRODUCT_ROWS) if kernel else PlainLinear(weight, bias)


def small_linear(weight: Tensor, bias: Tensor | None, scale: Tensor) -> KernelLinear:
    """Return x ↦ (x·Wᵀ)·scale + b for a weight that the kernel `takes`; may convert it. bfloat16 holds all of fp8."""
    stored = whole_numbers() if weight.dtype is torch.int8 else "bfloat16"
    kernel = load_kernel(stored)
    assert kernel is not None
    return KernelLinear(kernel, weight.to(STORED_AS[stored]), bias, PRODUCT_ROWS, scale)


def takes(stored: str, device: torch.device, dtype: torch.dtype) -> bool:
    """True if the kernel multiplies weights of this storage in this precision, without a copy in float32.

    With few rows memory traffic decides, and small weights cause less of it.
    """
    held: dict[str, WeightBits] = {"int8": whole_numbers(), "bfloat16": "bfloat16", "fp8": "bfloat16"}
    runs = device.type == "cpu" and dtype is torch.float32 and forced_kind() in (None, "llvm")
    return runs and stored in held and load_kernel(held[stored]) is not None


def forced_kind() -> LinearKind | None:
    """Return the kind that the environment forces; None: no kind."""
    name = os.environ.get(LINEAR_VARIABLE)
    if not name:
        return None
    kinds: tuple[LinearKind, ...] = get_args(LinearKind)
    if name not in kinds:
        raise unknown(f"value of {LINEAR_VARIABLE}", name, kinds)
    return kinds[kinds.index(name)]


class PlainLinear:
    """Torch's linear layer, for any dtype, device and layout."""

    kind: LinearKind = "torch"

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.weight, self.bias = weight, bias

    def __call__(self, x: Tensor) -> Tensor:
        """Apply the layer."""
        return F.linear(x, self.weight, self.bias)


class PackedLinear:
    """oneDNN on a packed copy of the weight."""

    kind: LinearKind = "onednn"

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.packed, self.bias = _pack(weight), bias

    def __call__(self, x: Tensor) -> Tensor:
        """Apply the layer."""
        y: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")
        return y


class KernelLinear:
    """The kernel for few rows: a row's bits do not depend on the other rows; int8 weights have a scale per output."""

    kind: LinearKind = "llvm"

    def __init__(
        self, kernel: Kernel, weight: Tensor, bias: Tensor | None, most_rows: int, scale: Tensor | None = None
    ) -> None:
        self.kernel, self.weight, self.bias, self.scale = kernel, weight, bias, scale
        self._most_rows = most_rows
        self._outs, self._ins = weight.shape
        self._sizes = (self._ins, self._outs, outputs_at_a_time(self._ins, self._outs, weight.element_size()))
        self._addresses = [0 if part is None else part.data_ptr() for part in (weight, bias, scale)]

    def __call__(self, x: Tensor) -> Tensor:
        """Apply the layer; torch handles calls that the kernel does not support, and their errors."""
        *outer, ins = x.shape
        rows = outer[0] if len(outer) == 1 else x.numel() // self._ins
        if (
            not 0 < rows <= self._most_rows
            or ins != self._ins
            or x.dtype is not torch.float32
            or not x.is_cpu
            or _tracked(x)
        ):
            return self._plain(x)
        x = x.contiguous()
        y = x.new_empty(*outer, self._outs)
        self.kernel(*self.arguments(x.data_ptr(), y.data_ptr(), rows))
        return y

    def arguments(self, x: int, y: int, rows: int) -> tuple[int, ...]:
        """Return the kernel's arguments for rows at address `x` with results at `y`."""
        weight, bias, scale = self._addresses
        return (x, weight, bias, y, rows, *self._sizes, scale)

    def _plain(self, x: Tensor) -> Tensor:
        if self.scale is None:
            return F.linear(x, self.weight, self.bias)
        y = F.linear(x, self.weight.to(x.dtype)) * self.scale  # the wide weight lives for this product only
        return y if self.bias is None else y + self.bias


def _tracked(x: Tensor) -> bool:
    return x.requires_grad and torch.is_grad_enabled()


def _suits(weight: Tensor, bias: Tensor | None) -> bool:
    """True if a kind other than plain torch may serve this layer."""
    parts = [weight] if bias is None else [weight, bias]
    return (
        weight.dim() == 2
        and weight.numel() > 0
        and all(map(_plain_float32, parts))
        and (bias is None or bias.shape == weight.shape[:1])
    )


def _plain_float32(part: Tensor) -> bool:
    stored_plainly = part.layout is torch.strided and part.device.type == "cpu" and part.dtype is torch.float32
    return stored_plainly and part.is_contiguous() and not part.requires_grad


def _pack(weight: Tensor) -> Tensor:
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, PACKED_ROWS)
    return packed


@cache
def onednn_works() -> bool:
    """True if torch has oneDNN's packed layers on this machine."""
    try:
        PackedLinear(torch.ones(4, 4), None)(torch.ones(1, 4))
    except (AttributeError, NotImplementedError, RuntimeError):
        return False
    return True
