"""A draft that reads its target's hidden states (EAGLE-3's form), as a trainable batch model, unrolled.

The row of a token reads the token and a hidden state: of the target at the token before, or, where the draft goes on
alone, the draft's own of the row before. Owns that forward over packed batches, and the start from the target's last
layers. The tensors of depth d are stored by *root*, the last row that reads the target: its place holds the row d
tokens later. So depth d sees the roots up to its own, and the rows fed since at its own place. Invariants: a
conversation's first token has no row, as nothing stands before it. Embedding and head are the target's own tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding, linear, rms_norm

from specbranch.errors import BadParameter, UnsupportedArchitecture
from specbranch.models.files.architecture import Architecture
from specbranch.models.files.matrix import Matrix
from specbranch.models.files.weights import LayerWeights, Weights
from specbranch.models.forward import rope
from specbranch.models.forward.arithmetic import gated
from specbranch.training.distill.material import PADDING, Batch
from specbranch.training.distill.model import DeepRows, TrainedLayer, check_layers, counted
from specbranch.training.distill.unrolled_attention import Kernel, attend_unrolled, kernel_of

TAPS = 3  # hidden states of the target that a row reads
FEATURE_LAYERS = 2  # most layers of such a draft


@dataclass(frozen=True, slots=True)
class FeatureWeights:
    """What a feature draft has of its own; the first layer's q, k and v read a token and a state side by side."""

    fc: Tensor  # [hidden, TAPS · hidden]
    hidden_norm: Tensor
    layers: tuple[LayerWeights, ...]
    norm: Tensor
    head_ids: Tensor | None = None  # [tokens], ascending; None: the head is whole


