"""The pairs a bench runs: which models, in whose shapes, where and how they run, and what results call them.

Owns the way from what was asked for to a pair that can be loaded; shapes become recipes in a folder beside the results.
Invariant: pairs that run otherwise have another title, so that their rows stand beside each other in one folder.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from specbranch.assembly import ModelChoice, fetched
from specbranch.config import ExecutorName, WeightsName
from specbranch.distill.draft_name import is_draft_folder
from specbranch.errors import BadParameter
from specbranch.models.files.inflation import is_inflation, read_inflation, write_inflation
from specbranch.models.shapes import ShapeChoice
from specbranch.pairs import chosen_models, draft_path

OWN = "own"  # the shape of a model as it is


@dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    """Where and how both models of a pair run; nothing: as the engine does unless told."""

    executor: ExecutorName = "serial"
    device: str | None = None
    draft_device: str | None = None
    draft_weights: WeightsName | None = None

    def told(self) -> dict[str, Any]:
        """What is not as usual."""
        usual = asdict(Running())
        return {name: value for name, value in asdict(self).items() if value != usual[name]}

    @property
    def suffix(self) -> str:
        """What a title says of it."""
        executor = None if self.executor == "serial" else self.executor
        beside = None if self.draft_device is None else f"{self.draft_device}-draft"
        return "".join(f"+{part}" for part in (self.draft_weights, beside, executor) if part)


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """A pair at the bench."""

    title: str
    target: str
    draft: str | None
    source: tuple[str, str | None]  # target and draft as they are, where these are inflated
    running: Running = Running()

    @property
    def is_plain(self) -> bool:
        """Whether it can be replayed as it is run: both models as they are, in one process."""
        return (self.target, self.draft) == self.source and not self.running.suffix


def make_subject(
    pair: str | None,
    target: str | None,
    draft: str | None,
    shapes: Mapping[str, str | None],
    running: Running,
    folder: Path,
) -> Subject:
    """Say what is run; `shapes` of target and draft, if they are to have another, become recipes in the folder."""
    big, small = chosen_models(pair, target, draft)
    plain = pair_title(pair, big, small)
    wanted = {role: ShapeChoice.parse(text) for role, text in shapes.items() if text not in (None, OWN)}
    if "draft" in wanted and small is None:
        raise BadParameter(
            f"--draft-shape is {shapes['draft']}, but {big} was given without a draft. Give one with --draft, or a "
            "--pair."
        )
    title = "-".join(
        (plain, *(wanted[role].short if role in wanted else OWN for role in ("draft", "target") if wanted))
    )
    title += running.suffix
    names = {"target": big, "draft": small}
    for role, shape in wanted.items():
        names[role] = _inflated(
            str(names[role]), big, shape, folder / f"{title}-{role}", f"--{role}-shape {shapes[role]}"
        )
    assert names["target"] is not None
    return Subject(title=title, target=names["target"], draft=names["draft"], source=(big, small), running=running)


def pair_title(pair: str | None, target: str, draft: str | None) -> str:
    """Return what results call a pair: its name, or those of its models."""
    return pair or (target if draft is None else f"{Path(draft).name}+{Path(target).name}")


def told_of(role: str, name: str) -> dict[str, Any]:
    """What results tell of a model: its name, and of an inflated one its shape and which head each step is charged
    with."""
    if not is_inflation(name):
        return {role: name}
    recipe = read_inflation(name)
    head = f"{recipe.head_rows} rows, {recipe.head_scored} of them tokens"
    return {role: recipe.name, f"{role}_shape": recipe.shape, f"{role}_head": head}


def _inflated(model: str, target: str, shape: ShapeChoice, folder: Path, asked: str) -> str:
    """Write the recipe of a model in a shape; returns its folder."""
    from specbranch.distill.sizing import sized

    source = fetched(ModelChoice(draft_path(model)))
    beside = fetched(ModelChoice(target)) if is_draft_folder(source) else None
    try:
        found = sized(model, source, shape, beside)
    except BadParameter as error:  # which names the options of `inflate`
        told = re.sub(
            r"--([a-z-]+)(?: (\d+))?",
            lambda found: found[1].replace("-", "_") + (f"={found[2]}" if found[2] else ""),
            str(error),
        )
        raise BadParameter(f"{asked}: {told}") from None
    write_inflation(folder, found.recipe)
    return str(folder)
