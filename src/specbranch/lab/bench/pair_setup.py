"""The pairs of a bench: models, shapes, devices, prompts, and the title of each pair in the results.

Owns the step from an order for a pair (`PairOrder`) to a pair that can be loaded (`Subject`). Larger shapes become
recipes in a folder with the results. Invariants: pairs that run differently have different titles, so one folder can
hold the rows of both. What cannot run is refused before a model is loaded.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import specbranch.lab.inflation.source  # noqa: F401 (registers inflated models)
from specbranch.assembly import ModelChoice, fetched, load_tokenizer
from specbranch.config import ExecutorName, WeightsName
from specbranch.errors import BadParameter
from specbranch.lab.inflation.recipe import is_inflation, read_inflation, write_inflation
from specbranch.lab.inflation.shapes import ShapeChoice
from specbranch.lab.suites.filler import with_filler
from specbranch.lab.suites.suite import Suite, conversation
from specbranch.models.drafts.draft_name import is_draft_folder
from specbranch.pairs import chosen_models, draft_path

OWN = "own"  # a model keeps its shape
USUAL_CONTEXT = 8192  # default context length


@dataclass(frozen=True, slots=True, kw_only=True)
class PairOrder:
    """The order for one pair: its name or its models, their shapes, and the number of prompts of each suite."""

    pair: str | None = None
    target: str | None = None
    draft: str | None = None
    target_shape: str | None = None  # None or OWN: unchanged
    draft_shape: str | None = None
    limit: int | None = None
    outside_limit: int | None = None  # number of prompts for methods of other engines

    @property
    def has_draft(self) -> bool:
        """True if there will be a draft."""
        return self.pair is not None or self.draft is not None

    @property
    def models(self) -> tuple[str, str | None]:
        """The names of target and draft."""
        return chosen_models(self.pair, self.target, self.draft)

    @property
    def title(self) -> str:
        """The title in the results: the pair's name, or those of its models."""
        return pair_title(self.pair, *self.models)


@dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    """Where and how both models of a pair run; None stands for the engine's default."""

    executor: ExecutorName = "serial"
    device: str | None = None
    draft_device: str | None = None
    weights: WeightsName | None = None
    draft_weights: WeightsName | None = None
    draft_window: int | None = None
    cache_dtype: str | None = None

    def not_default(self) -> dict[str, Any]:
        """Return the values that are not the defaults."""
        usual = asdict(Running())
        return {name: value for name, value in asdict(self).items() if value != usual[name]}

    @property
    def suffix(self) -> str:
        """The part of a title that says how the pair runs."""
        executor = None if self.executor == "serial" else self.executor
        drafting = None if self.draft_device is None else f"{self.draft_device}-draft"
        target = None if self.weights is None else f"{self.weights}-target"
        cache = None if self.cache_dtype is None else f"{self.cache_dtype}-cache"
        window = None if self.draft_window is None else f"{self.draft_window}-window"
        return "".join(f"+{part}" for part in (target, self.draft_weights, window, cache, drafting, executor) if part)


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """A pair as a bench runs it."""

    title: str
    target: str
    draft: str | None
    source: tuple[str, str | None]  # target and draft before they were inflated
    running: Running = Running()

    @property
    def is_plain(self) -> bool:
        """True if it can be replayed as it runs: not inflated, and in one process."""
        return (self.target, self.draft) == self.source and not self.running.suffix


def make_subject(order: PairOrder, running: Running, folder: Path) -> Subject:
    """Return the pair to run; models in another shape become recipes in the folder."""
    target, draft = order.models
    given = {"target": order.target_shape, "draft": order.draft_shape}
    shapes = {role: ShapeChoice.parse(text) for role, text in given.items() if text not in (None, OWN)}
    if "draft" in shapes and draft is None:
        raise BadParameter(
            f"--draft-shape is {order.draft_shape}, but {target} was given without a draft. Give one with --draft, or "
            "a --pair."
        )
    shorts = [shapes[role].short if role in shapes else OWN for role in ("draft", "target") if shapes]
    title = "-".join((order.title, *shorts)) + running.suffix
    names = {"target": target, "draft": draft}
    for role, shape in shapes.items():
        asked = f"--{role}-shape {given[role]}"
        names[role] = _inflated(str(names[role]), target, shape, folder / f"{title}-{role}", asked)
    return Subject(
        title=title, target=str(names["target"]), draft=names["draft"], source=(target, draft), running=running
    )


def pair_title(pair: str | None, target: str, draft: str | None) -> str:
    """Return the title of a pair: its name, or those of its models."""
    return pair or (target if draft is None else f"{Path(draft).name}+{Path(target).name}")


def model_facts(role: str, name: str) -> dict[str, Any]:
    """Return the facts about a model for the results: its name; if inflated, also its shape and the head that each step
    computes."""
    if not is_inflation(name):
        return {role: name}
    recipe = read_inflation(name)
    head = f"{recipe.head_rows} rows, {recipe.head_scored} of them tokens"
    return {role: recipe.name, f"{role}_shape": recipe.shape, f"{role}_head": head}


def _inflated(model: str, target: str, shape: ShapeChoice, folder: Path, asked: str) -> str:
    """Write the recipe of a model in a shape; return its folder."""
    from specbranch.lab.inflation.sizing import sized

    source = fetched(ModelChoice(draft_path(model)))
    target_path = fetched(ModelChoice(target)) if is_draft_folder(source) else None
    try:
        found = sized(model, source, shape, target_path)
    except BadParameter as error:  # the sentence names the options of `inflate`
        message = re.sub(
            r"--([a-z-]+)(?: (\d+))?",
            lambda found: found[1].replace("-", "_") + (f"={found[2]}" if found[2] else ""),
            str(error),
        )
        raise BadParameter(f"{asked}: {message}") from None
    write_inflation(folder, found.recipe)
    return str(folder)


@dataclass(frozen=True, slots=True)
class Group:
    """Prompts that run with the same settings, and the prompts to tune on."""

    suites: tuple[Suite, ...]
    tuning: tuple[Suite, ...]

    def with_filler(self, context: int, target: str, answer: int) -> Group:
        """Return the group with filler before its prompts, so that prompt and answer have about `context` tokens."""
        counts = _counts(target)
        suites, tuning = (
            tuple(with_filler(suite, context, answer, *counts) for suite in part) for part in (self.suites, self.tuning)
        )
        return Group(suites, tuning)


@dataclass(frozen=True, slots=True)
class BenchPair:
    """A pair and its prompts."""

    subject: Subject
    groups: tuple[Group, ...]
    outside: int | None = None  # prompts of each suite for methods of other engines; None: all
    context_length: int | None = None  # None: the default

    @property
    def suites(self) -> tuple[Suite, ...]:
        """All prompts."""
        return tuple(suite for group in self.groups for suite in group.suites)


def trained_context(target: str) -> int:
    """Return the context length that a target supports, in tokens."""
    from specbranch.models.files.locate import locate
    from specbranch.models.loading import open_model

    return open_model(locate(fetched(ModelChoice(target))))[0].context_length


def _counts(target: str) -> tuple[Callable[[str], int], Callable[[Sequence[str]], int]]:
    """Return two functions that count tokens: of a text, and of a conversation without its answers."""
    tokenizer = load_tokenizer(ModelChoice(target))

    def count(words: str) -> int:
        return len(tokenizer.encode(words))

    def count_turns(turns: Sequence[str]) -> int:
        return len(tokenizer.chat(conversation(turns)))

    return count, count_turns
