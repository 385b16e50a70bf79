"""Linear layers that stay cheap from 1 to 16 rows on a CPU: which implementation serves which shape, found by measurement at load.

Owns the choice and the callables; the machine code is in `kernels`. Invariant: one implementation serves a layer at every row count up to
`MOST_ROWS`, so that with "llvm" (and no other kind) scoring k tokens at once gives bit for bit the numbers of scoring them one by one.
More rows (prefill) are always torch's own.

`python -m specbranch.models.linear` prints what each kind costs on this machine.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from statistics import median
from typing import Literal, get_args

import torch
from torch import Tensor
from torch.nn import functional as F

from specbranch.errors import unknown
from specbranch.models.kernels import Kernel, load_kernel

Kind = Literal["torch", "onednn", "llvm"]
Linear = Callable[[Tensor], Tensor]

MOST_ROWS = 16
VARIABLE = "SPECBRANCH_LINEAR"  # forces a kind
TRIED_ROWS = (1, 4, 8)
TOLERATED = 1.15  # times torch's cost: what numbers that do not depend on the row count are worth
SAMPLE = 1 << 22  # elements of a large weight that are enough to measure with
SECONDS = 0.05  # to spend on measuring one shape


def choose_linear(weight: Tensor, bias: Tensor | None = None, *, most_rows: int = MOST_ROWS) -> Linear:
    """Return x ↦ x·Wᵀ + b in the kind that is best here for this shape; measures when a shape is new.

    The weight is used in place: it must not be moved or replaced afterwards, while new values written into it are seen. Only
    "onednn", which is never chosen unasked, holds a second, packed copy.
    """
    forced = forced_kind()
    if not _suits(weight, bias):
        return PlainLinear(weight, bias)
    kind = forced or _measured(weight)
    if kind == "onednn" and _onednn_works():
        return PackedLinear(weight, bias)
    kernel = load_kernel() if kind == "llvm" else None
    return KernelLinear(kernel, weight, bias, most_rows) if kernel else PlainLinear(weight, bias)


def forced_kind() -> Kind | None:
    """Read the kind that the environment forces, if any."""
    name = os.environ.get(VARIABLE)
    if not name:
        return None
    for kind in get_args(Kind):
        if name == kind:
            return kind
    raise unknown(f"value of {VARIABLE}", name, get_args(Kind))


class PlainLinear:
    """torch's own, for any dtype, device and layout."""

    kind: Kind = "torch"

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.weight, self.bias = weight, bias

    def __call__(self, x: Tensor) -> Tensor:
        """Apply the layer."""
        return F.linear(x, self.weight, self.bias)


class PackedLinear:
    """oneDNN on a packed copy of the weight."""

    kind: Kind = "onednn"

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.packed, self.bias = _pack(weight), bias

    def __call__(self, x: Tensor) -> Tensor:
        """Apply the layer."""
        y: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")
        return y


class KernelLinear:
    """The small-row kernel; a row's result does not depend on the rows beside it."""

    kind: Kind = "llvm"

    def __init__(self, kernel: Kernel, weight: Tensor, bias: Tensor | None, most_rows: int) -> None:
        self.weight, self.bias = weight, bias
        self._kernel, self._most_rows = kernel, most_rows
        self._outs, self._ins = weight.shape
        self._address, self._bias_address = weight.data_ptr(), 0 if bias is None else bias.data_ptr()

    def __call__(self, x: Tensor) -> Tensor:
        """Apply the layer; calls the kernel is not made for go to torch, errors included."""
        *outer, ins = x.shape
        rows = outer[0] if len(outer) == 1 else x.numel() // self._ins
        if not 0 < rows <= self._most_rows or ins != self._ins or x.dtype is not torch.float32 or not x.is_cpu or _tracked(x):
            return F.linear(x, self.weight, self.bias)
        x = x.contiguous()
        y = x.new_empty((*outer, self._outs))
        self._kernel(x.data_ptr(), self._address, self._bias_address, y.data_ptr(), rows, ins, self._outs)
        return y


def _tracked(x: Tensor) -> bool:
    return x.requires_grad and torch.is_grad_enabled()


def _suits(weight: Tensor, bias: Tensor | None) -> bool:
    """Whether anything but plain torch may serve this layer."""
    parts = [weight] if bias is None else [weight, bias]
    return weight.dim() == 2 and weight.numel() > 0 and all(map(_plain_float32, parts)) and (bias is None or bias.shape == weight.shape[:1])


def _plain_float32(part: Tensor) -> bool:
    stored_plainly = part.layout is torch.strided and part.device.type == "cpu" and part.dtype is torch.float32
    return stored_plainly and part.is_contiguous() and not part.requires_grad


def _pack(weight: Tensor) -> Tensor:
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, TRIED_ROWS[1])
    return packed


@cache
def _onednn_works() -> bool:
    if not torch.backends.mkldnn.is_available():
        return False
    try:
        PackedLinear(torch.ones(4, 4), None)(torch.ones(1, 4))
    except (AttributeError, NotImplementedError, RuntimeError):
        return False
    return True


_kinds: dict[tuple[int, int, int], Kind] = {}  # by outputs, inputs and threads


def _measured(weight: Tensor) -> Kind:
    outs, ins = weight.shape
    key = (outs, ins, torch.get_num_threads())
    if key not in _kinds:
        _kinds[key] = _faster(weight)
    return _kinds[key]


def _faster(weight: Tensor) -> Kind:
    """Compare torch and the kernel on (part of) a weight, over a few row counts; packed copies are no candidates, as memory counts."""
    kernel = load_kernel()
    if kernel is None:
        return "torch"
    part = weight[: max(1, SAMPLE // weight.shape[1])]
    pair = PlainLinear(part, None), KernelLinear(kernel, part, None, MOST_ROWS)
    inputs = [torch.ones(rows, weight.shape[1]) for rows in TRIED_ROWS]
    plain, small = (sum(costs) for costs in zip(*(_paired_costs(pair, x) for x in inputs), strict=True))
    return "llvm" if small <= TOLERATED * plain else "torch"


def _paired_costs(layers: tuple[Linear, ...], x: Tensor) -> list[float]:
    """Median seconds of each layer, taken in turns so that whatever else the machine does meets them alike; the first turn warms up."""
    turns: list[list[float]] = []
    until = time.perf_counter() + SECONDS / len(TRIED_ROWS)
    while len(turns) < 4 or (len(turns) < 12 and time.perf_counter() < until):
        turns.append([_seconds(layer, x) for layer in layers])
    return [median(times) for times in zip(*turns[1:], strict=True)]


def _seconds(layer: Linear, x: Tensor) -> float:
    start = time.perf_counter()
    layer(x)
    return time.perf_counter() - start
