"""GPTQ: matrices [in, out], whose words hold inputs one below the other; with desc_act an input names its group.

Owns that layout. A weight is `(number - zero) · scale`. The first format ("gptq") stores a zero less 1, within the same
bits; "gptq_v2" stores it as it is. Invariant: numbers come out as the file has them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specbranch.models.files.matrix import ZERO, Matrix
from specbranch.models.files.quantised.layout import MIDDLE, count_groups, input_order, int_matrix
from specbranch.models.files.quantised.settings import Quantisation, Scheme
from specbranch.models.files.quantised.tensors import WORD, Tensors, numbers_in


def outputs(tensors: Tensors) -> int:
    """Return how many outputs the file's matrix has."""
    return tensors.matrix_shape("scales")[1]


def read(tensors: Tensors, outs: int, ins: int, scheme: Scheme, file: Quantisation) -> Matrix:
    """Read a matrix."""
    groups, each = count_groups(tensors, "qweight", ins, scheme.group), 32 // scheme.bits
    if outs % each or ins % each:
        tensors.refuse("qweight", f"has {outs} outputs and {ins} inputs; expected multiples of {each}")
    numbers = numbers_in(tensors.read("qweight", (ins // each, outs), WORD).t(), scheme.bits)
    zeros = numbers_in(tensors.read("qzeros", (groups, outs // each), WORD), scheme.bits).t()
    if scheme.symmetric and _same(zeros, (MIDDLE - 1, MIDDLE) if scheme.bits == 8 else (ZERO - 1, ZERO)):
        zeros = torch.full_like(zeros, MIDDLE if scheme.bits == 8 else ZERO)  # some files store it as it is, unsaid
    elif file.zeros_less_one:
        zeros = zeros + 1 if scheme.bits == 8 else (zeros + 1) & 15  # within the same bits: 0 was stored as all ones
    scales = tensors.scales("scales", (groups, outs)).t().contiguous()
    order = None
    if "g_idx" in tensors:
        of_input = tensors.read("g_idx", (ins,), WORD)
        if (moved := input_order(tensors, of_input, ins // groups, groups)) is not None:
            order, taken = moved
            numbers = numbers.index_select(1, taken)
    if scheme.bits == 8:
        numbers, zeros = _signed(numbers), _signed(zeros)
    return int_matrix(tensors, "qweight", numbers.contiguous(), scales, zeros.contiguous(), order)


def _same(zeros: Tensor, known: tuple[int, ...]) -> bool:
    """True if all zeros are one of the known ones, the same."""
    return any(bool((zeros == one).all()) for one in known)


def _signed(numbers: Tensor) -> Tensor:
    """Return numbers from 0 to 255 less 128."""
    return (numbers ^ MIDDLE).view(torch.int8)
