"""Checking a saved answer against plain decoding: token for token, and where they part, how close the choice was.

Owns the comparison. Invariant: an answer passes only if it equals autoregressive decoding, or first departs from it at a near-tie, which
another order of float32 sums can turn either way.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from specbranch.config import SamplingParams
from specbranch.core.request import Request
from specbranch.engine import LLM
from specbranch.errors import BadParameter

NEAR = 1e-4  # logits

Verdict = Literal["identical", "near-tie", "different"]


@dataclass(frozen=True, slots=True)
class Departure:
    """Where a saved answer first differs from plain decoding."""

    position: int  # in the answer
    saved: int | None  # None: the saved answer ends here
    plain: int | None
    margin: float  # logits by which the target prefers its own token


@dataclass(frozen=True, slots=True)
class Recheck:
    """The outcome for one answer."""

    tokens: int
    departure: Departure | None = None

    @property
    def verdict(self) -> Verdict:
        """Whether the answer is what plain decoding gives."""
        if self.departure is None:
            return "identical"
        return "near-tie" if abs(self.departure.margin) < NEAR else "different"


def recheck(plain: LLM, saved: Mapping[str, Any]) -> Recheck:
    """Decode the saved answer's prompt again, autoregressively with its own noise, and compare."""
    prompt, tokens, params, seed, sample = _read(saved)
    again = list(plain.repeat(prompt, params, seed, sample).token_ids)
    at = next((i for i, (a, b) in enumerate(zip(tokens, again, strict=False)) if a != b), min(len(tokens), len(again)))
    if tokens == again:
        return Recheck(len(tokens))
    ours = again[at] if at < len(again) else None
    theirs = tokens[at] if at < len(tokens) else None
    request = Request(params, seed, len(prompt), sample, "match", plain.tokenizer.eos_ids)
    margin = float("inf")
    if ours is not None and theirs is not None and theirs < plain.vocabulary:
        margin = plain.margin([*prompt, *tokens[:at]], request, ours, theirs)
    return Recheck(len(tokens), Departure(at, theirs, ours, margin))


def _read(saved: Mapping[str, Any]) -> tuple[list[int], list[int], SamplingParams, int, int]:
    missing = [key for key in ("prompt_token_ids", "token_ids", "params", "seed") if key not in saved]
    if missing:
        raise BadParameter(f"The saved answer has no {', '.join(missing)}; expected what `specbranch generate --json` prints.")
    params = dict(saved["params"])
    if saved.get("rule") == "ratio" and params.get("temperature", 0) > 0:
        raise BadParameter(
            "The answer was sampled under the ratio rule, which promises the distribution, not the tokens; nothing to compare."
        )
    params["logit_bias"] = {int(token): bias for token, bias in params.get("logit_bias", {}).items()}
    return (
        list(saved["prompt_token_ids"]),
        list(saved["token_ids"]),
        SamplingParams.from_dict(params),
        saved["seed"],
        saved.get("sample", 0),
    )
