"""The methods a bench can run: those of this engine with their settings, and those of transformers and llama.cpp.

Owns the names of methods, the setting that each name stands for, and the values that a search tries of each knob.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from specbranch.config import MOST_NODES, SpeculativeConfig
from specbranch.core.methods import METHODS, Method
from specbranch.errors import BadParameter, unknown
from specbranch.lab.bench.results import BASELINE

TRANSFORMERS = {
    "hf-generate": "transformers' own generate, one token a forward",
    "hf-assisted": "transformers' assisted generation with the same draft",
    "hf-lookup": "transformers' prompt lookup",
}
LLAMACPP = {
    "llamacpp": "llama.cpp on the same GGUF file, one token a forward",
    "llamacpp-ngram": "llama.cpp's speculation by n-grams",
}
OTHER_ENGINES = {**TRANSFORMERS, **LLAMACPP}
Knobs = Mapping[str, Sequence[int | float]]
TWO_STAGE_KNOBS: Knobs = {
    "num_speculative_tokens": range(1, 17),
    "stop_below": tuple(n / 20 for n in range(20)),
    "max_branches": range(1, 7),
}
SPACES: dict[str, Knobs] = {  # the knobs of a method, and the values that a search tries
    BASELINE: {},
    "speculative": {"num_speculative_tokens": range(1, 13)},
    "adaptive": {"num_speculative_tokens": range(1, 13)},
    "pearl": {"num_speculative_tokens": range(1, 17)},
    "specbranch:confidence": TWO_STAGE_KNOBS,
    "specbranch:paper": TWO_STAGE_KNOBS,
    "specbranch:last": TWO_STAGE_KNOBS,
    "specbranch:fixed": {"num_speculative_tokens": range(1, 17)},
    "specbranch:oracle": {"num_speculative_tokens": range(1, 17), "max_branches": range(1, 7)},
    "lookup": {"num_speculative_tokens": range(1, 17), "ngram_max": range(1, 7), "ngram_min": range(1, 4)},
    "lookahead": {
        "lookahead_window": (1, 2, 3, 4, 5, 6, 7, 10, 15, 20),
        "lookahead_ngram": range(3, 8),
        "lookahead_candidates": (1, 2, 3, 4, 5, 7, 10, 15),
    },
    "tree": {},  # these plan their own drafts
    "specbranch": {},
}
TRIALS = 40  # settings that a search tries of a method with several knobs
TUNING_PROMPTS = 4  # prompts of each shipped suite that a search runs on
NOT_SEARCHED = ("auto",)  # it has no knobs, and with a draft it decodes like specbranch
MORE = {"speculative": ("policy", "stop_below")}  # settings that rows show and no search sets


@dataclass(frozen=True, slots=True)
class Setting:
    """A method with its configuration; a method of another engine has none."""

    method: str
    config: SpeculativeConfig | None

    @property
    def shown(self) -> dict[str, Any]:
        """The values that distinguish it from the same method with another setting."""
        if self.config is None:
            return {}
        values, name = asdict(self.config), Name.of(self.method)
        names = (*name.knobs, *MORE.get(name.like, ()), "without", *name.values)
        return {name: values[name] for name in names if values[name] not in (None, ()) and _matters(name, self.config)}

    @property
    def drafts(self) -> bool:
        """True if it uses a draft model, if there is one."""
        return self.needs_draft or (self._kind is not None and self._kind.uses_draft)

    @property
    def needs_draft(self) -> bool:
        """True if it cannot run without a draft model."""
        return self.method == "hf-assisted" or (self._kind is not None and self._kind.needs_draft)

    @property
    def plans(self) -> bool:
        """True if it decides by experience."""
        return self._kind is not None and self.config is not None and self._kind.plans(self.config)

    @property
    def uses_signals(self) -> bool:
        """True if it uses the signals of an H-RAD predictor."""
        return self._kind is not None and self.config is not None and self._kind.uses_signals(self.config)

    @property
    def _kind(self) -> Method | None:
        """The engine's method of that name; None for a method of another engine."""
        return None if self.method in OTHER_ENGINES else METHODS[Name.of(self.method).method]


@dataclass(frozen=True, slots=True)
class Name:
    """The parsed name of a method: METHOD or METHOD:POLICY, with -PART to switch a part off and @SETTING=VALUE to set a
    value."""

    method: str
    policy: str | None
    without: tuple[str, ...]
    values: Mapping[str, Any]

    @classmethod
    def of(cls, name: str) -> Name:
        """Parse a name; raise if it is wrong."""
        head, *settings = name.split("@")
        like, *parts = head.split("-")
        method, _, policy = like.partition(":")
        if method not in METHODS:
            raise unknown("method", name if parts else method, (*METHODS, *OTHER_ENGINES))
        return cls(method, policy or None, tuple(parts), dict(_value(name, setting) for setting in settings))

    @property
    def like(self) -> str:
        """The method of which it is a variant."""
        return f"{self.method}:{self.policy}" if self.policy else self.method

    @property
    def knobs(self) -> Knobs:
        """The knobs of the method; a policy that no search knows has those of a two-stage one."""
        if self.policy is not None:
            return SPACES.get(self.like, TWO_STAGE_KNOBS)
        return {} if self.method in NOT_SEARCHED else SPACES[self.method]

    def applied(self, values: Mapping[str, Any]) -> SpeculativeConfig:
        """Return the configuration of the base method, changed as the name says."""
        named = {"method": self.method, **({"policy": self.policy} if self.policy else {}), **self.values}
        config = SpeculativeConfig.from_dict({**values, **named, **({"without": self.without} if self.without else {})})
        METHODS[self.method].check(self.method, config)
        return config


