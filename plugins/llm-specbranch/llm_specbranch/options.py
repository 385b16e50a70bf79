"""What `-o NAME VALUE` may set: the models of a request, how they decode, how tokens are sampled.

Owns names and types. Ranges are checked by SpecBranch, so that they are the same everywhere. Invariant: requests with
equal `ModelChoice` share loaded models.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import llm
from pydantic import Field

MAX_TOKENS = 1024  # of an answer, unless the request says otherwise
SAMPLED = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed", "stop", "regex", "grammar")


class SpecBranchOptions(llm.Options):
    """The options of a request."""

    pair: str | None = Field(
        default=None, description="A pair by name: a target with its draft. Default: smollm2-default."
    )
    target: str | None = Field(
        default=None, description="The large model: a folder, a GGUF file, a Hub id or a known name."
    )
    draft: str | None = Field(default=None, description="The small model, or tcp://HOST:PORT of a draft worker.")
    device: str | None = Field(default=None, description="cpu, cuda or cuda:N. Default: a GPU if there is one.")
    context_length: int | None = Field(
        default=None, description="Most tokens of a conversation and its answer together."
    )
    method: str | None = Field(
        default=None, description="The decoding method, such as specbranch, auto or autoregressive."
    )
    prediction: str | None = Field(
        default=None, description="The text that the answer is expected to have, such as a draft."
    )
    temperature: float | None = Field(default=None, description="0, the default, decodes greedily.")
    top_p: float | None = Field(
        default=None, description="Sample among the likeliest tokens that add up to this probability."
    )
    top_k: int | None = Field(default=None, description="Sample among the k likeliest tokens.")
    min_p: float | None = Field(
        default=None, description="Drop tokens less likely than this share of the likeliest one."
    )
    repetition_penalty: float | None = Field(
        default=None, description="Above 1, tokens that occurred become less likely."
    )
    seed: int | None = Field(default=None, description="The same seed gives the same answer, with every method.")
    max_tokens: int | None = Field(default=None, description=f"The longest answer, in tokens. Default: {MAX_TOKENS}.")
    stop: str | None = Field(default=None, description="The answer ends before this text.")
    regex: str | None = Field(default=None, description="The answer matches this regular expression as a whole.")
    grammar: str | None = Field(
        default=None, description="The answer follows this grammar, in Lark's or llama.cpp's syntax."
    )


@dataclass(frozen=True, slots=True)
class ModelChoice:
    """Which models are loaded, and how; None: SpecBranch's default."""

    pair: str | None = None
    target: str | None = None
    draft: str | None = None
    device: str | None = None
    context_length: int | None = None

    @classmethod
    def of(cls, options: SpecBranchOptions, defaults: SpecBranchOptions) -> ModelChoice:
        """Take the models that a request names; if it names none, those of the model's defaults."""
        named = options if options.pair or options.target or options.draft else defaults
        return cls(
            named.pair,
            named.target,
            named.draft,
            options.device or defaults.device,
            options.context_length or defaults.context_length,
        )


def sampling_values(options: SpecBranchOptions, schema: dict[str, Any] | None) -> dict[str, Any]:
    """Return `SamplingParams` as a mapping: what the request sets, with its schema."""
    given = {name: value for name in SAMPLED if (value := getattr(options, name)) is not None}
    length = MAX_TOKENS if options.max_tokens is None else options.max_tokens
    return {**given, "max_tokens": length, **({} if schema is None else {"json_schema": schema})}
