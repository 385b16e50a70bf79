"""Products of stored weights on a GPU: kernels in Triton's interpreter, compiled, and what they are not made for."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from run_product_kernels import NO_NORM, linear_of
from specbranch.models.cpu.linear import PlainLinear
from specbranch.models.files.matrix import INT4_GROUPS, ROUNDED_KINDS, Matrix
from specbranch.models.forward.stored_linear import StoredLinear
from specbranch.models.gpu.products import BITS, BY_STEP, Stored, product_of, takes_matrix
from triton_programs import needs_triton, run_program

SMALL: list[Stored] = [kind for kind in BITS if kind != "plain"]


@needs_triton
@pytest.mark.parametrize("stored", SMALL)
def test_a_stored_product_in_the_interpreter_is_right_and_has_the_same_bits_among_any_rows(stored: Stored) -> None:
    assert run_kernels("interpret", stored) == f"{stored} 2\n"


@needs_triton
@pytest.mark.parametrize("stored", SMALL)
def test_a_stored_product_compiles_for_a_gpu(stored: Stored) -> None:
    assert run_kernels("compile", stored).count("True") == 4


def run_kernels(*arguments: str) -> str:
    return run_program("run_product_kernels.py", *arguments)


def numbers(outs: int, ins: int) -> torch.Tensor:
    return torch.randn(outs, ins, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)


@pytest.mark.parametrize("stored", BITS)
@pytest.mark.parametrize("ins", [384, 576])
def test_a_loop_step_of_a_grouped_form_is_a_group(stored: Stored, ins: int) -> None:
    linear = linear_of(stored, numbers(64, ins))
    product = product_of("down", linear, NO_NORM)
    assert (product.outs, product.ins) == (64, ins) and ins % product.cut.step == 0
    expected = "int4-zeros" if stored == "int4-zeros" else getattr(getattr(linear, "matrix", None), "stored", "plain")
    assert product.stored == expected
    if BITS[product.stored] in BY_STEP:
        assert isinstance(linear, StoredLinear) and product.cut.step == linear.matrix.group in INT4_GROUPS
        groups = ins // product.cut.step * (2 if stored == "int4-zeros" else 1)
        assert product.scale is not None and product.scale.shape == (groups, 64)
        assert not product.cut.swap


def test_the_kernels_take_zeros_of_int4_alone_no_order_and_no_other_groups() -> None:
    for kind in ROUNDED_KINDS:
        small = Matrix(numbers(64, 384)).stored_as(kind)
        assert takes_matrix(StoredLinear(small))
        zero = torch.ones(64, 384 // small.group, dtype=torch.int8)
        assert takes_matrix(StoredLinear(replace(small, zero=zero))) == kind.startswith("int4")
        assert not takes_matrix(StoredLinear(replace(small, order=torch.arange(384))))
    grouped = Matrix(torch.ones(64, 384, dtype=torch.int8), None, torch.ones(64, 12))
    assert grouped.stored == "int8-32" and not takes_matrix(StoredLinear(grouped))
    odd = Matrix(numbers(64, 384)).stored_as("fp8-block").in_groups(16)
    assert not takes_matrix(StoredLinear(odd)) and takes_matrix(PlainLinear(numbers(4, 64), None))
