"""A feature draft in plain words: one row after the other, from the tensors of its file alone.

A row reads norm(embedding of its token) beside hidden_norm(state), where the state is fc of the target's states at the
token before, or the draft's own output of the row before. It sees the rows of its path, by position.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.functional import silu

from specbranch.models.files.architecture import Architecture
from specbranch.models.forward import rope


@dataclass
class Path:
    """The keys and values of each layer along one path of rows."""

    keys: list[list[Tensor]] = field(default_factory=list)
    values: list[list[Tensor]] = field(default_factory=list)


@dataclass
class Eagle:
    """A draft by its file's tensors, in float64."""

    arch: Architecture
    tensors: Mapping[str, Tensor]
    embedding: Tensor
    head: Tensor

    def fused(self, states: Tensor) -> Tensor:
        """The first row's state, from the target's states side by side."""
        return self.tensors["fc.weight"] @ states

    def logits(self, state: Tensor) -> Tensor:
        """The scores after a row's state."""
        return self.head @ self.normed(state, "norm.weight")

    def row(self, token: int, position: int, state: Tensor, path: Path) -> Tensor:
        """Run one row, append it to the path, and return its state before the last norm."""
        layers = sum(name.endswith("mlp.down_proj.weight") for name in self.tensors)
        for layer in range(layers):
            if len(path.keys) <= layer:
                path.keys.append([])
                path.values.append([])
            h = self.normed(self.embedding[token] if layer == 0 else state, f"layers.{layer}.input_layernorm.weight")
            if layer == 0:
                h = torch.cat((h, self.normed(state, "layers.0.hidden_norm.weight")))
            state = state + self.attended(layer, h, position, path)
            h = self.normed(state, f"layers.{layer}.post_attention_layernorm.weight")
            inner = silu(self.times(layer, "mlp.gate_proj", h)) * self.times(layer, "mlp.up_proj", h)
            state = state + self.times(layer, "mlp.down_proj", inner)
        return state

    def attended(self, layer: int, h: Tensor, position: int, path: Path) -> Tensor:
        """One query over all rows of the path and its own."""
        a, size = self.arch, self.arch.head_dim
        q, k, v = (self.times(layer, f"self_attn.{part}_proj", h).view(-1, size) for part in "qkv")
        for part in ("q", "k"):
            name = f"layers.{layer}.self_attn.{part}_norm.weight"
            if name in self.tensors:
                q, k = (self.normed(q, name), k) if part == "q" else (q, self.normed(k, name))
        cos, sin = (table[position] for table in rope.tables(a.rope, size, position + 1, h.device, h.dtype))
        q, k = rope.turn(q, cos, sin), rope.turn(k, cos, sin)
        path.keys[layer].append(k)
        path.values[layer].append(v)
        keys, values = torch.stack(path.keys[layer]), torch.stack(path.values[layer])  # [rows, kv heads, size]
        out = []
        for head in range(a.heads):
            of = head // (a.heads // a.kv_heads)
            shares = (keys[:, of] @ q[head] / size**0.5).softmax(0)
            out.append(shares @ values[:, of])
        return self.times(layer, "self_attn.o_proj", torch.cat(out))

    def times(self, layer: int, name: str, x: Tensor) -> Tensor:
        """A matrix and its bias, if it has one."""
        product = self.tensors[f"layers.{layer}.{name}.weight"] @ x
        bias = self.tensors.get(f"layers.{layer}.{name}.bias")
        return product if bias is None else product + bias

    def normed(self, x: Tensor, name: str) -> Tensor:
        """Root mean square norm."""
        return x * (x.square().mean(-1, keepdim=True) + self.arch.rms_eps).rsqrt() * self.tensors[name]


def drafted(draft: Eagle, tokens: Sequence[int], states: Tensor, root: int, depths: int) -> list[Tensor]:
    """The logits of each depth from a root on, over the tokens of the text; `states` [tokens, width] of the target."""
    path = Path()
    for position in range(1, root + 1):
        state = draft.row(tokens[position], position, draft.fused(states[position - 1]), path)
    found = [draft.logits(state)]
    for position in range(root + 1, min(root + depths, len(tokens))):
        state = draft.row(tokens[position], position, state, path)
        found.append(draft.logits(state))
    return found
