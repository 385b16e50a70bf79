"""A saved answer as `specbranch generate --json` wrote it: its required fields and their parsing.

Owns the checks of its shape, and the list of fields that can be recomputed. Invariant: every field is used, recomputed
by `compare`, or listed as not checked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Self, get_args

from specbranch.config import Rule, SamplingParams
from specbranch.core.orders import TokenLogprobs
from specbranch.errors import BadParameter
from specbranch.text.line_files import json_value, numbered_lines

EXPECTED_ANSWER = "expected what `specbranch generate --json` prints"
# how an answer was made, saved with it: claims that decide how it is decoded again
NOTED = ("target", "dtype", "weights", "cache_dtype", "runner")
USED = (*NOTED, "prompt_token_ids", "token_ids", "params", "seed", "sample", "rule", "alternatives")
RECOMPUTED = ("text", "finish_reason", "logprobs", "prompt")  # and the number of tokens in `stats`
STATS = "stats (all but tokens)"


@dataclass(frozen=True, slots=True)
class Saved:
    """A saved answer and how it was made; None where that is unknown."""

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    params: SamplingParams
    seed: int
    sample: int = 0
    target: str | None = None
    dtype: str | None = None
    weights: str | None = None
    cache_dtype: str | None = None
    runner: str | None = None
    context_length: int | None = None  # never believed: it could cut an answer short
    prompt_text: str | None = None
    text: str | None = None
    finish_reason: str | None = None
    logprobs: tuple[TokenLogprobs, ...] | None = None
    counted: int | None = None  # tokens, as the statistics have them
    not_checked: tuple[str, ...] = ()  # fields that nothing here can recompute

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Parse the output of `specbranch generate --json`; raise if it is wrong."""
        _check(values)
        params = _params(values["params"])
        if values.get("rule") == "ratio" and params.temperature > 0:
            raise BadParameter(
                "The answer was sampled under the ratio rule, which promises the distribution, not the tokens; "
                "nothing to compare."
            )
        logprobs = values.get("logprobs")
        return cls(
            tuple(values["prompt_token_ids"]),
            tuple(values["token_ids"]),
            params,
            values["seed"],
            values.get("sample") or 0,
            **{name: values.get(name) for name in (*NOTED, "context_length", "text", "finish_reason")},
            prompt_text=values.get("prompt"),
            logprobs=None if logprobs is None else tuple(map(_logprobs, logprobs)),
            counted=(values.get("stats") or {}).get("tokens"),
            not_checked=_beyond_checking(values),
        )

    @property
    def recomputed(self) -> tuple[str, ...]:
        """The fields that are compared once the tokens equal those of plain decoding."""
        found = (self.text, self.finish_reason, self.logprobs, self.prompt_text)
        return tuple(name for name, value in zip(RECOMPUTED, found, strict=True) if value is not None)


def read_answers(text: str, name: str) -> list[Saved]:
    """Return all answers of a file, each checked."""
    answers = []
    for number, values in enumerate(_objects(text, name)):
        with naming(name, number):
            answers.append(Saved.from_dict(values))
    if not answers:
        raise BadParameter(f"{name} holds no answer; {EXPECTED_ANSWER}.")
    return answers


@contextmanager
def naming(name: str, number: int) -> Iterator[None]:
    """Add file and number of the answer to an error."""
    try:
        yield
    except BadParameter as error:
        raise BadParameter(f"{name}, answer {number}: {error}") from error


