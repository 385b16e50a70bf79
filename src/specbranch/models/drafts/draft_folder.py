"""A finished draft on disk: config.json, model.safetensors, README.md and provenance.json in one folder.

Owns the format. A draft holds its layers and its last norm; embedding and output head are its target's and are stored
nowhere else. Invariant: config.json is written last, so a folder that has one is whole, and it says by fingerprint
which target the draft belongs to.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal, Self, cast

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as as_safetensors
from torch import Tensor

from specbranch.errors import ModelError
from specbranch.file_values import FileValues, read_object
from specbranch.files import spoken
from specbranch.models.drafts.draft_name import KEY
from specbranch.models.files.architecture import Architecture, Rope
from specbranch.models.files.blocks import AnyMatrix
from specbranch.models.files.disk import RESUME, write_durably
from specbranch.models.files.gguf_file import GgufFile
from specbranch.models.files.matrix import Matrix
from specbranch.models.files.tensor_file import TensorSource
from specbranch.models.files.weights import GGUF, HUGGING_FACE, LayerWeights

Storage = Literal["bfloat16", "int8"]
STORAGES: tuple[Storage, ...] = ("bfloat16", "int8")
FORMAT = 1
HEAD_IDS = "draft.head_ids"
# Where a target lies that is known by another name here.
ON_THE_HUB = {"smollm2-135m": "HuggingFaceTB/SmolLM2-135M-Instruct"}


@dataclass(frozen=True, slots=True)
class DraftInfo:
    """What a draft's config.json says beyond its shape."""

    target: str
    target_fingerprint: str
    layers: tuple[int, ...]  # those of the target it started from
    head_tokens: int | None = None
    storage: Storage = "bfloat16"
    format: int = FORMAT

    @classmethod
    def read(cls, config: Mapping[str, Any], where: Path) -> Self:
        """Take the draft's part out of a config.json."""
        values = config.get(KEY)
        if not isinstance(values, dict):
            raise ModelError(f"{where} is no draft made by `specbranch distill`: its config.json has no {KEY!r}.")
        if values.get("format") != FORMAT:
            raise ModelError(
                f"{where} is a draft of format {values.get('format')!r}; this version reads format {FORMAT}. Upgrade "
                "specbranch."
            )
        kept = FileValues(values, f"The configuration of the draft in {where}", f"{KEY}.")
        layers = kept.items("layers")
        if not all(isinstance(layer, int) and layer >= 0 for layer in layers):
            kept.refuse("layers", "a list of layers' numbers")
        info = cls(
            target=kept.text("target"),
            target_fingerprint=kept.text("target_fingerprint"),
            layers=tuple(layers),
            head_tokens=None if kept.get("head_tokens") is None else kept.count("head_tokens"),
            storage=cast(Storage, kept.text("storage", "bfloat16")),
        )
        if info.storage not in STORAGES:
            raise ModelError(f"{where} stores its weights as {info.storage!r}; expected one of {', '.join(STORAGES)}.")
        return info

    def check(self, fingerprint: str, where: Path | str) -> None:
        """Refuse another target than the draft was made for: it would run on a wrong embedding and propose nonsense."""
        if fingerprint != self.target_fingerprint:
            raise ModelError(
                f"The draft in {where} was made for {self.target} (fingerprint {self.target_fingerprint[:12]}…), "
                f"not for this target ({fingerprint[:12]}…). Use it with its own target, or make one for this."
            )


@dataclass(frozen=True, slots=True)
class DraftWeights:
    """What a draft has of its own."""

    layers: Sequence[LayerWeights]
    norm: Tensor
    head_ids: Tensor | None = None  # [K], ascending


