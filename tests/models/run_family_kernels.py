"""A program of its own for test_family_kernels: steps of whole families in Triton's interpreter, or their kernels
compiled.

It needs Triton, but no GPU. The interpreter replaces Triton's functions for the whole process.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import Any

if __name__ == "__main__" and sys.argv[1] != "compile":
    os.environ["TRITON_INTERPRET"] = "1"  # before anything imports Triton
os.environ["SPECBRANCH_LINEAR"] = "torch"

import torch
from transformers import (
    Gemma2Config,
    Gemma3TextConfig,
    GptOssConfig,
    LlamaConfig,
    MixtralConfig,
    Qwen3MoeConfig,
    SmolLM3Config,
)

from packed_steps import PAGES, Stepper
from specbranch.core.slots import ROOT
from specbranch.models.forward.decoder import Decoder
from specbranch.models.gpu.attention import attend_by_kernels
from specbranch.models.gpu.kernel_step import KernelStep
from specbranch.models.gpu.step import Graphs
from specbranch.models.loading import load_native
from tiny_models import random_model, saved

SIZES: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "max_position_embeddings": 512, "initializer_range": 0.1, "bos_token_id": 0,
    "eos_token_id": 1, "head_dim": 64,
}  # fmt: skip
EXPERTS = {"num_local_experts": 5, "num_experts_per_tok": 2}
GEMMA = {**SIZES, "head_dim": 256, "sliding_window": 24, "query_pre_attn_scalar": 200}
KINDS = {
    "llama": lambda: LlamaConfig(**SIZES),
    "gemma2": lambda: Gemma2Config(**GEMMA, attn_logit_softcapping=5.0, final_logit_softcapping=3.0),
    "gemma3": lambda: Gemma3TextConfig(**GEMMA, sliding_window_pattern=2),
    "mixtral": lambda: MixtralConfig(**SIZES, **EXPERTS, sliding_window=40),
    "qwen3-moe": lambda: Qwen3MoeConfig(
        **SIZES,
        num_experts=6,
        num_experts_per_tok=3,
        moe_intermediate_size=64,
        norm_topk_prob=True,
        mlp_only_layers=[1],
    ),
    "gpt-oss": lambda: GptOssConfig(**SIZES, **EXPERTS, sliding_window=24),
    "smollm3": lambda: SmolLM3Config(**SIZES, no_rope_layer_interval=2, pad_token_id=0),
}
TOLERANCE = 0.02  # of the greatest logit, in float16


def decoder_of_kind(kind: str, weights: Any = None) -> Decoder:
    """The native decoder of a tiny random model."""
    with tempfile.TemporaryDirectory() as folder:
        saved(random_model(KINDS[kind]()), Path(folder))
        return load_native(Path(folder), context_length=512, dtype="float16", weights=weights, cache_tokens=512).decoder


def stepper_of(decoder: Decoder, kernels: bool) -> Stepper:
    stepper = Stepper(decoder, "cpu", torch.float16)
    if kernels:
        step = KernelStep(decoder, stepper.memory)
        step.attend = attend_by_kernels
        stepper.graphs = Graphs(step, PAGES, False)
    return stepper


@torch.inference_mode()
def interpret(kind: str, weights: str | None) -> None:
    """Compare a family's step by kernels with the same in plain torch, and a row's bits alone and among others."""
    import triton.language as tl

    tl.core.tensor.__index__ = lambda self: self.handle.data.item()  # the interpreter's ranges need it
    from specbranch.models.gpu import product_kernels

    product_kernels.cuda_capability_geq = lambda *_: False  # it has no PTX
    decoder = decoder_of_kind(kind, weights)
    assert decoder.plain == (kind == "llama")
    texts = [[number * 7 % 96 for number in range(start, start + length)] for start, length in ((3, 30), (50, 3))]
    feeds = [([5, 9], [ROOT, 0]), ([7], [ROOT])]
    found = {}
    for kernels in (True, False):
        stepper = stepper_of(decoder, kernels)
        sequences = [stepper.open() for _ in texts]
        first = stepper.score([seq.read(text) for seq, text in zip(sequences, texts, strict=True)])
        rows = [seq.grow(*feed) for seq, feed in zip(sequences, feeds, strict=True)]
        found[kernels] = first, stepper.score(rows), stepper.score(rows[:1])
    for by_kernels, plain in zip(found[True], found[False], strict=True):
        error = (by_kernels.float() - plain.float()).abs().max() / plain.float().abs().max()
        assert error < TOLERANCE, f"off by {error:.3f}"
    _, together, alone = found[True]
    assert torch.equal(together[:2], alone), "a row has other bits alone than among others"
    print(kind, "right")


def compile_all() -> None:
    """Compile the kernels that Llama's layer does not need for an H100 or H200."""
    from specbranch.models.gpu import expert_kernels, family_kernels, product_kernels

    tile = {"ROWS": 16, "TILE": 64, "STEP": 128, "SWAP": True, "EVEN": True, "FULL": True, "STORED": 0, "EARLY": True}
    heads = {"HEADS": 16, "KV_HEADS": 8, "DIM": 256, "HALF": 128, "PAGE": 256, "EARLY": True}
    rows = {"WIDTH": 4096, "NORMS": 1, "EARLY": True}
    choice = {"COUNT": 128, "ACTIVE": 8, "EARLY": True}
    wide = {**tile, "NORMS": 8, "UNIT": 128, "BOXED": False, "JOINED": False, "CHUNKS": False, "PARTS": 1}
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
        (product_kernels.embed, {**rows, "PIECE": 2048, "SIDE": 2048, "PAGE": 256, "DIM": 256, "SCALE": 62.0}, 8),
    ):  # fmt: skip
        compile_one(kernel, sizes, warps)


def compile_one(kernel: Any, sizes: dict[str, Any], warps: int) -> None:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    names = kernel.arg_names
    whole = dict.fromkeys(("page_stride", "rows", "N", "K", "H", "per", "spare", "pairs", "per_weight"), "i32")
    whole |= {"per_scale": "i32", "eps": "fp32", "w": "*u8" if sizes.get("STORED") else "*bf16"}
    whole |= dict.fromkeys(("ids", "order", "tiles", "used", "slots", "positions", "counts", "arrived"), "*i32")
    whole |= dict.fromkeys(("tokens", "picks", "moves"), "*i32")
    whole |= dict.fromkeys(("squares", "sums", "weights", "changes", "scale"), "*fp32")
    kinds = {name: "constexpr" if name in sizes else whole.get(name, "*bf16") for name in names}
    known = {(names.index(name),): size for name, size in sizes.items() if name in names}
    aligned = {(at,): [["tt.divisibility", 16]] for at, name in enumerate(names) if kinds[name].startswith("*")}
    source = ASTSource(fn=kernel, signature=kinds, constexprs=known, attrs=aligned)
    options = {"num_warps": warps, "num_stages": 4, "enable_fp_fusion": False, "launch_pdl": True}
    done = compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    print(kernel.__name__, done.metadata.shared)


if __name__ == "__main__":
    if sys.argv[1] == "compile":
        compile_all()
    else:
        interpret(sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else None)
