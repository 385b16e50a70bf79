"""A program of its own for test_family_kernels: steps of whole families in Triton's interpreter, or their kernels
compiled.

It needs Triton, but no GPU. The interpreter replaces Triton's functions for the whole process.
"""

from __future__ import annotations

import math
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # a test imports this file, too
    os.environ["SPECBRANCH_LINEAR"] = "torch"
    if sys.argv[1] != "compile":
        os.environ["TRITON_INTERPRET"] = "1"  # before anything imports Triton
sys.path.append(str(Path(__file__).parents[2] / "scripts"))

import torch
from family_shapes import A3B, GEMMA3_12B, GPT_OSS_20B, random_family, tiny
from shapes import architecture

from specbranch.core.pages import PAGE, Pool
from specbranch.models.cache.kv_memory import Memory, Table
from specbranch.models.families.operations import Experts
from specbranch.models.families.rotary import Rope
from specbranch.models.files.architecture import Architecture
from specbranch.models.forward.decoder import Decoder
from specbranch.models.forward.step_rows import Rows
from specbranch.models.gpu.attention import attend_by_kernels, attend_plainly
from specbranch.models.gpu.kernel_step import KernelStep
from specbranch.models.gpu.layout import pack, views
from specbranch.models.gpu.step import GpuStep

LLAMA = tiny(architecture("1b"))
UNTURNED = Rope(kind="divisors", divisors=(math.inf,) * 32)
KINDS: dict[str, Architecture] = {
    "llama": LLAMA,
    "draft-window": replace(LLAMA, draft_window=40),
    "smollm3": replace(LLAMA, family="smollm3", tables=(0, 1), local_rope=UNTURNED),
    "gemma2": replace(
        tiny(GEMMA3_12B), family="gemma2", head_dim=256, attention_softcap=5.0, logit_softcap=3.0, tables=()
    ),
    "gemma3": replace(tiny(GEMMA3_12B), head_dim=256),
    "mixtral": replace(LLAMA, family="mixtral", experts=Experts(5, 2, 64), expert_layers=(0, 1), windows=(40, 40)),
    "qwen3-moe": replace(tiny(A3B), expert_layers=(0,)),
    "gpt-oss": tiny(GPT_OSS_20B),
}
CONTEXT, PAGES, TOLERANCE = 130, 4, 0.02  # tolerance: of the greatest logit, in float16


def decoder_of_kind(kind: str, dtype: torch.dtype, weights: Any = None) -> Decoder:
    """The native decoder of a tiny random model."""
    torch.manual_seed(len(kind))
    arch = KINDS[kind]
    return Decoder(arch, random_family(arch, torch.device("cpu"), dtype, weights), 512)


@torch.inference_mode()
def interpret(kind: str, weights: str | None) -> None:
    """Compare a family's step by kernels with the same in plain torch, and a row's bits alone and among others.

    In float16: the interpreter multiplies bfloat16 wrongly.
    """
    import triton.language as tl

    tl.core.tensor.__index__ = lambda self: self.handle.data.item()  # the interpreter's ranges need it
    from specbranch.models.gpu import product_kernels

    product_kernels.cuda_capability_geq = lambda *_: False  # it has no PTX
    decoder = decoder_of_kind(kind, torch.float16, weights)
    assert decoder.plain == (kind == "llama")
    memory = Memory(decoder.arch, PAGES + 1, torch.device("cpu"), torch.float16)
    before = memory.data.normal_().clone()
    tables = [Table(Pool(PAGES), [0]), Table(Pool(PAGES), [2])]
    chain = Rows(tables[0], [5, 9, 7], CONTEXT, CONTEXT, [1, 3, 5])
    other = Rows(tables[1], [11], 20, 20, [1])

    def run(step: GpuStep, work: list[Rows]) -> tuple[torch.Tensor, torch.Tensor]:
        memory.data.copy_(before)
        packed, bucket = pack(work, PAGES * PAGE)
        logits = step.forward(views(torch.from_numpy(packed), bucket, PAGES))[0]
        return logits[: sum(len(part.tokens) for part in work)].clone(), memory.data[:-1].clone()

    by_kernels = KernelStep(decoder, memory)
    by_kernels.attend = attend_by_kernels
    found, written = run(by_kernels, [chain, other])
    expected, put = run(GpuStep(decoder, memory, attend_plainly), [chain, other])
    for one, plain in ((found, expected), (written, put)):
        error = (one.float() - plain.float()).abs().max() / plain.float().abs().max()
        assert error < TOLERANCE, f"off by {error:.3f}"
    assert not torch.equal(put, before[:-1])
    assert torch.equal(run(by_kernels, [chain])[0], found[:3]), "rows have other bits alone than among others"
    print(kind, "right")


