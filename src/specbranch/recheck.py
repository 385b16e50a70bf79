"""Checking a saved answer against plain decoding: token for token, and where they part, how close the choice was.

Owns what a saved answer must hold, and the comparison. Invariant: an answer passes only if it equals autoregressive
decoding, or first departs from it at a near-tie, which another order of float32 sums can turn either way. The
transformers runner on a GPU in bfloat16 may turn more.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, Self, get_args

from specbranch.config import Rule, SamplingParams
from specbranch.core.request import Request
from specbranch.engine import LLM
from specbranch.errors import BadParameter
from specbranch.text.line_files import json_value, numbered_lines

NEAR = 1e-4  # logits
EXPECTED = "expected what `specbranch generate --json` prints"
# how an answer was made, saved with it
NOTED = ("target", "context_length", "dtype", "weights", "cache_dtype", "runner")

Sameness = Literal["identical", "near-tie", "different"]


@dataclass(frozen=True, slots=True)
class Saved:
    """An answer as it was saved, and how it was made; nothing where that was not noted."""

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    params: SamplingParams
    seed: int
    sample: int = 0
    target: str | None = None
    context_length: int | None = None
    dtype: str | None = None
    weights: str | None = None
    cache_dtype: str | None = None
    runner: str | None = None

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Read what `specbranch generate --json` prints, or say what is wrong with it."""
        _check(values)
        params = _params(values["params"])
        if values.get("rule") == "ratio" and params.temperature > 0:
            raise BadParameter(
                "The answer was sampled under the ratio rule, which promises the distribution, not the tokens; "
                "nothing to compare."
            )
        noted = {name: values.get(name) for name in NOTED}
        return cls(
            tuple(values["prompt_token_ids"]),
            tuple(values["token_ids"]),
            params,
            values["seed"],
            values.get("sample") or 0,
            **noted,
        )


@dataclass(frozen=True, slots=True)
class Departure:
    """Where a saved answer first differs from plain decoding."""

    position: int  # in the answer
    saved: int | None  # None: the saved answer ends here
    plain: int | None
    margin: float | None  # logits by which the target prefers its own token; None where one of the two is no choice


@dataclass(frozen=True, slots=True)
class Recheck:
    """The outcome for one answer."""

    tokens: int
    departure: Departure | None = None

    @property
    def finding(self) -> Sameness:
        """Whether the answer is what plain decoding gives."""
        if self.departure is None:
            return "identical"
        margin = self.departure.margin
        return "near-tie" if margin is not None and abs(margin) < NEAR else "different"


def read_answers(text: str, name: str) -> list[Saved]:
    """Return all answers of a file with that name, each checked."""
    answers = []
    for number, values in enumerate(_objects(text, name)):
        with naming(name, number):
            answers.append(Saved.from_dict(values))
    if not answers:
        raise BadParameter(f"{name} holds no answer; {EXPECTED}.")
    return answers


@contextmanager
def naming(name: str, number: int) -> Iterator[None]:
    """Say in an error which answer of which file it is about."""
    try:
        yield
    except BadParameter as error:
        raise BadParameter(f"{name}, answer {number}: {error}") from error


