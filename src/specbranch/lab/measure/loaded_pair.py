"""A pair loaded for measurements: both workers, and the identities of its models.

Owns loading for everything that measures or checks a pair. Invariant: with the process executor, both models have half
of the threads, here as in the draft's own process.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from specbranch.assembly import (
    ModelChoice,
    assemble,
    common_vocabulary,
    drafter_recipe,
    fitted_to_target,
    half_the_threads,
    identity,
)
from specbranch.clock.profile import CostProfile
from specbranch.clock.virtual_clock import MeteredDrafter, VirtualClock
from specbranch.config import ExecutorName
from specbranch.core.loop import Executor
from specbranch.core.runner import Runner
from specbranch.errors import BadParameter
from specbranch.exec.drafter import Drafter
from specbranch.exec.messages import Recipe
from specbranch.exec.process import Process
from specbranch.exec.serial import Serial
from specbranch.exec.streams import Streams
from specbranch.exec.verifier import Verifier
from specbranch.lab.suites.suite import load_suite

if TYPE_CHECKING:
    from specbranch.text.tokenizer import Tokenizer

CONTEXT = 2048  # default KV slots of each cache: a long prompt and an answer
PROBED_SUITES = ("own-code", "own-math", "own-chat")  # a prompt of each is decoded


@dataclass(frozen=True, slots=True)
class LoadedPair:
    """Target and draft in this process; with a process executor, the child builds its draft from the recipe."""

    name: str
    tokenizer: Tokenizer
    verifier: Verifier
    drafter: Drafter
    recipe: Recipe
    target_identity: str
    draft_identity: str
    executor: ExecutorName

    def prompts(self) -> list[list[int]]:
        """Return three shipped prompts of different kinds, as token ids."""
        return suite_prompts(self.tokenizer)

    def ids(self, words: str) -> list[int]:
        """Return a user message in the target's chat template, or without one if the target has none."""
        return _message(self.tokenizer, words)

    def text(self, length: int) -> list[int]:
        """Return some shipped text of the given length."""
        words = [token for prompt in self.prompts() for token in prompt]
        return (words * (length // len(words) + 1))[:length]

    def real(self) -> Executor:
        """Return the executor itself; the caller closes it."""
        if self.executor == "process":
            return Process(self.verifier, self.recipe)
        return (Streams if self.executor == "streams" else Serial)(self.verifier, self.drafter)

    def modelled(self, profile: CostProfile) -> VirtualClock:
        """Return a clock that charges the same models' work by a profile."""
        return VirtualClock(self.verifier, MeteredDrafter(self.drafter.runner), profile)


def suite_prompts(tokenizer: Tokenizer) -> list[list[int]]:
    """Return three shipped prompts of different kinds, as token ids."""
    return [_message(tokenizer, load_suite(name).prompts[0].turns[0]) for name in PROBED_SUITES]


def _message(tokenizer: Tokenizer, words: str) -> list[int]:
    try:
        return tokenizer.chat([{"role": "user", "content": words}])
    except BadParameter:
        return tokenizer.encode(words)


def load_pair(target: ModelChoice, draft: ModelChoice, name: str, executor: ExecutorName = "serial") -> LoadedPair:
    """Load both models, with KV caches long enough to measure and without a prefix cache; refuse an executor that
    cannot run them."""
    draft = fitted_to_target(draft, target.name)
    if executor == "process":
        target, draft = (replace(choice, threads=half_the_threads()) for choice in (target, draft))
    target, draft = (
        replace(choice, context_length=choice.context_length or CONTEXT, shorten=True, prefix_cache=False)
        for choice in (target, draft)
    )
    parts = assemble(target, draft, "streams" if executor == "streams" else "serial")
    assert isinstance(parts.executor, Serial) and parts.executor.draft
    shared = min(common_vocabulary(parts.tokenizer, draft), parts.verifier.runner.vocabulary)
    workers = parts.verifier, parts.executor.draft, drafter_recipe(draft, shared)
    return LoadedPair(name, parts.tokenizer, *workers, identity(target.name), identity(draft.name), executor)


def own_runner(runner: Runner) -> Runner:
    """Return the runner that computes: a draft with another vocabulary is asked through another one."""
    return getattr(runner, "own", runner)


def precision(runner: Runner) -> str:
    """Return the precision a model computes in; empty if it does not say."""
    return str(getattr(own_runner(runner), "dtype", "")).removeprefix("torch.")


def stored_in(runner: Runner) -> str:
    """Return how a model's matrices are stored: a name, or else the precision it computes in."""
    return str(getattr(own_runner(runner), "weights", precision(runner)))


def cached_in(runner: Runner) -> str:
    """Return the type of a model's KV cache, likewise."""
    return str(getattr(own_runner(runner), "cache_dtype", precision(runner)))


def pair_name(pair: str | None, target: str, draft: str) -> str:
    """Return the name of a pair: its own, or those of its models."""
    is_plain = draft == Path(draft).name and "/" not in draft
    return pair or (draft if is_plain else f"{Path(draft).name} & {Path(target).name}")
