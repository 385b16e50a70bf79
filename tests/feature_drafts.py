"""Feature drafts with random weights in each layout of files, and their forward written from the formula alone."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.functional import silu

from specbranch.models.drafts.draft_folder import fingerprint_of
from specbranch.models.drafts.draft_name import FEATURES, KEY
from specbranch.models.files.locate import locate
from specbranch.models.loading import open_model

THETA, EPS = 10000.0, 1e-5


@dataclass(frozen=True)
class Recipe:
    """What a draft is to be: its layout, its sizes, its options."""

    layout: str = "specbranch"  # "speculators", "eagle3"
    hidden: int = 32
    vocabulary: int = 421
    layers: int = 1
    heads: int = 4
    kv_heads: int = 2
    intermediate: int = 48
    taps: tuple[int, ...] | None = (1, 2, 4)
    target_hidden: int | None = None
    normed_residual: bool = False
    feeds_normed: bool = False
    fc_norm: bool = False
    norm_before_fc: bool = False
    kept: tuple[int, ...] = ()  # tokens of a reduced head of its own
    embeds: bool = False  # it brings an embedding
    scores: bool = False  # it brings a head, also if it is whole
    seed: int = 1
    more: dict[str, Any] = field(default_factory=dict)  # changes of the configuration

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads


def random_tensors(recipe: Recipe) -> dict[str, Tensor]:
    """Tensors under speculators' names."""
    r, random = recipe, torch.Generator().manual_seed(recipe.seed)

    def matrix(rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns, generator=random) / columns**0.5

    def norm(size: int) -> Tensor:
        return 1 + torch.randn(size, generator=random) * 0.3

    read = (r.target_hidden or r.hidden) * len(r.taps or (0, 0, 0))
    made = {"fc.weight": matrix(r.hidden, read), "norm.weight": norm(r.hidden)}
    for index in range(r.layers):
        stem, ins = f"layers.{index}.", r.hidden * (2 if index == 0 else 1)
        made |= {f"{stem}{name}.weight": norm(r.hidden) for name in ("input_layernorm", "post_attention_layernorm")}
        wide, narrow = r.heads * r.head_dim, r.kv_heads * r.head_dim
        for name, rows in {"q": wide, "k": narrow, "v": narrow}.items():
            made[f"{stem}self_attn.{name}_proj.weight"] = matrix(rows, ins) * 2
        made[f"{stem}self_attn.o_proj.weight"] = matrix(r.hidden, wide)
        made |= {f"{stem}mlp.{name}_proj.weight": matrix(r.intermediate, r.hidden) for name in ("gate", "up")}
        made[f"{stem}mlp.down_proj.weight"] = matrix(r.hidden, r.intermediate)
    made["layers.0.hidden_norm.weight"] = norm(r.hidden)
    if r.fc_norm:
        made |= {f"fc_norm.{index}.weight": norm(r.target_hidden or r.hidden) for index in range(3)}
    if r.norm_before_fc:
        made["input_norm.weight"] = norm(read)
    if r.embeds:
        made["embed_tokens.weight"] = matrix(r.vocabulary, r.hidden) * 4
    if r.kept or r.scores:
        made["lm_head.weight"] = matrix(len(r.kept) or r.vocabulary, r.hidden) * 4
    if r.kept:
        made["d2t"] = torch.tensor(r.kept) - torch.arange(len(r.kept))
    return made


