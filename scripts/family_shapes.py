"""Shapes of model families with random weights, made on the device they run on: what such a model costs, and nothing
else."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from shapes import architecture
from torch import Tensor

from specbranch.config import WeightsName
from specbranch.models.families.operations import Experts, attention_of, experts_of
from specbranch.models.families.rotary import Rope
from specbranch.models.files.architecture import Architecture
from specbranch.models.files.matrix import Matrix
from specbranch.models.files.weights import LayerWeights, Weights

COMMON: dict[str, Any] = {
    "rms_eps": 1e-6, "rope": Rope(1e6), "tied": False, "context_length": 1 << 20, "eos_ids": (), "bos_id": None,
}  # fmt: skip
A3B = Architecture(
    name="30b-a3b", family="qwen3_moe", layers=48, hidden=2048, heads=32, kv_heads=4, head_dim=128, intermediate=6144,
    vocabulary=151_936, qk_norm=True, experts=Experts(128, 8, 768), expert_layers=tuple(range(48)), **COMMON,
)  # fmt: skip
GPT_OSS_20B = Architecture(
    name="gpt-oss-20b", family="gpt_oss", layers=24, hidden=2880, heads=64, kv_heads=8, head_dim=64, intermediate=2880,
    vocabulary=201_088, qkv_bias=True, out_bias=True, windows=(128, None) * 12,
    experts=Experts(32, 4, 2880, "bounded_swiglu", "best_first", biased=True), expert_layers=tuple(range(24)), **COMMON,
)  # fmt: skip
GEMMA3_12B = Architecture(
    name="gemma3-12b", family="gemma3", layers=48, hidden=3840, heads=16, kv_heads=8, head_dim=256, intermediate=15_360,
    vocabulary=262_208, qk_norm=True, windows=((1024,) * 5 + (None,)) * 8, tables=((1,) * 5 + (0,)) * 8,
    local_rope=Rope(), query_scale=1 / 16, **COMMON,
)  # fmt: skip
SHAPES_OF_FAMILIES = {shape.name: shape for shape in (A3B, GPT_OSS_20B, GEMMA3_12B)}


def shape_of(name: str) -> Architecture:
    """Return a family's shape, or a Llama of one of the other shapes; "tiny-" before it: a few numbers of each."""
    if name.startswith("tiny-"):
        return tiny(shape_of(name.removeprefix("tiny-")))
    return SHAPES_OF_FAMILIES.get(name) or architecture(name)


def tiny(arch: Architecture) -> Architecture:
    """Return the same family in a size for trying things out."""
    experts = None if arch.experts is None else replace(arch.experts, count=6, active=2, intermediate=64)
    windows = tuple(None if window is None else 40 for window in arch.windows[-2:])
    return replace(
        arch, name=f"tiny-{arch.name}", layers=2, hidden=64, heads=2, kv_heads=1, head_dim=min(arch.head_dim, 64),
        intermediate=64, vocabulary=128, experts=experts, windows=windows, tables=arch.tables[-2:],
        expert_layers=() if experts is None else (0, 1),
    )  # fmt: skip


def random_family(arch: Architecture, device: torch.device, dtype: torch.dtype, stored: WeightsName | None) -> Weights:
    """Make weights on the device; experts' and dense matrices are stored as asked, the embedding in floats."""

    def random(*shape: int) -> Tensor:
        return torch.empty(shape, device=device, dtype=dtype).normal_(std=shape[-1] ** -0.5)

    def matrix(outs: int, ins: int, biased: bool) -> Matrix:
        found = Matrix(random(outs, ins), random(1, outs)[0] if biased else None)
        return found if stored is None else found.stored_as(stored)

    def norm(size: int) -> Tensor:
        kind = torch.float32 if arch.of_family.norm_adds_one else dtype
        return torch.rand(size, device=device).add_(0.5).to(kind)

    def layer(index: int) -> LayerWeights:
        form = arch.of_family.layer(arch, index)
        experts, wide = experts_of(form), arch.heads * arch.head_dim
        count, inner = (1, arch.intermediate) if experts is None else (experts.count, experts.intermediate)
        biased = arch.mlp_bias if experts is None else experts.biased
        return LayerWeights(
            attention_norm=norm(arch.hidden),
            qkv=matrix(wide + 2 * arch.kv_heads * arch.head_dim, arch.hidden, arch.qkv_bias),
            q_norm=norm(arch.head_dim) if arch.qk_norm else None,
            k_norm=norm(arch.head_dim) if arch.qk_norm else None,
            out=matrix(arch.hidden, wide, arch.out_bias),
            mlp_norm=norm(arch.hidden),
            gate_up=matrix(count * 2 * inner, arch.hidden, biased),
            down=matrix(count * arch.hidden, inner, biased),
            attention_after_norm=norm(arch.hidden) if form[0].after else None,
            mlp_after_norm=norm(arch.hidden) if form[1].after else None,
            sinks=random(1, arch.heads)[0] if attention_of(form).sinks else None,
            router=None if experts is None else Matrix(random(count, arch.hidden), None),
        )

    layers = tuple(layer(index) for index in range(arch.layers))
    head = Matrix(random(arch.vocabulary, arch.hidden))
    return Weights(random(arch.vocabulary, arch.hidden), layers, norm(arch.hidden), head)


def bytes_read(weights: Weights, arch: Architecture, rows: int, context: int, itemsize: int) -> float:
    """Return what a step of one sequence has to read: weights, those of the experts that rows are expected to choose,
    and keys and values within each layer's window."""
    total = float(_bytes(weights.head))
    for index, layer in enumerate(weights.layers):
        form = arch.of_family.layer(arch, index)
        experts, window = experts_of(form), attention_of(form).window
        part = 1.0 if experts is None else 1 - (1 - experts.active / experts.count) ** rows
        total += _bytes(layer.qkv) + _bytes(layer.out) + (_bytes(layer.gate_up) + _bytes(layer.down)) * part
        seen = context if window is None else min(window, context)
        total += 2 * seen * arch.kv_heads * arch.head_dim * itemsize
    return total


def _bytes(matrix: Any) -> int:
    parts = (getattr(matrix, name, None) for name in ("weight", "scale", "zero"))
    return sum(math.prod(part.shape) * part.itemsize for part in parts if part is not None)
