"""Steps of many rows take larger tiles: keys, values and logits have the bits of steps of few rows."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from specbranch.core.pages import PAGE, Pool
from specbranch.models.cache.kv_memory import Memory, Table
from specbranch.models.families.rotary import Rope
from specbranch.models.files.architecture import Architecture
from specbranch.models.files.matrix import Matrix
from specbranch.models.files.weights import LayerWeights, Weights
from specbranch.models.forward.decoder import Decoder
from specbranch.models.forward.step_rows import Rows
from specbranch.models.gpu.kernel_step import KernelStep
from specbranch.models.gpu.layout import pack, views

pytestmark = pytest.mark.gpu

LLAMA = Architecture(
    name="wide", family="llama", layers=2, hidden=2048, heads=16, kv_heads=4, head_dim=128, intermediate=5632,
    vocabulary=24_001, rms_eps=1e-5, rope=Rope(), qkv_bias=False, out_bias=False, mlp_bias=False, qk_norm=False,
    tied=False, context_length=4096, eos_ids=(), bos_id=None,
)  # fmt: skip
QWEN2 = replace(LLAMA, family="qwen2", qkv_bias=True, hidden=1536, heads=12, kv_heads=2)
QWEN3 = replace(LLAMA, family="qwen3", qk_norm=True, kv_heads=8)
SMALL_HEADS = replace(LLAMA, heads=32, kv_heads=8, head_dim=64)
CASES = {"llama": LLAMA, "qwen2": QWEN2, "qwen3": QWEN3, "small heads": SMALL_HEADS}
BEFORE, ROWS, SEQUENCES = 300, 16, 32


def random_decoder(arch: Architecture, dtype: torch.dtype) -> Decoder:
    def random(*shape: int) -> torch.Tensor:
        return torch.empty(shape, device="cuda", dtype=dtype).normal_(std=shape[-1] ** -0.5)

    def layer() -> LayerWeights:
        queries = arch.heads * arch.head_dim
        outs = queries + 2 * arch.kv_heads * arch.head_dim
        bias = random(1, outs)[0] if arch.qkv_bias else None
        q_norm, k_norm = (1 + random(2, arch.head_dim)).unbind() if arch.qk_norm else (None, None)
        norms = (1 + random(2, arch.hidden)).unbind()
        return LayerWeights(
            norms[0], Matrix(random(outs, arch.hidden), bias), q_norm, k_norm, Matrix(random(arch.hidden, queries)),
            norms[1], Matrix(random(2 * arch.intermediate, arch.hidden)),
            Matrix(random(arch.hidden, arch.intermediate)),
        )  # fmt: skip

    ones = torch.ones(arch.hidden, device="cuda", dtype=dtype)
    layers = tuple(layer() for _ in range(arch.layers))
    head = Matrix(random(arch.vocabulary, arch.hidden))
    return Decoder(arch, Weights(random(arch.vocabulary, arch.hidden), layers, ones, head), 1024)


def chains(pool: Pool) -> list[Rows]:
    """Chains behind a context, one a sequence."""
    found = []
    for number in range(SEQUENCES):
        table = Table(pool)
        table.reach(BEFORE + ROWS)
        tokens = [(number * ROWS + row) * 37 % 24_001 for row in range(ROWS)]
        found.append(Rows(table, tokens, BEFORE, BEFORE, [(2 << row) - 1 for row in range(ROWS)]))
    return found


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("arch", CASES.values(), ids=CASES.keys())
@torch.inference_mode()
def test_a_step_of_many_rows_has_the_bits_of_steps_of_few(arch: Architecture, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    pool = Pool(2 * SEQUENCES)
    memory = Memory(arch, pool.pages + 1, torch.device("cuda"), dtype)
    before = memory.data.normal_().clone()
    step, work = KernelStep(random_decoder(arch, dtype), memory), chains(pool)

    def run(some: list[Rows]) -> torch.Tensor:
        packed, bucket = pack(some, pool.pages * PAGE)
        return step.forward(views(torch.from_numpy(packed).to("cuda"), bucket))[0][: len(some) * ROWS].clone()

    narrow = torch.cat([run([rows]) for rows in work])
    written = memory.data.clone()
    assert narrow.isfinite().all() and not torch.equal(written, before)
    for together in (4, 8, 16, 32):
        memory.data.copy_(before)
        wide = torch.cat([run(work[at : at + together]) for at in range(0, SEQUENCES, together)])
        assert torch.equal(wide, narrow), f"logits of {together * ROWS} rows"
        assert torch.equal(memory.data[:-1], written[:-1]), f"keys and values of {together * ROWS} rows"
