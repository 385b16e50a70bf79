"""A pair loaded to be measured: both workers, and what tells its models from others.

Owns loading for `measure` and `doctor`. Invariant: with the process executor both models have half of the threads, here
as in the draft's own process, because that is how they run there.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from specbranch.assembly import (
    ModelChoice,
    common_vocabulary,
    drafter_recipe,
    fitted_to_target,
    half_the_threads,
    identity,
    load_tokenizer,
    make_drafter,
    make_verifier,
)
from specbranch.config import ExecutorName
from specbranch.core.loop import Executor
from specbranch.core.runner import Runner
from specbranch.errors import BadParameter
from specbranch.exec.drafter import Drafter
from specbranch.exec.messages import Recipe
from specbranch.exec.process import Process
from specbranch.exec.serial import Serial
from specbranch.exec.verifier import Verifier
from specbranch.sim.clock import MeteredDrafter, VirtualClock
from specbranch.sim.profile import CostProfile
from specbranch.suites.suite import load_suite

if TYPE_CHECKING:
    from specbranch.text.tokenizer import Tokenizer

CONTEXT = 2048  # tokens the caches hold, unless told: a long prompt and an answer
SUITES = ("own-code", "own-math", "own-chat")  # a prompt of each is decoded


@dataclass(frozen=True, slots=True)
class Workers:
    """Target and draft at work in this process; the child of a process executor makes its draft by the recipe."""

    pair: str
    tokenizer: Tokenizer
    verifier: Verifier
    drafter: Drafter
    recipe: Recipe
    target_identity: str
    draft_identity: str
    executor: ExecutorName

    def prompts(self) -> list[list[int]]:
        """Three prompts of our own, of different kinds, as token ids."""
        return [self.ids(load_suite(name).prompts[0].turns[0]) for name in SUITES]

    def ids(self, words: str) -> list[int]:
        """Return a user's message as the target is given it; as it is where the target knows no chat."""
        try:
            return self.tokenizer.chat([{"role": "user", "content": words}])
        except BadParameter:
            return self.tokenizer.encode(words)

    def real(self) -> Executor:
        """Return the executor itself; to be closed."""
        return (
            Process(self.verifier, self.recipe) if self.executor == "process" else Serial(self.verifier, self.drafter)
        )

    def modelled(self, profile: CostProfile) -> VirtualClock:
        """Return a clock that charges by a profile what the same models do."""
        return VirtualClock(self.verifier, MeteredDrafter(self.drafter.runner), profile)


def load_workers(target: ModelChoice, draft: ModelChoice, pair: str, executor: ExecutorName = "serial") -> Workers:
    """Load both models, with caches that are long enough to measure in."""
    draft = fitted_to_target(draft, target.name)
    names = target.name, draft.name
    if executor == "process":
        target, draft = (replace(choice, threads=half_the_threads()) for choice in (target, draft))
    target, draft = (
        replace(choice, context_length=choice.context_length or CONTEXT, shorten=True) for choice in (target, draft)
    )
    tokenizer = load_tokenizer(target)
    shared = common_vocabulary(tokenizer, draft)
    verifier = make_verifier(target)
    vocabulary = min(shared, verifier.runner.vocabulary)
    drafter = make_drafter(draft, vocabulary, verifier.runner)
    recipe = drafter_recipe(draft, vocabulary)
    return Workers(pair, tokenizer, verifier, drafter, recipe, identity(names[0]), identity(names[1]), executor)


def stored_in(runner: Runner) -> str:
    """How a model's matrices are stored: a name, or the precision it computes in where it knows nothing else."""
    return str(getattr(runner, "weights", getattr(runner, "dtype", ""))).removeprefix("torch.")


def pair_name(pair: str | None, target: str, draft: str) -> str:
    """Name a pair: by its own name, or by those of its models."""
    return pair or (
        draft if draft == Path(draft).name and "/" not in draft else f"{Path(draft).name} & {Path(target).name}"
    )