def compile_all() -> None:
    """Compile the kernels that Llama's layer does not need for an H100 or H200."""
    from specbranch.models.gpu import expert_kernels, family_kernels, product_kernels

    tile = {"ROWS": 16, "TILE": 64, "STEP": 128, "SWAP": True, "EVEN": True, "FULL": True, "STORED": 0, "EARLY": True}
    heads = {"HEADS": 16, "KV_HEADS": 8, "DIM": 256, "HALF": 128, "PAGE": 256, "EARLY": True}
    rows = {"WIDTH": 4096, "NORMS": 1, "EARLY": True}
    choice = {"COUNT": 128, "ACTIVE": 8, "EARLY": True}
    wide = {**tile, "NORMS": 8, "UNIT": 128, "BOXED": False, "JOINED": False, "CHUNKS": False, "PARTS": 1}
    odd = {"FULL": False, "SOFTCAP": 0.0, "bias": None, "counts": None}  # outputs that do not fill their last tile
    for kernel, sizes, warps in (
        (family_kernels.turn, heads, 1),
        (family_kernels.settle, {**rows, "ACTIVE": 8}, 8),
        (family_kernels.settle, {**rows, "ACTIVE": 1, "ids": None}, 8),
        (expert_kernels.route, {**choice, "WIDTH": 128, "PLACES": 8, "ALL_FIRST": True, "TO_ONE": True}, 1),
        (expert_kernels.route, {**choice, "WIDTH": 128, "PLACES": 8, "ALL_FIRST": False, "TO_ONE": True}, 1),
        (expert_kernels.plan, {**choice, "WIDTH": 256, "BLOCK": 1024, "ROWS": 16}, 4),
        (expert_kernels.plan, {**choice, "WIDTH": 256, "BLOCK": 128, "ROWS": 16}, 4),
        (expert_kernels.gated_by_expert, {**tile, "ACTIVE": 8, "ACTIVATION": 2, "NORMS": 32}, 4),
        (expert_kernels.down_by_expert, tile, 4),
        (expert_kernels.down_by_expert, {**tile, "STORED": 5, "STEP": 64, "SWAP": False}, 4),
        (product_kernels.gated, {**wide, "ACTIVATION": 1, "BIASED": False}, 4),
        (product_kernels.added, {**wide, "ONTO": False, "BIASED": True, "NORM_TILE": 64, "PARTS": 2}, 4),
        (product_kernels.scored, {**wide, "SOFTCAP": 30.0, "bias": None, "counts": None}, 4),
        (product_kernels.scored, {**wide, **odd, "STORED": 9}, 4),
        (product_kernels.scored, {**wide, **odd, "STORED": 10}, 4),
        (product_kernels.embed, {**rows, "PIECE": 2048, "SIDE": 2048, "PAGE": 256, "DIM": 256, "SCALE": 62.0}, 8),
    ):  # fmt: skip
        compile_one(kernel, sizes, warps)


def compile_one(kernel: Any, sizes: dict[str, Any], warps: int) -> None:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    names = kernel.arg_names
    whole = dict.fromkeys(("page_stride", "rows", "N", "K", "H", "per", "spare", "pairs", "per_weight"), "i32")
    stored = {0: "*bf16", 9: "*fp8e4nv", 10: "*fp8e4nv"}.get(sizes.get("STORED", 0), "*u8")
    whole |= {"per_scale": "i32", "eps": "fp32", "w": stored}
    whole |= dict.fromkeys(("ids", "order", "tiles", "used", "slots", "positions", "counts", "arrived"), "*i32")
    whole |= dict.fromkeys(("tokens", "picks", "moves"), "*i32")
    whole |= dict.fromkeys(("squares", "sums", "weights", "changes", "scale"), "*fp32")
    kinds = {name: "constexpr" if name in sizes else whole.get(name, "*bf16") for name in names}
    known = {(names.index(name),): size for name, size in sizes.items() if name in names}
    sixteens = ("N", "K", "H", "per_weight", "per_scale", "page_stride")  # as models have them
    multiples = [name for name, kind in kinds.items() if kind.startswith("*") or (kind == "i32" and name in sixteens)]
    aligned = {(names.index(name),): [["tt.divisibility", 16]] for name in multiples}
    source = ASTSource(fn=kernel, signature=kinds, constexprs=known, attrs=aligned)
    options = {"num_warps": warps, "num_stages": 4, "enable_fp_fusion": False, "launch_pdl": True}
    done = compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    print(kernel.__name__, done.metadata.shared, flush=True)


if __name__ == "__main__":
    if sys.argv[1] == "compile":
        compile_all()
    else:
        interpret(sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else None)
