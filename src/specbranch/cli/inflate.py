"""`specbranch inflate`: a small model in the shape of a larger one, for benches where no large weights are at hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from specbranch.cli.sections import PATH, SectionedCommand, options_of
from specbranch.lab.inflation.shapes import SHAPES, Shape, ShapeChoice

if TYPE_CHECKING:
    from specbranch.lab.inflation.making import MadeInflation

SIZES = tuple(Shape.__dataclass_fields__)
SHAPE_TABLE = [
    (
        name,
        f"{s.hidden} hidden, {s.layers} layers, {s.heads} heads ({s.kv_heads} of keys) of {s.head_dim}, "
        f"{s.intermediate} neurons, {s.vocabulary} tokens",
    )
    for name, s in SHAPES.items()
    if name != "tiny"
]
_shape, _check = options_of("Shape"), options_of("Check")


@click.command(cls=SectionedCommand, tables={"Shapes": SHAPE_TABLE})
@click.argument("model")
@click.option("--out", type=PATH, required=True, metavar="DIR", help="Folder of the recipe.")
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
def inflate(shape: str | None, as_json: bool, **given: Any) -> None:
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
    from specbranch.cli.progress import narrated, pulled
    from specbranch.lab.inflation import making as inflation

    sizes = {name: given.pop(name) for name in SIZES}
    wanted = ShapeChoice(shape, {name: size for name, size in sizes.items() if size is not None})
    job = inflation.InflationJob(shape=wanted, **given)
    with narrated("Comparing it with its source"):
        made = inflation.inflate(job, pulled)
    click.echo(json.dumps(made.record(job.out)) if as_json else _table(job.out, made))


def _table(out: Path, made: MadeInflation) -> str:
    from specbranch.lab.inflation.making import step_parameters

    small, large, recipe = made.small, made.large, made.sized.recipe
    rows = [(name.replace("_", " "), f"{size:,}", f"{large.sizes()[name]:,}") for name, size in small.sizes().items()]
    rows[-1] = ("head rows", *rows[-1][1:])
    rows.append(("matrices", f"{step_parameters(small) / 1e9:.3g}B", f"{step_parameters(large) / 1e9:.3g}B"))
    before, after = (f"{made.weight_bytes(arch) / 1e9:.2f} GB" for arch in (made.sized.small, made.sized.large))
    rows.append((f"weights, {made.dtype}", before, after))
    lines = [f"  {name:18} {before:>10} {after:>10}" for name, before, after in (("", "source", "inflated"), *rows)]
    if random := recipe.head_rows - recipe.head_scored:
        lines.append(
            f"Of the head's rows {recipe.head_scored:,} score a token; {random:,} are random and never looked at."
        )
    return "\n".join([f"{recipe.name} is in {out}.", *lines, made.compared()])
