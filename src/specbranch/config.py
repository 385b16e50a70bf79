"""What users may set: how to sample (`SamplingParams`), how to speculate (`SpeculativeConfig`), how to load models
(`LoadOptions`).

Owns names, defaults and ranges. It does not own the defaults of particular models. Invariant: a value is frozen, and
its fields are checked when it is made; an unknown key is refused with the nearest known name.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, Self, cast, get_args

from specbranch.errors import BadParameter, unknown

Rule = Literal["match", "ratio"]
ConstraintKind = Literal["json_schema", "regex", "choice", "grammar"]
HeadKind = Literal["top", "sampled"]
PolicyName = Literal["fixed", "confidence", "entropy", "last", "paper", "oracle", "planner"]
Part = Literal["overlap", "trees", "branches", "lookup", "learning", "hrad", "posterior"]  # of any policy

TUNED_FOR = "tuned_for"  # a key in files of `specbranch tune` that says what was tuned for; it is no setting
LONGEST_DRAFT = 64  # tokens: a chain and its verification fit the tail of the KV cache
MOST_NODES = 128  # of the KV cache's tail: lookahead's window and candidates fit it
NGRAMS = (3, 16)  # shortest and longest n-gram of lookahead decoding
ExecutorName = Literal["serial", "process", "streams"]
OVERLAPPING: tuple[ExecutorName, ...] = ("process", "streams")  # executors that run draft and target at once
# how matrices are stored
WeightsName = Literal["float32", "bfloat16", "int8", "fp8", "fp8-block", "int4", "int4-64", "int4-32", "stored"]
WEIGHTS: tuple[WeightsName, ...] = get_args(WeightsName)
RunnerName = Literal["auto", "native", "transformers"]
RUNNERS: tuple[RunnerName, ...] = get_args(RunnerName)
DeviceMap = Literal["auto"]
WarmUpName = Literal["full", "lazy"]  # when a GPU's kernels are compiled and its CUDA graphs captured
WARM_UP_NAMES: tuple[WarmUpName, ...] = get_args(WarmUpName)


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
    """How tokens are sampled and when an answer ends. Target and draft are sampled alike.

    Attributes:
        temperature: logits are divided by it. 0, the default, is greedy decoding.
        top_k: sample among the k most likely tokens. None, the default, keeps all.
        top_p: sample among the most likely tokens whose probabilities add up to it. 1.0, the default, keeps all.
        min_p: drop tokens less likely than this share of the most likely one. 0.0, the default, keeps all.
        repetition_penalty: above 1, tokens of the prompt and the answer become less likely. Default 1.0: no effect.
        presence_penalty: subtracted once from the logit of a token that is in the answer. Default 0.0.
        frequency_penalty: subtracted from a token's logit for each time it is in the answer. Default 0.0.
        logit_bias: numbers to add to logits, by token id. Default: none.
        seed: the same seed gives the same answer, with every method under the match rule. Default None: a random one.
        n: samples of the prompt. Default 1.
        max_tokens: the answer ends after this number of tokens. Default 256.
        min_tokens: the answer does not end before it has this number of tokens. Default 0.
        stop: the answer ends before the first of these strings. Default: none.
        stop_token_ids: the answer ends at the first of these tokens. Default: none.
        ignore_eos: True if end-of-text tokens do not end the answer. Default False.
        logprobs: report each token's log-probability, and those of this many most likely tokens. Default None: no
            log-probabilities.
        json_schema: the answer is JSON that this schema describes, a mapping or its JSON text; {} is any JSON.
            Default None. At most one of this and the next three is set; see docs/structured.md.
        regex: the answer matches this regular expression as a whole. Default None.
        choice: the answer is one of these strings. Default: none.
        grammar: the answer follows this grammar, in Lark's or llama.cpp's syntax. Default None.
        reasoning: the opening and closing markers of reasoning, such as ("<think>", "</think>"). Reasoning at the start
            of the answer is free, and the grammar begins behind it. The opening marker "" means that the prompt has
            opened it. Default: none; the grammar begins at once.
    """

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
    json_schema: Mapping[str, Any] | str | None = None
    regex: str | None = None
    choice: tuple[str, ...] = ()
    grammar: str | None = None
    reasoning: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        self._check_constraint()
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

    @property
    def is_constrained(self) -> bool:
        """True if a grammar decides which tokens may follow."""
        return self.constraint is not None

    @property
    def constraint(self) -> tuple[ConstraintKind, str] | None:
        """The kind and the text of the grammar that the answer follows."""
        if self.choice:
            return "choice", json.dumps(self.choice)
        for kind, text in (("json_schema", self.json_schema), ("regex", self.regex), ("grammar", self.grammar)):
            if text is not None:
                return cast(ConstraintKind, kind), str(text)
        return None

    def _check_constraint(self) -> None:
        choices = self.choice
        _require(
            isinstance(choices, Iterable) and not isinstance(choices, str) and all(isinstance(c, str) for c in choices),
            "choice",
            choices,
            "strings",
        )
        object.__setattr__(self, "choice", tuple(choices))
        _require(all(self.choice), "choice", self.choice, "strings that are not empty")
        object.__setattr__(self, "json_schema", schema_text(self.json_schema))
        markers = self.reasoning
        are_texts = isinstance(markers, (list, tuple)) and all(isinstance(one, str) for one in markers)
        pair = are_texts and (not markers or (len(markers) == 2 and bool(markers[1])))
        _require(pair, "reasoning", markers, "an opening and a closing marker, as ('<think>', '</think>')")
        object.__setattr__(self, "reasoning", tuple(markers))
        for name in ("regex", "grammar"):
            value = getattr(self, name)
            _require(value is None or (isinstance(value, str) and bool(value)), name, value, "a text")
        given = [name for name in get_args(ConstraintKind) if getattr(self, name) not in (None, ())]
        if len(given) > 1:
            raise BadParameter(f"{given[0]} and {given[1]} are both given; an answer follows one of them. Give one.")

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
    """Which method decodes, and how it speculates. Names follow vLLM where the idea is the same.

    Attributes:
        method: the name of the method. Default None: "specbranch" with a draft, "auto" without one.
        num_speculative_tokens: the maximum length of a drafted chain (γ). Default 5. The planner ignores it.
        policy: what decides draft lengths and branches. Default None: the method's own policy.
        rule: "match", the default, accepts a drafted token if plain decoding with the same seed chooses it; "ratio"
            is rejection sampling, which keeps the distribution.
        heads: what a branch starts with under the ratio rule: "top" is the draft's most likely tokens, "sampled" are
            samples. Default None: the method's own.
        stop_below: policies by confidence end a chain when its confidence falls below this (ε in the paper).
            Default 0.4.
        max_branches: the maximum number of branches at a branch point (k_max in the paper). Default 6.
        until_target: True if the draft continues until the target is done, instead of a fixed length. Default False.
        ngram_max: the longest n-gram that lookup searches the text for. Default 4.
        ngram_min: the shortest one. Default 1.
        lookahead_window: the columns of lookahead decoding (W in its paper). Default 15, the paper's for 7B models.
        lookahead_ngram: the length of its n-grams (N). Default 5.
        lookahead_candidates: the n-grams that it keeps, and verifies, for each first token (G). Default 15.
        without: parts of the policy to switch off, to see what each brings (`core/policies.py`). Default: none.
    """

    method: str | None = None
    num_speculative_tokens: int = 5
    policy: PolicyName | None = None
    rule: Rule = "match"
    heads: HeadKind | None = None
    stop_below: float = 0.4
    max_branches: int = 6
    until_target: bool = False
    ngram_max: int = 4
    ngram_min: int = 1
    lookahead_window: int = 15
    lookahead_ngram: int = 5
    lookahead_candidates: int = 15
    without: tuple[Part, ...] = ()

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
    """How models are loaded, beyond what most users set; the rarer arguments of `LLM` as one value.

    Attributes:
        runner: "native", "transformers", or "auto", the default: native if it knows the model's architecture.
        draft_device: the device of the draft. Default None: the target's.
        device_map: "auto" spreads the target over all GPUs, by the transformers runner; the draft stays on one
            device. Default None: one device.
        weights: how the target's weight matrices are stored. Default None: in the dtype; on a CPU, a quantised GGUF
            file keeps its own format ("stored"), and so does a quantised checkpoint on any device. "int8", "fp8",
            "int4" and their like are quantised: every method gives the text of plain decoding with the quantised
            weights.
        draft_weights: the same for the draft.
        draft_window: the draft attends only to the first few and to this many last positions, so that its steps cost
            no more at long contexts, and its context may be longer than it was trained for. The text stays the same.
            Default None: it attends to all positions.
        context_length: the maximum number of tokens of a prompt and its answer together. Default None: the model's.
        cache_tokens: the KV slots of each model, for all requests together. Default None: what fits in memory.
        cache_dtype: "bfloat16" or "int8" stores keys and values in less memory, on a CPU; this quantises, too.
            Default None: the dtype.
        max_batch: how many prompts of a list are decoded at once. Default None: 64; 1 with the transformers runner,
            which a batch does not speed up.
        max_num_batched_tokens: the most tokens of one forward of the target, decode rows and prompt tokens together.
            Default None: as many prompt tokens as measured costs allow. Decode rows always run, and a prompt advances
            by at least one chunk in a round.
        clock: the name or the file of a cost profile. Decisions are real, but time is what the profile charges.
            Default None: real time.
        force_profile: True accepts a cost profile that was measured with another pair. Default False.
        predictor: an H-RAD predictor, a folder of `specbranch train-predictor`. Default None: the one of the pair.
        keep_experience: True, the default, loads and saves the costs and statistics learned of a pair, in the cache
            folder.
        prefix_cache: True, the default, keeps the KV pages of prompts. A prompt with the same beginning then skips
            the prefill of that beginning.
        warm_up: "full", the default, compiles a GPU's kernels and captures its CUDA graphs at load, for all steps that
            the method and `max_batch` can need. "lazy" does so when a step first occurs, in the middle of an answer:
            for scripts that ask once. A CPU has nothing to warm up.
    """

    runner: RunnerName = "auto"
    draft_device: str | None = None
    device_map: DeviceMap | None = None
    weights: WeightsName | None = None
    draft_weights: WeightsName | None = None
    draft_window: int | None = None
    context_length: int | None = None
    cache_tokens: int | None = None
    cache_dtype: str | None = None
    max_batch: int | None = None
    max_num_batched_tokens: int | None = None
    clock: str | None = None
    force_profile: bool = False
    predictor: str | None = None
    keep_experience: bool = True
    prefix_cache: bool = True
    warm_up: WarmUpName = "full"

    def __post_init__(self) -> None:
        check_loading(self.runner, self.weights, self.context_length, self.cache_tokens)
        if self.draft_weights is not None and self.draft_weights not in WEIGHTS:
            raise unknown("storage of weights", str(self.draft_weights), WEIGHTS)
        check_draft_window(self.draft_window)
        if self.max_batch is not None:
            check_batch_size(self.max_batch)
        check_warm_up(self.warm_up)
        if (most := self.max_num_batched_tokens) is not None:
            _require(_is_count(most, 1), "max_num_batched_tokens", most, "a whole number ≥ 1, or none for the default")
        for name in ("force_profile", "keep_experience", "prefix_cache"):
            _require(isinstance(getattr(self, name), bool), name, getattr(self, name), "true or false")

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Build from a mapping, refusing keys that do not exist."""
        return cls(**_known_only(cls, "option of LLM", values))


