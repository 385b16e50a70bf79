"""Train the three drafts for SmolLM2-135M-Instruct that come with the project, as they were: `python
scripts/train_drafts.py --help`.

On one H200 the writing takes about 5 minutes and each draft 2 to 8. Every part can run by itself, and continues where
it was stopped. The figures of the shipped drafts are in each provenance.json. No prompt of a benchmark is trained on:
the target invents all questions, from the openings in `training/distill/openings.py`. `scripts/check_material.py`
searches the material for benchmark prompts.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

TARGET = "smollm2-135m"
WRITING = ("--writing-rows", "3072", "--writing-length", "1152", "--seed", "0")
TRAINING = ("--rows", "32", "--length", "1152", "--storage", "int8", "--seed", "0")


@dataclass(frozen=True, slots=True)
class Recipe:
    """What differs between the drafts."""

    start: tuple[int, ...]  # layers of the target that it is initialised with
    head_tokens: int | None
    learning_rate: float
    seconds: int


# Trials of 250 steps (7 M tokens), by held-out top-1 with four layers. Layers at equal distances: 0.59, against 0.50 of
# the first and last ones. A learning rate of 2e-3: 0.59, against 0.50 of 1e-3 (first and last layers). The two were not
# tried together before.
RECIPES = {
    "weak": Recipe((0, 29), 8192, 2e-3, 80),
    "default": Recipe((0, 10, 20, 29), 8192, 2e-3, 270),
    "strong": Recipe((0, 1, 2, 4, 5, 7, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 29), None, 1e-3, 375),
}


def main() -> None:
    """Write the material, then train the drafts asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "parts", nargs="*", default=["write", *RECIPES], metavar="PART", help="write, weak, default, strong [all]"
    )
    parser.add_argument(
        "--out", type=Path, default=Path("trained-drafts"), help="folder of the drafts [trained-drafts]"
    )
    parser.add_argument("--target", default=TARGET, help=f"where the target is, if not to be had by name [{TARGET}]")
    parser.add_argument("--seconds-writing", type=int, default=240, help="how long the target writes [240]")
    given = parser.parse_args()
    if unknown := [part for part in given.parts if part not in ("write", *RECIPES)]:
        parser.error(f"unknown part {unknown[0]!r}; expected write, {', '.join(RECIPES)}")
    for part in given.parts:
        arguments = writing(given.seconds_writing) if part == "write" else training(RECIPES[part], given.out)
        folder = given.out / ("material" if part == "write" else f"smollm2-{part}")
        distill("--target", given.target, "--out", str(folder), "--resume", *arguments)


def writing(seconds: int) -> list[str]:
    """Say how the material is written."""
    return ["--layers", "1", "--only-write", "--seconds-writing", str(seconds), *WRITING]


def training(recipe: Recipe, out: Path) -> list[str]:
    """Say how a draft is trained."""
    head = [] if recipe.head_tokens is None else ["--head-tokens", str(recipe.head_tokens)]
    start = ["--layers", str(len(recipe.start)), "--start", ",".join(map(str, recipe.start))]
    budget = ["--learning-rate", str(recipe.learning_rate), "--seconds-training", str(recipe.seconds)]
    return [*start, *head, *budget, "--material", str(out / "material" / "training"), *TRAINING]


def distill(*arguments: str) -> None:
    """Run the command a user would."""
    subprocess.run([sys.executable, "-m", "specbranch", "distill", *arguments], check=True)


if __name__ == "__main__":
    main()