class DraftFile:
    """A draft folder, its tensors read one at a time and given as plain floats."""

    def __init__(self, folder: Path, config: dict[str, Any], info: DraftInfo) -> None:
        self.folder, self.config, self.info = folder, config, info
        self._path = folder / "model.safetensors"
        try:
            with safe_open(self._path, framework="pt") as file:
                self._names = frozenset(file.keys())
        except (OSError, SafetensorError) as error:
            raise ModelError(
                f"{self._path} is missing or damaged ({error}). Make the draft again, or fetch it again."
            ) from None

    @property
    def name(self) -> str:
        """The folder's path."""
        return str(self.folder)

    def __contains__(self, tensor: str) -> bool:
        return tensor in self._names

    def tensor(self, name: str) -> Tensor:
        """Return a tensor as it was before it was stored, as nearly as its storage allows; ids as int64."""
        if name not in self:
            raise ModelError(
                f"{self._path} has no tensor {name!r}, which its configuration needs. Make the draft again."
            )
        try:
            with safe_open(self._path, framework="pt") as file:
                held: Tensor = file.get_tensor(name)
                if held.dtype != torch.int8:
                    return held.long() if held.dtype == torch.int32 else held.float()
                scale: Tensor = file.get_tensor(_scale_name(name))
        except (OSError, SafetensorError) as error:
            raise ModelError(
                f"{self._path}: tensor {name!r} cannot be read ({error}). Make the draft again, or fetch it again."
            ) from None
        if scale.shape != held.shape[:-1]:
            shapes = f"{list(held.shape)} and a scale of shape {list(scale.shape)}"
            raise ModelError(
                f"{self._path}: tensor {name!r} has shape {shapes}; expected a scale for each row. Make the draft "
                "again."
            )
        return held.float() * scale.unsqueeze(-1)

    def read(self, tensor: str, into: Tensor, *, leading: bool = False) -> None:
        """Fill a tensor of the same shape, converting, as a TensorSource does."""
        held = self.tensor(tensor)
        held = held[: into.shape[0]] if leading else held
        if held.shape != into.shape:
            raise ModelError(
                f"{self._path}: tensor {tensor!r} has shape {list(held.shape)}; its configuration says "
                f"{list(into.shape)}."
            )
        into.copy_(held)

    @property
    def head_ids(self) -> Tensor | None:
        """The tokens of a reduced head."""
        if HEAD_IDS not in self:
            return None
        ids = self.tensor(HEAD_IDS)
        if ids.dim() != 1 or ids.dtype != torch.int64:
            raise ModelError(
                f"{self._path}: tensor {HEAD_IDS!r} holds no list of token ids. Make the draft again, or fetch it "
                "again."
            )
        return ids


def read_draft(folder: Path | str, fingerprint: str | None = None) -> DraftFile:
    """Open a draft folder without reading its weights; with a target's fingerprint, refuse a draft of another."""
    path = Path(folder)
    config = read_object(path / "config.json")
    info = DraftInfo.read(config, path)
    if fingerprint is not None:
        info.check(fingerprint, path)
    return DraftFile(path, config, info)


def save_draft(
    folder: Path | str,
    arch: Architecture,
    weights: DraftWeights,
    info: DraftInfo,
    *,
    licence: str | None = None,
    figures: Mapping[str, Any] | None = None,
    provenance: Mapping[str, Any] | None = None,
) -> None:
    """Write a draft of the target `arch`, replacing one that is there; another target's is refused."""
    path = Path(folder)
    refuse_other_draft(path, info.target_fingerprint)
    config = {**config_of(arch), "num_hidden_layers": len(weights.layers), KEY: asdict(info)}
    told, made = dict(figures or {}), dict(provenance or {})
    texts = {"README.md": _card(info, licence, told, made), "provenance.json": _json({**made, "figures": told})}
    with spoken(path, RESUME):
        (path / "config.json").unlink(missing_ok=True)
    write_durably(path / "model.safetensors", as_safetensors(_stored(arch, weights, info.storage), {"format": "pt"}))
    for name, text in {**texts, "config.json": _json(config)}.items():
        write_durably(path / name, text.encode())


def refuse_other_draft(folder: Path, fingerprint: str) -> None:
    """Refuse to write where the draft of another target, or another model, lies."""
    if (folder / "config.json").exists():
        read_draft(folder).info.check(fingerprint, folder)


def fingerprint_of(arch: Architecture, source: TensorSource) -> str:
    """Digest the target's embedding, in float32 and on the CPU: the same however the target is run."""
    held = torch.empty(arch.vocabulary, arch.hidden)
    names = GGUF if isinstance(source, GgufFile) else HUGGING_FACE
    source.read(f"{names['embedding']}.weight", held, leading=True)
    return sha256(held.numpy().data).hexdigest()


def config_of(arch: Architecture) -> dict[str, Any]:
    """Write an architecture as the config.json from which it would be read again."""
    return {
        "model_type": arch.family,
        "num_hidden_layers": arch.layers,
        "hidden_size": arch.hidden,
        "num_attention_heads": arch.heads,
        "num_key_value_heads": arch.kv_heads,
        "head_dim": arch.head_dim,
        "intermediate_size": arch.intermediate,
        "vocab_size": arch.vocabulary,
        "rms_norm_eps": arch.rms_eps,
        "rope_parameters": _rope(arch.rope),
        "attention_bias": arch.qkv_bias,
        "mlp_bias": arch.mlp_bias,
        "tie_word_embeddings": arch.tied,
        "max_position_embeddings": arch.context_length,
        "sliding_window": arch.window,
        "use_sliding_window": arch.window is not None,
        "hidden_act": "silu",
        "eos_token_id": list(arch.eos_ids),
        "bos_token_id": arch.bos_id,
    }


