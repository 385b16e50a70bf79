"""`specbranch train-predictor`: H-RAD for a pair, made from nothing but the pair."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from specbranch.cli.options import PAIR, TABLES, with_options, writing_options
from specbranch.cli.sections import PATH, SectionedCommand, options_of
from specbranch.errors import BadParameter
from specbranch.pairs import chosen_models

if TYPE_CHECKING:
    from specbranch.hrad.predictor import Predictor

FITTING = ("epochs", "batch", "learning_rate", "weight_decay", "forgets", "seed")
_models, _training = options_of("Pair"), options_of("Training")


@click.command("train-predictor", cls=SectionedCommand, tables={"Pairs": TABLES["Pairs"]})
@with_options(PAIR)
@_models("--target", metavar="MODEL", help="Target model, instead of a pair's.")
@_models("--draft", metavar="MODEL", help="Draft model for --target.")
@_models("--device", metavar="DEVICE", help="Device: cpu, cuda, cuda:1 … [a GPU if there is one].")
@_models("--out", type=PATH, required=True, metavar="DIR", help="Folder for the predictor.")
@with_options(
    writing_options(30, 512, "640", "Use text that an earlier run wrote (its DIR/material.safetensors); write nothing.")
)
@_training(
    "--texts",
    type=click.IntRange(min=8),
    default=2000,
    metavar="N",
    help="Maximum number of conversations to take rounds from [2000].",
)
@_training(
    "--longest",
    type=click.IntRange(1, 64),
    default=16,
    metavar="N",
    help="Maximum draft length (γ) that it predicts [16].",
)
@_training(
    "--layers",
    type=click.IntRange(1, 64),
    default=4,
    metavar="K",
    help="Number of target layers whose hidden states it reads [4].",
)
@_training(
    "--epochs", type=click.IntRange(min=1), default=20, metavar="N", help="Number of passes over the rounds [20]."
)
@_training("--batch", type=click.IntRange(min=1), default=256, metavar="N", help="Batch size, in rounds [256].")
@_training("--learning-rate", type=float, default=1e-3, metavar="X", help="Peak learning rate [0.001].")
@_training("--weight-decay", type=float, default=0.1, metavar="X", help="Weight decay [0.1].")
@_training(
    "--forgets",
    type=click.FloatRange(0, 1, max_open=True),
    default=0.2,
    metavar="X",
    help="Dropout: share of features left out in each step [0.2].",
)
@_training(
    "--across-tasks/--no-across-tasks",
    default=True,
    help="Also train without each kind of text, to measure transfer to unseen tasks [yes].",
)
@click.option("--seed", type=int, default=0, metavar="N", help="Seed of writing, splitting and training [0].")
@click.option(
    "--json", "as_json", is_flag=True, help="Print one JSON object: accuracy, confusion, calibration, log_loss …"
)
def train_predictor(
    as_json: bool, pair: str | None, target: str | None, draft: str | None, data: Path | None, **given: Any
) -> None:
    """Train an H-RAD predictor for a pair: it predicts from the target's hidden states how much of the next draft is
    accepted.

    \b
    specbranch train-predictor --pair smollm2-default --out my-predictor
    specbranch train-predictor --target BIG --draft SMALL --out my-predictor
    specbranch generate --policy paper --predictor my-predictor "Once upon a time"

    No data set is needed. The target writes questions and answers them greedily. The command derives rounds of
    speculative decoding from these answers, with drafts of full length. It trains on 75 % of the texts, calibrates on
    10 % and evaluates on 15 %. DIR/report.svg shows the calibration, DIR/predictor.json holds all figures. A predictor
    fits only the pair it was trained for; others refuse it.
    """
    from specbranch.cli.generate import read_prompts
    from specbranch.cli.progress import counted, pulled
    from specbranch.training.hrad.train import FitSettings
    from specbranch.training.making.predictor import PredictorJob, make_predictor

    big, small = chosen_models(pair, target, draft)
    if small is None:
        raise BadParameter(
            "A predictor foretells what becomes of a draft, and none was given. Name one with --draft, or a --pair."
        )
    fit = FitSettings(**{name: given.pop(name) for name in FITTING})
    prompts = () if data is None else tuple(read_prompts(None, data))
    job = PredictorJob(target=big, draft=small, prompts=prompts, fit=fit, **given)
    with counted() as bars:
        predictor = make_predictor(job, pulled, bars)
    click.echo(json.dumps(predictor.about.figures) if as_json else _summary(job.out, predictor))


def _summary(out: Path, predictor: Predictor) -> str:
    figures, learned = predictor.about.figures, predictor.about.provenance
    lines = [
        f"The predictor is in {out}. On {figures['rounds']:,} held-out rounds, with drafts of "
        f"{figures['length']} tokens:",
        f"  {figures['accuracy']:.1%} predicted correctly ("
        + ", ".join(f"{name} {share:.1%}" for name, share in figures["accuracy_by_class"].items())
        + f"); probabilities are off by {figures['calibration_error']:.1%} on average.",
        "  true \\ pred.  none    some     all",
        *(f"  {name:10} " + " ".join(f"{count:7,}" for count in row) for name, row in _confusion(figures)),
        "Log-loss of each way to predict the accepted length, in nats per round (less is better; in brackets the "
        "difference to H-RAD):",
        *(
            f"  {name:23} {one['nats']:.3f} ({one['low']:+.3f} … {one['high']:+.3f})"
            for name, one in figures["rivals"].items()
        ),
    ]
    for name, one in figures.get("across_tasks", {}).items():
        more = one["nats_unseen"] / one["nats"] - 1
        lines.append(
            f"  {name}: {one['nats']:.3f} nats, {one['nats_unseen']:.3f} without such text in training ({more:+.1%})"
        )
    lines.append(f"{learned['rounds_learned']:,} training rounds, in {learned['seconds']:.0f} s.")
    return "\n".join(lines)


def _confusion(figures: Mapping[str, Any]) -> list[tuple[str, list[int]]]:
    return list(zip(figures["accuracy_by_class"], figures["confusion"], strict=True))
