"""A saved answer compared with plain decoding: token by token, then everything else that can be recomputed.

Owns the comparison. Invariant: an answer passes only if autoregressive decoding gives all its tokens. One near-tie is
allowed, because another order of float32 sums can turn it. After a near-tie, decoding continues from the saved token.
The transformers runner on a GPU in bfloat16 may turn more.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from specbranch.config import SamplingParams
from specbranch.core.orders import TokenLogprobs
from specbranch.core.request import Request
from specbranch.engine import LLM, Output
from specbranch.errors import BadParameter
from specbranch.lab.recheck.repeat import margin, repeat
from specbranch.lab.recheck.saved import Saved, short

NEAR_LOGITS = 1e-4  # logits, and log-probabilities
SPARE_TOKENS = 8  # more of the likeliest tokens than were saved: near-ties may change their order
SHOWN_CHARACTERS = 20  # characters of a text before the first that differs

Sameness = Literal["identical", "near-tie", "different"]


@dataclass(frozen=True, slots=True)
class Departure:
    """A position at which a saved answer differs from plain decoding after the same tokens."""

    position: int  # in the answer
    saved: int | None  # None: the saved answer ends here
    plain: int | None
    margin: float | None  # logits by which the target prefers its own token; None where one of the two is no choice

    @property
    def is_near(self) -> bool:
        """True if rounding may decide between the two tokens."""
        return self.margin is not None and abs(self.margin) < NEAR_LOGITS


@dataclass(frozen=True, slots=True)
class Mismatch:
    """A saved field that differs from the recomputed one."""

    field: str
    saved: str
    plain: str


@dataclass(frozen=True, slots=True)
class Recheck:
    """The outcome for one answer."""

    tokens: int
    departures: tuple[Departure, ...] = ()  # two at most: a second one decides
    mismatches: tuple[Mismatch, ...] = ()
    not_checked: tuple[str, ...] = ()
    claimed_context: int | None = None  # the saved answer ends where this context would, which only its file says

    @property
    def finding(self) -> Sameness:
        """True if the answer equals that of plain decoding."""
        if self.mismatches or len(self.departures) > 1 or not all(one.is_near for one in self.departures):
            return "different"
        return "near-tie" if self.departures else "identical"


def recheck(plain: LLM, saved: Saved) -> Recheck:
    """Decode the saved answer's prompt again, autoregressively with its own seed, and compare."""
    _refuse_misfit(plain, saved)
    again, departures = _decoded_along(plain, saved)
    same, prompt = again.token_ids == saved.tokens, _prompt(plain, saved)
    dated = bool(prompt) and plain.tokenizer.dates_chats  # it may have been written on another day
    unsure = [name for name in saved.recomputed if (dated if name == "prompt" else not same)]
    found = [*_stated(saved), *(() if dated else prompt), *(_contents(saved, again) if same else ())]
    cut = saved.context_length if _ends_at_claimed_context(saved, departures) else None
    return Recheck(len(saved.tokens), departures, tuple(found), (*unsure, *saved.not_checked), cut)


def _refuse_misfit(plain: LLM, saved: Saved) -> None:
    if max(saved.prompt, default=0) >= plain.vocabulary:
        raise BadParameter(
            f"The saved prompt has token {max(saved.prompt)}, but the target knows {plain.vocabulary}. Name its own "
            "--target."
        )
    length = len(saved.prompt) + len(saved.tokens)
    if length > plain.context_length:
        raise BadParameter(
            f"Prompt and answer have {length} tokens, but the context holds {plain.context_length}. Give "
            "--context-length if the answer was made with a longer one."
        )


def _decoded_along(plain: LLM, saved: Saved) -> tuple[Output, tuple[Departure, ...]]:
    """Decode again until the end or a decisive departure; after a near-tie, continue from the saved token."""
    departures: list[Departure] = []
    given: tuple[int, ...] = ()
    while True:
        # one token more than was saved shows whether the text ends there
        most = len(saved.tokens) + 1
        again = repeat(plain, saved.prompt, _asked(plain, saved), saved.seed, saved.sample, given, most)
        departure = _first_departure(plain, saved, again.token_ids)
        if departure is None:
            return again, tuple(departures)
        departures.append(departure)
        if not departure.is_near or len(departures) > 1:
            return again, tuple(departures)
        given = saved.tokens[: departure.position + 1]


def _asked(plain: LLM, saved: Saved) -> SamplingParams:
    """Return the saved parameters, with as many log-probabilities as the comparison needs."""
    top = None if saved.logprobs is None else min((saved.params.logprobs or 0) + SPARE_TOKENS, plain.vocabulary)
    return replace(saved.params, logprobs=top)


