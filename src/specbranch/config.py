"""What users may set: how to sample (`SamplingParams`), how to speculate (`SpeculativeConfig`), how to load models
(`LoadOptions`).

Frozen, checked when made; unknown keys are refused with the nearest name. Holds no defaults of particular models.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, Self, get_args

from specbranch.errors import BadParameter, unknown

Rule = Literal["match", "ratio"]
HeadKind = Literal["top", "sampled"]
PolicyName = Literal["fixed", "confidence", "entropy", "last", "paper", "oracle", "planner"]
Part = Literal["overlap", "trees", "branches", "lookup", "learning", "hrad", "posterior"]  # of any policy

TUNED_FOR = "tuned_for"  # beside the settings that `specbranch tune` writes: what they are good for; no setting itself
LONGEST_DRAFT = 64  # tokens: a chain and its verification fit a cache's tail
MOST_NODES = 128  # of a cache's tail: lookahead's window and candidates fit it
NGRAMS = (3, 16)  # shortest and longest n-gram of lookahead decoding
ExecutorName = Literal["serial", "process", "streams"]
AT_ONCE: tuple[ExecutorName, ...] = ("process", "streams")  # executors under which draft and target work at once
WeightsName = Literal["float32", "bfloat16", "int8", "int4", "stored"]  # how matrices are stored
WEIGHTS: tuple[WeightsName, ...] = get_args(WeightsName)
RunnerName = Literal["auto", "native", "transformers"]
RUNNERS: tuple[RunnerName, ...] = get_args(RunnerName)
DeviceMap = Literal["auto"]


def _require(ok: bool, name: str, got: object, expected: str) -> None:
    if not ok:
        raise BadParameter(f"{name} is {got!r}; expected {expected}.")


def _is_number(value: object) -> bool:
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # a whole number that no float holds
        return False


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_count(value: object, least: int) -> bool:
    return isinstance(value, int) and _is_whole(value) and value >= least


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How tokens are drawn and when a request ends; one pipeline for target and draft."""

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)
    seed: int | None = None
    n: int = 1
    max_tokens: int = 256
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        for name, expected in (("stop", "strings that are not empty"), ("stop_token_ids", "token ids ≥ 0")):
            value = getattr(self, name)
            _require(isinstance(value, Iterable), name, value, expected)
            object.__setattr__(self, name, tuple(value))
        _require(isinstance(self.logit_bias, Mapping), "logit_bias", self.logit_bias, "token ids with numbers")
        _require(isinstance(self.ignore_eos, bool), "ignore_eos", self.ignore_eos, "true or false")
        self._check_ranges()
        self._check_limits()

    def _check_ranges(self) -> None:
        for name, low, high, expected in (
            ("temperature", 0.0, math.inf, "a number ≥ 0 (0 decodes greedily)"),
            ("top_p", 0.0, 1.0, "a number above 0 and at most 1 (1 keeps every token)"),
            ("min_p", 0.0, 1.0, "a number from 0 to 1 (0 keeps every token)"),
            ("repetition_penalty", 0.0, math.inf, "a number above 0 (1 changes nothing)"),
            ("presence_penalty", -2.0, 2.0, "a number from -2 to 2"),
            ("frequency_penalty", -2.0, 2.0, "a number from -2 to 2"),
        ):
            value = getattr(self, name)
            _require(_is_number(value) and low <= value <= high, name, value, expected)
            if name in ("top_p", "repetition_penalty"):
                _require(value > 0, name, value, expected)
        _require(
            self.top_k is None or _is_count(self.top_k, 1),
            "top_k",
            self.top_k,
            "a whole number ≥ 1, or nothing for all tokens",
        )
        for token, bias in self.logit_bias.items():
            _require(
                _is_count(token, 0) and _is_number(bias),
                "logit_bias",
                {token: bias},
                "token ids ≥ 0 with finite numbers",
            )

    def _check_limits(self) -> None:
        for name, least in (("max_tokens", 1), ("min_tokens", 0), ("n", 1)):
            _require(_is_count(getattr(self, name), least), name, getattr(self, name), f"a whole number ≥ {least}")
        _require(
            self.min_tokens <= self.max_tokens, "min_tokens", self.min_tokens, f"at most max_tokens ({self.max_tokens})"
        )
        _require(
            self.logprobs is None or _is_count(self.logprobs, 0),
            "logprobs",
            self.logprobs,
            "a whole number ≥ 0, or nothing",
        )
        _require(
            self.seed is None or _is_whole(self.seed), "seed", self.seed, "a whole number, or nothing for a fresh one"
        )
        _require(all(isinstance(s, str) and s for s in self.stop), "stop", self.stop, "strings that are not empty")
        _require(
            all(_is_count(t, 0) for t in self.stop_token_ids), "stop_token_ids", self.stop_token_ids, "token ids ≥ 0"
        )

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Build from a mapping, refusing keys that do not exist."""
        return cls(**_known_only(cls, "sampling parameter", values))


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculativeConfig:
    """How a method speculates. Names follow vLLM where the idea is the same."""

    method: str | None = None  # nothing: the best fit (core.methods.best_fit)
    num_speculative_tokens: int = 5
    policy: PolicyName | None = None  # nothing: the method's own
    rule: Rule = "match"
    heads: HeadKind | None = None  # nothing: the method's own
    stop_below: float = 0.4  # confidence under which a chain ends (ε in the paper)
    max_branches: int = 6  # k_max in the paper
    until_target: bool = False  # draft on until the target is done, instead of a fixed length
    ngram_max: int = 4
    ngram_min: int = 1
    lookahead_window: int = 15  # W in lookahead decoding's paper, which has these three for a model of 7B
    lookahead_ngram: int = 5  # N
    lookahead_candidates: int = 15  # G: n-grams kept, and verified, for each first token
    without: tuple[Part, ...] = ()  # parts of the policy to leave out, to see what each brings (core.policies)

    def __post_init__(self) -> None:
        self._check_parts()
        self._check_lookahead()
        _require(self.method is None or isinstance(self.method, str), "method", self.method, "a name")
        asked = self.num_speculative_tokens
        _require(
            _is_count(asked, 1) and asked <= LONGEST_DRAFT,
            "num_speculative_tokens",
            asked,
            f"a whole number from 1 to {LONGEST_DRAFT}",
        )
        _require(_is_count(self.max_branches, 1), "max_branches", self.max_branches, "a whole number ≥ 1")
        _require(
            _is_number(self.stop_below) and 0 <= self.stop_below <= 1,
            "stop_below",
            self.stop_below,
            "a number from 0 to 1",
        )
        _require(_is_count(self.ngram_min, 1), "ngram_min", self.ngram_min, "a whole number ≥ 1")
        _require(
            _is_count(self.ngram_max, self.ngram_min),
            "ngram_max",
            self.ngram_max,
            f"a whole number ≥ ngram_min ({self.ngram_min})",
        )
        _require(isinstance(self.until_target, bool), "until_target", self.until_target, "true or false")
        for name, choices in (
            ("rule", get_args(Rule)),
            ("heads", get_args(HeadKind)),
            ("policy", get_args(PolicyName)),
        ):
            value = getattr(self, name)
            if value is not None and value not in choices:
                raise unknown(name, str(value), choices)

    def _check_lookahead(self) -> None:
        for name in ("lookahead_window", "lookahead_candidates"):
            _require(_is_count(getattr(self, name), 1), name, getattr(self, name), "a whole number ≥ 1")
        shortest, longest = NGRAMS
        size, width = self.lookahead_ngram, self.lookahead_window + self.lookahead_candidates
        _require(
            _is_count(size, shortest) and size <= longest,
            "lookahead_ngram",
            size,
            f"a whole number from {shortest} to {longest}",
        )
        nodes = width * (size - 1)
        fits = f"at most {MOST_NODES}, the nodes a cache's tail holds; lower one of them"
        _require(nodes <= MOST_NODES, "(lookahead_window + lookahead_candidates) · (lookahead_ngram − 1)", nodes, fits)

    def _check_parts(self) -> None:
        parts = (self.without,) if isinstance(self.without, str) else self.without
        _require(isinstance(parts, Iterable), "without", parts, f"some of {', '.join(get_args(Part))}")
        object.__setattr__(self, "without", tuple(parts))
        for part in self.without:
            if part not in get_args(Part):
                raise unknown("part of a policy", str(part), get_args(Part))

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Build from a mapping, refusing keys that do not exist."""
        return cls(
            **_known_only(
                cls, "speculative setting", {name: value for name, value in values.items() if name != TUNED_FOR}
            )
        )

    @classmethod
    def from_file(cls, path: str | Path) -> Self:
        """Read from a JSON file, such as `specbranch tune` writes."""
        return cls.from_dict(read_settings(path))


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions:
    """How models are loaded, beyond what most users set; the rarer arguments of `LLM` as one value."""

    runner: RunnerName = "auto"
    draft_device: str | None = None  # nothing: the target's
    # "auto" spreads the target over all GPUs, by the transformers runner; the draft stays on one device
    device_map: DeviceMap | None = None
    # How matrices are stored; nothing: in the dtype, or as a quantised GGUF file has them ("stored") on a CPU. With
    # "int8", "int4" and "stored" the model is another, coarser one, and every method gives its plain decoding's text.
    weights: WeightsName | None = None
    draft_weights: WeightsName | None = None
    context_length: int | None = None  # tokens of prompt and answer; nothing: the model's own
    cache_tokens: int | None = None  # KV slots of each model for all requests together; nothing: what memory allows
    cache_dtype: str | None = None  # "bfloat16" or "int8": keys and values in less memory, on a CPU; another model, too
    # prompts of a list that are decoded at once; nothing: 64, or one with the transformers runner, which gains nothing
    max_batch: int | None = None
    clock: str | None = None  # name or file of a cost profile: decisions are real, and time is what the profile charges
    force_profile: bool = False  # take a profile that was measured with another pair
    predictor: str | None = None  # a folder of `specbranch train-predictor`; nothing: the one of the pair
    keep_experience: bool = True  # read and write what is learned of a pair in the cache folder
    prefix_cache: bool = True  # keep the KV pages of prompts for those that start alike

    def __post_init__(self) -> None:
        check_loading(self.runner, self.weights, self.context_length, self.cache_tokens)
        if self.draft_weights is not None and self.draft_weights not in WEIGHTS:
            raise unknown("storage of weights", str(self.draft_weights), WEIGHTS)
        if self.max_batch is not None:
            batch_size(self.max_batch)
        for name in ("force_profile", "keep_experience", "prefix_cache"):
            _require(isinstance(getattr(self, name), bool), name, getattr(self, name), "true or false")

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Build from a mapping, refusing keys that do not exist."""
        return cls(**_known_only(cls, "option of LLM", values))


def check_loading(runner: str, weights: str | None, context_length: int | None, cache_tokens: int | None) -> None:
    """Refuse how a model cannot be loaded, whatever the model."""
    if runner not in RUNNERS:
        raise unknown("runner", str(runner), RUNNERS)
    if weights is not None and weights not in WEIGHTS:
        raise unknown("storage of weights", str(weights), WEIGHTS)
    for name, value, least in (("context_length", context_length, 2), ("cache_tokens", cache_tokens, 1)):
        expected = f"a whole number ≥ {least}, or nothing"
        _require(value is None or (isinstance(value, int) and value >= least), name, value, expected)


def batch_size(given: int) -> int:
    """Return how many requests may be decoded at once, or refuse it."""
    _require(isinstance(given, int) and given >= 1, "max_batch", given, "a whole number ≥ 1")
    return given


def read_settings(path: str | Path) -> dict[str, Any]:
    """Read speculative settings from a JSON file, as they are there, with what they were tuned for if it says so."""
    try:
        values = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise BadParameter(
            f"The configuration {path} cannot be read ({error}); expected a JSON object as `specbranch tune` writes it."
        ) from None
    if not isinstance(values, dict):
        raise BadParameter(f"The configuration {path} is no JSON object; expected one from `specbranch tune`.")
    SpeculativeConfig.from_dict(values)
    return values


def _known_only(cls: type[Any], what: str, values: Mapping[str, Any]) -> dict[str, Any]:
    names = [f.name for f in fields(cls)]
    for key in values:
        if key not in names:
            raise unknown(what, key, names)
    return dict(values)
