"""How products are cut up, and which models the kernels are made for; what they compute is tested on a GPU."""

from __future__ import annotations

from itertools import chain
from pathlib import Path

import pytest

from specbranch.models.gpu.kernel_step import PINNED, KernelStep, Stored, cut_of, kernels_fit, step_of
from specbranch.models.gpu.step import GpuStep
from specbranch.models.native import load_native
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
