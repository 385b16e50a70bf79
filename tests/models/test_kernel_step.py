"""How products are cut up, and which models the kernels are made for; what they compute is tested on a GPU."""

from __future__ import annotations

from itertools import chain
from pathlib import Path

import pytest
import torch

from specbranch.models.gpu.kernel_step import KernelStep, kernels_fit, step_of
from specbranch.models.gpu.products import PINNED, Product, Stored, cut_of, wide_tiles
from specbranch.models.gpu.step import GpuStep
from specbranch.models.loading import load_native
from tiny_models import saved, tiny

SMALL = [("qkv", 960, 576), ("down", 576, 1536), ("head", 49152, 576), ("head", 301, 384)]


@pytest.mark.parametrize("stored", PINNED)
@pytest.mark.parametrize(("purpose", "outs", "ins"), sorted({*SMALL, *chain(*PINNED.values())}))
def test_a_cut_reads_all_of_a_product_in_whole_steps(purpose: str, outs: int, ins: int, stored: Stored) -> None:
    if stored == "int4" and ins % 128:
        pytest.skip("such a matrix stays in int8")
    cut = cut_of(purpose, outs, ins, stored)
    assert cut == PINNED[stored].get((purpose, outs, ins), cut)
    assert ins % cut.step == 0 and ins // cut.step >= cut.parts
    assert cut.tile in (16, 32, 64, 128) and cut.step in (64, 128, 256)
    assert stored != "int4" or (cut.step == 128 and not cut.swap)


def test_what_the_kernels_are_not_made_for_takes_the_plain_step(tmp_path: Path) -> None:
    runner = load_native(saved(tiny("llama"), tmp_path), context_length=64, dtype="bfloat16")
    assert not kernels_fit(runner.decoder, runner.memory)
    step = step_of(runner.decoder, runner.memory)
    assert isinstance(step, GpuStep) and not isinstance(step, KernelStep)


def made(purpose: str, outs: int, ins: int, head_dim: int = 128) -> Product:
    cut = cut_of(purpose, outs, ins)
    return Product(torch.empty(0), None, None, outs, ins, cut, wide_tiles(purpose, cut, head_dim))


@pytest.mark.parametrize(("purpose", "outs", "ins"), sorted({*SMALL, *PINNED["plain"]}))
def test_tiles_cover_every_row_and_column_and_keep_the_parts(purpose: str, outs: int, ins: int) -> None:
    product = made(purpose, outs, ins)
    for rows in (1, 4, 16, 32, 64, 128, 256, 512):
        tiles = product.tiles(rows)
        down, across = product.grid(rows)
        assert down * tiles.rows >= rows and across * tiles.cut.tile >= outs
        assert rows < 16 or rows % tiles.rows == 0  # buffers have as many rows as a step
        assert tiles.cut.tile % product.cut.tile == 0  # squares are summed over the columns of the narrow tile
        assert product.how(rows, early=False)["PARTS"] == product.cut.parts
        assert purpose != "qkv" or tiles.cut.tile <= 128


def test_many_rows_share_what_a_program_reads_if_enough_programs_are_left() -> None:
    gate_up = made("gate_up", 28672, 4096)
    assert [gate_up.tiles(rows).rows for rows in (1, 16, 64, 128, 512)] == [16, 16, 64, 128, 128]
    assert made("out", 4096, 4096).tiles(128).cut.tile == 64  # half as many programs would leave half a GPU idle
    assert made("qkv", 3072, 2048, head_dim=64).tiles(512).cut.tile == 64  # a tile is part of one head