def save_feature_draft(folder: Path, recipe: Recipe, target: str | None = None) -> str:
    """Write a draft; one in our own layout names its `target`."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = random_tensors(recipe)
    if recipe.layout == "eagle3":
        tensors = {name.replace("layers.0.", "midlayer."): tensor for name, tensor in tensors.items()}
        if recipe.kept:
            tensors["t2d"] = torch.zeros(recipe.vocabulary, dtype=torch.bool)
            tensors["t2d"][list(recipe.kept)] = True
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({**_config(recipe, target), **recipe.more}))
    return str(folder)


def _config(r: Recipe, target: str | None) -> dict[str, Any]:
    layer: dict[str, Any] = {
        "model_type": "llama",
        "hidden_size": r.hidden,
        "intermediate_size": r.intermediate,
        "num_hidden_layers": r.layers,
        "num_attention_heads": r.heads,
        "num_key_value_heads": r.kv_heads,
        "head_dim": r.head_dim,
        "vocab_size": r.vocabulary,
        "rms_norm_eps": EPS,
        "rope_theta": THETA,
        "max_position_embeddings": 64,  # as often, shorter than it is used
    }
    reduced = {"draft_vocab_size": len(r.kept)} if r.kept else {}
    flags = {"norm_before_residual": r.normed_residual, "norm_output": r.feeds_normed, "fc_norm": r.fc_norm}
    flags["norm_before_fc"] = r.norm_before_fc
    if r.layout == "speculators":
        ids = {} if r.taps is None else {"eagle_aux_hidden_state_layer_ids": list(r.taps)}
        nested = {"speculators_model_type": "eagle3", "transformer_layer_config": layer}
        return {"architectures": ["Eagle3Speculator"], **nested, **reduced, **flags, **ids}
    if r.layout == "eagle3":
        ids = {} if r.taps is None else {"eagle_aux_hidden_state_layer_ids": list(r.taps)}
        named = {"architectures": ["LlamaForCausalLMEagle3"], "eagle_config": {"use_aux_hidden_state": True, **ids}}
        return {**layer, **named, **reduced, **flags}
    assert target is not None
    fingerprint = fingerprint_of(*open_model(locate(target)))
    info = {"format": 1, "target": target, "target_fingerprint": fingerprint, "layers": [0] * r.layers}
    features = {"taps": r.taps, **flags}
    return {**layer, **reduced, "max_position_embeddings": 512, KEY: {**info, FEATURES: features}}


class Formula:
    """The forward of a feature draft, row by row in float64."""

    def __init__(self, recipe: Recipe, embedding: Tensor, head: Tensor) -> None:
        self.recipe, self.tensors = recipe, {name: x.double() for name, x in random_tensors(recipe).items()}
        self.embedding = self.tensors.get("embed_tokens.weight", embedding.double())
        self.head = self.tensors.get("lm_head.weight", head.double())

    def features(self, states: Sequence[Tensor]) -> Tensor:
        """fc of the target's hidden states behind each tap [positions, hidden]."""
        if self.recipe.fc_norm:
            states = [self._normed(state, f"fc_norm.{index}") for index, state in enumerate(states)]
        joined = torch.cat(tuple(states), -1)
        joined = self._normed(joined, "input_norm") if self.recipe.norm_before_fc else joined
        return joined @ self.tensors["fc.weight"].T

    def logits(self, tokens: Sequence[int], features: Tensor) -> Tensor:
        """Logits behind each token but the first; where `features` end, the draft's own states go on."""
        self.keys: list[list[Tensor]] = [[] for _ in range(self.recipe.layers)]
        self.values: list[list[Tensor]] = [[] for _ in range(self.recipe.layers)]
        found, own = [], torch.zeros(self.recipe.hidden, dtype=torch.float64)
        for position in range(1, len(tokens)):
            g = features[position - 1] if position <= len(features) else own
            hidden = self._row(tokens[position], position, g)
            normed = self._normed(hidden, "norm")
            own = normed if self.recipe.feeds_normed else hidden
            found.append(self.head @ normed)
        return torch.stack(found)

    def _row(self, token: int, position: int, g: Tensor) -> Tensor:
        feature = self._normed(g, "layers.0.hidden_norm")
        x = feature if self.recipe.normed_residual else g
        h = torch.cat((self._normed(self.embedding[token], "layers.0.input_layernorm"), feature))
        for index in range(self.recipe.layers):
            stem = f"layers.{index}"
            if index:
                h = self._normed(x, f"{stem}.input_layernorm")
            x = x + self._attended(index, position, h)
            h = self._normed(x, f"{stem}.post_attention_layernorm")
            gate, up = (self.tensors[f"{stem}.mlp.{name}_proj.weight"] @ h for name in ("gate", "up"))
            x = x + self.tensors[f"{stem}.mlp.down_proj.weight"] @ (silu(gate) * up)
        return x

    def _attended(self, index: int, position: int, h: Tensor) -> Tensor:
        r, stem = self.recipe, f"layers.{index}.self_attn"
        q, k, v = ((self.tensors[f"{stem}.{name}_proj.weight"] @ h).view(-1, r.head_dim) for name in ("q", "k", "v"))
        self.keys[index].append(_turned(k, position))
        self.values[index].append(v)
        keys, values = (
            torch.stack(side[index], 1).repeat_interleave(r.heads // r.kv_heads, 0) for side in (self.keys, self.values)
        )
        shares = ((_turned(q, position)[:, None] * keys).sum(-1) / r.head_dim**0.5).softmax(-1)
        return self.tensors[f"{stem}.o_proj.weight"] @ (shares[..., None] * values).sum(1).flatten()

    def _normed(self, x: Tensor, name: str) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * self.tensors[f"{name}.weight"]


def _turned(heads: Tensor, position: int) -> Tensor:
    size = heads.shape[-1]
    # angles in float32, as all engines have them; as one table, since a cosine's last bit depends on its neighbours
    slow = 1.0 / THETA ** (torch.arange(0, size, 2, dtype=torch.float32) / size)
    angles = torch.outer(torch.arange(512, dtype=torch.float32), slow)
    cos, sin = angles.cos()[position].double(), angles.sin()[position].double()
    first, second = heads[:, : size // 2], heads[:, size // 2 :]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)
