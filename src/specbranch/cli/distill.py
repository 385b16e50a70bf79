"""`specbranch distill`: a draft for a target, trained on the target's own text."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from specbranch.cli.options import with_options, writing_options
from specbranch.cli.sections import PATH, SectionedCommand, options_of
from specbranch.errors import BadParameter

RESUME_HERE = ""  # --resume without a draft
_model, _writing, _training = (options_of(title) for title in ("Target and draft", "Writing", "Training"))


@click.command(cls=SectionedCommand)
@_model("--target", metavar="MODEL", help="Target model: a folder, a .gguf file, a Hub id or a known name.")
@_model(
    "--kind",
    type=click.Choice(["plain", "features"]),
    default="plain",
    help="plain: the draft reads tokens alone. features: its row also reads the target's hidden states, which is right "
    "for rounds on one GPU, where draft and target take turns; such rounds do not run on the device yet [plain].",
)
@_model(
    "--layers",
    type=int,
    metavar="N",
    help="Number of layers of the draft; it starts from as many layers of the target, evenly spaced. Of a feature "
    "draft 1 or 2 [1], the target's last ones.",
)
@_model(
    "--start",
    metavar="I,J,…",
    help="Layers of the target to start from instead, numbered from 0; as many as --layers.",
)
@_model(
    "--taps",
    metavar="A,B,C",
    help="A feature draft reads the target's states after A, B and C of its layers; 0 is the embedding "
    "[2, half of them, all but --layers].",
)
@_model("--out", type=PATH, required=True, metavar="DIR", help="Folder for the draft.")
@_model(
    "--head",
    type=click.Choice(["full", "reduced"]),
    help="Output head: full scores all tokens, which `export` to hf and gguf needs; reduced scores --head-tokens of "
    "them [full, or reduced if --head-tokens is given].",
)
@_model(
    "--head-tokens",
    type=int,
    metavar="K",
    help="Reduce the draft's output head to the K tokens that the target writes most often [all].",
)
@_model(
    "--storage",
    type=click.Choice(["bfloat16", "int8"]),
    default="bfloat16",
    help="Storage type of the draft's weights [bfloat16].",
)
@_model("--device", metavar="DEVICE", help="Device: cpu, cuda, cuda:1 … [a GPU if there is one].")
@with_options(
    writing_options(
        120,
        1024,
        "2048 on a GPU, else 640",
        "Train on text that an earlier run wrote (a file, or a folder of files); write nothing.",
    )
)
@_writing(
    "--only-write",
    is_flag=True,
    help="Stop after writing; train later with --resume or --material.",
)
@_training(
    "--from-served",
    type=PATH,
    metavar="DIR",
    help="Train the draft of --resume DRAFT on with texts that `serve --keep-text DIR` kept, mixed with its original "
    "material; the draft itself stays, the new one goes to --out.",
)
@_training(
    "--seconds-training",
    type=float,
    metavar="S",
    help="Seconds of training, with what the target says to the material computed first; at least 20 steps "
    "[300; 120 with --from-served].",
)
@_training("--steps", type=int, metavar="N", help="Train for N steps instead.")
@_training("--learning-rate", type=float, metavar="X", help="Peak learning rate [0.0006; 0.0002 with --from-served].")
@_training(
    "--rows",
    type=int,
    metavar="N",
    help="Batch size of a training step; halved while memory is short [64 K tokens on a GPU, else 8 rows].",
)
@_training(
    "--length",
    type=int,
    metavar="N",
    help="Number of tokens in a row, packed with whole conversations [2048 on a GPU, else 1024].",
)
@_training(
    "--unroll",
    type=int,
    metavar="N",
    help="Train a feature draft for drafts of N tokens, in which it reads its own states [8].",
)
@_training("--checkpoint-seconds", type=float, default=60.0, metavar="S", help="Seconds between two checkpoints [60].")
@click.option(
    "--resume",
    is_flag=False,
    flag_value=RESUME_HERE,
    metavar="[DRAFT]",
    help="Resume the run in DIR, wherever it stopped. With --from-served: the draft that learns on, a folder or the "
    "name of a pair.",
)
@click.option("--seed", type=int, default=0, metavar="N", help="Seed of writing and training [0].")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object: top1, top3, divergence, steps, tokens …")
def distill(
    as_json: bool, start: str | None, taps: str | None, data: Path | None, resume: str | None, **given: Any
) -> None:
    """Train a draft for a target. No data set is needed: the target writes questions and answers, and the draft learns
    from them.

    \b
    specbranch distill --target smollm2-135m --layers 4 --out my-draft
    specbranch distill --target BIG --layers 4 --head-tokens 8192 --out my-draft --resume
    specbranch distill --target BIG --kind features --head-tokens 24576 --out my-draft
    specbranch distill --from-served kept --resume my-draft --out my-draft-2

    The draft shares the target's embedding and output head, and stores only its own layers. If the command is killed,
    the same command with --resume continues. DIR/training holds the training text, checkpoints, metrics.jsonl and a
    chart; you may delete it afterwards. DIR/evaluation.json counts how often the target chose the draft's candidates
    on held-out text; a planner starts from it.
    """
    from specbranch.cli.generate import read_prompts
    from specbranch.cli.progress import counted, pulled
    from specbranch.training.making.draft import DraftJob, make_draft

    prompts = () if data is None else tuple(read_prompts(None, data))
    given = {name: value for name, value in given.items() if name != "learning_rate" or value is not None}
    if (served := given.pop("from_served")) is not None:
        from specbranch.cli.distill_served import learn

        learn(served, resume, as_json, {**given, "prompts": prompts})
        return
    _check_new(given, resume)
    starts, read = _layers("--start", start), _layers("--taps", taps)
    job = DraftJob(start=starts, taps=read, prompts=prompts, resume=resume is not None, **given)
    with counted() as bars:
        record = make_draft(job, pulled, bars)
    if as_json:
        click.echo(json.dumps(record))
    else:
        click.echo(_written(record) if job.only_write else _summary(record))


def _check_new(given: Mapping[str, Any], resume: str | None) -> None:
    """Refuse a new draft without a target, and one that goes on from a draft."""
    if given["target"] is None:
        raise click.MissingParameter(param_hint="'--target'", param_type="option")
    if resume:
        raise BadParameter(
            f"--resume names {resume}, which is for --from-served DIR. To resume the run in {given['out']}, say "
            "--resume alone."
        )


def _layers(option: str, given: str | None) -> tuple[int, ...] | None:
    """Take the numbers of layers apart."""
    try:
        return None if given is None else tuple(int(part) for part in given.split(","))
    except ValueError:
        raise BadParameter(
            f"{option} is {given!r}; expected numbers of layers with commas between them, such as 2,14,27."
        ) from None


def _written(record: Mapping[str, Any]) -> str:
    return (
        f"{record['conversations']:,} conversations, {record['tokens_written']:,} tokens, are in "
        f"{record['material']}. Train on them with --material {record['material']}."
    )


def _summary(record: Mapping[str, Any]) -> str:
    outside = f", {record['outside']:.1%} of the target's probability outside the head" if record["head_tokens"] else ""
    count = len(record["layers"])
    kind = f"{count} layer{'s' if count > 1 else ''}" + (f", taps {record['taps']}" if record["taps"] else "")
    deeper = record.get("top1_by_depth", ())
    depths = f"Top-1 after 0, 1, 2 … own states: {', '.join(f'{one:.3f}' for one in deeper)}.\n" if deeper else ""
    return (
        f"The draft is in {record['out']}: {kind}, {record['bytes'] / 1e6:.1f} MB.\n"
        f"On {record['compared']:,.0f} held-out tokens of the target: top-1 agreement {record['top1']:.3f}, top-3 "
        f"{record['top3']:.3f}, divergence {record['divergence']:.3f}{outside}.\n{depths}"
        f"{record['tokens_written']:,} tokens written, {record['tokens']:,} trained on in {record['steps']:,} steps "
        f"({record['seconds']:.0f} s)."
    )
