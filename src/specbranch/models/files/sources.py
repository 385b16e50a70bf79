"""Model folders whose tensors are made rather than stored, and the modules that make them.

Owns the registry. The engine knows no kind by itself: a module registers its kind when it is imported. Such a folder
holds a recipe, a JSON file that names the model it is made from. Invariant: reading a recipe needs no torch.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from specbranch.errors import ModelError

if TYPE_CHECKING:
    from torch import Tensor

    from specbranch.models.files.architecture import Architecture
    from specbranch.models.files.tensor_file import TensorSource

NAMES_ITS_BASE = {"source", "source_identity"}  # what every recipe has


class MadeModel(Protocol):
    """A model that is made from another one, its base, when its tensors are read."""

    @property
    def name(self) -> str:
        """What to call it in a sentence."""
        ...

    @property
    def how(self) -> str:
        """The participle that says how it was made, as in "it is quantized"."""
        ...

    @property
    def again(self) -> str:
        """The sentence that says how to make it again."""
        ...

    @property
    def is_draft(self) -> bool:
        """True if it runs only with its target."""
        ...

    @property
    def base(self) -> str:
        """The model it is made from: a known name, a Hub id or a path. Both have the same tokenizer."""
        ...

    @property
    def base_identity(self) -> str:
        """The identity that the base must have."""
        ...

    @property
    def digest(self) -> str:
        """A digest that differs between models made from the same base."""
        ...

    def made_from(
        self, arch: Architecture, source: TensorSource, head_ids: Tensor | None = None
    ) -> tuple[Architecture, TensorSource]:
        """Return its architecture and tensors, given its base's; `head_ids`: the tokens of a draft's reduced head."""
        ...


@dataclass(frozen=True, slots=True)
class MadeKind:
    """One kind of such folders."""

    marker: str  # the name of the recipe file
    module: str  # registers this kind when it is imported, also in another process
    read: Callable[[Path], MadeModel]


_KINDS: dict[str, MadeKind] = {}  # by marker


def register_source(kind: MadeKind) -> None:
    """Make a kind known to this process; a second registration replaces the first."""
    _KINDS[kind.marker] = kind


def source_modules() -> tuple[str, ...]:
    """Return the modules that another process must import to know the same kinds."""
    return tuple(dict.fromkeys(kind.module for kind in _KINDS.values()))


def is_made(name: str | Path) -> bool:
    """Return True for a folder of a registered kind."""
    return _kind_of(name) is not None


def made_model(name: str | Path) -> MadeModel | None:
    """Read the recipe in a folder of a registered kind; None for any other name."""
    kind = _kind_of(name)
    return None if kind is None else kind.read(Path(name))


def made_alone(folder: Path) -> MadeModel:
    """Read the recipe of a model that runs alone, which a draft does not."""
    found = made_model(folder)
    assert found is not None, "located as a made model"
    if found.is_draft:
        raise ModelError(f"{folder} ({found.name}) is a draft, which runs only with its target. Name it with --draft.")
    return found


def unknown_recipe(folder: Path) -> Path | None:
    """Return the recipe in a folder whose kind nobody registered, if there is one."""
    return next((file for file in sorted(folder.glob("*.json")) if _names_its_base(file)), None)


def _kind_of(name: str | Path) -> MadeKind | None:
    folder = Path(name).expanduser()
    return next((kind for marker, kind in _KINDS.items() if (folder / marker).is_file()), None)


def _names_its_base(file: Path) -> bool:
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(values, dict) and values.keys() >= NAMES_ITS_BASE
