"""The search for the best setting of each method, for one pair and one clock.

Owns the search (`Tuner`), the job of `specbranch tune` (`run_tuning`) and the file it writes for `--config`. A search
replays records on the last few prompts of each shipped suite; a bench reports the first few, so the two differ. The
search first tries each setting on a part of the prompts. It replays a setting on all prompts only if it is close to the
best so far. A method with one knob is searched value by value until longer drafts only get worse. Optuna's TPE sampler
searches methods with several knobs, with a fixed seed. It starts with the usual setting and random ones, the same for
every clock. The objective is the sum of charged decode seconds.

Invariants: the same question gives the same answer. A finished search is stored under a hash of all its inputs; an
interrupted one leaves its trials in `Tuner.tried`. Plain decoding always takes part, as the reference.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

from specbranch import __version__
from specbranch.assembly import identity
from specbranch.clock.profile import CostProfile
from specbranch.config import TUNED_FOR, SpeculativeConfig
from specbranch.core.experience import Experience
from specbranch.errors import BadParameter
from specbranch.extras import OPTUNA
from specbranch.files import write_whole
from specbranch.lab.bench.clocks import Clock, machine_clock
from specbranch.lab.bench.methods import (
    SPACES,
    TRIALS,
    TUNING_PROMPTS,
    Name,
    Setting,
    can_be_tuned,
    config_with,
    default_setting,
    has_several_values,
    knob_values,
    usual_indices,
    variant,
)
from specbranch.lab.bench.order import TuneOrder
from specbranch.lab.bench.recorded_pair import RecordedPair, Workload
from specbranch.lab.replay.record import Record
from specbranch.lab.suites.suite import SHIPPED, Suite, load_suite
from specbranch.pairs import draft_path
from specbranch.progress import StepsDone, silent

VERSION = 3  # a search by another version is repeated
PART = 5  # number of answers for the first look at a trial
CLOSE = 1.03  # a trial within this factor of the best is tried on all answers
RANDOM_TRIALS = 24  # the first trials are random
WORSE, ENOUGH = 1.1, 3  # lengths that take 1.1 times the best are bad; three in a row end a search
SEED = 20260301


@dataclass(frozen=True, slots=True)
class TunedSeconds:
    """A setting and its decode seconds over all tuning prompts."""

    config: SpeculativeConfig
    seconds: float


@dataclass(frozen=True, slots=True)
class Search:
    """The trials of one method."""

    method: str
    trials: tuple[TunedSeconds, ...]  # those tried on all prompts
    decoded: int  # tokens, after the first of each answer
    looked_at: int  # how many settings, on a part of the prompts or on all

    @property
    def best(self) -> TunedSeconds:
        """The fastest trial; of equal ones the first."""
        return min(self.trials, key=lambda trial: trial.seconds)

    @property
    def setting(self) -> Setting:
        """The method with its best configuration."""
        return Setting(self.method, self.best.config)

    @property
    def tokens_per_second(self) -> float:
        """The decode rate of the best trial."""
        return self.decoded / self.best.seconds


@dataclass(frozen=True, slots=True)
class Goal:
    """The clock, workload and prompts to tune for, and the number of trials."""

    clock: Clock
    workload: Workload
    suites: tuple[Suite, ...]
    trials: int = TRIALS

    @property
    def profile(self) -> CostProfile:
        """The profile that charges seconds."""
        if self.clock.profile is None:
            raise BadParameter(
                "Tuning needs a cost profile, and none was given. Measure this machine with "
                "`specbranch profile`, and give the file with --profile."
            )
        return self.clock.profile


def tuning_suites(prompts: int = TUNING_PROMPTS) -> tuple[Suite, ...]:
    """Return the default prompts for tuning: the last few of each shipped suite."""
    suites = (load_suite(name) for name in SHIPPED)
    return tuple(replace(suite, prompts=suite.prompts[-prompts:]) for suite in suites)


class Tuner:
    """Searches with one pair for one goal."""

    def __init__(self, recorded: RecordedPair, goal: Goal, progress: StepsDone = silent) -> None:
        self.recorded, self.goal = recorded, goal
        self.tried: dict[str, list[TunedSeconds]] = {}  # by method, while a search goes on
        self.looked_at: dict[str, int] = {}
        self.decoded = 0
        self._progress = progress
        self._records: list[Record] = []

    def setting(self, method: str) -> Setting:
        """Return a method with its best setting; a method without knobs keeps its usual one."""
        if not can_be_tuned(method):
            return default_setting(method)
        return variant(method, self.search(Name.of(method).like).setting)

    def search(self, method: str) -> Search:
        """Return the stored search of a method, or run it."""
        self._recorded()
        held = self._held(method)
        if held is not None:
            self.tried[method], self.looked_at[method] = list(held.trials), held.looked_at
            return held
        self.tried[method], self.looked_at[method] = [], 0
        for config in self._optimised(method) if has_several_values(method) else self._ascending(method):
            self.tried[method].append(TunedSeconds(config, self._seconds(config, self._records)))
        found = self.found(method)
        assert found is not None
        self._keep(found)
        return found

    def found(self, method: str) -> Search | None:
        """Return the trials of a method so far."""
        trials = self.tried.get(method)
        return Search(method, tuple(trials), self.decoded, self.looked_at[method]) if trials else None

    def _ascending(self, method: str) -> Iterator[SpeculativeConfig]:
        """Try one draft length after another on a part of the prompts; yield those worth trying on all."""
        name, values = next(iter(SPACES[method].items()), ("", ()))
        settings = [{name: value} for value in values] or [{}]
        best, bad = math.inf, 0
        for setting in settings:
            self._look(method, len(settings))
            config = config_with(method, setting)
            seconds = self._seconds(config, self._part)
            best = min(best, seconds)
            bad = bad + 1 if seconds > WORSE * best else 0
            if seconds <= CLOSE * best:
                yield config
            if bad == ENOUGH:
                return

    def _optimised(self, method: str) -> Iterator[SpeculativeConfig]:
        """Let optuna choose by a part of the prompts; yield the settings worth trying on all."""
        OPTUNA.require()
        import optuna

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=SEED, n_startup_trials=RANDOM_TRIALS))
        study.enqueue_trial(usual_indices(method))
        known: dict[SpeculativeConfig, float] = {}
        for _ in range(self.goal.trials):
            self._look(method, self.goal.trials)
            trial = study.ask()
            indices = {name: trial.suggest_int(name, 0, len(values) - 1) for name, values in SPACES[method].items()}
            config = config_with(method, {name: SPACES[method][name][index] for name, index in indices.items()})
            if config not in known:
                known[config] = self._seconds(config, self._part)
                if known[config] <= min(known.values()) * CLOSE:
                    yield config
            study.tell(trial, known[config])

    def _look(self, method: str, of: int) -> None:
        self._progress(f"Tuning {method} for {self.goal.clock.name}", self.looked_at[method], of)
        self.looked_at[method] += 1

    @property
    def _part(self) -> list[Record]:
        """A sample of the answers, from all kinds of prompts."""
        return self._records[:: max(len(self._records) // PART, 1)]

    def _seconds(self, config: SpeculativeConfig, records: Sequence[Record]) -> float:
        """Replay by this clock, with one experience for all records, as in an LLM."""
        profile, replays = self.goal.profile, self.recorded.replays
        known = Experience(profile, self.recorded.draft is not None, self.recorded.prior)
        return sum(replays.stats(record, config, profile, known).decode_seconds for record in records)

    def _recorded(self) -> None:
        if self._records:
            return
        _ = self.goal.profile  # without a profile there is nothing to record for
        workload = self.goal.workload
        prompts = [prompt for suite in self.goal.suites for prompt in suite.prompts]
        asked = [(prompt, workload) for prompt in prompts if self.recorded.has_room_for(prompt, workload)]
        self._records = self.recorded.record(asked, self._progress)
        self.decoded = sum(len(record.tokens) - 1 for record in self._records)
        if self.decoded < 1:
            raise BadParameter(
                "No tuning prompt fits the target's context and gets an answer of more than one token, so there is "
                "nothing to tune on. Give other prompts, or fewer --max-tokens."
            )

    @property
    def _folder(self) -> Path:
        return self.recorded.folder / "tuned"

    def _file(self, method: str) -> Path:
        goal = self.goal
        models = [value for name, value in sorted(self.recorded.identity.items()) if name.endswith("identity")]
        prompts = [[prompt.digest for prompt in suite.prompts] for suite in goal.suites]
        space = {name: list(values) for name, values in SPACES[method].items()}
        question = [VERSION, __version__, models, self.recorded.llm.weights, goal.profile.digest, method, space]
        question += [asdict(goal.workload), prompts, goal.trials]
        question += [self.recorded.llm.cache_dtype] if self.recorded.llm.cache_dtype else []
        question += [asdict(self.recorded.prior)] if self.recorded.prior else []
        if method == "specbranch:paper" and self.recorded.forecasts is not None:
            question.append(self.recorded.forecasts.predictor.digest)
        return self._folder / f"{sha256(json.dumps(question, sort_keys=True).encode()).hexdigest()[:32]}.json"

    def _held(self, method: str) -> Search | None:
        """Return the stored search; an unreadable file counts as none."""
        with suppress(OSError, ValueError, KeyError, TypeError, BadParameter):
            held = json.loads(self._file(method).read_text(encoding="utf-8"))
            trials = tuple(
                TunedSeconds(config_with(method, one["config"]), float(one["seconds"])) for one in held["trials"]
            )
            return Search(method, trials, self.decoded, int(held["looked_at"])) if trials else None
        return None

    def _keep(self, found: Search) -> None:
        held = {
            "method": found.method,
            "pair": self.recorded.pair,
            "clock": self.goal.clock.name,
            "temperature": self.goal.workload.temperature,
            "looked_at": found.looked_at,
            "trials": [{"config": knob_values(trial.config), "seconds": trial.seconds} for trial in found.trials],
        }
        write_whole(self._file(found.method), json.dumps(held, indent=1) + "\n")


@dataclass(frozen=True, slots=True)
class TuneOutcome:
    """The searches by method, plain decoding first; `complete` is false after an interruption."""

    searches: tuple[Search, ...]
    complete: bool
    pair: str
    circumstances: dict[str, Any]  # what it was tuned for

    def to_dict(self) -> dict[str, Any]:
        """Return all figures; `best` holds the contents of a file for --config."""
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
            "best": {**named, **knob_values(best.best.config), TUNED_FOR: about},
        }

    def save(self, path: Path) -> None:
        """Write the best setting to a file for --config."""
        write_whole(path, json.dumps(self.to_dict()["best"], indent=2, ensure_ascii=False) + "\n")


def run_tuning(order: TuneOrder, progress: StepsDone, fetch: Callable[[str], object]) -> TuneOutcome:
    """Fetch the models and run the searches. After Ctrl-C the searches so far are kept, if there is one."""
    target, draft = order.pair.models
    for model in (target,) if draft is None else (draft_path(draft), target):
        fetch(model)
    if order.clock is not None and not order.force_profile:
        order.clock.refuse_other_pair(target, draft)
    goal = Goal(order.clock or _measured(order, progress), order.workload, order.suites, order.trials)
    own = replace(order.running, executor="serial")  # replays run in one process
    with RecordedPair(
        target=target, draft=draft, folder=order.records, title=order.pair.title, running=own
    ) as recorded:
        tuner, complete = Tuner(recorded, goal, progress), True
        try:
            for method in order.methods:
                tuner.search(method)
        except KeyboardInterrupt:
            complete = False
        found = tuple(one for method in order.methods if (one := tuner.found(method)) is not None)
        if not found:
            raise KeyboardInterrupt
        return TuneOutcome(found, complete, recorded.pair, _circumstances(order, tuner))


def _measured(order: TuneOrder, progress: StepsDone) -> Clock:
    """Measure this machine with the pair, briefly."""
    target, draft = order.pair.models
    assert draft is not None
    return machine_clock(target, draft, draft, order.running, progress)


def _circumstances(order: TuneOrder, tuner: Tuner) -> dict[str, Any]:
    """Return the conditions that a setting was tuned for."""
    (target, draft), goal = order.pair.models, tuner.goal
    return {
        "pair": tuner.recorded.pair,
        "target": target,
        "draft": draft,
        "target_identity": identity(target),
        "draft_identity": None if draft is None else identity(draft),
        "weights": tuner.recorded.llm.weights,
        "cache_dtype": tuner.recorded.llm.cache_dtype,
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
        "setting": knob_values(found.best.config),
        "looked_at": found.looked_at,
        "tried": [
            {**knob_values(trial.config), "tokens_per_second": found.decoded / trial.seconds} for trial in found.trials
        ],
    }
