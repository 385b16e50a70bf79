"""FP8 checkpoints as DeepSeek's and Qwen's: e4m3 weights [out, in] with a scale for each block, or for each matrix.

Owns the names of the scales: `weight_scale_inv`, by which weights are multiplied despite its name, or `weight_scale`.
Scales of inputs (`input_scale`, `activation_scale`) are not read: activations are not rounded. Invariant: numbers come
out as the file has them.
"""

from __future__ import annotations

from torch import Tensor

from specbranch.models.files.matrix import FP8, Matrix
from specbranch.models.files.quantised.layout import fp8_matrix
from specbranch.models.files.quantised.settings import Quantisation, Scheme
from specbranch.models.files.quantised.tensors import Tensors


def outputs(tensors: Tensors) -> int:
    """Return how many outputs the file's matrix has."""
    return tensors.matrix_shape("weight")[0]


def read(tensors: Tensors, outs: int, ins: int, scheme: Scheme, _: Quantisation) -> Matrix:
    """Read a matrix."""
    numbers = tensors.read("weight", (outs, ins), (FP8,))
    part = "weight_scale" if "weight_scale" in tensors and "weight_scale_inv" not in tensors else "weight_scale_inv"
    return fp8_matrix(numbers, scales_of(tensors, part, outs, ins, scheme), scheme.block)


def scales_of(tensors: Tensors, part: str, outs: int, ins: int, scheme: Scheme) -> Tensor:
    """Read the scales of e4m3 numbers: of the matrix, of each output, or of blocks."""
    if scheme.block is not None:
        return tensors.scales(part, (-(-outs // scheme.block[0]), -(-ins // scheme.block[1])))
    shape = tensors.entry(part).shape
    known = {"tensor": ((), (1,), (1, 1)), "channel": ((outs, 1), (outs,))}[scheme.scales]
    return tensors.scales(part, shape if shape in known else known[-1])
