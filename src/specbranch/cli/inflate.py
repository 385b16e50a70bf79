"""`specbranch inflate`: a small model in the shape of a larger one, for benches where no large weights are at hand."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from specbranch.cli.sections import SectionedCommand, options_of
from specbranch.config import WEIGHTS
from specbranch.errors import BadParameter, ModelError
from specbranch.models.shapes import SHAPES, Shape, ShapeChoice
from specbranch.pairs import draft_path

if TYPE_CHECKING:
    from specbranch.assembly import ModelChoice
    from specbranch.measure.likeness import Likeness
    from specbranch.models.files.architecture import Architecture
    from specbranch.models.files.inflation import Inflation

SIZES = tuple(Shape.__dataclass_fields__)
TABLE = [
    (name, f"{s.hidden} hidden, {s.layers} layers, {s.heads} heads ({s.kv_heads} of keys) of {s.head_dim}, " f"{s.intermediate} neurons, "
     f"{s.vocabulary} tokens")
    for name, s in SHAPES.items() if name != "tiny"
]  # fmt: skip
_shape, _check = options_of("Shape"), options_of("Check")


@click.command(cls=SectionedCommand, tables={"Shapes": TABLE})
@click.argument("model")
@click.option("--out", type=click.Path(path_type=Path), required=True, metavar="DIR", help="Folder of the recipe.")
@click.option(
    "--target",
    metavar="MODEL",
    help="Of a draft made by `distill`: its target, as it is, not inflated [the one it names].",
)
@click.option("--seed", type=int, default=0, metavar="N", help="Seed of the numbers that nobody reads [0].")
@_shape("--shape", metavar="NAME", help="A shape by name, see below [the model's own].")
@_shape("--hidden", type=int, metavar="N", help="Width of the residual stream, instead of the shape's.")
@_shape("--layers", type=int, metavar="N", help="Layers; those beyond the model's add nothing.")
@_shape("--heads", type=int, metavar="N", help="Query heads.")
@_shape("--kv-heads", type=int, metavar="N", help="Key and value heads.")
@_shape("--head-dim", type=int, metavar="N", help="Dimensions of a head, a multiple of the model's.")
@_shape("--intermediate", type=int, metavar="N", help="Neurons of a layer.")
@_shape("--vocabulary", type=int, metavar="N", help="Rows of the output head; never fewer than the model scores.")
@_check("--device", metavar="DEVICE", help="Where both are compared: cpu, cuda, cuda:1 … [a GPU if there is one]")
@_check(
    "--dtype",
    metavar="TYPE",
    help="Compares in float64, float32, bfloat16 or float16 [float32 on a CPU, else bfloat16].",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object: the recipe, head_rows, parameters, checked …")
def inflate(model: str, as_json: bool, **given: Any) -> None:
    """Put MODEL into the shape of a larger one: it says what it said before, at the cost of the larger one.

    \b
    specbranch inflate smollm2-135m --shape 7b --out smollm2-7b
    specbranch inflate smollm2-weak --shape 68m --out weak-68m
    specbranch generate --target smollm2-7b --draft weak-68m "Once upon a time"

    For benches of speculative decoding without large weights: what draft and target agree on is real, and so is what a
    step takes. DIR holds a recipe of a few hundred bytes and goes wherever a model is named. The weights are made where
    the model runs, from MODEL and the seed, and are written nowhere. What is added is random and multiplied by zero at
    last; tokenizer, context and end tokens stay MODEL's.

    Both are loaded here once, and their logits compared: without agreement nothing is written. A shape must be at least
    as large as the model in every number but the vocabulary, whose head has the larger number of rows. MODEL may be a
    draft made by `distill`, or a pair's name for its draft; inflated it has an embedding and a head of its own.
    """
    from specbranch.cli.progress import narrated
    from specbranch.measure.likeness import compare
    from specbranch.models.files.inflation import refuse_other_folder, write_inflation

    refuse_other_folder(given["out"])
    job = _Job.of(model, given)
    with narrated("Comparing it with its source"), tempfile.TemporaryDirectory() as place:
        write_inflation(Path(place), job.recipe)
        found = compare(job.choice(str(job.source)), job.choice(place), job.tokens)
    if not found.agrees:
        raise ModelError(f"{job.recipe.name} is another model than its source: {_compared(found)} Nothing was written.")
    recipe = replace(job.recipe, checked=found.record())
    write_inflation(given["out"], recipe)
    record = _record(given["out"], recipe, job)
    click.echo(json.dumps(record) if as_json else _table(record, job, found))


@dataclass(frozen=True, slots=True)
class _Job:
    """What is to be inflated, and into what."""

    source: str  # the model's path
    target: str | None  # of a draft: what it runs beside
    small: Architecture
    large: Architecture
    recipe: Inflation
    device: str
    dtype: str

    @classmethod
    def of(cls, model: str, given: Mapping[str, Any]) -> _Job:
        """Refuse what cannot be done, before anything is loaded."""
        from specbranch.assembly import ModelChoice, chosen_device
        from specbranch.cli.progress import pulled
        from specbranch.distill.draft_name import is_draft_folder
        from specbranch.distill.sizing import sized
        from specbranch.models.files.inflation import is_inflation

        shape = ShapeChoice(given["shape"], {name: given[name] for name in SIZES if given[name] is not None})
        device = chosen_device(given["device"])
        dtype = ModelChoice(model, dtype=given["dtype"]).dtype or ("float32" if device == "cpu" else "bfloat16")
        source = pulled(draft_path(model))
        target = _target_of(source, given["target"]) if is_draft_folder(source) and not is_inflation(source) else None
        found = sized(model, source, shape, target, given["seed"])
        return cls(source, target, found.small, found.large, found.recipe, device, dtype)

    def choice(self, name: str) -> ModelChoice:
        """How a model is loaded to be compared: in plain floats, whatever its file has."""
        from specbranch.assembly import ModelChoice

        weights: Any = self.dtype if self.dtype in WEIGHTS else None
        return ModelChoice(name, "native", self.device, self.dtype, shares=self.target, weights=weights)

    @property
    def tokens(self) -> ModelChoice:
        """Whose tokenizer is used."""
        return self.choice(self.target or self.source)


def _target_of(draft: str, given: str | None) -> str:
    """Return the path of the target a draft shares with: the one given, or the one that its folder names if that is
    known here."""
    from specbranch.cli.progress import pulled
    from specbranch.distill.draft_name import draft_config
    from specbranch.models.files.store import KNOWN

    named = given or (draft_config(draft) or {}).get("target")
    if given is None and named not in KNOWN:
        raise BadParameter(f"{draft} is a draft for {named}, which is no known name. Say where that is with --target.")
    return pulled(str(named))


def _record(out: Path, recipe: Inflation, job: _Job) -> dict[str, Any]:
    from specbranch.models.files.identity import model_identity

    facts = {
        name: getattr(recipe, name)
        for name in ("kind", "source", "source_identity", "shape", "head_rows", "head_scored", "seed")
    }
    charged = replace(recipe.sizes, vocabulary=recipe.head_rows)
    return {
        "out": str(out),
        "identity": model_identity(str(out)),
        **facts,
        "sizes": recipe.sizes.sizes(),
        "matrix_parameters": _step_parameters(charged),
        "weight_bytes": _bytes(job.large, job.dtype),
        "checked": recipe.checked,
    }


def _step_parameters(shape: Shape) -> int:
    """How many numbers a step multiplies by: all but the embedding's."""
    return shape.parameters - shape.vocabulary * shape.hidden