def _rope(rope: Rope) -> dict[str, Any]:
    values: dict[str, Any] = {"rope_type": rope.kind, "rope_theta": rope.theta}
    if rope.kind == "divisors":
        return {**values, "divisors": list(rope.divisors)}
    if rope.kind in ("linear", "llama3", "yarn"):
        values["factor"] = rope.factor
    if rope.kind in ("llama3", "yarn"):
        values["original_max_position_embeddings"] = rope.original_context
    if rope.kind == "llama3":
        values |= {"low_freq_factor": rope.low_freq, "high_freq_factor": rope.high_freq}
    if rope.kind == "yarn":
        values |= {
            "beta_fast": rope.beta_fast,
            "beta_slow": rope.beta_slow,
            "truncate": rope.truncate,
            "attention_factor": rope.magnitude,
        }
    return values


def _stored(arch: Architecture, weights: DraftWeights, storage: Storage) -> dict[str, Tensor]:
    named = {f"{HUGGING_FACE['norm']}.weight": weights.norm}
    for index, layer in enumerate(weights.layers):
        named |= _layer_tensors(arch, layer, index)
    stored: dict[str, Tensor] = {}
    for name, tensor in named.items():
        stored |= _encoded(name, tensor.detach().cpu(), storage)
    if weights.head_ids is not None:
        stored[HEAD_IDS] = weights.head_ids.cpu().int().contiguous()
    return stored


def _layer_tensors(arch: Architecture, layer: LayerWeights, index: int) -> dict[str, Tensor]:
    """Take the joined matrices apart, under Hugging Face's names."""
    q, kv = arch.heads * arch.head_dim, arch.kv_heads * arch.head_dim
    parts = {
        **_parts(layer.qkv, {"q": q, "k": kv, "v": kv}),
        **_parts(layer.out, {"out": arch.hidden}),
        **_parts(layer.gate_up, {"gate": arch.intermediate, "up": arch.intermediate}),
        **_parts(layer.down, {"down": arch.hidden}),
    }
    for part in ("attention_norm", "q_norm", "k_norm", "mlp_norm"):
        if (vector := getattr(layer, part)) is not None:
            parts[part, "weight"] = vector
    return {f"{HUGGING_FACE[part].format(index)}.{suffix}": tensor for (part, suffix), tensor in parts.items()}


def _parts(matrix: AnyMatrix, sizes: Mapping[str, int]) -> dict[tuple[str, str], Tensor]:
    assert isinstance(matrix, Matrix)  # what is trained is in floats
    whole = {"weight": matrix.weight} if matrix.bias is None else {"weight": matrix.weight, "bias": matrix.bias}
    return {
        (part, suffix): rows
        for suffix, tensor in whole.items()
        for part, rows in zip(sizes, torch.split(tensor, list(sizes.values())), strict=True)
    }


def _encoded(name: str, tensor: Tensor, storage: Storage) -> dict[str, Tensor]:
    if storage == "bfloat16" or tensor.dim() < 2:  # norms and biases are small, and coarse steps would hurt them most
        return {name: tensor.bfloat16().contiguous()}
    wide = tensor.float()
    scale = wide.abs().amax(-1).clamp(min=torch.finfo(torch.float32).tiny) / 127
    return {name: (wide / scale.unsqueeze(-1)).round().to(torch.int8), _scale_name(name): scale}


def _scale_name(name: str) -> str:
    return f"{name.removesuffix('.weight')}.scale"


def _json(values: Any) -> str:
    return json.dumps(values, indent=2, ensure_ascii=False) + "\n"


def _card(info: DraftInfo, licence: str | None, figures: Mapping[str, Any], provenance: Mapping[str, Any]) -> str:
    head = (
        "the target's whole vocabulary"
        if info.head_tokens is None
        else f"the {info.head_tokens} tokens the target wrote most often"
    )
    layers = ", ".join(map(str, info.layers))
    return f"""---
license: {(licence or "other").lower()}
base_model: {ON_THE_HUB.get(info.target, info.target)}
library_name: specbranch
---

# Draft for {info.target}

A draft for speculative decoding of {info.target}: {len(info.layers)} layers, started from the target's layers
{layers} and trained to give the target's own distribution on text the target wrote. It proposes {head}.
Embedding and output head are the target's and are not in this folder, so the draft runs beside its target only
(sha256 of the embedding in float32: `{info.target_fingerprint}`). Weights are stored as {info.storage}.

Licence: {_licence_sentence(licence)}

## Figures
{_table(figures)}
## How it was made
{_table(provenance)}"""


def _licence_sentence(licence: str | None) -> str:
    if licence is None:
        return "that of the target, from which the draft is derived; see there."
    return f"{licence}, as the target from which the draft is derived."


def _table(values: Mapping[str, Any]) -> str:
    lines = [f"| {name} | {json.dumps(value, ensure_ascii=False).strip(chr(34))} |" for name, value in values.items()]
    return "\n".join(["", "| | |", "|---|---|", *lines, ""])
