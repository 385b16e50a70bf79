"""The decoder of the Llama family in plain torch: one step over rows of several sequences, on a pool of pages; the
reference on any device.

Owns the arithmetic; which token lies where is decided outside and comes in as tensors. Invariants: a step waits for
nothing. It writes the new keys and values at their rows' KV slots before it attends, and nowhere else. A row of the
tail reads its keys in the order of their positions, and by code that its position alone decides."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import rms_norm, silu

from specbranch.core.pages import PAGE
from specbranch.models import rope
from specbranch.models.chunk_attention import choose_attend_chunk
from specbranch.models.cpu.block_kernels import block_linear
from specbranch.models.cpu.linear import Linear, choose_linear, small_linear, takes
from specbranch.models.files.architecture import Architecture
from specbranch.models.files.blocks import AnyMatrix, BlockMatrix
from specbranch.models.files.stored_rows import looked_up
from specbranch.models.files.weights import LayerWeights, Weights
from specbranch.models.gpu.stored import StoredLinear
from specbranch.models.kv import Memory, gathered, put, widened


@dataclass(frozen=True, slots=True)
class OwnPaths:
    """What rows of the tail see: the first `shared` positions in common, then each its own path, one by one in
    the pool."""

    pages: Sequence[int]
    most_shared: int
    shared: Tensor  # [rows]
    own: Tensor  # [rows, longest path]
    counts: Tensor  # [rows], of each path


@dataclass(frozen=True, slots=True)
class ChunkView:
    """What rows of a chunk see: the text so far, each row what comes before it, and itself."""

    pages: Tensor  # [pages]
    end: int  # positions, with those of the chunk


@dataclass(frozen=True, slots=True)
class DecoderRows:
    """The rows of one sequence within a step: nodes of its tail, or a chunk of its text."""

    rows: int
    sees: OwnPaths | ChunkView


@dataclass(frozen=True, slots=True)
class Step:
    """What one forward works on: the rows of every part, one after the other."""

    tokens: Tensor  # [rows]
    positions: Tensor  # [rows]
    kv_slots: Tensor  # [2, rows]: the page each is written to, and the KV slot within it
    parts: tuple[DecoderRows, ...]


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
        device, dtype = weights.norm.device, weights.norm.dtype
        self.head = _linear(weights.reduced.matrix if weights.reduced else weights.head, dtype)
        self.head_matrix = None if weights.reduced else _held(weights.head, self.head)
        self.cos, self.sin = rope.tables(arch.rope, arch.head_dim, positions, device, dtype)
        self.attend_chunk = choose_attend_chunk(device, dtype, arch.heads, arch.kv_heads, arch.head_dim)

    def forward(self, step: Step, memory: Memory, seen: list[Tensor] | None = None) -> Tensor:
        """Run every layer, writing keys and values; returns the last hidden states [rows, hidden], not yet normed.

        What each layer is given is appended to `seen`, where there is one.
        """
        x, *turning = self._entered(step)
        for index, layer in enumerate(self.layers):
            if seen is not None:
                seen.append(x)
            x = self._through(layer, x, step, memory.layer(index), turning)
        return x

    def store(self, step: Step, memory: Memory) -> None:
        """Write keys and values, and compute nothing that they do not need."""
        x, *turning = self._entered(step)
        *others, last = self.layers
        for index, layer in enumerate(others):
            x = self._through(layer, x, step, memory.layer(index), turning)
        self._written(last, x, step, memory.layer(len(others)), turning)

    def logits(self, hidden: Tensor) -> Tensor:
        """Score the vocabulary, or `columns` of it, for hidden states [rows, hidden]."""
        return self.head(self.normed(hidden))

    def normed(self, hidden: Tensor) -> Tensor:
        """Return the last hidden states as the head reads them."""
        return self._normed(hidden, self.norm)

    def _entered(self, step: Step) -> tuple[Tensor, Tensor, Tensor]:
        """The rows' embeddings, and what turns them [rows, 1, head_dim]."""
        cos, sin = (table.index_select(0, step.positions).unsqueeze(1) for table in (self.cos, self.sin))
        return looked_up(self.embedding, step.tokens), cos, sin

    def _through(
        self, layer: Layer, x: Tensor, step: Step, held: tuple[Tensor, Tensor], turning: Sequence[Tensor]
    ) -> Tensor:
        """Run one layer."""
        queries = self._written(layer, x, step, held, turning)
        x = x + layer.out(self._attend(step.parts, held, queries))
        return x + self._mlp(layer, self._normed(x, layer.mlp_norm))

    def _written(
        self, layer: Layer, x: Tensor, step: Step, held: tuple[Tensor, Tensor], turning: Sequence[Tensor]
    ) -> Tensor:
        """Write the keys and values of all rows; returns their queries [rows, heads, head_dim]."""
        heads, kv_heads = self.arch.heads, self.arch.kv_heads
        h = self._normed(x, layer.attention_norm)
        qkv = layer.qkv(h).view(h.shape[0], heads + 2 * kv_heads, self.arch.head_dim)
        qk, values = qkv[:, : heads + kv_heads], qkv[:, heads + kv_heads :]
        if layer.qk_norm is not None:
            qk = rms_norm(qk, (self.arch.head_dim,), eps=self.arch.rms_eps) * layer.qk_norm
        qk = rope.turn(qk, *turning)
        for side, new in zip(held, (qk[:, heads:], values), strict=True):
            put(side, step.kv_slots, new)
        return qk[:, :heads]

    def _attend(self, parts: Sequence[DecoderRows], held: tuple[Tensor, Tensor], queries: Tensor) -> Tensor:
        """Let the rows of each part attend to its own sequence; returns [rows, heads·head_dim]."""
        split = zip(parts, torch.split(queries, [part.rows for part in parts]), strict=True)
        seen = [self._attend_part(part.sees, held, rows) for part, rows in split]
        return seen[0] if len(seen) == 1 else torch.cat(seen)

    def _attend_part(self, sees: OwnPaths | ChunkView, held: tuple[Tensor, Tensor], queries: Tensor) -> Tensor:
        if isinstance(sees, OwnPaths):
            return attend_own_paths(queries, *held, sees)
        return self.attend_chunk(
            queries, *(widened(gathered(side, sees.pages, sees.end), queries.dtype) for side in held)
        )

    def _mlp(self, layer: Layer, h: Tensor) -> Tensor:
        gate, up = layer.gate_up(h).chunk(2, -1)
        return layer.down(silu(gate).mul_(up))

    def _normed(self, x: Tensor, weight: Tensor) -> Tensor:
        return rms_norm(x, (self.arch.hidden,), weight, self.arch.rms_eps)


