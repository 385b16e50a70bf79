"""The job of `specbranch inflate`: compare a model with its inflated form, then write the recipe.

Owns the order of the work. Invariants: impossible requests are refused before anything is loaded. Nothing is written
unless both models agree.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from specbranch.assembly import ModelChoice, chosen_device
from specbranch.config import WEIGHTS
from specbranch.errors import ModelError
from specbranch.lab.inflation.recipe import is_inflation, refuse_other_folder, write_inflation
from specbranch.lab.inflation.shapes import Shape, ShapeChoice
from specbranch.lab.inflation.sizing import Sized, sized
from specbranch.lab.inflation.tensors import shape_of
from specbranch.lab.measure.likeness import Likeness, compare
from specbranch.models.cache.pool_size import weight_bytes
from specbranch.models.drafts.draft_name import is_draft_folder
from specbranch.models.files.architecture import Architecture
from specbranch.models.files.identity import model_identity
from specbranch.pairs import draft_path
from specbranch.training.making.draft_target import target_of
from specbranch.training.making.writing import Fetch

FACTS = ("kind", "source", "source_identity", "shape", "head_rows", "head_scored", "seed")


@dataclass(frozen=True, slots=True, kw_only=True)
class InflationJob:
    """The request."""

    model: str
    out: Path
    shape: ShapeChoice
    target: str | None = None  # of a draft made by `distill`; None: the one it names
    seed: int = 0
    device: str | None = None
    dtype: str | None = None


@dataclass(frozen=True, slots=True)
class MadeInflation:
    """The result: both models' sizes, the recipe, and their distance."""

    sized: Sized
    dtype: str  # in which they were compared
    found: Likeness

    @property
    def small(self) -> Shape:
        """The source's shape, with the rows of its head that score a token."""
        return replace(shape_of(self.sized.small), vocabulary=self.sized.recipe.head_scored)

    @property
    def large(self) -> Shape:
        """The shape whose cost each step has."""
        return replace(self.sized.recipe.sizes, vocabulary=self.sized.recipe.head_rows)

    def weight_bytes(self, arch: Architecture) -> int:
        """Return the memory of one model's weights."""
        return weight_bytes(arch, getattr(torch, self.dtype))

    def record(self, out: Path) -> dict[str, Any]:
        """Return all figures by name."""
        recipe = self.sized.recipe
        return {
            "out": str(out),
            "identity": model_identity(str(out)),
            **{name: getattr(recipe, name) for name in FACTS},
            "sizes": recipe.sizes.sizes(),
            "matrix_parameters": step_parameters(self.large),
            "weight_bytes": self.weight_bytes(self.sized.large),
            "checked": recipe.checked,
        }

    def compared(self) -> str:
        """Return the distance of both models as a sentence."""
        found = self.found
        return (
            f"Compared after {found.tokens} tokens in {found.dtype}: logits differ by {found.difference:.1e} of the "
            f"largest at most (allowed: {found.tolerance:.1e}); the likeliest token is the same after "
            f"{found.same_choice:.0%} of them."
        )


def step_parameters(shape: Shape) -> int:
    """Return the number of weights that a step multiplies by: all but the embedding."""
    return shape.parameters - shape.vocabulary * shape.hidden


def inflate(job: InflationJob, fetch: Fetch) -> MadeInflation:
    """Compare a model with its inflated form, and write the recipe."""
    refuse_other_folder(job.out)
    device = chosen_device(job.device)
    dtype = ModelChoice(job.model, dtype=job.dtype).dtype or ("float32" if device == "cpu" else "bfloat16")
    source = fetch(draft_path(job.model))
    target = target_of(source, job.target, fetch) if is_draft_folder(source) and not is_inflation(source) else None
    plan = sized(job.model, source, job.shape, target, job.seed)
    # in plain floats, whatever its file has
    weights: Any = dtype if dtype in WEIGHTS else None
    choice = ModelChoice(source, "native", device, dtype, shares=target, weights=weights)
    with tempfile.TemporaryDirectory() as folder:
        write_inflation(Path(folder), plan.recipe)
        found = compare(choice, replace(choice, name=folder), replace(choice, name=target or source))
    made = MadeInflation(replace(plan, recipe=replace(plan.recipe, checked=found.record())), dtype, found)
    if not found.agrees:
        name = plan.recipe.name
        raise ModelError(f"{name} is another model than its source: {made.compared()} Nothing was written.")
    write_inflation(job.out, made.sized.recipe)
    return made
