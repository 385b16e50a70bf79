"""Options that several commands share, and how they become parameters.

Owns names and help of the shared options; a value that was not given is not passed on, so that defaults live in `config` alone.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from specbranch.cli.sections import F, options_of
from specbranch.config import SamplingParams, SpeculativeConfig
from specbranch.core.methods import METHODS, find_method
from specbranch.errors import BadParameter

if TYPE_CHECKING:
    from specbranch.engine import LLM

METHOD_TABLE = {"Methods": [(name, method.summary) for name, method in METHODS.items()]}


def text(value: str) -> str:
    """Refuse what the shell passed if it is not valid UTF-8, before a model is loaded."""
    from specbranch.text.tokenizer import check_text

    try:
        check_text(value)
    except BadParameter as error:
        raise click.BadParameter(str(error)) from None
    return value


def bias(value: str) -> tuple[int, float]:
    """Take a token id and what is added to its logit apart."""
    token, _, added = value.partition(":")
    try:
        return int(token), float(added)
    except ValueError:
        raise click.BadParameter(f"{value!r}; expected a token id and a number, such as 42:-1.5.") from None


_model, _draft, _speculation, _sampling = (options_of(title) for title in ("Target", "Draft", "Speculation", "Sampling"))

TARGET = (
    _model("--target", metavar="MODEL", help="Target model: a folder, a .gguf file, a Hub id, or a known name [smollm2-135m]."),
    _model("--device", metavar="DEVICE", help="cpu, cuda, cuda:1 … [a GPU if there is one]"),
    _model("--dtype", metavar="TYPE", help="float32, bfloat16, float16 or float64 [float32 on a CPU, else bfloat16]."),
    _model("--runner", metavar="RUNNER", help="native, transformers, or auto: native where the architecture allows [auto]."),
    _model("--context-length", type=int, metavar="N", help="Tokens that prompt and answer may have together."),
)
DRAFT = (
    _draft("--draft", metavar="MODEL", help="Draft model, with the target's vocabulary; needed by the methods that draft."),
    _draft("--draft-device", metavar="DEVICE", help="Device of the draft [the target's]."),
)
SPECULATION = (
    _speculation("--method", metavar="METHOD", help="Decoding method, see below [specbranch with a draft, else lookup]."),
    _speculation(
        "--rule", metavar="RULE", help="match: exactly what plain decoding gives with this seed; ratio: the same distribution [match]."
    ),
    _speculation("--num-speculative-tokens", type=int, metavar="N", help="Longest draft of a round [5]."),
    _speculation("--executor", metavar="NAME", help="serial, or process: the draft in a process of its own, beside the target [serial]."),
    _speculation("--speculative-config", metavar="JSON", help='Further settings, e.g. \'{"max_branches": 6, "stop_below": 0.4}\'.'),
)
SAMPLING = (
    _sampling("--temperature", type=float, metavar="T", help="0 is greedy [0]."),
    _sampling("--top-k", type=int, metavar="K", help="Sample among the K likeliest tokens."),
    _sampling("--top-p", type=float, metavar="P", help="Sample among the likeliest tokens that make up P."),
    _sampling("--min-p", type=float, metavar="P", help="Leave out tokens below P times the likeliest."),
    _sampling("--repetition-penalty", type=float, metavar="X", help="Above 1 discourages tokens already in the text."),
    _sampling("--presence-penalty", type=float, metavar="X", help="Subtracted once for a token already in the answer."),
    _sampling("--frequency-penalty", type=float, metavar="X", help="Subtracted for each time a token is already in the answer."),
    _sampling("--logit-bias", type=bias, multiple=True, metavar="ID:BIAS", help="Added to a token's logit; may be repeated."),
    _sampling("--seed", type=int, metavar="N", help="The same seed gives the same answer, with every method [random]."),
    _sampling("--max-tokens", type=int, metavar="N", help="Longest answer [256]."),
    _sampling("--min-tokens", type=int, metavar="N", help="Shortest answer [0]."),
    _sampling("--stop", type=text, multiple=True, metavar="TEXT", help="End the answer before this text; may be repeated."),
    _sampling(
        "--stop-token-id", "stop_token_ids", type=int, multiple=True, metavar="ID", help="End the answer at this token; may be repeated."
    ),
    _sampling("--ignore-eos", is_flag=True, help="Do not end at the end-of-text token."),
    _sampling("--logprobs", type=int, metavar="K", help="Log-probabilities of each token and the K likeliest (with --json)."),
)


def with_options(*groups: tuple[Callable[[F], F], ...]) -> Callable[[F], F]:
    """Decorate a command with groups of shared options, in their order."""

    def decorate(function: F) -> F:
        for option in reversed([option for group in groups for option in group]):
            function = option(function)
        return function

    return decorate


def sampling_params(given: dict[str, Any]) -> SamplingParams:
    """Build the sampling parameters from what was given on the command line."""
    names = SamplingParams.__dataclass_fields__
    values = {name: value for name, value in given.items() if name in names and value not in (None, ())}
    if "logit_bias" in values:
        values["logit_bias"] = dict(values["logit_bias"])
    return SamplingParams.from_dict(values)


def speculative_config(given: dict[str, Any]) -> dict[str, Any]:
    """Collect the speculative settings: the JSON, then the options of their own, which win."""
    values = _parsed(given.get("speculative_config"))
    values |= {k: given[k] for k in ("method", "rule", "num_speculative_tokens") if given.get(k) is not None}
    SpeculativeConfig.from_dict(values)  # refuse mistakes before a model is loaded
    return values


def load_llm(given: dict[str, Any]) -> LLM:
    """Load the models that were asked for, with a progress bar where a fetch is needed."""
    from specbranch.assembly import DEFAULT_TARGET
    from specbranch.cli.progress import pulled

    config = speculative_config(given)
    names = ("target", "draft", "device", "draft_device", "dtype", "runner", "context_length", "executor")
    chosen = _without_idle_draft({name: given[name] for name in names if given.get(name) is not None}, config.get("method"))
    for name in (chosen.get("target", DEFAULT_TARGET), chosen.get("draft")):
        if name is not None:
            pulled(name)
    from specbranch.engine import LLM

    return LLM(**chosen, speculative=config)


def _without_idle_draft(chosen: dict[str, Any], method: str | None) -> dict[str, Any]:
    """Refuse a method without the draft it needs; leave out, aloud, a draft that it does not."""
    if method is None or find_method(method, "draft" in chosen).needs_draft:
        return chosen
    if "draft" in chosen:
        click.echo(f"The draft model {chosen['draft']} is not used: method {method!r} drafts without one.", err=True)
    return {name: value for name, value in chosen.items() if name not in ("draft", "draft_device")}


def _parsed(text: str | None) -> dict[str, Any]:
    try:
        values = json.loads(text or "{}")
    except ValueError as error:
        raise BadParameter(f"--speculative-config is no JSON ({error}); expected an object such as '{{\"max_branches\": 6}}'.") from None
    if not isinstance(values, dict):
        raise BadParameter(f"--speculative-config is {text}; expected a JSON object.")
    return values
