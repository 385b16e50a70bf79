"""The methods a bench can run: those of this engine, each with its settings, and transformers' own from outside.

Owns their names and what settings a name stands for.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from specbranch.bench.results import BASELINE
from specbranch.config import SpeculativeConfig
from specbranch.core.methods import METHODS
from specbranch.errors import BadParameter, unknown

OUTSIDE = {
    "hf-generate": "transformers' own generate, one token a forward",
    "hf-assisted": "transformers' assisted generation with the same draft",
    "hf-lookup": "transformers' prompt lookup",
}
SHOWN = {  # what of a configuration is told beside a row, by method
    "autoregressive": (),
    "speculative": ("num_speculative_tokens", "policy", "stop_below"),
    "adaptive": ("num_speculative_tokens",),
    "pearl": ("num_speculative_tokens",),
    "specbranch:confidence": ("num_speculative_tokens", "stop_below", "max_branches"),
    "tree": ("without",),
    "specbranch": ("without",),
    "auto": ("without",),
    "lookup": ("num_speculative_tokens", "ngram_max", "ngram_min"),
}


@dataclass(frozen=True, slots=True)
class Setting:
    """A method as it is run: by its name, with what was set; nothing is set of a method from outside."""

    method: str
    config: SpeculativeConfig | None

    @property
    def shown(self) -> dict[str, Any]:
        """What tells it from the same method set otherwise."""
        if self.config is None:
            return {}
        values = asdict(self.config)
        names = SHOWN.get(self.method, ("num_speculative_tokens", "stop_below", "max_branches"))  # those with a policy of their own
        return {name: values[name] for name in names if values[name] not in (None, ()) and _matters(name, self.config)}

    @property
    def drafts(self) -> bool:
        """Whether a draft model is at work, if there is one."""
        return self.needs_draft or _base(self.method) == "auto"

    @property
    def needs_draft(self) -> bool:
        """Whether it cannot run without a draft model."""
        return self.method == "hf-assisted" or (_base(self.method) in METHODS and METHODS[_base(self.method)].needs_draft)


def default_setting(method: str, overrides: Mapping[str, Any] | None = None) -> Setting:
    """Return a method with its usual settings; METHOD:POLICY names another policy than its own."""
    if method in OUTSIDE:
        return Setting(method, None)
    base, _, policy = method.partition(":")
    if base not in METHODS:
        raise unknown("method", base, (*METHODS, *OUTSIDE))
    config = SpeculativeConfig.from_dict({**(overrides or {}), "method": base, **({"policy": policy} if policy else {})})
    METHODS[base].check(base, config)
    return Setting(method, config)


def given_setting(values: Mapping[str, Any]) -> Setting:
    """Return settings given by hand under the name that tells them from the method's own: a planned method by another policy is another."""
    method, policy = str(values["method"]), values.get("policy")
    planned = method in METHODS and METHODS[method].policy == "planner"
    return default_setting(f"{method}:{policy}" if planned and policy not in (None, "planner") else method, values)


def chosen_methods(names: Iterable[str], has_draft: bool) -> tuple[str, ...]:
    """Return the methods asked for, each once, plain decoding first: without it there is nothing to hold the others against."""
    asked = tuple(dict.fromkeys((BASELINE, *names)))
    for name in asked:
        setting = default_setting(name)
        if setting.needs_draft and not has_draft:
            raise BadParameter(f"Method {name!r} needs a draft model, and none was given. Name a --pair, or leave it out of --methods.")
    return asked


def _base(method: str) -> str:
    """The method of a name that may tell a policy, too."""
    return method.partition(":")[0]


def _matters(name: str, config: SpeculativeConfig) -> bool:
    """Whether a value has any effect: the threshold has none where nothing stops by confidence, nor branches where there are none."""
    return {"stop_below": config.policy == "confidence", "max_branches": config.method == "specbranch"}.get(name, True)