def _value(name: str, setting: str) -> tuple[str, Any]:
    key, _, text = setting.partition("=")
    if key in ("method", "policy", "without"):
        raise BadParameter(f"{name!r} sets {key!r} after '@'; expected METHOD:POLICY and -PART for these.")
    try:
        return key, json.loads(text)
    except ValueError:
        raise BadParameter(f"{name!r} sets {setting!r}; expected @SETTING=VALUE, such as @stop_below=0.2.") from None


def default_setting(method: str, overrides: Mapping[str, Any] | None = None) -> Setting:
    """Return a method with its usual setting; `Name` explains METHOD:POLICY and variants."""
    if method in OTHER_ENGINES:
        return Setting(method, None)
    return Setting(method, Name.of(method).applied(overrides or {}))


def variant(method: str, of: Setting) -> Setting:
    """Return a variant of a method whose setting is known."""
    return of if of.config is None else Setting(method, Name.of(method).applied(asdict(of.config)))


def given_setting(values: Mapping[str, Any]) -> Setting:
    """Return a setting given by hand. A planned method with another policy is named METHOD:POLICY."""
    method, policy = str(values["method"]), values.get("policy")
    planned = method in METHODS and METHODS[method].policy == "planner"
    return default_setting(f"{method}:{policy}" if planned and policy not in (None, "planner") else method, values)


def listed(names: str) -> list[str]:
    """Split a list of names at its commas."""
    return [name.strip() for name in names.split(",") if name.strip()]


def chosen_methods(names: Iterable[str], has_draft: bool) -> tuple[str, ...]:
    """Return the requested methods, each once; plain decoding comes first, as the reference."""
    asked = tuple(dict.fromkeys((BASELINE, *names)))
    for name in asked:
        setting = default_setting(name)
        if setting.needs_draft and not has_draft:
            raise BadParameter(
                f"Method {name!r} needs a draft model, and none was given. Name a --pair, or leave it out of --methods."
            )
    return asked


def _matters(name: str, config: SpeculativeConfig) -> bool:
    """True if a value has any effect: the threshold needs a policy that stops by confidence, max_branches needs
    branches."""
    branching = config.method == "specbranch" and "branches" not in config.without
    return {"stop_below": config.policy in ("confidence", "paper", "last"), "max_branches": branching}.get(name, True)


def can_be_tuned(method: str) -> bool:
    """True if a method has a knob."""
    return method not in OTHER_ENGINES and bool(SPACES.get(Name.of(method).like))


def has_several_values(method: str) -> bool:
    """True if a method has more than one knob; its search then needs optuna."""
    return method not in OTHER_ENGINES and len(SPACES.get(Name.of(method).like, {})) > 1


def candidates(has_draft: bool) -> tuple[str, ...]:
    """Return the methods that can be searched with a pair, plain decoding first."""
    return tuple(name for name in SPACES if has_draft or not default_setting(name).needs_draft)


def knob_values(config: SpeculativeConfig) -> dict[str, Any]:
    """Return the values of a configuration that a search decides."""
    return {name: getattr(config, name) for name in SPACES.get(_searched_as(config), {})}


def _searched_as(config: SpeculativeConfig) -> str:
    """Return the name under which a configuration is searched."""
    return f"{config.method}:{config.policy}" if config.policy else config.method or BASELINE


def config_with(method: str, values: Mapping[str, int | float]) -> SpeculativeConfig:
    """Return a method's configuration with these knob values; values that do not fit together are lowered."""
    made = dict(values)
    if "ngram_min" in values:  # the shortest n-gram is no longer than the longest
        made["ngram_min"] = min(values["ngram_min"], values["ngram_max"])
    if "lookahead_ngram" in values:  # shorter n-grams if the window would not fit the cache's tail
        made["lookahead_ngram"] = min(
            values["lookahead_ngram"],
            MOST_NODES // int(values["lookahead_window"] + values["lookahead_candidates"]) + 1,
        )
    config = default_setting(method, made).config
    assert config is not None
    return config


def usual_indices(method: str) -> dict[str, int]:
    """Return the index of the usual value of each knob."""
    usual = default_setting(method).config
    return {
        name: min(range(len(values)), key=lambda at: abs(values[at] - getattr(usual, name)))
        for name, values in SPACES[method].items()
    }
