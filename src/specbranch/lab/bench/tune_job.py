"""A search from its order to what is told of it: which method to use with a pair, some hardware and some prompts.

Owns `TuneOrder` and the shape of what a search came to, which `specbranch tune` writes and `--config` reads. Invariant:
plain decoding always takes part, so that there is something to hold the others against.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from specbranch import __version__
from specbranch.assembly import identity
from specbranch.config import TUNED_FOR
from specbranch.core.methods import METHODS
from specbranch.errors import BadParameter, unknown
from specbranch.extras import OPTUNA
from specbranch.files import write_whole
from specbranch.lab.bench.clocks import Clock, machine_clock
from specbranch.lab.bench.lab import Lab, Workload
from specbranch.lab.bench.methods import SPACES
from specbranch.lab.bench.results import BASELINE
from specbranch.lab.bench.subjects import PairOrder, Running
from specbranch.lab.bench.tuning import TRIALS, Goal, Search, Tuner, candidates, chosen, has_several_values
from specbranch.lab.suites.suite import Suite
from specbranch.pairs import draft_path
from specbranch.progress import StepsDone


@dataclass(frozen=True, slots=True, kw_only=True)
class TuneOrder:
    """What is searched for, all names checked and nothing loaded."""

    pair: PairOrder
    methods: tuple[str, ...]  # plain decoding first
    suites: tuple[Suite, ...]
    clock: Clock | None = None  # None: this machine is measured first
    force_profile: bool = False  # a clock of another pair is taken all the same
    workload: Workload
    trials: int = TRIALS
    running: Running  # how this machine is measured
    records: Path | None = None


@dataclass(frozen=True, slots=True)
class TuneOutcome:
    """What a search came to: by method, plain decoding first; not complete if it was interrupted."""

    searches: tuple[Search, ...]
    complete: bool
    pair: str
    circumstances: dict[str, Any]  # what it was tuned for

    def to_dict(self) -> dict[str, Any]:
        """Return all that is told, the contents of a file for --config under `best`."""
        plain = self.searches[0].tokens_per_second
        best = max(self.searches, key=lambda found: found.tokens_per_second)
        about = {
            **self.circumstances,
            "tokens_per_second": best.tokens_per_second,
            "speedup": best.tokens_per_second / plain,
            "plain_tokens_per_second": plain,
            "complete": self.complete,
        }
        method, _, policy = best.method.partition(":")
        named = {"method": method, "policy": policy} if policy else {"method": method}
        return {
            "pair": self.pair,
            "methods": [_row(found, plain) for found in self.searches],
            "complete": self.complete,
            "best": {**named, **chosen(best.best.config), TUNED_FOR: about},
        }

    def save(self, path: Path) -> None:
        """Write the best setting to a file for --config."""
        write_whole(path, json.dumps(self.to_dict()["best"], indent=2, ensure_ascii=False) + "\n")


def tuned_methods(names: Sequence[str], has_draft: bool) -> tuple[str, ...]:
    """Return the methods to search among, plain decoding first; unless some are named all that are searched quickly."""
    known = candidates(has_draft)
    # A method that guesses has the target decode anew for each setting.
    asked = names or [name for name in known if name not in METHODS or not METHODS[name].guesses]
    for name in asked:
        if name not in SPACES:
            raise unknown("method to tune", name, SPACES)
        if name not in known:
            raise BadParameter(
                f"Method {name!r} needs a draft model, and none was given. Give one with --draft, or name a --pair."
            )
    if several := [name for name in asked if has_several_values(name)]:
        OPTUNA.require(f"or leave {', '.join(several)} out with --methods")
    return tuple(dict.fromkeys((BASELINE, *asked)))


def run_tuning(order: TuneOrder, progress: StepsDone, fetch: Callable[[str], object]) -> TuneOutcome:
    """Carry out the searches, the models fetched first; what was found before Ctrl-C is kept, if there is anything to
    hold it against."""
    target, draft = order.pair.models
    for model in (target,) if draft is None else (draft_path(draft), target):
        fetch(model)
    if order.clock is not None and not order.force_profile:
        order.clock.refuse_other_pair(target, draft)
    goal = Goal(order.clock or _measured(order, progress), order.workload, order.suites, order.trials)
    own = replace(order.running, executor="serial")  # replays run in one process
    with Lab(target=target, draft=draft, folder=order.records, title=order.pair.title, running=own) as lab:
        tuner, complete = Tuner(lab, goal, progress), True
        try:
            for method in order.methods:
                tuner.search(method)
        except KeyboardInterrupt:
            complete = False
        found = tuple(one for method in order.methods if (one := tuner.found(method)) is not None)
        if not found:
            raise KeyboardInterrupt
        return TuneOutcome(found, complete, lab.pair, _circumstances(order, tuner))


def _measured(order: TuneOrder, progress: StepsDone) -> Clock:
    """Measure this machine with the pair, briefly."""
    target, draft = order.pair.models
    assert draft is not None
    return machine_clock(target, draft, draft, order.running, progress)


def _circumstances(order: TuneOrder, tuner: Tuner) -> dict[str, Any]:
    """Return what a setting was tuned for."""
    (target, draft), goal = order.pair.models, tuner.goal
    return {
        "pair": tuner.lab.pair,
        "target": target,
        "draft": draft,
        "target_identity": identity(target),
        "draft_identity": None if draft is None else identity(draft),
        "weights": tuner.lab.llm.weights,
        "cache_dtype": tuner.lab.llm.cache_dtype,
        "profile": goal.clock.name,
        "hardware": goal.profile.hardware,
        "overlap": goal.profile.overlap,
        "prompts": {suite.name: len(suite.prompts) for suite in goal.suites},
        "tokens": tuner.decoded,
        "temperature": goal.workload.temperature,
        "max_tokens": goal.workload.max_tokens,
        "version": __version__,
    }


def _row(found: Search, plain: float) -> dict[str, Any]:
    rate = found.tokens_per_second
    return {
        "method": found.method,
        "tokens_per_second": rate,
        "speedup": rate / plain,
        "setting": chosen(found.best.config),
        "looked_at": found.looked_at,
        "tried": [
            {**chosen(trial.config), "tokens_per_second": found.decoded / trial.seconds} for trial in found.trials
        ],
    }
