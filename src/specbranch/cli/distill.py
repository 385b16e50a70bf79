"""`specbranch distill`: a draft for a target, made from nothing but the target."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from specbranch.cli.options import with_options, writing_options
from specbranch.cli.sections import PATH, SectionedCommand, options_of
from specbranch.errors import BadParameter

_model, _writing, _training = (options_of(title) for title in ("Target and draft", "Writing", "Training"))


@click.command(cls=SectionedCommand)
@_model(
    "--target", required=True, metavar="MODEL", help="Target model: a folder, a .gguf file, a Hub id, or a known name."
)
@_model(
    "--layers",
    type=int,
    required=True,
    metavar="N",
    help="Layers of the draft; it starts from as many of the target's, at equal distances.",
)
@_model(
    "--start",
    metavar="I,J,…",
    help="Start from these of the target's layers instead, numbered from 0; as many as --layers.",
)
@_model("--out", type=PATH, required=True, metavar="DIR", help="Folder of the draft.")
@_model(
    "--head-tokens",
    type=int,
    metavar="K",
    help="Let the draft propose only the K tokens the target writes most often [all].",
)
@_model(
    "--storage",
    type=click.Choice(["bfloat16", "int8"]),
    default="bfloat16",
    help="How its weights are stored [bfloat16].",
)
@_model("--device", metavar="DEVICE", help="cpu, cuda, cuda:1 … [a GPU if there is one]")
@with_options(
    writing_options(120, 1024, "Train on what an earlier run wrote (a file, or a folder of them); nothing is written.")
)
@_writing(
    "--only-write",
    is_flag=True,
    help="Stop when the material is written; train on it later with --resume or --material.",
)
@_training(
    "--seconds-training", type=float, metavar="S", help="How long the draft is trained, 20 steps at the least [300]."
)
@_training("--steps", type=int, metavar="N", help="Train for N steps instead.")
@_training("--learning-rate", type=float, default=6e-4, metavar="X", help="Highest learning rate [0.0006].")
@_training(
    "--rows", type=int, metavar="N", help="Rows of a step; halved at a time if memory is short [64 on a GPU, else 8]."
)
@_training(
    "--length", type=int, default=1024, metavar="N", help="Tokens of a row, packed with whole conversations [1024]."
)
@_training("--checkpoint-seconds", type=float, default=60.0, metavar="S", help="Time between two checkpoints [60].")
@click.option("--resume", is_flag=True, help="Go on with the run in DIR, wherever it was stopped.")
@click.option("--seed", type=int, default=0, metavar="N", help="Seed of writing and training [0].")
@click.option("--json", "as_json", is_flag=True, help="One JSON object: top1, top3, divergence, steps, tokens …")
def distill(as_json: bool, start: str | None, data: Path | None, **given: Any) -> None:
    """Make a draft for a target. No data set is needed: the target invents questions and answers them, and the draft
    learns from that.

    \b
    specbranch distill --target smollm2-135m --layers 4 --out my-draft
    specbranch distill --target BIG --layers 4 --head-tokens 8192 --out my-draft --resume

    The draft shares the target's embedding and output head; only its own layers are stored. Killed at any moment, the
    same command with --resume goes on. DIR/training holds the material, checkpoints, metrics.jsonl and a picture; it
    may be deleted afterwards.
    """
    from specbranch.cli.generate import read_prompts
    from specbranch.cli.progress import counted, pulled
    from specbranch.training.making.draft import DraftJob, make_draft

    prompts = () if data is None else tuple(read_prompts(None, data))
    job = DraftJob(start=_layers(start), prompts=prompts, **given)
    with counted() as bars:
        record = make_draft(job, pulled, bars)
    if as_json:
        click.echo(json.dumps(record))
    else:
        click.echo(_written(record) if job.only_write else _summary(record))


def _layers(start: str | None) -> tuple[int, ...] | None:
    """Take the numbers of layers apart."""
    try:
        return None if start is None else tuple(int(part) for part in start.split(","))
    except ValueError:
        raise BadParameter(
            f"--start is {start!r}; expected numbers of layers with commas between them, such as 0,1,28,29."
        ) from None


def _written(record: Mapping[str, Any]) -> str:
    return (
        f"{record['conversations']:,} conversations, {record['tokens_written']:,} tokens, are in "
        f"{record['material']}. Train on them with --material {record['material']}."
    )


def _summary(record: Mapping[str, Any]) -> str:
    outside = f", {record['outside']:.1%} of the target's probability outside the head" if record["head_tokens"] else ""
    return (
        f"The draft is in {record['out']}: {len(record['layers'])} layers, {record['bytes'] / 1e6:.1f} MB.\n"
        f"On {record['compared']:,.0f} held-out tokens of the target: top-1 agreement {record['top1']:.3f}, top-3 "
        f"{record['top3']:.3f}, divergence {record['divergence']:.3f}{outside}.\n"
        f"{record['tokens_written']:,} tokens written, {record['tokens']:,} trained on in {record['steps']:,} steps "
        f"({record['seconds']:.0f} s)."
    )
