"""Another draft for a running engine: checked and loaded beside the one at work, then exchanged between two rounds.

Owns which engines can do that, and what of the old draft ends with it. It does not own how a draft is loaded
(`assembly.py`), or how a worker recovers a text that it does not hold (`exec/worker.py`). Invariant: until the new
draft is loaded and fits the target, nothing of the old one is touched. No request ends by an exchange.
"""

from __future__ import annotations

import gc
from dataclasses import dataclass, replace
from pathlib import Path

from specbranch.assembly import (
    ModelChoice,
    Parts,
    as_long,
    chosen_draft,
    common_vocabulary,
    draft_evaluation,
    drafter_recipe,
    fitted_to_target,
    half_the_threads,
    make_drafter,
    torch_device,
)
from specbranch.config import ExecutorName, LoadOptions
from specbranch.core.draft_evaluation import DraftEvaluation
from specbranch.core.warm_up import ForwardSizes, count_late_from_now
from specbranch.engine_core import EngineCore, experience_file
from specbranch.errors import BadParameter, ModelError
from specbranch.exec.address import is_link
from specbranch.exec.drafter import Drafter
from specbranch.exec.process import Process, ReadyDraft
from specbranch.exec.serial import Serial
from specbranch.experiences import ExperienceFile
from specbranch.models.drafts.draft_name import feature_layout
from specbranch.pairs import draft_path

RESTART = "Start the server, or the LLM, again with the new draft."


@dataclass(frozen=True, slots=True)
class HowLoaded:
    """How an `LLM` was loaded, so that another draft is loaded in the same way."""

    target: ModelChoice
    options: LoadOptions
    executor: ExecutorName
    sizes: ForwardSizes | None  # that a draft in another process is warmed up for
    saves: bool  # what is learned


@dataclass(frozen=True, slots=True)
class NewDraft:
    """A loaded draft that fits the target and does not work yet."""

    name: str
    worker: Drafter | ReadyDraft
    evaluation: DraftEvaluation | None
    file: ExperienceFile | None  # of what is learned with it

    def discard(self) -> None:
        """End its process, if it has one: the draft is not needed."""
        if isinstance(self.worker, ReadyDraft):
            self.worker.discard()


def load_new_draft(name: str, how: HowLoaded, core: EngineCore) -> NewDraft:
    """Check another draft and load it; any thread may do so while requests run."""
    _check_engine(how, core)
    parts, choice = core.models.parts, _choice(name, how)
    # What is read later is found here, because after the exchange nothing may fail.
    evaluation = draft_evaluation(choice)
    file = experience_file(how.target, choice, how.executor, parts) if how.saves else None
    vocabulary = min(common_vocabulary(parts.tokenizer, choice), core.vocabulary)
    return NewDraft(name, _worker(choice, vocabulary, how, parts), evaluation, file)


def take_new_draft(new: NewDraft, core: EngineCore) -> None:
    """Let a loaded draft work from the next round on; only the thread that makes the rounds may call this."""
    executor = core.loop.executor
    if isinstance(executor, Process) and isinstance(new.worker, ReadyDraft):
        executor.exchange_draft(new.worker)
    elif isinstance(executor, Serial) and isinstance(new.worker, Drafter):
        executor.exchange_draft(new.worker)
        count_late_from_now((new.worker.runner,))
    core.loop.draft_exchanged()
    core.models.predictor.look_for(new.name)
    core.experiences.start_again(new.file, new.evaluation)
    # The old draft is among what full garbage collections skip; it is let go once, and with it its memory.
    gc.unfreeze()
    gc.collect()
    gc.freeze()


def _check_engine(how: HowLoaded, core: EngineCore) -> None:
    """Refuse an exchange that this engine cannot make, and say why."""
    executor = core.loop.executor
    if not core.models.has_draft:
        raise BadParameter(f"This engine decodes without a draft, so there is none to exchange. {RESTART}")
    if core.models.predictor.is_used:
        raise BadParameter(f"An H-RAD predictor is at work, which was trained for the draft that runs. {RESTART}")
    if isinstance(executor, Process):
        if not executor.exchanges_draft:
            raise BadParameter(
                "The draft is a worker on a network, which has loaded it. Start that worker again with the new draft."
            )
    elif type(executor) is not Serial:
        raise BadParameter(
            f"Executor {how.executor!r} cannot exchange its draft; 'serial' and 'process' can. {RESTART}"
        )
    elif executor.draft is not None and executor.draft.reads_features is not None:
        raise BadParameter(f"The draft at work reads its target's hidden states and cannot be exchanged. {RESTART}")
    elif torch_device(how.target) != "cpu" or how.options.draft_device not in (None, "cpu"):
        raise BadParameter(
            "The draft works on a GPU in the target's process, where it cannot be exchanged. Use --executor process, "
            "or start again with the new draft."
        )


def _choice(name: str, how: HowLoaded) -> ModelChoice:
    """Return the choice of the new draft, made as at the start; refuse one that is not on this machine."""
    if is_link(name):
        raise BadParameter(f"{name} is a draft worker; expected the folder or the file of a draft.")
    if not Path(draft_path(name)).exists():
        raise ModelError(f"There is no draft at {name}. Name a folder or a file that the server can read, or a pair.")
    if feature_layout(draft_path(name)) is not None:
        raise BadParameter(
            f"{name} reads its target's hidden states, and a running target does not begin to write them. {RESTART}"
        )
    chosen = chosen_draft(name, how.target, how.options)
    assert chosen is not None  # it has a name
    fitted = fitted_to_target(chosen, how.target.name)
    return replace(fitted, threads=half_the_threads()) if how.executor == "process" else fitted


def _worker(choice: ModelChoice, vocabulary: int, how: HowLoaded, parts: Parts) -> Drafter | ReadyDraft:
    if isinstance(parts.executor, Process):
        choice = as_long(choice, parts.verifier.runner)
        return parts.executor.start_draft(drafter_recipe(choice, vocabulary, how.sizes))
    return make_drafter(choice, vocabulary, parts.verifier.runner)
