"""The decoder of the Llama family in plain torch: one step over rows of several sequences, on paged KV memory.

It is the reference on every device. Owns the arithmetic. The caller decides which token lies in which KV slot, and
passes that as tensors. Invariants: a step never waits for the device. It writes new keys and values to the rows' KV
slots before it attends, and nowhere else. A row of a tail attends to keys in the order of their positions; its position
alone decides which of them are read page by page.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import rms_norm, silu

from specbranch.core.pages import PAGE
from specbranch.models.cache.kv_memory import Memory, gathered, put, widened
from specbranch.models.cpu.block_kernels import block_linear
from specbranch.models.cpu.linear import Linear, choose_linear, small_linear, takes
from specbranch.models.files.architecture import Architecture
from specbranch.models.files.blocks import AnyMatrix, BlockMatrix
from specbranch.models.files.stored_rows import looked_up
from specbranch.models.files.weights import LayerWeights, Weights
from specbranch.models.forward import rope
from specbranch.models.forward.chunk_attention import choose_attend_chunk
from specbranch.models.forward.stored_linear import StoredLinear


@dataclass(frozen=True, slots=True)
class OwnPaths:
    """What the rows of a tail attend to: the first `shared` positions of the sequence, then each row's own path."""

    pages: Sequence[int]  # of the sequence
    most_shared: int  # the largest of `shared`
    shared: Tensor  # [rows]: positions that a row has in common with the others
    own: Tensor  # [rows, longest path]: KV slots of the pool, padded
    counts: Tensor  # [rows]: how many of `own` are not padding


@dataclass(frozen=True, slots=True)
class ChunkView:
    """What the rows of a prefill chunk attend to: all positions up to their own (causal)."""

    pages: Tensor  # [pages]
    end: int  # positions so far, those of the chunk included


@dataclass(frozen=True, slots=True)
class DecoderRows:
    """The rows of one sequence within a step: nodes of its tail, or a prefill chunk."""

    rows: int
    sees: OwnPaths | ChunkView


