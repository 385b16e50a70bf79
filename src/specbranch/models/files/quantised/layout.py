"""From the numbers, scales and zeros of a file to a `Matrix`, and several matrices into one.

Owns the choice of groups. A `Matrix` knows groups of 128, 64 and 32 inputs for int4, so larger groups become several
with equal scales. Invariant: no weight changes by that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import gcd

import torch
from torch import Tensor

from specbranch.models.files.matrix import FP8, INT4_GROUPS, ZERO, Matrix, packed
from specbranch.models.files.quantised.tensors import Tensors

MIDDLE = 128  # the number of 8 bits without a sign that stands for zero if zeros are symmetric


def count_groups(tensors: Tensors, part: str, ins: int, group: int | None) -> int:
    """Return how many groups the inputs have, or refuse sizes that are not whole ones; `group`: None: one group."""
    if group is not None and ins % group:
        tensors.refuse(part, f"has groups of {group} inputs, which do not divide {ins}")
    return 1 if group is None else ins // group


def int_matrix(
    tensors: Tensors, part: str, numbers: Tensor, scale: Tensor, zero: Tensor | None, order: Tensor | None = None
) -> Matrix:
    """Return the matrix of numbers from 0 to 15, uint8 [out, in], or of int8.

    `scale`, `zero`: [out, groups]. `part`: the tensor that an error names.
    """
    usual = ZERO if numbers.dtype is torch.uint8 else 0
    if zero is not None and bool((zero == usual).all()):
        zero = None
    if numbers.dtype is torch.int8:
        return Matrix(numbers, None, scale if scale.shape[1] > 1 else scale[:, 0].contiguous(), zero, order)
    group = numbers.shape[1] // scale.shape[1]
    size = next((size for size in INT4_GROUPS if group % size == 0), None)
    if size is None:
        tensors.refuse(part, f"has int4 in groups of {group} inputs; expected a multiple of {INT4_GROUPS[-1]}")
    times = group // size
    zeros = None if zero is None else zero.repeat_interleave(times, 1)
    return Matrix(packed(numbers, size), None, scale.repeat_interleave(times, 1), zeros, order)


def fp8_matrix(numbers: Tensor, scale: Tensor, block: tuple[int, int] | None) -> Matrix:
    """Return the matrix of e4m3 numbers; `scale`: of one block, of outputs [out, 1], or of blocks."""
    outs, ins = numbers.shape
    assert numbers.dtype is FP8
    if block is None:
        return Matrix(numbers, None, scale.reshape(-1).expand(outs).contiguous())
    group = gcd(block[1], ins)  # the last block may be cut
    by_row = scale.repeat_interleave(block[0], 0)[:outs]
    by_group = by_row.repeat_interleave(block[1] // group, 1)[:, : ins // group]
    wide = Matrix(numbers, None, by_group.contiguous())
    return wide.in_groups(next((size for size in INT4_GROUPS if group % size == 0), group))


def input_order(tensors: Tensors, groups: Tensor, group: int, count: int) -> tuple[Tensor, Tensor] | None:
    """Return where inputs move to so that each group is contiguous, and from where; None if they are in order.

    `groups`: the group of each input.
    """
    of_input = groups.long()
    sizes = torch.bincount(of_input.clamp(0, count), minlength=count)
    if bool((of_input < 0).any()) or len(sizes) != count or bool((sizes != group).any()):
        tensors.refuse("g_idx", f"does not give each of {count} groups {group} inputs")
    taken = torch.argsort(of_input, stable=True)
    if bool((taken == torch.arange(len(taken), device=taken.device)).all()):
        return None
    return torch.argsort(taken), taken


def stacked(parts: Sequence[Matrix]) -> Matrix | None:
    """Return the outputs of several matrices, one below the other; None if they are stored too differently."""
    first = parts[0]
    if len(parts) == 1:
        return first
    if any(one.weight.dtype != first.weight.dtype or not _same_order(one, first) for one in parts):
        return None
    size = gcd(*(one.group for one in parts))
    if first.packed and size not in INT4_GROUPS:
        return None
    if all(one.scale is not None and one.scale.dim() == 1 and one.zero is None for one in parts):
        alike = list(parts)
    else:
        alike = [_by_group(one, size) for one in parts]
    zeros = [one.zero for one in alike]
    if any(zero is not None for zero in zeros):
        zeros = [_zeros(one) for one in alike]
    scales = torch.cat([one.scale for one in alike if one.scale is not None])
    if scales.dim() > 1 and scales.shape[1] == 1 and not first.packed:
        scales = scales[:, 0].contiguous()
    return Matrix(
        torch.cat([one.weight for one in alike]),
        None,
        scales,
        torch.cat([zero for zero in zeros if zero is not None]) if zeros[0] is not None else None,
        first.order,
    )


def _by_group(one: Matrix, size: int) -> Matrix:
    finer = one.in_groups(size)
    assert finer.scale is not None
    return replace(finer, scale=finer.scale.view(finer.outs, -1))


def _zeros(one: Matrix) -> Tensor:
    if one.zero is not None:
        return one.zero
    assert one.scale is not None
    kind = torch.uint8 if one.packed else torch.int8
    return torch.full(one.scale.shape, ZERO if one.packed else 0, dtype=kind, device=one.weight.device)


def _same_order(one: Matrix, other: Matrix) -> bool:
    if one.order is None or other.order is None:
        return one.order is other.order
    return torch.equal(one.order, other.order)
