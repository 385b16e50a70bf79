"""The decoder of the Llama family in plain torch: one step over rows of several sequences, on a pool of pages; the reference on any device.

Owns the arithmetic; which token lies where is decided outside and comes in as tensors. Invariants: a step waits for nothing. It writes the
new keys and values at their rows' places before it attends, and nowhere else. A row of the tail reads its keys in the order of their
positions, and by code that its position alone decides.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import embedding, rms_norm, scaled_dot_product_attention, silu

from specbranch.models import rope
from specbranch.models.cpu.linear import Linear, choose_linear, small_linear, takes
from specbranch.models.files.architecture import Architecture
from specbranch.models.files.matrix import Matrix
from specbranch.models.files.weights import LayerWeights, Weights
from specbranch.models.gpu.stored import StoredLinear
from specbranch.models.kv import PAGE, Memory


@dataclass(frozen=True, slots=True)
class Lines:
    """What rows of the tail see: the first `shared` positions in common, then each its own line, place by place in the pool."""

    most_shared: int
    shared: Tensor  # [rows]
    own: Tensor  # [rows, longest line]
    counts: Tensor  # [rows], of each line


@dataclass(frozen=True, slots=True)
class Part:
    """The rows of one sequence within a step: nodes of its tail, or a chunk of its text, in which each row sees all before it."""

    pages: Sequence[int]
    places: Tensor  # [rows], in the pool
    end: int  # positions, with those of this part
    lines: Lines | None  # nothing: a chunk


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
    """Weights and position tables; the pool's memory comes with each step."""

    def __init__(self, arch: Architecture, weights: Weights, positions: int) -> None:
        self.arch, self.stored = arch, weights.stored
        self.embedding = weights.embedding
        self.layers = tuple(_layer(arch, layer) for layer in weights.layers)
        self.norm = weights.norm
        self.columns = weights.reduced.columns if weights.reduced else None
        self.head = _linear(weights.reduced.matrix if weights.reduced else weights.head, weights.norm.dtype)
        # The weight that is multiplied by, should that be another than was given: none is held twice.
        held = getattr(self.head, "weight", weights.head.weight)
        self.head_matrix = None if weights.reduced else replace(weights.head, weight=held)
        self.cos, self.sin = rope.tables(arch.rope, arch.head_dim, positions, weights.norm.device, weights.norm.dtype)

    def forward(self, step: Step, memory: Memory, seen: list[Tensor] | None = None) -> Tensor:
        """Run every layer, writing keys and values; returns the last hidden states [rows, hidden], not yet normed.

        What each layer is given is appended to `seen`, where there is one.
        """
        x = embedding(step.tokens, self.embedding)
        cos, sin = (table.index_select(0, step.positions).unsqueeze(1) for table in (self.cos, self.sin))
        for index, layer in enumerate(self.layers):
            if seen is not None:
                seen.append(x)
            h = self._normed(x, layer.attention_norm)
            x = x + self._attention(layer, h, step.parts, memory.layer(index), cos, sin)
            x = x + self._mlp(layer, self._normed(x, layer.mlp_norm))
        return x

    def logits(self, hidden: Tensor) -> Tensor:
        """Score the vocabulary, or `columns` of it, for hidden states [rows, hidden]."""
        return self.head(self.normed(hidden))

    def normed(self, hidden: Tensor) -> Tensor:
        """Return the last hidden states as the head reads them."""
        return self._normed(hidden, self.norm)

    def _attention(self, layer: Layer, h: Tensor, parts: Sequence[Part], held: tuple[Tensor, Tensor], cos: Tensor, sin: Tensor) -> Tensor:
        heads, kv_heads = self.arch.heads, self.arch.kv_heads
        qkv = layer.qkv(h).view(h.shape[0], heads + 2 * kv_heads, self.arch.head_dim)
        qk, values = qkv[:, : heads + kv_heads], qkv[:, heads + kv_heads :]
        if layer.qk_norm is not None:
            qk = rms_norm(qk, (self.arch.head_dim,), eps=self.arch.rms_eps) * layer.qk_norm
        qk = rope.turn(qk, cos, sin)
        return layer.out(self._attend(parts, held, qk[:, :heads], qk[:, heads:], values))

    def _attend(self, parts: Sequence[Part], held: tuple[Tensor, Tensor], queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Let the rows of each part attend to its own sequence; returns [rows, heads·head_dim]."""
        counts = [part.places.shape[0] for part in parts]
        pieces = zip(parts, *(torch.split(whole, counts) for whole in (queries, keys, values)), strict=True)
        seen = [_attend_part(part, held, *piece) for part, *piece in pieces]
        return seen[0] if len(seen) == 1 else torch.cat(seen)

    def _mlp(self, layer: Layer, h: Tensor) -> Tensor:
        gate, up = layer.gate_up(h).chunk(2, -1)
        return layer.down(silu(gate).mul_(up))

    def _normed(self, x: Tensor, weight: Tensor) -> Tensor:
        return rms_norm(x, (self.arch.hidden,), weight, self.arch.rms_eps)


def _attend_part(part: Part, held: tuple[Tensor, Tensor], queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Store the keys and values of a part's rows, then let them attend; returns [rows, heads·head_dim]."""
    for stored, new in zip(held, (keys, values), strict=True):
        stored[part.places // PAGE, :, part.places % PAGE] = new
    attend = attend_chunk if part.lines is None else attend_lines
    return attend(queries, *held, part)


def attend_chunk(queries: Tensor, keys: Tensor, values: Tensor, part: Part) -> Tensor:
    """Attend with the last rows of a text to all of it; keys and values are those of all pages [pages, kv_heads, PAGE, head_dim]."""
    rows, heads, head_dim = queries.shape
    keys, values = (torch.cat([whole[page] for page in part.pages], dim=1)[None, :, : part.end] for whole in (keys, values))
    at = torch.arange(part.end, device=queries.device)
    seen = at <= at[part.end - rows :, None]
    if queries.device.type == "cpu":
        out = scaled_dot_product_attention(queries.transpose(0, 1)[None], keys, values, attn_mask=seen, enable_gqa=True)
        return out[0].transpose(0, 1).reshape(rows, heads * head_dim)
    # Masked kernels of GPUs know no groups of heads: those that share a key head are taken as several rows.
    group = heads // keys.shape[1]
    grouped = queries.view(rows, -1, group, head_dim).transpose(0, 1).reshape(1, -1, rows * group, head_dim)
    out = scaled_dot_product_attention(grouped, keys, values, attn_mask=seen.repeat_interleave(group, 0, output_size=rows * group))
    return out.view(-1, rows, group, head_dim).transpose(0, 1).reshape(rows, heads * head_dim)


def attend_lines(queries: Tensor, keys: Tensor, values: Tensor, part: Part) -> Tensor:
    """Attend by positions: what is shared page by page, where it lies, then each row's own line."""
    rows, heads, head_dim = queries.shape
    lines, kv_heads = part.lines, keys.shape[1]
    assert lines is not None
    grouped = queries.view(rows, kv_heads, -1, head_dim).transpose(0, 1) * head_dim**-0.5  # [kv_heads, rows, group, head_dim]
    flat = grouped.reshape(kv_heads, -1, head_dim)
    at = lines.own // PAGE, lines.own % PAGE
    own_keys, own_values = (whole[at[0], :, at[1]].permute(2, 0, 1, 3) for whole in (keys, values))  # [kv_heads, rows, own, head_dim]
    ends = [min(PAGE, lines.most_shared - start) for start in range(0, lines.most_shared, PAGE)]  # what lies beyond may be anything
    pages = [(page, end) for page, end in zip(part.pages, ends, strict=False)]
    common = [(flat @ keys[page, :, :end].mT).view(kv_heads, rows, -1, end) for page, end in pages]
    hidden = [torch.arange(lines.most_shared, device=queries.device) >= lines.shared[:, None]]
    hidden.append(torch.arange(lines.own.shape[1], device=queries.device) >= lines.counts[:, None])
    scores = _wide(torch.cat((*common, grouped @ own_keys.mT), dim=-1)).masked_fill_(torch.cat(hidden, -1)[:, None], -torch.inf)
    *shares, own = torch.split(scores.softmax(dim=-1).to(queries.dtype), [*ends, lines.own.shape[1]], dim=-1)
    out = own @ own_values
    for (page, end), share in zip(pages, shares, strict=True):
        out = out + (share.reshape(kv_heads, -1, end) @ values[page, :, :end]).view_as(out)
    return out.permute(1, 0, 2, 3).reshape(rows, heads * head_dim)


def _wide(x: Tensor) -> Tensor:
    """Return it in float32 or better."""
    return x.float() if x.dtype.itemsize < 4 else x


def _layer(arch: Architecture, weights: LayerWeights) -> Layer:
    dtype = weights.attention_norm.dtype
    return Layer(
        attention_norm=weights.attention_norm,
        qkv=_linear(weights.qkv, dtype),
        qk_norm=_joined_norm(arch, weights.q_norm, weights.k_norm),
        out=_linear(weights.out, dtype),
        mlp_norm=weights.mlp_norm,
        gate_up=_linear(weights.gate_up, dtype),
        down=_linear(weights.down, dtype),
    )


def _joined_norm(arch: Architecture, q_norm: Tensor | None, k_norm: Tensor | None) -> Tensor | None:
    """One row a head, so that queries and keys are scaled in one go."""
    if q_norm is None or k_norm is None:
        return None
    return torch.cat((q_norm.expand(arch.heads, -1), k_norm.expand(arch.kv_heads, -1)))


def _linear(matrix: Matrix, dtype: torch.dtype) -> Linear:
    """Return what multiplies by a matrix in this precision."""
    if matrix.scale is None:
        return choose_linear(matrix.weight, matrix.bias)
    if takes(matrix.stored, matrix.weight.device, dtype):
        return small_linear(matrix.weight, matrix.bias, matrix.scale)
    return StoredLinear(matrix)