def common_settings(answers: Sequence[Saved], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings shared by all answers, since one model is loaded for them; given values override them."""
    settings = {name: _agreed(name, answers) if given[name] is None else given[name] for name in NOTED}
    if settings["weights"] == settings["dtype"]:
        settings["weights"] = None  # stored as it is computed in, also where that is float16, which no --weights names
    return settings


def claimed_settings(answers: Sequence[Saved], given: Mapping[str, Any]) -> list[str]:
    """Return the names of settings that come from the file alone."""
    return [name for name in NOTED if given[name] is None and _agreed(name, answers) is not None]


def short(value: object) -> str:
    """Return a value as it appears in a sentence."""
    shown = repr(value)
    return shown if len(shown) <= 60 else f"{shown[:57]}…"


def _objects(text: str, name: str) -> Iterator[dict[str, Any]]:
    """Yield each answer, and its further samples, which share prompt and settings."""
    for where, line in numbered_lines(text, name):
        answer = json_value(line, where, f"{EXPECTED_ANSWER}.")
        if not isinstance(answer, dict):
            raise BadParameter(f"{where} is no JSON object; {EXPECTED_ANSWER}.")
        others = answer.get("alternatives") or []
        if not isinstance(others, list) or not all(isinstance(other, dict) for other in others):
            raise BadParameter(f"{where} has alternatives that are no answers; {EXPECTED_ANSWER}.")
        shared = {name: answer[name] for name in (*NOTED, "context_length", "prompt") if name in answer}
        yield answer
        yield from ({**shared, **other} for other in others)


def _agreed(name: str, answers: Sequence[Saved]) -> Any:
    found = {getattr(answer, name) for answer in answers}
    if len(found) > 1:
        values, option = ", ".join(sorted(map(str, found))), name.replace("_", "-")
        raise BadParameter(
            f"The answers were made with different values of {name} ({values}); verify them apart, or give --{option}."
        )
    return found.pop()


def _beyond_checking(values: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the fields that are neither used nor recomputed, including unknown ones."""
    names = (name for name in values if name not in USED and name not in RECOMPUTED and values[name] is not None)
    return tuple(STATS if name == "stats" else name for name in names)


def _is_count(value: object, least: int = 0) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value < 2**63


def _is_number(value: object) -> bool:
    """True for a number that can be subtracted, including NaN and infinities, which then differ."""
    return isinstance(value, float) or (_is_count(abs(value)) if isinstance(value, int) else False)


def _are_ids(value: object) -> bool:
    return isinstance(value, list) and all(_is_count(token) for token in value)


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _is_name(value: object) -> bool:
    return isinstance(value, str) and value != ""


def _is_pair(value: object) -> bool:
    return isinstance(value, list) and len(value) == 2 and _is_count(value[0]) and _is_number(value[1])


def _is_entry(value: object) -> bool:
    if not isinstance(value, dict) or not _is_number(value.get("logprob")):
        return False
    top = value.get("top")
    return isinstance(top, list) and all(map(_is_pair, top))


def _are_logprobs(value: object) -> bool:
    return isinstance(value, list) and all(map(_is_entry, value))


def _are_stats(value: object) -> bool:
    return isinstance(value, dict) and (value.get("tokens") is None or _is_count(value["tokens"]))


Check = tuple[Callable[[object], bool], str]  # accepts a value; and what was expected
_NEEDED: dict[str, Check] = {
    "prompt_token_ids": (_are_ids, "a list of token ids"),
    "token_ids": (_are_ids, "a list of token ids"),
    "params": (lambda value: isinstance(value, Mapping), "an object of sampling parameters"),
    "seed": (lambda value: isinstance(value, int) and not isinstance(value, bool), "a whole number"),
}
_OPTIONAL: dict[str, Check] = {
    "sample": (_is_count, "a whole number ≥ 0"),
    "rule": (lambda value: value in get_args(Rule), " or ".join(get_args(Rule))),
    "target": (_is_name, "the name of a model"),
    "context_length": (lambda value: _is_count(value, 2), "a whole number ≥ 2"),
    "dtype": (_is_name, "a name"),
    "weights": (_is_name, "a name"),
    "cache_dtype": (_is_name, "a name"),
    "runner": (_is_name, "a name"),
    "prompt": (_is_text, "a text"),
    "text": (_is_text, "a text"),
    "finish_reason": (_is_text, "a text"),
    "logprobs": (_are_logprobs, 'a list of {"logprob": …, "top": [[id, …], …]}'),
    "stats": (_are_stats, "an object of numbers"),
}


def _check(values: Mapping[str, Any]) -> None:
    missing = [name for name in _NEEDED if name not in values]
    if missing:
        raise BadParameter(f"The saved answer has no {', '.join(missing)}; {EXPECTED_ANSWER}.")
    noted = {name: check for name, check in _OPTIONAL.items() if values.get(name) is not None}
    for name, (fits, expected) in {**_NEEDED, **noted}.items():
        if not fits(values[name]):
            raise BadParameter(f"{name} is {short(values[name])}; expected {expected}.")


def _logprobs(entry: Mapping[str, Any]) -> TokenLogprobs:
    return TokenLogprobs(entry["logprob"], tuple((token, value) for token, value in entry["top"]))


def _params(values: Mapping[str, Any]) -> SamplingParams:
    """Parse the sampling parameters; JSON turned the ids of logit_bias into strings."""
    bias = values.get("logit_bias", {})
    if not isinstance(bias, Mapping):
        raise BadParameter(f"logit_bias is {short(bias)}; expected an object of token ids with numbers.")
    try:
        numbers = {int(token): added for token, added in bias.items()}
    except ValueError:
        raise BadParameter(f"logit_bias is {short(bias)}; expected token ids with numbers.") from None
    return SamplingParams.from_dict({**values, "logit_bias": numbers})
