"""The decoder of the Llama family: one step over rows of several sequences, on caches of committed prefix and tail.

Owns the arithmetic and the cache memory; which token lies where is decided outside and comes in as tensors. Invariant: a step waits for
nothing and its shapes depend only on row counts and spans, so that it can be captured in a CUDA graph. It writes the new keys and values
at their rows' places before it attends, and nowhere else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import embedding, rms_norm, scaled_dot_product_attention, silu

from specbranch.models import rope
from specbranch.models.cpu.linear import Linear, choose_linear
from specbranch.models.files.architecture import Architecture
from specbranch.models.files.weights import LayerWeights, Matrix, Weights


class Cache:
    """Keys and values of one sequence, all layers in one tensor, so that moving a place is one copy."""

    def __init__(self, arch: Architecture, places: int, device: torch.device, dtype: torch.dtype) -> None:
        shape = (2, arch.layers, arch.kv_heads, places, arch.head_dim)
        # Elsewhere than on a CPU spans are padded: what no mask lets through is still multiplied by 0, and must not be NaN.
        self.data = (
            torch.empty(shape, device=device, dtype=dtype) if device.type == "cpu" else torch.zeros(shape, device=device, dtype=dtype)
        )
        self.keys = self.data[0].unbind(0)  # a layer: [kv_heads, places, head_dim]
        self.values = self.data[1].unbind(0)

    def move(self, sources: Tensor, targets: Tensor) -> None:
        """Copy places to others in every layer at once; the two may overlap."""
        self.data.index_copy_(3, targets, self.data.index_select(3, sources))

    def write(self, layer: int, places: Tensor, keys: Tensor, values: Tensor) -> None:
        """Store keys and values [rows, kv_heads, head_dim] at their places."""
        self.keys[layer].index_copy_(1, places, keys.transpose(0, 1))
        self.values[layer].index_copy_(1, places, values.transpose(0, 1))


@dataclass(frozen=True, slots=True)
class Lines:
    """What each row of a sequence sees, as places: the first `prefix` ones, then its own line; `counts` tokens in all."""

    prefix: int
    places: np.ndarray  # int64 [rows, longest line]
    counts: np.ndarray  # int64 [rows]


@dataclass(frozen=True, slots=True)
class Part:
    """The rows of one sequence within a step; row i sees the first `span` places where `mask[i]` is 0, not -inf."""

    cache: Cache
    places: Tensor  # [rows]
    span: int
    mask: Tensor | None  # [rows, span], elsewhere than on a CPU each row `group` times; None: every row sees the whole span
    lines: Lines | None = None  # the same, where a fused step runs in place of this decoder's


@dataclass(frozen=True, slots=True)
class Step:
    """What one forward works on: the rows of every part, one after the other."""

    tokens: Tensor  # [rows]
    positions: Tensor  # [rows]
    parts: tuple[Part, ...]


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer, its matrices as callables."""

    attention_norm: Tensor
    qkv: Linear
    qk_norm: Tensor | None  # [heads + kv_heads, head_dim]
    out: Linear
    mlp_norm: Tensor
    gate_up: Linear
    down: Linear


