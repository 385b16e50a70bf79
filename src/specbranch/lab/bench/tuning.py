"""The best setting of each method for a pair and a clock, found on prompts other than those a bench reports.

Owns the search and what it found. The prompts are the last few of each shipped suite, so that a bench on the first few
of those has others, too. Each setting is looked at on a part of the prompts, and replayed on all of them if it does
about as well there as the best before it. A length alone is tried out value by value, until longer ones only get worse.
Several knobs are searched by optuna's TPE with a fixed seed, beginning with the method's usual setting and a number of
settings drawn at random, the same for every clock, so that these are replayed once for all. What counts is the sum of
charged decode seconds over all prompts. Invariants: the same question gives the same answer; a finished search is kept
under everything it depends on, and an interrupted one leaves its trials in `Tuner.tried`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

from specbranch import __version__
from specbranch.clock.profile import CostProfile
from specbranch.config import MOST_NODES, SpeculativeConfig
from specbranch.core.experience import Experience
from specbranch.errors import BadParameter
from specbranch.extras import OPTUNA
from specbranch.files import write_whole
from specbranch.lab.bench.clocks import Clock
from specbranch.lab.bench.lab import Lab, Workload
from specbranch.lab.bench.methods import OUTSIDE, SPACES, Name, Setting, default_setting, variant
from specbranch.lab.bench.results import BASELINE
from specbranch.lab.replay.record import Record
from specbranch.lab.suites.suite import SHIPPED, Suite, load_suite
from specbranch.progress import StepsDone, silent

VERSION = 3  # a search by another version is made again
TUNING_PROMPTS = 4  # of each shipped suite
TRIALS = 40
PART = 5  # every trial is looked at on so many answers
CLOSE = 1.03  # a trial within so many times the best seconds there is tried on all answers
RANDOM_TRIALS = 24  # the first trials are drawn at random
WORSE, ENOUGH = 1.1, 3  # lengths that take 1.1 times the best are bad; three in a row end a search
SEED = 20260301


@dataclass(frozen=True, slots=True)
class TunedSeconds:
    """A setting and the decode seconds that all tuning prompts together would take with it."""

    config: SpeculativeConfig
    seconds: float


@dataclass(frozen=True, slots=True)
class Search:
    """What was tried of one method."""

    method: str
    trials: tuple[TunedSeconds, ...]  # those tried on all prompts
    decoded: int  # tokens, after the first of each answer
    looked_at: int  # how many settings, on a part of the prompts or on all

    @property
    def best(self) -> TunedSeconds:
        """The quickest, of equals the first that was tried."""
        return min(self.trials, key=lambda trial: trial.seconds)

    @property
    def setting(self) -> Setting:
        """The method, set like that."""
        return Setting(self.method, self.best.config)

    @property
    def tokens_per_second(self) -> float:
        """What the clock would show with it."""
        return self.decoded / self.best.seconds


@dataclass(frozen=True, slots=True)
class Goal:
    """What a setting is to be good for, and how long to look for it."""

    clock: Clock
    workload: Workload
    suites: tuple[Suite, ...]
    trials: int = TRIALS

    @property
    def profile(self) -> CostProfile:
        """What seconds are charged by."""
        if self.clock.profile is None:
            raise BadParameter(
                "Methods are tuned from records, by a profile, and none was given. Measure this machine with "
                "`specbranch profile`, and give the file with --profile."
            )
        return self.clock.profile


def can_be_tuned(method: str) -> bool:
    """Whether a method has anything to set."""
    return method not in OUTSIDE and bool(SPACES.get(Name.of(method).like))


def has_several_values(method: str) -> bool:
    """Whether a search has more than one value to find, which takes optuna."""
    return method not in OUTSIDE and len(SPACES.get(Name.of(method).like, {})) > 1


def tuning_suites(prompts: int = TUNING_PROMPTS) -> tuple[Suite, ...]:
    """Return the prompts that methods are tuned on unless others are given: so many of each shipped suite."""
    suites = (load_suite(name) for name in SHIPPED)
    return tuple(replace(suite, prompts=suite.prompts[-prompts:]) for suite in suites)


def candidates(has_draft: bool) -> tuple[str, ...]:
    """Return the methods that can be searched with a pair, plain decoding first."""
    return tuple(name for name in SPACES if has_draft or not default_setting(name).needs_draft)


class Tuner:
    """Searches with one pair for one goal."""

    def __init__(self, lab: Lab, goal: Goal, progress: StepsDone = silent) -> None:
        self.lab, self.goal = lab, goal
        self.tried: dict[str, list[TunedSeconds]] = {}  # by method, while a search goes on
        self.looked_at: dict[str, int] = {}
        self.decoded = 0
        self._progress = progress
        self._records: list[Record] = []

    def setting(self, method: str) -> Setting:
        """Return a method at its best; one that has nothing to set, or sets itself, as it is."""
        if not can_be_tuned(method):
            return default_setting(method)
        return variant(method, self.search(Name.of(method).like).setting)

    def search(self, method: str) -> Search:
        """Return what is known of a method, trying out what is not."""
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
        """Return what was tried of a method up to now."""
        trials = self.tried.get(method)
        return Search(method, tuple(trials), self.decoded, self.looked_at[method]) if trials else None

    def _ascending(self, method: str) -> Iterator[SpeculativeConfig]:
        """Try one length after another; yields what is worth trying on all prompts."""
        name, values = next(iter(SPACES[method].items()), ("", ()))
        settings = [{name: value} for value in values] or [{}]
        best, bad = math.inf, 0
        for setting in settings:
            self._look(method, len(settings))
            config = _config(method, setting)
            seconds = self._seconds(config, self._part)
            best = min(best, seconds)
            bad = bad + 1 if seconds > WORSE * best else 0
            if seconds <= CLOSE * best:
                yield config
            if bad == ENOUGH:
                return

    def _optimised(self, method: str) -> Iterator[SpeculativeConfig]:
        """Let optuna choose, going by a part of the prompts; yields what is worth trying on all of them."""
        OPTUNA.require()
        import optuna

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=SEED, n_startup_trials=RANDOM_TRIALS))
        study.enqueue_trial(_places(method))
        known: dict[SpeculativeConfig, float] = {}
        for _ in range(self.goal.trials):
            self._look(method, self.goal.trials)
            trial = study.ask()
            places = {name: trial.suggest_int(name, 0, len(values) - 1) for name, values in SPACES[method].items()}
            config = _config(method, {name: SPACES[method][name][place] for name, place in places.items()})
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
        """Some of the answers, from all kinds of prompts."""
        return self._records[:: max(len(self._records) // PART, 1)]

    def _seconds(self, config: SpeculativeConfig, records: Sequence[Record]) -> float:
        """Replay by this clock; one experience for all records, as an LLM has it."""
        profile, replays = self.goal.profile, self.lab.replays
        known = Experience(profile, self.lab.draft is not None)
        return sum(replays.stats(record, config, profile, known).decode_seconds for record in records)

    def _recorded(self) -> None:
        if self._records:
            return
        _ = self.goal.profile  # without a profile there is nothing to record for
        workload = self.goal.workload
        prompts = [prompt for suite in self.goal.suites for prompt in suite.prompts]
        asked = [(prompt, workload) for prompt in prompts if self.lab.has_room_for(prompt, workload)]
        self._records = self.lab.record(asked, self._progress)
        self.decoded = sum(len(record.tokens) - 1 for record in self._records)
        if self.decoded < 1:
            raise BadParameter(
                "No tuning prompt fits the target's context and gets an answer of more than one token, so there is "
                "nothing to tune on. Give other prompts, or fewer --max-tokens."
            )

    @property
    def _folder(self) -> Path:
        return self.lab.folder / "tuned"

    def _file(self, method: str) -> Path:
        goal = self.goal
        models = [value for name, value in sorted(self.lab.identity.items()) if name.endswith("identity")]
        prompts = [[prompt.digest for prompt in suite.prompts] for suite in goal.suites]
        space = {name: list(values) for name, values in SPACES[method].items()}
        question = [VERSION, __version__, models, self.lab.llm.weights, goal.profile.digest, method, space]
        question += [asdict(goal.workload), prompts, goal.trials]
        question += [self.lab.llm.cache_dtype] if self.lab.llm.cache_dtype else []
        if method == "specbranch:paper" and self.lab.forecasts is not None:
            question.append(self.lab.forecasts.predictor.digest)
        return self._folder / f"{sha256(json.dumps(question, sort_keys=True).encode()).hexdigest()[:32]}.json"

    def _held(self, method: str) -> Search | None:
        """Return what an earlier search found; a file that cannot be read counts as none."""
        with suppress(OSError, ValueError, KeyError, TypeError, BadParameter):
            held = json.loads(self._file(method).read_text(encoding="utf-8"))
            trials = tuple(
                TunedSeconds(_config(method, one["config"]), float(one["seconds"])) for one in held["trials"]
            )
            return Search(method, trials, self.decoded, int(held["looked_at"])) if trials else None
        return None

    def _keep(self, found: Search) -> None:
        held = {
            "method": found.method,
            "pair": self.lab.pair,
            "clock": self.goal.clock.name,
            "temperature": self.goal.workload.temperature,
            "looked_at": found.looked_at,
            "trials": [{"config": chosen(trial.config), "seconds": trial.seconds} for trial in found.trials],
        }
        write_whole(self._file(found.method), json.dumps(held, indent=1) + "\n")


def chosen(config: SpeculativeConfig) -> dict[str, Any]:
    """Return what of a setting a search decides."""
    return {name: getattr(config, name) for name in SPACES.get(_label(config), {})}


def _label(config: SpeculativeConfig) -> str:
    """The name under which a configuration is searched."""
    return f"{config.method}:{config.policy}" if config.policy else config.method or BASELINE


def _config(method: str, values: Mapping[str, int | float]) -> SpeculativeConfig:
    made = dict(values)
    if "ngram_min" in values:  # the shortest n-gram is no longer than the longest
        made["ngram_min"] = min(values["ngram_min"], values["ngram_max"])
    if "lookahead_ngram" in values:  # what does not fit a cache's tail is tried with shorter n-grams
        made["lookahead_ngram"] = min(
            values["lookahead_ngram"],
            MOST_NODES // int(values["lookahead_window"] + values["lookahead_candidates"]) + 1,
        )
    config = default_setting(method, made).config
    assert config is not None
    return config


def _places(method: str) -> dict[str, int]:
    """Return where the method's usual setting lies in its space."""
    usual = default_setting(method).config
    return {
        name: min(range(len(values)), key=lambda at: abs(values[at] - getattr(usual, name)))
        for name, values in SPACES[method].items()
    }
