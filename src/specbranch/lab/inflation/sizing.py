"""From a model's name and a shape to the recipe of an inflated model.

Owns what this needs from a model: its architecture, and the number of tokens it scores. Invariant: a returned recipe
works, and no weights were loaded to find out.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import specbranch.lab.inflation.source  # noqa: F401 (registers inflated models)
from specbranch.errors import BadParameter
from specbranch.lab.inflation.recipe import Inflation, is_inflation
from specbranch.lab.inflation.shapes import ShapeChoice
from specbranch.lab.inflation.tensors import inflated_architecture, shape_of
from specbranch.models.drafts.draft_name import is_draft_folder
from specbranch.models.files.architecture import Architecture
from specbranch.models.files.identity import model_identity
from specbranch.models.files.locate import locate
from specbranch.models.loading import open_model


@dataclass(frozen=True, slots=True)
class Sized:
    """A model, and the same model in another shape."""

    small: Architecture
    large: Architecture
    recipe: Inflation


def sized(model: str, source: str, shape: ShapeChoice, target: str | None = None, seed: int = 0) -> Sized:
    """Give a model a shape. `model` is its name, `source` its path, `target` the path of the target of a distilled
    draft."""
    if is_inflation(source):
        raise BadParameter(f"{source} is inflated already. Inflate its source instead.")
    is_draft = is_draft_folder(source)
    small, scored = _opened(source, target if is_draft else None)
    sizes = shape.over(shape_of(small))
    by_name = not Path(model).expanduser().exists() and not is_draft  # a known name or a Hub id is the same everywhere
    recipe = Inflation(
        kind="draft" if is_draft else "model",
        source=model if by_name else str(Path(source).expanduser().resolve()),
        source_identity=model_identity(source),
        shape=shape.title,
        sizes=sizes,
        head_rows=max(sizes.vocabulary, scored),
        head_scored=scored,
        seed=seed,
    )
    return Sized(small, inflated_architecture(small, sizes, recipe.head_rows, recipe.name), recipe)


def _opened(source: str, target: str | None) -> tuple[Architecture, int]:
    """Return a model's architecture, and the number of tokens it scores."""
    if target is None:
        arch, _ = open_model(locate(source))
        return arch, arch.vocabulary
    from specbranch.models.drafts.load import open_for_target

    found = open_for_target(source, target)
    ids = found.draft.head_ids
    return found.arch, found.arch.vocabulary if ids is None else len(ids)