def attend_own_paths(queries: Tensor, keys: Tensor, values: Tensor, paths: OwnPaths) -> Tensor:
    """Attend by positions: what is shared page by page, where it lies, then each row's own path."""
    rows, heads, head_dim = queries.shape
    kv_heads = keys.shape[1]
    # [kv_heads, rows, group, head_dim]
    grouped = queries.view(rows, kv_heads, -1, head_dim).transpose(0, 1) * head_dim**-0.5
    flat = grouped.reshape(kv_heads, -1, head_dim)
    at = paths.own // PAGE, paths.own % PAGE
    # [kv_heads, rows, own, head_dim]
    own_keys, own_values = (
        widened(whole[at[0], :, at[1]].permute(2, 0, 1, 3), queries.dtype) for whole in (keys, values)
    )
    # what lies beyond may be anything
    ends = [min(PAGE, paths.most_shared - start) for start in range(0, paths.most_shared, PAGE)]
    pages = [(page, end) for page, end in zip(paths.pages, ends, strict=False)]
    seen = [widened(keys[page, :, :end], queries.dtype) for page, end in pages]
    common = [(flat @ some.mT).view(kv_heads, rows, -1, some.shape[1]) for some in seen]
    hidden = [torch.arange(paths.most_shared, device=queries.device) >= paths.shared[:, None]]
    hidden.append(torch.arange(paths.own.shape[1], device=queries.device) >= paths.counts[:, None])
    scores = _wide(torch.cat((*common, grouped @ own_keys.mT), dim=-1)).masked_fill_(
        torch.cat(hidden, -1)[:, None], -torch.inf
    )
    *shares, own = torch.split(scores.softmax(dim=-1).to(queries.dtype), [*ends, paths.own.shape[1]], dim=-1)
    out = own @ own_values
    for (page, end), share in zip(pages, shares, strict=True):
        found = widened(values[page, :, :end], queries.dtype)
        out = out + (share.reshape(kv_heads, -1, end) @ found).view_as(out)
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


def _held(matrix: AnyMatrix, linear: Linear) -> AnyMatrix:
    """The matrix with the weight that is multiplied by, should that be another than was given: none is held twice."""
    return (
        matrix if isinstance(matrix, BlockMatrix) else replace(matrix, weight=getattr(linear, "weight", matrix.weight))
    )


def _linear(matrix: AnyMatrix, dtype: torch.dtype) -> Linear:
    """Return what multiplies by a matrix in this precision."""
    if isinstance(matrix, BlockMatrix):
        return block_linear(matrix)
    if matrix.scale is None:
        return choose_linear(matrix.weight, matrix.bias)
    if takes(matrix.stored, matrix.weight.device, dtype):
        return small_linear(matrix.weight, matrix.bias, matrix.scale)
    return StoredLinear(matrix)
