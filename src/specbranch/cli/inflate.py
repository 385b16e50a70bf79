"""`specbranch inflate`: a small model in the shape of a larger one, for benchmarks without large weights."""

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
        f"{s.hidden} hidden, {s.layers} layers, {s.heads} heads ({s.kv_heads} KV) of {s.head_dim}, "
        f"{s.intermediate} neurons, {s.vocabulary} tokens",
    )
    for name, s in SHAPES.items()
    if name != "tiny"
]
_shape, _check = options_of("Shape"), options_of("Check")


@click.command(cls=SectionedCommand, tables={"Shapes": SHAPE_TABLE})
@click.argument("model")
@click.option("--out", type=PATH, required=True, metavar="DIR", help="Folder for the recipe.")
@click.option(
    "--target",
    metavar="MODEL",
    help="Target of a draft made by `distill`, not inflated [the one that the draft names].",
)
@click.option("--seed", type=int, default=0, metavar="N", help="Seed of the added random weights [0].")
@_shape("--shape", metavar="NAME", help="Name of a shape, see below [the model's own].")
@_shape("--hidden", type=int, metavar="N", help="Width of the residual stream, instead of the shape's.")
@_shape("--layers", type=int, metavar="N", help="Number of layers; the added ones contribute nothing.")
@_shape("--heads", type=int, metavar="N", help="Number of query heads.")
@_shape("--kv-heads", type=int, metavar="N", help="Number of key/value heads.")
@_shape("--head-dim", type=int, metavar="N", help="Dimension of a head, a multiple of the model's.")
@_shape("--intermediate", type=int, metavar="N", help="Number of neurons in an MLP.")
@_shape("--vocabulary", type=int, metavar="N", help="Rows of the output head, at least as many as the model scores.")
@_check("--device", metavar="DEVICE", help="Device of the comparison: cpu, cuda, cuda:1 … [a GPU if there is one].")
@_check(
    "--dtype",
    metavar="TYPE",
    help="Precision of the comparison: float64, float32, bfloat16 or float16 [float32 on a CPU, else bfloat16].",
)
@click.option(
    "--json", "as_json", is_flag=True, help="Print one JSON object: the recipe, head_rows, parameters, checked …"
)
def inflate(shape: str | None, as_json: bool, **given: Any) -> None:
    """Give MODEL the shape of a larger model: its text stays the same, its cost is that of the larger one.

    \b
    specbranch inflate smollm2-135m --shape 7b --out smollm2-7b
    specbranch inflate smollm2-weak --shape 68m --out weak-68m
    specbranch generate --target smollm2-7b --draft weak-68m "Once upon a time"

    This is for benchmarks of speculative decoding without large weights. The agreement of draft and target is real,
    and so is the time of a step. DIR holds a recipe of a few hundred bytes, and stands wherever a model is named.
    The weights are generated when the model is loaded, from MODEL and the seed, and are never written. Added weights
    are random, and their output is multiplied by zero. Tokenizer, context length and end tokens are those of MODEL.

    The command loads both models once and compares their logits; if they differ, it writes nothing. A shape must be at
    least as large as MODEL in every size except the vocabulary; the output head gets the larger number of rows. MODEL
    may be a draft made by `distill`, or a pair's name, which stands for its draft. An inflated draft has an embedding
    and a head of its own.
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
