"""AWQ in the order of its "gemm" kernels: matrices [in, out], whose words hold eight outputs each, interleaved.

Owns that order. A weight is `(number - zero) · scale`, with 4 bits for number and zero. Invariant: numbers come out as
the file has them.
"""

from __future__ import annotations

from torch import Tensor

from specbranch.models.files.matrix import Matrix
from specbranch.models.files.quantised.layout import count_groups, int_matrix
from specbranch.models.files.quantised.settings import Quantisation, Scheme
from specbranch.models.files.quantised.tensors import WORD, Tensors, numbers_in

PLACES = (0, 4, 1, 5, 2, 6, 3, 7)  # the nibble of a word that holds each of its eight outputs


def outputs(tensors: Tensors) -> int:
    """Return how many outputs the file's matrix has."""
    return tensors.matrix_shape("scales")[1]


def read(tensors: Tensors, outs: int, ins: int, scheme: Scheme, _: Quantisation) -> Matrix:
    """Read a matrix."""
    groups = count_groups(tensors, "qweight", ins, scheme.group)
    if outs % 8:
        tensors.refuse("qweight", f"has {outs} outputs; expected a multiple of 8")
    numbers = _in_order(tensors.read("qweight", (ins, outs // 8), WORD))
    zeros = _in_order(tensors.read("qzeros", (groups, outs // 8), WORD))
    scales = tensors.scales("scales", (groups, outs))
    return int_matrix(tensors, "qweight", numbers.t().contiguous(), scales.t().contiguous(), zeros.t().contiguous())


def _in_order(words: Tensor) -> Tensor:
    """Return the numbers of a matrix [rows, outputs / 8 words]."""
    nibbles = numbers_in(words, 4)
    return nibbles.view(len(words), -1, 8)[:, :, PLACES].flatten(1)
