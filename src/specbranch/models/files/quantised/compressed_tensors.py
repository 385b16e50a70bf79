"""compressed-tensors: packed int4 and int8, plain int8, and e4m3, with scales by matrix, output, group or block.

Owns the names and layouts of its tensors. Packed numbers lie in words along the inputs, packed zeros along the outputs;
both have half their range added. Invariant: numbers come out as the file has them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specbranch.models.files.matrix import FP8, Matrix
from specbranch.models.files.quantised.fp8 import scales_of
from specbranch.models.files.quantised.layout import MIDDLE, count_groups, fp8_matrix, input_order, int_matrix
from specbranch.models.files.quantised.settings import Quantisation, Scheme
from specbranch.models.files.quantised.tensors import WORD, Tensors, numbers_in

PACKED, CT_SCALE, ZERO_POINT = "weight_packed", "weight_scale", "weight_zero_point"


def outputs(tensors: Tensors) -> int:
    """Return how many outputs the file's matrix has."""
    return tensors.matrix_shape(PACKED if PACKED in tensors else "weight")[0]


def read(tensors: Tensors, outs: int, ins: int, scheme: Scheme, _: Quantisation) -> Matrix:
    """Read a matrix."""
    if scheme.floats:
        return _floats(tensors, outs, ins, scheme)
    if scheme.scales == "block":
        tensors.refuse(CT_SCALE, "has integers with scales by block; expected scales by matrix, output or group")
    part = PACKED if PACKED in tensors else "weight"
    numbers = _packed(tensors, outs, ins, scheme) if part == PACKED else _plain(tensors, outs, ins, scheme)
    groups = count_groups(tensors, part, ins, scheme.group)
    scale = _scales(tensors, outs, groups, scheme)
    zero = None if scheme.symmetric else _zeros(tensors, outs, groups, scheme, part == PACKED)
    order = None
    if "weight_g_idx" in tensors and groups > 1:
        of_input = tensors.read("weight_g_idx", (ins,), WORD)
        if (moved := input_order(tensors, of_input, ins // groups, groups)) is not None:
            order, taken = moved
            numbers = numbers.index_select(1, taken)
    return int_matrix(tensors, part, numbers, scale, zero, order)


def _floats(tensors: Tensors, outs: int, ins: int, scheme: Scheme) -> Matrix:
    numbers = tensors.read("weight", (outs, ins), (FP8,))
    if scheme.scales != "group":
        return fp8_matrix(numbers, scales_of(tensors, CT_SCALE, outs, ins, scheme), scheme.block)
    groups = count_groups(tensors, "weight", ins, scheme.group)
    return fp8_matrix(numbers, tensors.scales(CT_SCALE, (outs, groups)), (1, ins // groups))


def _packed(tensors: Tensors, outs: int, ins: int, scheme: Scheme) -> Tensor:
    """Read packed numbers: 4 bits from 0 to 15, or int8."""
    given = tensors.read("weight_shape", (2,), (torch.int64, torch.int32)).tolist()
    if given != [outs, ins]:
        tensors.refuse("weight_shape", f"says {given}; expected {[outs, ins]}")
    words = tensors.read(PACKED, (outs, -(-ins * scheme.bits // 32)), WORD)
    return _signed(numbers_in(words, scheme.bits)[:, :ins], scheme.bits)


def _plain(tensors: Tensors, outs: int, ins: int, scheme: Scheme) -> Tensor:
    """Read int8 numbers; those of 4 bits, too, become numbers from 0 to 15."""
    numbers = tensors.read("weight", (outs, ins), (torch.int8,))
    return numbers if scheme.bits == 8 else (numbers + 8).view(torch.uint8) & 15


def _scales(tensors: Tensors, outs: int, groups: int, scheme: Scheme) -> Tensor:
    """Read the scales [out, groups]."""
    if scheme.scales == "group":
        return tensors.scales(CT_SCALE, (outs, groups))
    shape = tensors.entry(CT_SCALE).shape
    known = ((), (1,), (1, 1)) if scheme.scales == "tensor" else ((outs,), (outs, 1))
    return tensors.scales(CT_SCALE, shape if shape in known else known[-1]).reshape(-1, 1).expand(outs, 1).contiguous()


def _zeros(tensors: Tensors, outs: int, groups: int, scheme: Scheme, in_words: bool) -> Tensor:
    """Read the zeros [out, groups], as the numbers are held."""
    if in_words and scheme.scales != "tensor":
        words = tensors.read(ZERO_POINT, (-(-outs * scheme.bits // 32), groups), WORD)
        return _signed(numbers_in(words.t(), scheme.bits)[:, :outs], scheme.bits).t().contiguous()
    shape = tensors.entry(ZERO_POINT).shape
    known = ((outs, groups), *(((), (1,)) if scheme.scales == "tensor" else ((outs,),) if groups == 1 else ()))
    found = tensors.read(ZERO_POINT, shape if shape in known else known[0], (torch.int8, torch.int32))
    zeros = found.to(torch.int8).reshape(-1, groups).expand(outs, groups).contiguous()
    return zeros if scheme.bits == 8 else (zeros + 8).view(torch.uint8) & 15


def _signed(numbers: Tensor, bits: int) -> Tensor:
    """Return numbers of 8 bits without the half of their range that was added; those of 4 bits keep it."""
    return numbers.contiguous() if bits == 4 else (numbers ^ MIDDLE).contiguous().view(torch.int8)
