"""Steps of whole families by Triton: in its interpreter, compiled, and which kernels a step launches."""

from __future__ import annotations

import pytest
import torch

from recorded_kernels import Launch, recorded_step
from run_family_kernels import KINDS, decoder_of_kind
from specbranch.models.families.operations import Experts
from specbranch.models.forward.decoder import Decoder
from specbranch.models.gpu.mixture_step import expert_products, most_expert_tiles, takes_experts
from tiers import tiered
from triton_programs import needs_triton, run_program

LLAMA_LAYER = ["qkv", "attend", "added", "gated", "added"]
EXPERT_LAYER = ["qkv", "attend", "added", "scored", "route", "plan", "gated_by_expert", "down_by_expert", "settle"]
GEMMA_LAYER = ["scored", "turn", "attend", "added", "settle", "gated", "added", "settle"]
LAYERS = {
    "llama": [LLAMA_LAYER] * 2, "smollm3": [LLAMA_LAYER] * 2, "mixtral": [EXPERT_LAYER] * 2,
    "qwen3-moe": [EXPERT_LAYER, LLAMA_LAYER], "gpt-oss": [EXPERT_LAYER] * 2, "gemma2": [GEMMA_LAYER] * 2,
    "gemma3": [GEMMA_LAYER] * 2,
}  # fmt: skip


@needs_triton
@pytest.mark.parametrize("kind", tiered(list(KINDS), {"gpt-oss"}.__contains__))
def test_a_step_in_the_interpreter_gives_what_plain_torch_gives_alone_and_among_others(kind: str) -> None:
    assert run_program("run_family_kernels.py", kind) == f"{kind} right\n"


@needs_triton
@pytest.mark.slow
@pytest.mark.parametrize("weights", ["int8", "int4-32"])
def test_stored_experts_in_the_interpreter_give_what_plain_torch_gives(weights: str) -> None:
    assert run_program("run_family_kernels.py", "mixtral", weights) == "mixtral right\n"


@needs_triton
def test_the_kernels_of_families_compile_for_a_gpu() -> None:
    assert len(run_program("run_family_kernels.py", "compile").splitlines()) == 16


def decoder_of(kind: str, patch: pytest.MonkeyPatch) -> Decoder:
    patch.setenv("SPECBRANCH_LINEAR", "torch")
    return decoder_of_kind(kind, torch.bfloat16)


def launches_of(kind: str, patch: pytest.MonkeyPatch, rows: int = 4) -> list[Launch]:
    return recorded_step(decoder_of(kind, patch), patch, rows)


@pytest.mark.parametrize("kind", LAYERS)
def test_a_step_launches_the_kernels_of_its_operations_and_of_llama_no_others(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [launch.name for launch in launches_of(kind, monkeypatch)]
    assert names == ["embed", *LAYERS[kind][0], *LAYERS[kind][1], "scored"]


def test_a_step_of_llama_passes_nothing_that_families_added(monkeypatch: pytest.MonkeyPatch) -> None:
    for launch in launches_of("llama", monkeypatch):
        given = launch.constants
        assert given.get("ONTO", True) and not given.get("ACTIVATION") and not given.get("SOFTCAP")
        assert given.get("SCALE") is None and given.get("bias") is None
        assert launch.name != "attend" or len(launch.args) == 1  # True if rows of prompts are left out, and no more


def test_windows_and_sinks_of_each_layer_reach_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    launches = launches_of("gpt-oss", monkeypatch)
    first, second = (launch.args for launch in launches if launch.name == "attend")
    assert [one[1].window for one in (first, second)] == [40, None] and first[1].sinks and second[1].sinks
    assert first[2][0] == second[2][0] == (2,)  # a sink for each head


@pytest.mark.parametrize("rows", [1, 4, 16])
def test_grids_of_experts_have_a_program_for_each_tile_that_rows_can_make(
    rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = next(one for one in launches_of("mixtral", monkeypatch, rows) if one.name == "gated_by_expert")
    assert gate.grid == (min(2 * rows, 5 + 2 * rows // 16), 2)


def test_no_choice_of_experts_makes_more_tiles_than_the_bound() -> None:
    form = Experts(4, 2, 64)
    for rows in (1, 7, 8, 33, 100):
        # the most tiles: one pair for each of all experts but one, which has the rest
        pairs = rows * form.active
        spread = min(pairs, form.count)
        assert most_expert_tiles(rows, form) >= spread - 1 + -(-(pairs - spread + 1) // 16)


def test_experts_lie_one_behind_the_other_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in ("mixtral", "gpt-oss"):
        experts = decoder_of(kind, monkeypatch).layers[0].experts
        assert experts is not None and takes_experts(experts)
        arch = decoder_of(kind, monkeypatch).arch
        product = expert_products(experts, arch).down
        base = product.first.weight
        for number, linear in enumerate(experts.down):
            assert linear.weight.data_ptr() == base.data_ptr() + number * product.per_weight * 2  # type: ignore[union-attr]
        assert (product.bias is None) == (kind == "mixtral")