def common_settings(answers: Sequence[Saved], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return how all the answers were made, as one model is loaded for them; what was given for it wins."""
    settings = {name: _agreed(name, answers) if given[name] is None else given[name] for name in NOTED}
    if settings["weights"] == settings["dtype"]:
        settings["weights"] = None  # stored as it is computed in, also where that is float16, which no --weights names
    return settings


def recheck(plain: LLM, saved: Saved) -> Recheck:
    """Decode the saved answer's prompt again, autoregressively with its own noise, and compare."""
    if max(saved.prompt, default=0) >= plain.vocabulary:
        raise BadParameter(
            f"The saved prompt has token {max(saved.prompt)}, but the target knows {plain.vocabulary}. Name its own "
            "--target."
        )
    tokens, again = saved.tokens, plain.repeat(saved.prompt, saved.params, saved.seed, saved.sample).token_ids
    if tokens == again:
        return Recheck(len(tokens))
    at = next((i for i, (a, b) in enumerate(zip(tokens, again, strict=False)) if a != b), min(len(tokens), len(again)))
    ours = again[at] if at < len(again) else None
    theirs = tokens[at] if at < len(tokens) else None
    return Recheck(len(tokens), Departure(at, theirs, ours, _margin(plain, saved, at, ours, theirs)))


def _objects(text: str, name: str) -> Iterator[dict[str, Any]]:
    """Yield each answer, and the further samples it holds, which were made in the same way."""
    for where, line in numbered_lines(text, name):
        answer = json_value(line, where, f"{EXPECTED}.")
        if not isinstance(answer, dict):
            raise BadParameter(f"{where} is no JSON object; {EXPECTED}.")
        others = answer.get("alternatives") or []
        if not isinstance(others, list) or not all(isinstance(other, dict) for other in others):
            raise BadParameter(f"{where} has alternatives that are no answers; {EXPECTED}.")
        noted = {setting: answer[setting] for setting in NOTED if setting in answer}
        yield answer
        yield from ({**noted, **other} for other in others)


def _agreed(name: str, answers: Sequence[Saved]) -> Any:
    found = {getattr(answer, name) for answer in answers}
    if len(found) > 1:
        values, option = ", ".join(sorted(map(str, found))), name.replace("_", "-")
        raise BadParameter(
            f"The answers were made with different values of {name} ({values}); verify them apart, or give --{option}."
        )
    return found.pop()


def _margin(plain: LLM, saved: Saved, at: int, ours: int | None, theirs: int | None) -> float | None:
    if ours is None or theirs is None or theirs >= plain.vocabulary:
        return None
    request = Request(saved.params, saved.seed, len(saved.prompt), saved.sample, "match", plain.tokenizer.eos_ids)
    margin = plain.margin([*saved.prompt, *saved.tokens[:at]], request, ours, theirs)
    return margin if math.isfinite(margin) else None


def _is_count(value: object, least: int = 0) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value < 2**63


def _are_ids(value: object) -> bool:
    return isinstance(value, list) and all(_is_count(token) for token in value)


def _is_text(value: object) -> bool:
    return isinstance(value, str) and value != ""


Check = tuple[Callable[[object], bool], str]  # whether a value will do, and what was expected
_NEEDED: dict[str, Check] = {
    "prompt_token_ids": (_are_ids, "a list of token ids"),
    "token_ids": (_are_ids, "a list of token ids"),
    "params": (lambda value: isinstance(value, Mapping), "an object of sampling parameters"),
    "seed": (lambda value: isinstance(value, int) and not isinstance(value, bool), "a whole number"),
}
_OPTIONAL: dict[str, Check] = {
    "sample": (_is_count, "a whole number ≥ 0"),
    "rule": (lambda value: value in get_args(Rule), " or ".join(get_args(Rule))),
    "target": (_is_text, "the name of a model"),
    "context_length": (lambda value: _is_count(value, 2), "a whole number ≥ 2"),
    "dtype": (_is_text, "a name"),
    "weights": (_is_text, "a name"),
    "cache_dtype": (_is_text, "a name"),
    "runner": (_is_text, "a name"),
}


def _check(values: Mapping[str, Any]) -> None:
    missing = [name for name in _NEEDED if name not in values]
    if missing:
        raise BadParameter(f"The saved answer has no {', '.join(missing)}; {EXPECTED}.")
    noted = {name: check for name, check in _OPTIONAL.items() if values.get(name) is not None}
    for name, (fits, expected) in {**_NEEDED, **noted}.items():
        if not fits(values[name]):
            raise BadParameter(f"{name} is {_short(values[name])}; expected {expected}.")


def _params(values: Mapping[str, Any]) -> SamplingParams:
    """Read the sampling parameters; JSON made texts of the ids in logit_bias."""
    bias = values.get("logit_bias", {})
    if not isinstance(bias, Mapping):
        raise BadParameter(f"logit_bias is {_short(bias)}; expected an object of token ids with numbers.")
    try:
        numbers = {int(token): added for token, added in bias.items()}
    except ValueError:
        raise BadParameter(f"logit_bias is {_short(bias)}; expected token ids with numbers.") from None
    return SamplingParams.from_dict({**values, "logit_bias": numbers})


def _short(value: object) -> str:
    shown = repr(value)
    return shown if len(shown) <= 60 else f"{shown[:57]}…"
