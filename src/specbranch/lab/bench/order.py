"""The order of a bench (`BenchOrder`) or of a search (`TuneOrder`): pairs, methods, prompts and clocks.

Owns both orders and the checks of what a user asked for. Invariant: these checks run before anything is loaded or
fetched.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from specbranch import pairs as known
from specbranch.config import WEIGHTS, ExecutorName, WarmUpName, check_draft_window
from specbranch.core.methods import METHODS
from specbranch.errors import BadParameter, unknown
from specbranch.extras import OPTUNA
from specbranch.lab.bench.clocks import Clock
from specbranch.lab.bench.methods import (
    LLAMACPP,
    OTHER_ENGINES,
    SPACES,
    TRANSFORMERS,
    TRIALS,
    TUNING_PROMPTS,
    Setting,
    can_be_tuned,
    candidates,
    chosen_methods,
    given_setting,
    has_several_values,
)
from specbranch.lab.bench.pair_setup import PairOrder, Running
from specbranch.lab.bench.recorded_pair import Workload
from specbranch.lab.bench.results import BASELINE
from specbranch.lab.suites.suite import Suite


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchOrder:
    """Everything that decides what a bench runs, how, and where its results go."""

    pairs: tuple[PairOrder, ...]
    methods: tuple[str, ...]  # plain decoding first
    settings: tuple[Setting, ...] = ()  # given by hand, run in addition to the methods
    workloads: tuple[Workload, ...]  # they differ in temperature alone
    clocks: tuple[Clock, ...]  # the wall clock alone, or profiles
    running: Running
    suites: tuple[str, ...] = ()
    prompts: tuple[Path, ...] = ()  # files
    data: Path | None = None
    limit: int | None = None
    contexts: tuple[int, ...] = ()  # tokens of prompt and answer; empty: no filler text
    may_leave_out_contexts: bool = False  # skip a context that the target does not support, instead of refusing it
    repeats: int = 1
    tune: bool = True
    trials: int = TRIALS
    tuning_prompts: int = TUNING_PROMPTS
    profile: Path | None = None  # tunes for the wall clock; None: measure this machine
    force_profile: bool = False
    predictor: str | None = None
    keep_experience: bool = False
    warm_up: WarmUpName = "full"
    timeline: bool = False
    records: Path | None = None
    texts: Path | None = None  # records of another target, to replay its texts
    out: Path
    command: str = ""  # for the provenance

    @property
    def by_the_wall(self) -> bool:
        """True if time is measured, false if it is modelled."""
        return self.clocks[0].is_wall

    @property
    def tunes(self) -> bool:
        """True if there is anything to tune."""
        return self.tune and any(map(can_be_tuned, self.methods))

    @property
    def has_transformers(self) -> bool:
        """True if a method of transformers is to run."""
        return any(name in TRANSFORMERS for name in self.methods)

    @property
    def has_llamacpp(self) -> bool:
        """True if a method of llama.cpp is to run."""
        return any(name in LLAMACPP for name in self.methods)


@dataclass(frozen=True, slots=True, kw_only=True)
class TuneOrder:
    """Everything that decides a search; all names are checked, nothing is loaded."""

    pair: PairOrder
    methods: tuple[str, ...]  # plain decoding first
    suites: tuple[Suite, ...]
    clock: Clock | None = None  # None: measure this machine first
    force_profile: bool = False  # accept a profile of another pair
    workload: Workload
    trials: int = TRIALS
    running: Running  # how the models run while this machine is measured
    records: Path | None = None


def chosen_pairs(
    names: Sequence[str],
    target: str | None,
    draft: str | None,
    usual: Mapping[str, Any] | None = None,
    of_pair: Mapping[str, Mapping[str, Any]] | None = None,
    preset: str | None = None,
) -> tuple[PairOrder, ...]:
    """Return an order for each pair, with the usual values unless a preset has others for the pair."""
    usual, of_pair = usual or {}, of_pair or {}
    if target or draft:
        known.chosen_models(names[0] if names else None, target, draft)
        pairs = [PairOrder(target=target, draft=draft, **usual)]
    else:
        chosen = dict.fromkeys(names or (known.DEFAULT_PAIR,))
        for name in chosen:
            known.draft_folder(known.find_pair(name).name)
        pairs = [PairOrder(pair=name, **{**usual, **of_pair.get(name, {})}) for name in chosen]
    if of_pair:
        for pair in pairs:
            _refuse_without_shapes(pair, str(preset), of_pair)
    return tuple(pairs)


def checked_methods(
    names: Sequence[str], pairs: Sequence[PairOrder], clocks: Sequence[Clock], tune: bool
) -> tuple[str, ...]:
    """Return the requested methods, plain decoding first; refuse those that these pairs and clocks cannot run."""
    chosen = chosen_methods(names, all(pair.has_draft for pair in pairs))
    if clocks[0].is_wall and (knowing := [name for name in chosen if ":oracle" in name]):
        why = "knows the target's text in advance, which only a replay does"
        raise BadParameter(f"{knowing[0]} {why}. Give a --clock, or leave it out.")
    if tune and any(map(has_several_values, chosen)):
        OPTUNA.require("or give --no-tune")
    if not clocks[0].is_wall and (outside := [name for name in chosen if name in OTHER_ENGINES]):
        why = f"run by the wall clock only, and --clock {clocks[0].name} was given"
        raise BadParameter(f"{', '.join(outside)} {why}. Leave one of them out.")
    return chosen


def tuned_methods(names: Sequence[str], has_draft: bool) -> tuple[str, ...]:
    """Return the methods to search, plain decoding first; without names, all that search quickly."""
    known = candidates(has_draft)
    # A method that guesses needs the target to decode again for each setting.
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


def checked_texts(texts: Path | None, by_the_wall: bool) -> Path | None:
    """Return the folder of another target's records; refuse the wall clock and a folder without records."""
    if texts is not None and by_the_wall:
        raise BadParameter(
            "--texts replays the texts of another target, which only a modelled clock can. Give a --clock."
        )
    if texts is not None and not (texts / "records").is_dir():
        raise BadParameter(
            f"--texts is {texts}, which holds no records; expected a folder that was given as --records."
        )
    return texts