def default_taps(held: int, layers: int) -> tuple[int, ...]:
    """Return after how many of a target's layers its state is read: early, in the middle, and what the draft's first
    layer read in the target.

    EAGLE-3 takes the last tap three layers before the end. Here the draft starts as the target's last layers, which
    compute what they were trained for only on the state that stood before them.
    """
    last = max(held - layers, TAPS - 1)
    first = min(2, last - 2)
    return first, min(max(held // 2, first + 1), last - 1), last


def check_taps(taps: Sequence[int], held: int) -> None:
    """Raise unless these are three ascending numbers of layers that the target has."""
    if len(taps) != TAPS or list(taps) != sorted(set(taps)) or not 0 <= taps[0] <= taps[-1] <= held:
        raise BadParameter(
            f"The taps are {list(taps)}; expected {TAPS} ascending numbers from 0 (the embedding) to {held} (all "
            "layers)."
        )


def check_feature_target(arch: Architecture, layers: Sequence[int], length: int) -> None:
    """Raise unless feature drafts can be made from these layers of a target."""
    if not 1 <= len(layers) <= FEATURE_LAYERS:
        raise BadParameter(
            f"A feature draft of {len(layers)} layers was asked for; expected 1 to {FEATURE_LAYERS}. A draft with more "
            "is made with --kind plain."
        )
    if not arch.is_plain(length) or any(arch.table_of(layer) for layer in layers):
        raise UnsupportedArchitecture(
            f"{arch.name} is of the family {arch.family}, whose layers are not Llama's, or see fewer than {length} "
            "positions; feature drafts have Llama's layers. Use --kind plain."
        )


def starting_weights(
    arch: Architecture, weights: Weights, layers: Sequence[int], head_ids: Tensor | None = None
) -> FeatureWeights:
    """Return a draft that computes what the target's layers compute from the last tap; tokens do not count yet."""
    check_layers(layers, len(weights.layers))
    first, *others = (weights.layers[index] for index in layers)
    qkv, size = first.qkv, arch.hidden
    assert isinstance(qkv, Matrix)
    wide = torch.cat((torch.zeros_like(qkv.weight), qkv.weight), dim=1)  # [embedding, state]
    fc = torch.cat((qkv.weight.new_zeros(size, (TAPS - 1) * size), torch.eye(size).to(qkv.weight)), dim=1)
    start = replace(first, qkv=Matrix(wide, qkv.bias), attention_norm=torch.ones_like(first.attention_norm))
    return FeatureWeights(fc, first.attention_norm, (start, *others), weights.norm, head_ids)


def rooted(batch: Batch) -> Batch:
    """Give each conversation's first token a segment of its own: no row sees it."""
    inner = batch.segments * 2 + (batch.positions > 0)
    return replace(batch, segments=inner.masked_fill(batch.segments == PADDING, PADDING), edges=None)


def depth_weights(batch: Batch, depths: int, fade: float) -> list[Tensor]:
    """Return how much each position [rows, length] counts at each depth: `fade` to its power, and nothing where the
    conversation began less than a row before the root."""
    return [
        torch.where((batch.positions > depth) & (batch.segments != PADDING), batch.weight * fade**depth, 0.0)
        for depth in range(depths)
    ]


def ahead(x: Tensor, places: int) -> Tensor:
    """Move what stands `places` later in a row [batch, length, …] to each place; what comes round means nothing."""
    return x if places == 0 else x.roll(-places, 1)


class FeatureStack(nn.Module):
    """A feature draft between its target's embedding and head; depth d has fed itself d states."""

    embedding: Tensor
    head: Tensor
    head_ids: Tensor | None

    def __init__(self, arch: Architecture, target: Weights, own: FeatureWeights, *, trained: bool = False) -> None:
        super().__init__()
        self.arch = arch
        self.blocks = nn.ModuleList(TrainedLayer(layer, trained) for layer in own.layers)
        vectors = {"fc": own.fc, "hidden_norm": own.hidden_norm, "norm": own.norm}
        for name, tensor in vectors.items():
            self.register_parameter(name, _parameter_of(tensor, trained))
        table, whole = target.in_floats()
        head = whole if own.head_ids is None else whole.rows(own.head_ids.to(whole.weight.device))
        self.register_buffer("embedding", table, persistent=False)  # no checkpoint stores the target's matrices again
        self.register_buffer("head", head.weight, persistent=False)
        self.register_buffer("head_ids", own.head_ids, persistent=False)

    def weights(self) -> FeatureWeights:
        """Return what the draft has of its own."""
        layers = tuple(block.weights() for block in self.blocks if isinstance(block, TrainedLayer))
        fc, hidden_norm, norm = (getattr(self, name).detach() for name in ("fc", "hidden_norm", "norm"))
        return FeatureWeights(fc, hidden_norm, layers, norm, self.head_ids)

    def forward(self, batch: Batch, taps: Tensor, depths: int) -> list[Tensor]:
        """Return the normed hidden states [batch, length, hidden] of each depth, by root.

        `batch` is `rooted`; `taps`: the target's states [batch, length, TAPS · hidden].
        """
        kernel = kernel_of(batch, self.embedding.dtype, self.arch.head_dim)
        assert isinstance(self.fc, Tensor)
        state = linear(ahead(taps, -1), self.fc.to(taps.dtype))
        texts = [_Text() for _ in self.blocks]
        found = []
        for depth in range(depths):
            state = self._row(ahead(batch.tokens, depth), batch.positions + depth, state, kernel, texts)
            found.append(self._normed(state, self.norm))
        return found

    def logits(self, hidden: Tensor) -> Tensor:
        """Score the tokens of the head."""
        return linear(hidden, self.head)

    def _row(self, tokens: Tensor, positions: Tensor, state: Tensor, kernel: Kernel, texts: list[_Text]) -> Tensor:
        """Return the state after all layers; `texts` get its keys and values."""
        turns = self._turns(positions)
        for index, (block, text) in enumerate(zip(self.blocks, texts, strict=True)):
            assert isinstance(block, TrainedLayer)
            if index == 0:
                token = self._normed(embedding(tokens, self.embedding), block.attention_norm)
                h = torch.cat((token, self._normed(state, self.hidden_norm)), -1)
            else:
                h = self._normed(state, block.attention_norm)
            state = state + self._attention(block, h, turns, kernel, text)
            h = self._normed(state, block.mlp_norm)
            state = state + block.apply_matrix("down", gated(block.apply_matrix("gate_up", h), "silu"))
        return state

    def _attention(
        self, block: TrainedLayer, h: Tensor, turns: tuple[Tensor, Tensor], kernel: Kernel, text: _Text
    ) -> Tensor:
        a = self.arch
        qkv = block.apply_matrix("qkv", h).view(*h.shape[:-1], -1, a.head_dim)  # [batch, length, heads, head_dim]
        queries, keys, values = torch.split(qkv, [a.heads, a.kv_heads, a.kv_heads], dim=-2)
        if isinstance(block.q_norm, Tensor) and isinstance(block.k_norm, Tensor):
            queries, keys = self._scaled(queries, block.q_norm), self._scaled(keys, block.k_norm)
        queries, keys = rope.turn(queries, *turns), rope.turn(keys, *turns)
        keys, values = (x.repeat_interleave(a.heads // a.kv_heads, dim=-2) for x in (keys, values))
        return block.apply_matrix("out", text.attended(kernel, queries, keys, values).flatten(-2))

    def _scaled(self, heads: Tensor, weight: Tensor) -> Tensor:
        return rms_norm(heads, (self.arch.head_dim,), weight.to(heads.dtype), self.arch.rms_eps)

    def _normed(self, x: Tensor, weight: Tensor | nn.Module) -> Tensor:
        assert isinstance(weight, Tensor)
        return rms_norm(x, (self.arch.hidden,), weight.to(x.dtype), self.arch.rms_eps)

    def _turns(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return cos and sin of each row's position."""
        longest = 2 * positions.shape[1]  # no position is greater than its index in the row, and the depths after it
        held = self._tables
        if held is None or held[0].shape[0] < longest:
            table = self.embedding
            held = rope.tables(self.arch.rope, self.arch.head_dim, longest, table.device, table.dtype)
            self._tables = held
        return held[0][positions].unsqueeze(-2), held[1][positions].unsqueeze(-2)

    _tables: tuple[Tensor, Tensor] | None = None


class _Text:
    """The keys and values of one layer: of the roots, then of each depth at its root's place."""

    def __init__(self) -> None:
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []

    def attended(self, kernel: Kernel, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Add a depth's keys and values; return what its queries attend to."""
        self._keys.append(keys)
        self._values.append(values)
        (text, *own), (of_text, *of_own) = self._keys, self._values
        return attend_unrolled(kernel, queries, text, of_text, own, of_own)


def deep_rows(student: FeatureStack, batch: Batch, roots: Batch, heard: Tensor, depths: int, fade: float) -> DeepRows:
    """Compare a feature draft with its target at all depths.

    `batch` is on the CPU, `roots` the same on the device with rooted segments; `heard`: the target's normed state,
    then its taps [batch, length, (1 + TAPS) · hidden].
    """
    truth, taps = torch.split(heard, [student.arch.hidden, TAPS * student.arch.hidden], dim=-1)
    return counted(truth, student(roots, taps, depths), depth_weights(batch, depths, fade))


def _parameter_of(tensor: Tensor, trained: bool) -> nn.Parameter:
    if not trained:
        return nn.Parameter(tensor, requires_grad=False)
    return nn.Parameter(tensor.detach().to(torch.promote_types(tensor.dtype, torch.float32), copy=True))
