"""Train the predictors (H-RAD) of the three SmolLM2 pairs that come with the package, as they were: `python
scripts/train_predictors.py`.

This is `specbranch train-predictor` for each pair, except that the target writes and computes its texts once for all.
For the default pair it also trains predictors over fewer and more layers, for the table over K in docs/benchmarks.md.
It takes a few minutes on one H200.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from specbranch.assembly import chosen_device, load_runner
from specbranch.cli.progress import Bars, counted, pulled
from specbranch.pairs import chosen_models
from specbranch.training.hrad.rounds import LabelledRounds
from specbranch.training.hrad.train import FitSettings, dealt, fit
from specbranch.training.making.predictor import PredictorJob, load_collector, save, trained, written, written_texts

PAIRS = ("smollm2-weak", "smollm2-default", "smollm2-strong")
SHIPPED_LAYERS = 4
SWEEP = (1, 2, 8, 16)  # of the default pair
BATCH = 512
Recipe = tuple[float, float, float]  # learning rate, weight decay, share of the features forgotten
RECIPES: tuple[Recipe, ...] = (
    (1e-3, 0.02, 0.0),
    (1e-3, 0.1, 0.3),
    (4e-4, 0.1, 0.3),
    (4e-4, 0.3, 0.6),
    (1e-3, 1.0, 0.5),
)
MOST = max(SWEEP)


def main() -> None:
    """Write, read, train."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("trained-predictors"))
    parser.add_argument("--seconds-writing", type=float, default=40.0)
    parser.add_argument("--tokens", type=int)
    parser.add_argument("--writing-rows", type=int)
    parser.add_argument("--texts", type=int, default=5000)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--seconds-reading", type=float, default=240.0, help="read no longer than this")
    parser.add_argument("--material", type=Path)
    asked = parser.parse_args()
    with counted() as bars:
        material = written(job(PAIRS[0], MOST, asked), pulled, bars)
        say(f"{len(material):,} conversations, {material.tokens.numel():,} tokens")
        rounds = read(asked, material)
        recipe = best_recipe(narrowed(rounds[PAIRS[1]], SHIPPED_LAYERS), asked)
        for pair, found in rounds.items():
            one = job(pair, SHIPPED_LAYERS, asked, recipe, across=pair == PAIRS[1])
            train(one, narrowed(found, SHIPPED_LAYERS), bars, asked.out / pair)
        for layers in SWEEP:
            train(
                job(PAIRS[1], layers, asked, recipe),
                narrowed(rounds[PAIRS[1]], layers),
                bars,
                asked.out / f"layers-{layers}",
            )


def best_recipe(rounds: LabelledRounds, asked: argparse.Namespace) -> Recipe:
    """Try the recipes on the default pair, and take the one that does best on the texts that calibrate."""
    parts = dealt(rounds.to(torch.device(chosen_device(None))))
    found = {}
    for recipe in RECIPES:
        fitted = fit(parts, FitSettings(asked.epochs, BATCH, *recipe))
        found[recipe] = fitted.nats
        say(
            f"rate {recipe[0]}, decay {recipe[1]}, forgets {recipe[2]}: {fitted.nats:.4f} nats, best after epoch "
            f"{fitted.epoch}"
        )
    return min(found, key=lambda one: found[one])


def job(
    pair: str, layers: int, asked: argparse.Namespace, recipe: Recipe = (1e-3, 0.1, 0.2), across: bool = False
) -> PredictorJob:
    """One run of the command."""
    target, draft = chosen_models(pair, None, None)
    assert draft is not None
    return PredictorJob(
        target=target,
        draft=draft,
        out=asked.out,
        seconds_writing=asked.seconds_writing,
        tokens=asked.tokens,
        material=asked.material,
        writing_rows=asked.writing_rows,
        writing_length=768,
        texts=asked.texts,
        layers=layers,
        across_tasks=across,
        fit=FitSettings(asked.epochs, BATCH, *recipe),
    )


def read(asked: argparse.Namespace, material: Any) -> dict[str, LabelledRounds]:
    """Compute the texts once, with one target and all drafts."""
    jobs = {pair: job(pair, MOST, asked) for pair in PAIRS}
    one = jobs[PAIRS[0]]
    target = load_runner(one.choices[0])
    collectors = {pair: load_collector(one, target) for pair, one in jobs.items()}
    texts = [text for text in written_texts(one, material) if all(c.fits(text) for c in collectors.values())]
    texts = texts[: asked.texts]
    made: dict[str, list[LabelledRounds]] = {pair: [] for pair in PAIRS}
    start, number = time.monotonic(), 0
    for number, text in enumerate(texts):
        shown = collectors[PAIRS[0]].shown(text)
        for pair, collector in collectors.items():
            found = collector.rounds(text, number, shown)
            made[pair].append(found if pair == PAIRS[1] else narrowed(found, SHIPPED_LAYERS))
        if number % 250 == 249:
            say(f"{number + 1} of {len(texts)} texts in {time.monotonic() - start:.0f} s")
        if time.monotonic() - start > asked.seconds_reading:
            break
    material.select(torch.arange(len(material))[: int(1.3 * (number + 1))]).save(
        asked.out / "material-read.safetensors"
    )
    return {pair: LabelledRounds.join(parts) for pair, parts in made.items()}


def narrowed(rounds: LabelledRounds, layers: int) -> LabelledRounds:
    """Leave out the hidden states of the first of the layers that were read."""
    hidden = 576
    return replace(rounds, features=rounds.features[:, -(layers + 1) * hidden :].contiguous())


def train(one: PredictorJob, rounds: LabelledRounds, bars: Bars, out: Path) -> None:
    """Train and save."""
    start = time.monotonic()
    predictor = trained(one, rounds, bars)
    save(predictor, out)
    figures = predictor.about.figures
    nats = {name: round(rival["nats"], 3) for name, rival in figures["rivals"].items()}
    say(
        f"{out.name}: {len(rounds):,} rounds, accuracy {figures['accuracy']:.3f}, nats {json.dumps(nats)}, "
        f"{time.monotonic() - start:.0f} s"
    )


def say(words: str) -> None:
    """Print a line at once."""
    print(words, flush=True)


if __name__ == "__main__":
    main()