def given_settings(texts: Sequence[str], pairs: Sequence[PairOrder]) -> tuple[Setting, ...]:
    """Parse the settings given by hand."""
    found = tuple(given_setting(_read_setting(text)) for text in texts)
    chosen_methods([setting.method for setting in found], all(pair.has_draft for pair in pairs))
    return found


def checked_running(
    executor: str,
    device: str | None,
    draft_device: str | None,
    weights: str | None,
    draft_weights: str | None,
    draft_window: int | None,
    cache_dtype: str | None,
    by_the_wall: bool,
) -> Running:
    """Return where and how the models run; refuse missing devices."""
    if executor not in get_args(ExecutorName):
        raise unknown("executor", executor, get_args(ExecutorName))
    for kind in (weights, draft_weights):
        if kind is not None and kind not in WEIGHTS:
            raise unknown("storage of weights", kind, WEIGHTS)
    check_draft_window(draft_window)
    if not by_the_wall and executor != "serial":
        raise BadParameter(
            f"--executor {executor} runs by the wall clock only, and --clock was given. Leave one of them out."
        )
    for asked in (device, draft_device):
        if asked is not None:
            from specbranch.assembly import chosen_device

            chosen_device(asked)
    checked: dict[str, Any] = {"executor": executor, "weights": weights, "draft_weights": draft_weights}
    checked |= {"draft_window": draft_window, "cache_dtype": cache_dtype}
    return Running(device=device, draft_device=draft_device, **checked)


def _refuse_without_shapes(pair: PairOrder, preset: str, of_pair: Mapping[str, Mapping[str, Any]]) -> None:
    """Raise if a preset with larger shapes has none for this pair and none was given."""
    lacking = ["--target-shape"] if pair.target_shape is None else []
    lacking += ["--draft-shape"] if pair.draft_shape is None and pair.has_draft else []
    if lacking:
        raise BadParameter(
            f"Preset {preset} has shapes for the pairs {', '.join(of_pair)}, not for "
            f"{pair.pair or pair.target or pair.draft}. Add {' and '.join(lacking)} (own keeps a shape), or "
            "take --preset gpu-real, where models keep their shapes."
        )


def _read_setting(text: str) -> dict[str, Any]:
    example = '\'{"method": "pearl"}\''
    try:
        values = json.loads(text)
    except ValueError as error:
        raise BadParameter(f"--config is no JSON ({error}); expected an object such as {example}.") from None
    if not isinstance(values, dict) or "method" not in values:
        raise BadParameter(f"--config is {text}; expected a JSON object with a method, such as {example}.")
    return values
