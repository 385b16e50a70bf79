"""The decoder in plain torch: one step over rows of several sequences, on paged KV memory.

It is the reference on every device. It runs the operations that a family lists for each layer (`families/`). Owns the
order of keys and values. The caller decides which token lies in which KV slot, and
passes that as tensors. Invariants: a step never waits for the device. It writes new keys and values to the rows' KV
slots before it attends, and nowhere else. A row of a tail attends to keys in the order of their positions; its position
alone decides which of them are read page by page.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import repeat

import torch
from torch import Tensor

from specbranch.core.pages import PAGE
from specbranch.models.cache.kv_memory import Memory, gathered, put, widened
from specbranch.models.cpu.block_kernels import block_linear
from specbranch.models.cpu.linear import Linear, choose_linear, small_linear, takes
from specbranch.models.families.operations import (
    PLAIN_ATTENTION,
    Attention,
    Experts,
    GatedMlp,
    LayerForm,
    Residual,
    attention_of,
    experts_of,
)
from specbranch.models.files.architecture import Architecture
from specbranch.models.files.blocks import AnyMatrix, BlockMatrix
from specbranch.models.files.stored_rows import looked_up
from specbranch.models.files.weights import LayerWeights, Weights
from specbranch.models.forward import rope
from specbranch.models.forward.arithmetic import bounded, gated, heads_normed, normed, outside, shares
from specbranch.models.forward.chunk_attention import attend_masked, choose_attend_chunk
from specbranch.models.forward.experts import ExpertLinears
from specbranch.models.forward.row_attention import attend_row, parts_seen, ranges_seen
from specbranch.models.forward.stored_linear import StoredLinear

Angles = tuple[Tensor, Tensor]  # cos and signed sin [rows, 1, head_dim]


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
    features: Tensor | None = None  # [rows, hidden]: of the position before each row, for a draft that reads them


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer: what it computes, and its matrices as callables."""

    form: LayerForm
    attention_norm: Tensor
    qkv: Linear
    qk_norm: Tensor | None  # [heads + kv_heads, head_dim]
    out: Linear
    mlp_norm: Tensor
    gate_up: Linear | None  # of a layer with an MLP
    down: Linear | None
    experts: ExpertLinears | None  # of a layer with experts
    attention_after_norm: Tensor | None
    mlp_after_norm: Tensor | None
    sinks: Tensor | None  # [heads]
    hidden_norm: Tensor | None = None  # of a layer that reads features

    def norm(self, name: str) -> Tensor:
        """Return the weight of a norm."""
        weight: Tensor = getattr(self, name)
        return weight

    def run_mlp(self, operation: GatedMlp | Experts, h: Tensor) -> Tensor:
        """Run the MLP, or the experts, on normed rows."""
        if self.experts is not None:
            return self.experts(h)
        assert self.gate_up is not None and self.down is not None
        return self.down(gated(self.gate_up(h), operation.activation))