def _first_departure(plain: LLM, saved: Saved, again: tuple[int, ...]) -> Departure | None:
    tokens = saved.tokens
    if tokens == again:
        return None
    at = next((i for i, (a, b) in enumerate(zip(tokens, again, strict=False)) if a != b), min(len(tokens), len(again)))
    ours = again[at] if at < len(again) else None
    theirs = tokens[at] if at < len(tokens) else None
    return Departure(at, theirs, ours, _margin(plain, saved, at, ours, theirs))


def _margin(plain: LLM, saved: Saved, at: int, ours: int | None, theirs: int | None) -> float | None:
    if ours is None or theirs is None or theirs >= plain.vocabulary:
        return None
    request = Request(saved.params, saved.seed, len(saved.prompt), saved.sample, "match", plain.tokenizer.eos_ids)
    found = margin(plain, [*saved.prompt, *saved.tokens[:at]], request, ours, theirs)
    return found if math.isfinite(found) else None


def _ends_at_claimed_context(saved: Saved, departures: tuple[Departure, ...]) -> bool:
    ends_early = bool(departures) and departures[-1].saved is None
    return ends_early and saved.context_length == len(saved.prompt) + len(saved.tokens)


def _stated(saved: Saved) -> Iterator[Mismatch]:
    """Compare fields that state the same thing twice."""
    if saved.params.seed not in (None, saved.seed):
        yield Mismatch("seed", str(saved.seed), f"{saved.params.seed} in params")
    if saved.sample >= saved.params.n:
        yield Mismatch("sample", str(saved.sample), f"below n, which is {saved.params.n}")
    if saved.counted not in (None, len(saved.tokens)):
        yield Mismatch("stats.tokens", str(saved.counted), str(len(saved.tokens)))


def _prompt(plain: LLM, saved: Saved) -> list[Mismatch]:
    """Compare the prompt's text with its tokens, as plain text or as a user message."""
    text, tokenizer = saved.prompt_text, plain.tokenizer
    if text is None or tuple(tokenizer.encode(text)) == saved.prompt:
        return []
    try:
        as_message = tuple(tokenizer.chat([{"role": "user", "content": text}]))
    except BadParameter:  # the template refuses it
        as_message = ()
    if as_message == saved.prompt:
        return []
    return [Mismatch("prompt", short(text), short(tokenizer.decode(saved.prompt, skip_special=False)))]


def _contents(saved: Saved, again: Output) -> Iterator[Mismatch]:
    """Compare the fields that follow from the tokens."""
    if saved.text is not None and saved.text != again.text:
        yield Mismatch("text", *_excerpts(saved.text, again.text))
    if saved.finish_reason not in (None, again.finish_reason):
        yield Mismatch("finish_reason", short(saved.finish_reason), short(again.finish_reason))
    if saved.logprobs is not None:
        yield from _logprobs(saved.logprobs, again.logprobs or (), saved.params.logprobs or 0)


def _excerpts(saved: str, plain: str) -> tuple[str, str]:
    """Return two texts from shortly before their first difference."""
    same = next((i for i, (a, b) in enumerate(zip(saved, plain, strict=False)) if a != b), min(len(saved), len(plain)))
    start = max(same - SHOWN_CHARACTERS, 0)
    return short(saved[start:]), short(plain[start:])


def _logprobs(saved: tuple[TokenLogprobs, ...], plain: tuple[TokenLogprobs, ...], count: int) -> Iterator[Mismatch]:
    if len(saved) != len(plain):
        yield Mismatch("logprobs", f"{len(saved)} entries", f"{len(plain)} entries")
        return
    pairs = zip(saved, plain, strict=True)
    at = next((i for i, (one, other) in enumerate(pairs) if not _agree(one, other, count)), None)
    if at is not None:
        shown = replace(plain[at], top=plain[at].top[:count])
        yield Mismatch(f"logprobs[{at}]", *(f"{one.logprob:.4f}, {list(one.top)}" for one in (saved[at], shown)))


def _agree(saved: TokenLogprobs, plain: TokenLogprobs, count: int) -> bool:
    """True if log-probabilities are equal up to rounding, which may change the order of near-ties."""
    known = dict(plain.top)
    ranks = zip(saved.top, plain.top, strict=False)
    return (
        _close(saved.logprob, plain.logprob)
        and len(saved.top) == len({token for token, _ in saved.top}) == min(count, len(plain.top))
        and all(_close(value, other) for (_, value), (_, other) in ranks)
        and all(token in known and _close(value, known[token]) for token, value in saved.top)
    )


def _close(one: float, other: float) -> bool:
    return one == other or abs(one - other) < NEAR_LOGITS