def _bytes(arch: Architecture, dtype: str) -> int:
    import torch

    from specbranch.models.room import weight_bytes

    return weight_bytes(arch, getattr(torch, dtype))


def _table(record: Mapping[str, Any], job: _Job, found: Likeness) -> str:
    small, recipe = replace(_shape_of(job.small), vocabulary=job.recipe.head_scored), job.recipe
    large = replace(recipe.sizes, vocabulary=recipe.head_rows)
    rows = [(name.replace("_", " "), f"{value:,}", f"{large.sizes()[name]:,}") for name, value in small.sizes().items()]
    rows[-1] = ("head rows", *rows[-1][1:])
    rows.append(("matrices", *_pair(f"{_step_parameters(shape) / 1e9:.3g}B" for shape in (small, large))))
    rows.append(
        (f"weights, {job.dtype}", *_pair(f"{_bytes(arch, job.dtype) / 1e9:.2f} GB" for arch in (job.small, job.large)))
    )
    lines = [f"  {name:18} {before:>10} {after:>10}" for name, before, after in (("", "source", "inflated"), *rows)]
    random = recipe.head_rows - recipe.head_scored
    head = (
        f"Of the head's rows {recipe.head_scored:,} score a token; {random:,} are random and never looked at.\n"
        if random
        else ""
    )
    return f"{recipe.name} is in {record['out']}.\n" + "\n".join(lines) + f"\n{head}{_compared(found)}"


def _pair(told: Iterable[str]) -> tuple[str, str]:
    before, after = told
    return before, after


def _shape_of(arch: Architecture) -> Shape:
    from specbranch.models.files.inflated import shape_of

    return shape_of(arch)


def _compared(found: Likeness) -> str:
    return (
        f"Compared after {found.tokens} tokens in {found.dtype}: logits differ by {found.difference:.1e} of the "
        "largest at most "
        f"(allowed: {found.tolerance:.1e}); the likeliest token is the same after {found.same_choice:.0%} of them."
    )
