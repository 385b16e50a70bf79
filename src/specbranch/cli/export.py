"""`specbranch export`: a draft for other engines."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import click

from specbranch.cli.sections import PATH, SectionedCommand

FORMAT_TABLE = [
    ("hf", "a model folder for transformers' assisted generation, and for vLLM's draft models; full head only"),
    ("gguf", "a file for llama.cpp; full head only"),
    ("speculators", "a model folder with speculators_config; a reduced head keeps its rows, with d2t and t2d"),
]


@click.command(cls=SectionedCommand, tables={"Formats": FORMAT_TABLE})
@click.argument("draft")
@click.option(
    "--format",
    "form",
    type=click.Choice([name for name, _ in FORMAT_TABLE]),
    required=True,
    help="Form of the export, see below.",
)
@click.option("--out", type=PATH, metavar="DIR", help="Folder for the export, which must not exist [NAME-FORMAT].")
@click.option("--target", metavar="MODEL", help="Target of the draft [the one that the draft names].")
@click.option(
    "--dtype",
    metavar="TYPE",
    help="Precision of the weights: float32, bfloat16 or float16 [the smallest that holds every number exactly].",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object: out, dtype, bytes, agreement, licence …")
def export(as_json: bool, **given: Any) -> None:
    """Write DRAFT, a folder made by `distill` or a pair's name, in the form of another engine.

    \b
    specbranch distill --target BIG --layers 4 --head full --out my-draft
    specbranch export my-draft --format hf
    specbranch export my-draft --format gguf --out my-draft-gguf
    specbranch export smollm2-default --format speculators

    A draft shares embedding and output head with its target. An export holds them itself, so it is larger, and runs
    beside any copy of the target. Its greedy text is the draft's own. DIR also has the target's tokenizer, a card with
    agreement, licence and origin, and provenance.json. It appears whole or not at all.
    """
    from specbranch.cli.progress import counted, pulled
    from specbranch.training.making.export import ExportJob, export_draft

    with counted() as bars:
        record = export_draft(ExportJob(**given), pulled, bars)
    click.echo(json.dumps(record) if as_json else _summary(record))


def _summary(record: Mapping[str, Any]) -> str:
    kept = "every number as the draft has it" if record["exact"] else "rounded"
    head = "all tokens" if record["head_tokens"] is None else f"{record['head_tokens']:,} tokens"
    lines = [
        f"{record['out']}: {record['layers']} layers, {record['parameters'] / 1e6:.1f} million weights in "
        f"{record['dtype']} ({kept}), {record['bytes'] / 1e6:.1f} MB. Its head scores {head}.",
    ]
    if (agreement := record["agreement"]) is not None:
        lines.append(f"Agreement with {record['target']}: top-1 {agreement['top1']:.3f} ({agreement['text']}).")
    return "\n".join(lines)