def schema_text(schema: Mapping[str, Any] | str | None) -> str | None:
    """Return a JSON schema as its text; refuse what is none."""
    if schema is None:
        return None
    expected = "a JSON schema: a mapping, or the text of one"
    if isinstance(schema, str):
        try:
            found = json.loads(schema)
        except (ValueError, RecursionError) as error:
            raise BadParameter(
                f"json_schema is {schema[:60]!r}, which is no JSON ({error}); expected {expected}."
            ) from None
        _require(isinstance(found, dict), "json_schema", found, expected)
        return schema
    _require(isinstance(schema, Mapping), "json_schema", schema, expected)
    try:
        return json.dumps(schema, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise BadParameter(f"json_schema holds a value that is no JSON ({error}); expected {expected}.") from None


def check_loading(runner: str, weights: str | None, context_length: int | None, cache_tokens: int | None) -> None:
    """Refuse options with which no model can be loaded."""
    if runner not in RUNNERS:
        raise unknown("runner", str(runner), RUNNERS)
    if weights is not None and weights not in WEIGHTS:
        raise unknown("storage of weights", str(weights), WEIGHTS)
    for name, value, least in (("context_length", context_length, 2), ("cache_tokens", cache_tokens, 1)):
        expected = f"a whole number ≥ {least}, or nothing"
        _require(value is None or (isinstance(value, int) and value >= least), name, value, expected)


def check_draft_window(given: int | None) -> None:
    """Refuse what is no number of positions."""
    expected = "a whole number ≥ 1, or none for all positions"
    _require(given is None or _is_count(given, 1), "draft_window", given, expected)


def check_warm_up(given: str) -> None:
    """Refuse what is no kind of warm-up."""
    if given not in WARM_UP_NAMES:
        raise unknown("warm-up", str(given), WARM_UP_NAMES)


def check_batch_size(given: int) -> int:
    """Return a maximum batch size as it was given; refuse what is none."""
    _require(isinstance(given, int) and given >= 1, "max_batch", given, "a whole number ≥ 1")
    return given


def read_settings(path: str | Path) -> dict[str, Any]:
    """Read the settings of a JSON file as they are there, also the key `tuned_for`; refuse a bad setting."""
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
