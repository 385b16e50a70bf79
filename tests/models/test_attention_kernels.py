"""Attention with windows, bounded scores and sinks by Triton: in its interpreter, and compiled."""

from __future__ import annotations

import math

import pytest

from run_attention_kernels import FORMS
from specbranch.models.families.operations import Attention
from specbranch.models.gpu.attention import block_positions, chunk_tile_rows, powers_of_two
from tiers import tiered
from triton_programs import needs_triton, run_program


@needs_triton
@pytest.mark.parametrize("form", tiered(list(FORMS), {"all"}.__contains__))
def test_kernels_in_the_interpreter_are_right_and_give_a_row_the_same_bits_in_any_step(form: str) -> None:
    assert run_program("run_attention_kernels.py", form, "6") == f"{form} right\n"


@needs_triton
def test_the_kernels_compile_and_fit_into_the_memory_of_a_multiprocessor() -> None:
    assert len(run_program("run_attention_kernels.py", "compile").splitlines()) == 12


def test_bounded_scores_are_those_of_a_hyperbolic_tangent() -> None:
    scale, bound = powers_of_two(Attention(scale=0.2, softcap=5.0), 64)
    for product in (-300.0, -3.0, 0.0, 0.1, 40.0):
        found = (1 - 2 / (2 ** (product * scale) + 1)) * bound
        assert found == pytest.approx(math.log2(math.e) * 5.0 * math.tanh(product * 0.2 / 5.0), abs=1e-9)
    assert powers_of_two(Attention(), 64) == (math.log2(math.e) / 8, 0.0)


def test_large_heads_have_smaller_blocks_and_tiles() -> None:
    assert (block_positions(128, 2), block_positions(256, 2), block_positions(256, 4)) == (128, 64, 32)
    assert (chunk_tile_rows(2, 128), chunk_tile_rows(2, 256), chunk_tile_rows(8, 256)) == (64, 32, 16)