@dataclass(frozen=True, slots=True)
class Step:
    """The input of one forward: the rows of every sequence, one sequence after the other."""

    tokens: Tensor  # [rows]
    positions: Tensor  # [rows]
    kv_slots: Tensor  # [2, rows]: the page that each row is written to, and the offset within it
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
        self.head_matrix = None if weights.reduced else _with_used_weight(weights.head, self.head)
        self.cos, self.sin = rope.tables(arch.rope, arch.head_dim, positions, device, dtype)
        self.attend_chunk = choose_attend_chunk(device, dtype, arch.heads, arch.kv_heads, arch.head_dim)

    def forward(self, step: Step, memory: Memory, layer_inputs: list[Tensor] | None = None) -> Tensor:
        """Run all layers and write keys and values; returns the last hidden states [rows, hidden], not yet normed.

        Appends the input of each layer to `layer_inputs` if that is given.
        """
        x, *angles = self._inputs(step)
        for index, layer in enumerate(self.layers):
            if layer_inputs is not None:
                layer_inputs.append(x)
            x = self._run_layer(layer, x, step, memory.layer(index), angles)
        return x

    def store(self, step: Step, memory: Memory) -> None:
        """Write keys and values only: no attention in the last layer, no logits."""
        x, *angles = self._inputs(step)
        *others, last = self.layers
        for index, layer in enumerate(others):
            x = self._run_layer(layer, x, step, memory.layer(index), angles)
        self._write_keys_values(last, x, step, memory.layer(len(others)), angles)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits of hidden states [rows, hidden]: over the vocabulary, or over `columns` of it."""
        return self.head(self.normed(hidden))

    def normed(self, hidden: Tensor) -> Tensor:
        """Apply the final norm."""
        return self._normed(hidden, self.norm)

    def _inputs(self, step: Step) -> tuple[Tensor, Tensor, Tensor]:
        """Return the rows' embeddings [rows, hidden], and their cos and sin [rows, 1, head_dim]."""
        cos, sin = (table.index_select(0, step.positions).unsqueeze(1) for table in (self.cos, self.sin))
        return looked_up(self.embedding, step.tokens), cos, sin

    def _run_layer(
        self, layer: Layer, x: Tensor, step: Step, kv: tuple[Tensor, Tensor], angles: Sequence[Tensor]
    ) -> Tensor:
        """Run one layer; `kv`: its keys and values in the cache."""
        queries = self._write_keys_values(layer, x, step, kv, angles)
        x = x + layer.out(self._attend(step.parts, kv, queries))
        return x + self._mlp(layer, self._normed(x, layer.mlp_norm))

    def _write_keys_values(
        self, layer: Layer, x: Tensor, step: Step, kv: tuple[Tensor, Tensor], angles: Sequence[Tensor]
    ) -> Tensor:
        """Write the keys and values of all rows, and return their queries [rows, heads, head_dim]."""
        heads, kv_heads = self.arch.heads, self.arch.kv_heads
        h = self._normed(x, layer.attention_norm)
        qkv = layer.qkv(h).view(h.shape[0], heads + 2 * kv_heads, self.arch.head_dim)
        qk, values = qkv[:, : heads + kv_heads], qkv[:, heads + kv_heads :]
        if layer.qk_norm is not None:
            qk = rms_norm(qk, (self.arch.head_dim,), eps=self.arch.rms_eps) * layer.qk_norm
        qk = rope.turn(qk, *angles)
        for side, new in zip(kv, (qk[:, heads:], values), strict=True):
            put(side, step.kv_slots, new)
        return qk[:, :heads]

    def _attend(self, parts: Sequence[DecoderRows], kv: tuple[Tensor, Tensor], queries: Tensor) -> Tensor:
        """Attend: the rows of each part to their own sequence; returns [rows, heads·head_dim]."""
        split = zip(parts, torch.split(queries, [part.rows for part in parts]), strict=True)
        attended = [self._attend_part(part.sees, kv, rows) for part, rows in split]
        return attended[0] if len(attended) == 1 else torch.cat(attended)

    def _attend_part(self, sees: OwnPaths | ChunkView, kv: tuple[Tensor, Tensor], queries: Tensor) -> Tensor:
        if isinstance(sees, OwnPaths):
            return attend_own_paths(queries, *kv, sees)
        return self.attend_chunk(
            queries, *(widened(gathered(side, sees.pages, sees.end), queries.dtype) for side in kv)
        )

    def _mlp(self, layer: Layer, h: Tensor) -> Tensor:
        gate, up = layer.gate_up(h).chunk(2, -1)
        return layer.down(silu(gate).mul_(up))

    def _normed(self, x: Tensor, weight: Tensor) -> Tensor:
        return rms_norm(x, (self.arch.hidden,), weight, self.arch.rms_eps)


def attend_own_paths(queries: Tensor, keys: Tensor, values: Tensor, paths: OwnPaths) -> Tensor:
    """Attend from rows of a tail: to shared positions page by page, in place, then to each row's own path."""
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
    # per page, how many of its KV slots are shared; the memory beyond may hold anything
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
    """Convert to float32 unless the type is as wide or wider."""
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
    """Join both norms, one row for each head, so that queries and keys are scaled in one operation."""
    if q_norm is None or k_norm is None:
        return None
    return torch.cat((q_norm.expand(arch.heads, -1), k_norm.expand(arch.kv_heads, -1)))


def _with_used_weight(matrix: AnyMatrix, linear: Linear) -> AnyMatrix:
    """Return the matrix with the weight that the linear layer uses, which may be a copy: none is stored twice."""
    return (
        matrix if isinstance(matrix, BlockMatrix) else replace(matrix, weight=getattr(linear, "weight", matrix.weight))
    )


def _linear(matrix: AnyMatrix, dtype: torch.dtype) -> Linear:
    """Return the linear layer that multiplies by a matrix in this precision."""
    if isinstance(matrix, BlockMatrix):
        return block_linear(matrix)
    if matrix.scale is None:
        return choose_linear(matrix.weight, matrix.bias)
    if matrix.simple and takes(matrix.stored, matrix.weight.device, dtype):
        return small_linear(matrix.weight, matrix.bias, matrix.scale)
    return StoredLinear(matrix)
