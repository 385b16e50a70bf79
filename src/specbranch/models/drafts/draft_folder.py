"""Reading a finished draft: config.json and model.safetensors in one folder.

Owns the format; `training/distill/draft_saving.py` writes it. A draft has its own layers and last norm; it uses its
target's embedding and output head, which are not in the folder. Invariant: config.json is written last, so a folder
that has one is complete. Its fingerprint says which target the draft belongs to.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal, Self, cast

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from specbranch.errors import ModelError
from specbranch.file_values import FileValues, read_object
from specbranch.models.drafts.draft_name import KEY
from specbranch.models.files.architecture import Architecture
from specbranch.models.files.tensor_file import TensorSource
from specbranch.models.files.weights import read_part

Storage = Literal["bfloat16", "int8"]
STORAGES: tuple[Storage, ...] = ("bfloat16", "int8")
DRAFT_FORMAT = 1
HEAD_IDS = "draft.head_ids"


@dataclass(frozen=True, slots=True)
class DraftInfo:
    """The part of a draft's config.json that is not its architecture."""

    target: str
    target_fingerprint: str
    layers: tuple[int, ...]  # layers of the target that training started from
    head_tokens: int | None = None
    storage: Storage = "bfloat16"
    format: int = DRAFT_FORMAT

    @classmethod
    def read(cls, config: Mapping[str, Any], where: Path) -> Self:
        """Read the draft's part of a config.json."""
        values = config.get(KEY)
        if not isinstance(values, dict):
            raise ModelError(f"{where} is no draft made by `specbranch distill`: its config.json has no {KEY!r}.")
        if values.get("format") != DRAFT_FORMAT:
            raise ModelError(
                f"{where} is a draft of format {values.get('format')!r}; this version reads format {DRAFT_FORMAT}. "
                "Upgrade specbranch."
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
        """Raise a ModelError for another target: with its embedding the draft would propose nonsense."""
        if fingerprint != self.target_fingerprint:
            raise ModelError(
                f"The draft in {where} was made for {self.target} (fingerprint {self.target_fingerprint[:12]}…), "
                f"not for this target ({fingerprint[:12]}…). Use it with its own target, or make one for this."
            )


class DraftFile:
    """A draft folder; reads its tensors one at a time, and returns plain floats."""

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

    @property
    def names(self) -> frozenset[str]:
        """The names of all tensors, those of scales and token ids, too."""
        return self._names

    def __contains__(self, tensor: str) -> bool:
        return tensor in self._names

    def tensor(self, name: str) -> Tensor:
        """Return a tensor in floats, int8 times its scale; token ids as int64."""
        if name not in self:
            raise ModelError(
                f"{self._path} has no tensor {name!r}, which its configuration needs. Make the draft again."
            )
        try:
            with safe_open(self._path, framework="pt") as file:
                stored: Tensor = file.get_tensor(name)
                if stored.dtype != torch.int8:
                    return stored.long() if stored.dtype == torch.int32 else stored.float()
                scale: Tensor = file.get_tensor(scale_name(name))
        except (OSError, SafetensorError) as error:
            raise ModelError(
                f"{self._path}: tensor {name!r} cannot be read ({error}). Make the draft again, or fetch it again."
            ) from None
        if scale.shape != stored.shape[:-1]:
            shapes = f"{list(stored.shape)} and a scale of shape {list(scale.shape)}"
            raise ModelError(
                f"{self._path}: tensor {name!r} has shape {shapes}; expected a scale for each row. Make the draft "
                "again."
            )
        return stored.float() * scale.unsqueeze(-1)

    def read(self, tensor: str, into: Tensor, *, leading: bool = False) -> None:
        """Read a tensor into one of the same shape; see TensorSource."""
        found = self.tensor(tensor)
        found = found[: into.shape[0]] if leading else found
        if found.shape != into.shape:
            raise ModelError(
                f"{self._path}: tensor {tensor!r} has shape {list(found.shape)}; its configuration says "
                f"{list(into.shape)}."
            )
        into.copy_(found)

    @property
    def head_ids(self) -> Tensor | None:
        """The tokens of a reduced head; None: the head is whole."""
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
    """Open a draft folder without reading its weights; `fingerprint`: refuse a draft of another target."""
    path = Path(folder)
    config = read_object(path / "config.json")
    info = DraftInfo.read(config, path)
    if fingerprint is not None:
        info.check(fingerprint, path)
    return DraftFile(path, config, info)


def fingerprint_of(arch: Architecture, source: TensorSource) -> str:
    """Return a digest of the target's embedding in float32, which does not depend on how the target runs."""
    embedding = read_part(arch, source, "embedding", torch.device("cpu"), torch.float32)
    return sha256(embedding.numpy().data).hexdigest()


def scale_name(name: str) -> str:
    """Return the name of the tensor with the scales of an int8 tensor."""
    return f"{name.removesuffix('.weight')}.scale"
