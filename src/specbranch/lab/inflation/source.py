"""Inflated models as a source of tensors: importing this module lets the engine load their folders.

Owns what the engine asks of an inflated folder. Invariant: importing it needs no torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from specbranch.lab.inflation.recipe import AGAIN, MARKER, Inflation, read_inflation
from specbranch.models.files.sources import MadeKind, register_source

if TYPE_CHECKING:
    from torch import Tensor

    from specbranch.models.files.architecture import Architecture
    from specbranch.models.files.tensor_file import TensorSource


@dataclass(frozen=True, slots=True)
class InflatedModel:
    """A `MadeModel`: a small model, its base, in the shape of a larger one."""

    recipe: Inflation

    @property
    def name(self) -> str:
        """What to call it in a sentence."""
        return self.recipe.name

    @property
    def how(self) -> str:
        """The participle that says how it was made."""
        return "inflated"

    @property
    def again(self) -> str:
        """The sentence that says how to make it again."""
        return AGAIN

    @property
    def is_draft(self) -> bool:
        """True if it runs only with its target."""
        return self.recipe.kind == "draft"

    @property
    def base(self) -> str:
        """The small model."""
        return self.recipe.source

    @property
    def base_identity(self) -> str:
        """The identity that the small model must have."""
        return self.recipe.source_identity

    @property
    def digest(self) -> str:
        """Tell it from other shapes of the same model."""
        return self.recipe.digest

    def made_from(
        self, arch: Architecture, source: TensorSource, head_ids: Tensor | None = None
    ) -> tuple[Architecture, TensorSource]:
        """Return the larger architecture, and a source that makes its tensors from the small model's."""
        from specbranch.lab.inflation.tensors import InflatedSource, inflated_architecture

        recipe = self.recipe
        large = inflated_architecture(arch, recipe.sizes, recipe.head_rows, recipe.name)
        return large, InflatedSource(arch, source, large, recipe.seed, head_ids)


def read_inflated(folder: Path) -> InflatedModel:
    """Read the recipe in a folder."""
    return InflatedModel(read_inflation(folder))


register_source(MadeKind(MARKER, __name__, read_inflated))
