"""What `bench run` runs with one pair: the pair in its shapes, and its prompts, behind as much text as was asked for.

Owns the way from options to a `Subject` and its groups of prompts. Invariant: what cannot be run is refused here,
before a model is loaded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import click

from specbranch.config import WEIGHTS, ExecutorName
from specbranch.errors import BadParameter, unknown

if TYPE_CHECKING:
    from specbranch.bench.subjects import Running, Subject
    from specbranch.suites.suite import Suite

USUAL_CONTEXT = 8192  # that a model is given unless more is asked for
ROLES = ("target", "draft")


@dataclass(frozen=True, slots=True)
class Group:
    """Prompts that are run with the same settings, and those that methods are tuned on."""

    suites: tuple[Suite, ...]
    tuning: tuple[Suite, ...]


@dataclass(frozen=True, slots=True)
class BenchPair:
    """A pair and what it is run on."""

    subject: Subject
    groups: tuple[Group, ...]
    outside: int | None = None  # prompts of each suite for methods from outside
    context_length: int | None = None  # where it is more than usual

    @property
    def suites(self) -> tuple[Suite, ...]:
        """All prompts."""
        return tuple(suite for group in self.groups for suite in group.suites)


def chosen_subject(pair: dict[str, Any], wanted: dict[str, Any], out: Path) -> Subject:
    """Return a pair in the shapes that were asked for."""
    from specbranch.bench.subjects import make_subject
    from specbranch.cli.progress import pulled
    from specbranch.pairs import chosen_models

    how, shapes = _running(wanted), _shapes(pair, for_pair(pair, wanted))
    if any(shapes.values()) or wanted["context"]:
        pulled(chosen_models(pair.get("pair"), pair.get("target"), pair.get("draft"))[0])
    return make_subject(pair.get("pair"), pair.get("target"), pair.get("draft"), shapes, how, out / "models")


def for_pair(pair: dict[str, Any], wanted: dict[str, Any]) -> dict[str, Any]:
    """Return what is wanted of one pair."""
    return {**wanted, **wanted["of_pair"].get(pair.get("pair"), {})}


def make_entry(subject: Subject, wanted: dict[str, Any], suites: Sequence[Suite]) -> BenchPair:
    """Put together what is run with a pair."""
    from specbranch.bench.tuning import PROMPTS, tuning_suites

    found = tuple(suite.first(wanted["limit"]) for suite in suites)
    tuning = tuning_suites(wanted["tuning_prompts"] or PROMPTS)
    contexts = _contexts(subject, wanted)
    if not contexts:
        return BenchPair(subject, (Group(found, tuning),), wanted["outside_limit"])
    groups = tuple(
        Group(*(_behind(part, context, subject, wanted["max_tokens"]) for part in (found, tuning)))
        for context in contexts
    )
    return BenchPair(subject, groups, wanted["outside_limit"], max(contexts) if max(contexts) > USUAL_CONTEXT else None)


def _running(wanted: dict[str, Any]) -> Running:
    """Return where and how models run, refusing devices that are not there."""
    from specbranch.bench.subjects import Running

    executor, weights = wanted["executor"], wanted["draft_weights"]
    if executor not in get_args(ExecutorName):
        raise unknown("executor", executor, get_args(ExecutorName))
    if weights is not None and weights not in WEIGHTS:
        raise unknown("storage of weights", weights, WEIGHTS)
    if wanted["clock"] and executor != "serial":
        raise BadParameter(
            f"--executor {executor} runs by the wall clock only, and --clock was given. Leave one of them out."
        )
    asked = [device for device in (wanted["device"], wanted["draft_device"]) if device is not None]
    if asked:
        from specbranch.assembly import chosen_device

        for device in asked:
            chosen_device(device)
    return Running(
        executor=executor, device=wanted["device"], draft_device=wanted["draft_device"], draft_weights=weights
    )


def _shapes(pair: dict[str, Any], wanted: dict[str, Any]) -> dict[str, str | None]:
    """Return the shapes of target and draft: those given, else the preset's for this pair."""
    shapes = {role: wanted[f"{role}_shape"] for role in ROLES}
    lacking = [
        f"--{role}-shape"
        for role in ROLES
        if shapes[role] is None and (role == "target" or pair.get("draft") or "pair" in pair)
    ]
    if wanted["of_pair"] and lacking:
        raise BadParameter(
            f"Preset {wanted['preset']} has shapes for the pairs {', '.join(wanted['of_pair'])}, not for "
            f"{pair.get('pair') or pair.get('target') or pair.get('draft')}. Add {' and '.join(lacking)} (own: as it "
            "is), or take --preset "
            "gpu-real, where models are as they are."
        )
    return shapes


def _contexts(subject: Subject, wanted: dict[str, Any]) -> tuple[int, ...]:
    """Return the lengths of text that the target was made for; what a preset asks for beyond them is left out aloud."""
    asked = tuple(dict.fromkeys(wanted["context"]))
    if not asked:
        return ()
    from specbranch.assembly import ModelChoice, fetched
    from specbranch.models.files.locate import locate
    from specbranch.models.native import open_model

    arch, _ = open_model(locate(fetched(ModelChoice(subject.source[0]))))
    fitting, beyond = [n for n in asked if n <= arch.context_length], [n for n in asked if n > arch.context_length]
    made = f"{subject.source[0]} was made for texts of up to {arch.context_length} tokens"
    if beyond and (wanted["context_given"] or not fitting):
        raise BadParameter(f"--context is {beyond[0]}, but {made}. Give a smaller one, or another --target.")
    if beyond:
        click.echo(f"{subject.title}: a context of {beyond[0]} tokens is left out, as {made}.", err=True)
    return tuple(fitting)


def _behind(suites: Sequence[Suite], context: int, subject: Subject, answer: int) -> tuple[Suite, ...]:
    """Put text before prompts, counted by the target's tokenizer."""
    from specbranch.assembly import ModelChoice, load_tokenizer
    from specbranch.suites.filler import behind

    tokenizer = load_tokenizer(ModelChoice(subject.source[0]))

    def count(words: str) -> int:
        return len(tokenizer.encode(words))

    def count_turns(turns: Sequence[str]) -> int:
        messages = [
            {"role": role, "content": words if role == "user" else ""}
            for words in turns
            for role in ("user", "assistant")
        ]
        return len(tokenizer.chat(messages[:-1]))

    return tuple(behind(suite, context, answer, count, count_turns) for suite in suites)