class Decoder:
    """Weights and position tables; the pool's memory comes with each step."""

    def __init__(self, arch: Architecture, weights: Weights, positions: int) -> None:
        self.arch, self.stored = arch, weights.stored
        self.embedding = weights.embedding
        self.dtype = dtype = weights.embedding.dtype
        self.plain = arch.is_plain(positions)  # True if it computes what Llama computes
        self.compilable = arch.is_plain_but_for_draft_window(positions)  # True if the compiled CPU step may run it
        # True if a row's bits may depend on other rows: compiled steps do better, and a feature draft need not
        self.together = self.plain or arch.join is not None
        self.layers = tuple(map(_layer, repeat(arch), arch.forms(positions), weights.layers, repeat(dtype)))
        self.norm = weights.norm
        self.columns = weights.reduced.columns if weights.reduced else None
        device = weights.norm.device
        self.head = _linear(weights.reduced.matrix if weights.reduced else weights.head, dtype)
        self.head_matrix = None if weights.reduced else _with_used_weight(weights.head, self.head)
        self.tables = tuple(rope.tables(one, arch.head_dim, positions, device, dtype) for one in arch.ropes)
        self.cos, self.sin = self.tables[0]
        # rounded as the embedding is, so that every precision multiplies by a number of its own type
        scale = arch.embedding_scale
        self.embedding_scale = None if scale is None else torch.tensor(scale, dtype=dtype).item()
        self.attend_chunk = choose_attend_chunk(device, dtype, arch.heads, arch.kv_heads, arch.head_dim)

    def forward(self, step: Step, memory: Memory, layer_inputs: list[Tensor] | None = None) -> Tensor:
        """Run all layers and write keys and values; returns the last hidden states [rows, hidden], not yet normed.

        Appends the input of each layer to `layer_inputs` if that is given.
        """
        (x, embedded), angles = self._entered(step), self._angles(step)
        for index, layer in enumerate(self.layers):
            if layer_inputs is not None:
                layer_inputs.append(x)
            x = self._run_layer(layer, x, embedded, step, memory.layer(index), angles)
        return x

    def store(self, step: Step, memory: Memory, layer_inputs: list[Tensor] | None = None) -> None:
        """Write keys and values only: no attention in the last layer, no logits. `layer_inputs` as for `forward`."""
        (x, embedded), angles = self._entered(step), self._angles(step)
        *others, last = self.layers
        for index, layer in enumerate(others):
            if layer_inputs is not None:
                layer_inputs.append(x)
            x = self._run_layer(layer, x, embedded, step, memory.layer(index), angles)
        if layer_inputs is not None:
            layer_inputs.append(x)
        h, _ = self._input_of(layer=last, residual=last.form[0], x=x, embedded=embedded)
        self._write_keys_values(last, h, step, memory.layer(len(others)), angles[attention_of(last.form).table])

    def embedded(self, tokens: Tensor) -> Tensor:
        """Return the first layer's input [rows, hidden]."""
        x = looked_up(self.embedding, tokens)
        return x if self.embedding_scale is None else x * self.embedding_scale

    def _entered(self, step: Step) -> tuple[Tensor, Tensor]:
        """Return the first layer's input, and the rows' embeddings: the same, unless the model reads features."""
        embedded = self.embedded(step.tokens)
        return (embedded if step.features is None else step.features), embedded

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits of hidden states [rows, hidden]: over the vocabulary, or over `columns` of it."""
        return self.scored(self.normed(hidden))

    def scored(self, normed_rows: Tensor) -> Tensor:
        """Return the logits of normed hidden states."""
        return bounded(self.head(normed_rows), self.arch.logit_softcap)

    def normed(self, hidden: Tensor) -> Tensor:
        """Apply the final norm."""
        return self._normed(hidden, self.norm)

    def _angles(self, step: Step) -> list[Angles]:
        """Return the rows' cos and sin of each rotary table."""
        return [
            (cos.index_select(0, step.positions).unsqueeze(1), sin.index_select(0, step.positions).unsqueeze(1))
            for cos, sin in self.tables
        ]

    def _run_layer(
        self,
        layer: Layer,
        x: Tensor,
        embedded: Tensor,
        step: Step,
        kv: tuple[Tensor, Tensor],
        angles: Sequence[Angles],
    ) -> Tensor:
        """Run the operations of one layer; `kv`: its keys and values in the cache."""
        for residual in layer.form:
            h, x = self._input_of(layer, residual, x, embedded)
            operation = residual.operation
            if isinstance(operation, Attention):
                queries = self._write_keys_values(layer, h, step, kv, angles[operation.table])
                change = layer.out(self._attend(step.parts, kv, queries, operation, layer.sinks))
            else:
                change = layer.run_mlp(operation, h)
            x = x + (change if residual.after is None else self._normed(change, layer.norm(residual.after)))
        return x

    def _input_of(self, layer: Layer, residual: Residual, x: Tensor, embedded: Tensor) -> tuple[Tensor, Tensor]:
        """Return the input of an operation, and the stream that its output is added to."""
        norm = layer.norm(residual.norm)
        if residual.join is None:
            return self._normed(x, norm), x
        assert layer.hidden_norm is not None
        feature = self._normed(x, layer.hidden_norm)
        joined = torch.cat((self._normed(embedded, norm), feature), dim=-1)
        return joined, feature if residual.join.normed_residual else x

    def _write_keys_values(
        self, layer: Layer, h: Tensor, step: Step, kv: tuple[Tensor, Tensor], angles: Angles
    ) -> Tensor:
        """Write the keys and values of all normed rows, and return their queries [rows, heads, head_dim]."""
        heads, kv_heads = self.arch.heads, self.arch.kv_heads
        qkv = layer.qkv(h).view(h.shape[0], heads + 2 * kv_heads, self.arch.head_dim)
        qk, values = qkv[:, : heads + kv_heads], qkv[:, heads + kv_heads :]
        if layer.qk_norm is not None:
            qk = heads_normed(qk, layer.qk_norm, self.arch.rms_eps)
        qk = rope.turn(qk, *angles)
        for side, new in zip(kv, (qk[:, heads:], values), strict=True):
            put(side, step.kv_slots, new)
        return qk[:, :heads]

    def _attend(
        self,
        parts: Sequence[DecoderRows],
        kv: tuple[Tensor, Tensor],
        queries: Tensor,
        attention: Attention,
        sinks: Tensor | None,
    ) -> Tensor:
        """Attend: the rows of each part to their own sequence; returns [rows, heads·head_dim]."""
        split = zip(parts, torch.split(queries, [part.rows for part in parts]), strict=True)
        attended = [self._attend_part(part.sees, kv, rows, attention, sinks) for part, rows in split]
        return attended[0] if len(attended) == 1 else torch.cat(attended)

    def _attend_part(
        self,
        sees: OwnPaths | ChunkView,
        kv: tuple[Tensor, Tensor],
        queries: Tensor,
        attention: Attention,
        sinks: Tensor | None,
    ) -> Tensor:
        if isinstance(sees, OwnPaths):
            attend = attend_own_paths if self.together else attend_rows_apart
            return attend(queries, *kv, sees, attention, sinks)
        keys, values = (widened(gathered(side, sees.pages, sees.end), queries.dtype) for side in kv)
        if attention.is_plain:
            return self.attend_chunk(queries, keys, values)
        return attend_masked(queries, keys, values, attention, sinks)

    def _normed(self, x: Tensor, weight: Tensor) -> Tensor:
        return normed(x, weight, self.arch.rms_eps)