class Decoder:
    """Weights and position tables; caches come with each step."""

    def __init__(self, arch: Architecture, weights: Weights, positions: int) -> None:
        self.arch = arch
        self.embedding = weights.embedding
        self.layers = tuple(_layer(arch, layer) for layer in weights.layers)
        self.norm = weights.norm
        self.head_weight = None if weights.reduced else weights.head
        self.columns = weights.reduced.columns if weights.reduced else None
        self.head = _linear(weights.reduced.matrix if weights.reduced else Matrix(weights.head))
        self.cos, self.sin = rope.tables(arch.rope, arch.head_dim, positions, weights.norm.device, weights.norm.dtype)

    def forward(self, step: Step, seen: list[Tensor] | None = None) -> Tensor:
        """Run every layer, writing the caches; returns the last hidden states [rows, hidden], not yet normed.

        What each layer is given is appended to `seen`, where there is one.
        """
        x = embedding(step.tokens, self.embedding)
        cos, sin = (table.index_select(0, step.positions).unsqueeze(1) for table in (self.cos, self.sin))
        for index, layer in enumerate(self.layers):
            if seen is not None:
                seen.append(x)
            x = x + self._attention(index, layer, self._normed(x, layer.attention_norm), step.parts, cos, sin)
            x = x + self._mlp(layer, self._normed(x, layer.mlp_norm))
        return x

    def logits(self, hidden: Tensor) -> Tensor:
        """Score the vocabulary, or `columns` of it, for hidden states [rows, hidden]."""
        return self.head(self.normed(hidden))

    def normed(self, hidden: Tensor) -> Tensor:
        """Return the last hidden states as the head reads them."""
        return self._normed(hidden, self.norm)

    def _attention(self, index: int, layer: Layer, h: Tensor, parts: Sequence[Part], cos: Tensor, sin: Tensor) -> Tensor:
        heads, kv_heads = self.arch.heads, self.arch.kv_heads
        qkv = layer.qkv(h).view(h.shape[0], heads + 2 * kv_heads, self.arch.head_dim)
        qk, values = qkv[:, : heads + kv_heads], qkv[:, heads + kv_heads :]
        if layer.qk_norm is not None:
            qk = rms_norm(qk, (self.arch.head_dim,), eps=self.arch.rms_eps) * layer.qk_norm
        qk = rope.turn(qk, cos, sin)
        return layer.out(self._attend_parts(index, qk[:, :heads], qk[:, heads:], values, parts))

    def _mlp(self, layer: Layer, h: Tensor) -> Tensor:
        gate, up = layer.gate_up(h).chunk(2, -1)
        return layer.down(silu(gate).mul_(up))

    def _normed(self, x: Tensor, weight: Tensor) -> Tensor:
        return rms_norm(x, (self.arch.hidden,), weight, self.arch.rms_eps)

    def _attend_parts(self, index: int, queries: Tensor, keys: Tensor, values: Tensor, parts: Sequence[Part]) -> Tensor:
        """Let the rows of each part attend in their own cache; returns [rows, heads·head_dim]."""
        if len(parts) == 1:
            return _attend_part(index, parts[0], queries, keys, values)
        counts = [part.places.shape[0] for part in parts]
        pieces = zip(parts, *(torch.split(whole, counts) for whole in (queries, keys, values)), strict=True)
        return torch.cat([_attend_part(index, *piece) for piece in pieces])


def _attend_part(index: int, part: Part, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    part.cache.write(index, part.places, keys, values)
    return attend(queries, part.cache.keys[index][:, : part.span], part.cache.values[index][:, : part.span], part.mask)


def attend(queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
    """Attend with queries [rows, heads, head_dim] to keys and values [kv_heads, span, head_dim]; returns [rows, heads·head_dim].

    Rows and the heads that share a key head are taken together where one row decodes (each key is read once: 1.6 times faster on a
    CPU) and on GPUs, whose masked kernels know no head groups. Several rows on a CPU: torch's own grouping needs no wider mask.
    """
    rows, heads, head_dim = queries.shape
    if rows > 1 and queries.device.type == "cpu":
        out = scaled_dot_product_attention(queries.transpose(0, 1)[None], keys[None], values[None], attn_mask=mask, enable_gqa=True)
        return out[0].transpose(0, 1).reshape(rows, heads * head_dim)
    group = heads // keys.shape[0]
    grouped = queries.view(rows, -1, group, head_dim).transpose(0, 1).reshape(1, -1, rows * group, head_dim)
    out = scaled_dot_product_attention(grouped, keys[None], values[None], attn_mask=mask)
    return out.view(-1, rows, group, head_dim).transpose(0, 1).reshape(rows, heads * head_dim)


def _layer(arch: Architecture, weights: LayerWeights) -> Layer:
    return Layer(
        attention_norm=weights.attention_norm,
        qkv=_linear(weights.qkv),
        qk_norm=_joined_norm(arch, weights.q_norm, weights.k_norm),
        out=_linear(weights.out),
        mlp_norm=weights.mlp_norm,
        gate_up=_linear(weights.gate_up),
        down=_linear(weights.down),
    )


def _joined_norm(arch: Architecture, q_norm: Tensor | None, k_norm: Tensor | None) -> Tensor | None:
    """One row a head, so that queries and keys are scaled in one go."""
    if q_norm is None or k_norm is None:
        return None
    return torch.cat((q_norm.expand(arch.heads, -1), k_norm.expand(arch.kv_heads, -1)))


def _linear(matrix: Matrix) -> Linear:
    return choose_linear(matrix.weight, matrix.bias, matrix.scale)