def attend_own_paths(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    paths: OwnPaths,
    attention: Attention = PLAIN_ATTENTION,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attend from rows of a tail: to shared positions page by page, in place, then to each row's own path."""
    rows, heads, head_dim = queries.shape
    kv_heads = keys.shape[1]
    # [kv_heads, rows, group, head_dim]
    grouped = queries.view(rows, kv_heads, -1, head_dim).transpose(0, 1) * (attention.scale or head_dim**-0.5)
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
    last = None if sinks is None else sinks.view(kv_heads, 1, -1, 1)
    found = shares(
        torch.cat((*common, grouped @ own_keys.mT), dim=-1), _hidden(paths, attention), attention.softcap, last
    )
    *parts, own = torch.split(found.to(queries.dtype), [*ends, paths.own.shape[1]], dim=-1)
    out = own @ own_values
    for (page, end), share in zip(pages, parts, strict=True):
        found = widened(values[page, :, :end], queries.dtype)
        out = out + (share.reshape(kv_heads, -1, end) @ found).view_as(out)
    return out.permute(1, 0, 2, 3).reshape(rows, heads * head_dim)


def attend_rows_apart(
    queries: Tensor, keys: Tensor, values: Tensor, paths: OwnPaths, attention: Attention, sinks: Tensor | None = None
) -> Tensor:
    """Attend as `attend_own_paths` does, with products of its own for each row."""
    pages, found = list(paths.pages), []
    for query, shared, own, count in zip(queries, paths.shared.tolist(), paths.own, paths.counts.tolist(), strict=True):
        end = shared + count
        ranges = ranges_seen(attention, end)
        seen = [part for first, last in ranges for part in parts_seen(pages, first, min(last, shared))]
        own = torch.cat([own[max(first - shared, 0) : max(last - shared, 0)] for first, last in ranges])
        found.append(attend_row(query, keys, values, seen, own, attention, sinks))
    return torch.stack(found)


def _hidden(paths: OwnPaths, attention: Attention) -> Tensor:
    """Return which keys a row does not see [rows, 1, shared positions and KV slots of its own path]."""
    shared, own = (
        torch.arange(size, device=paths.own.device).expand(len(paths.own), -1)
        for size in (paths.most_shared, paths.own.shape[1])
    )
    starts, counts = paths.shared[:, None], paths.counts[:, None]
    hidden = torch.cat((shared >= starts, own >= counts), -1)
    if attention.window is not None:
        left = starts + counts - attention.window  # the first position that the row sees
        hidden |= outside(attention, torch.cat((shared, own + starts), -1), left)
    if attention.skips_first:
        hidden |= (torch.cat((shared, own + starts), -1) == 0) & (starts + counts > 1)
    return hidden[:, None]


def _layer(arch: Architecture, form: LayerForm, weights: LayerWeights, dtype: torch.dtype) -> Layer:
    experts = experts_of(form)
    mlp = (_linear(weights.gate_up, dtype), _linear(weights.down, dtype)) if experts is None else (None, None)
    return Layer(
        form=form,
        attention_norm=weights.attention_norm,
        qkv=_linear(weights.qkv, dtype),
        qk_norm=_joined_norm(arch, weights.q_norm, weights.k_norm),
        out=_linear(weights.out, dtype),
        mlp_norm=weights.mlp_norm,
        gate_up=mlp[0],
        down=mlp[1],
        experts=None if experts is None else _experts(experts, weights, dtype),
        attention_after_norm=weights.attention_after_norm,
        mlp_after_norm=weights.mlp_after_norm,
        sinks=weights.sinks,
        hidden_norm=weights.hidden_norm,
    )


def _experts(form: Experts, weights: LayerWeights, dtype: torch.dtype) -> ExpertLinears:
    assert weights.router is not None
    gate_up, down = (
        tuple(_linear(part, dtype) for part in matrix.split(form.count)) for matrix in (weights.gate_up, weights.down)
    )
    return ExpertLinears(form, _linear(weights.router, dtype), gate_up, down)


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
