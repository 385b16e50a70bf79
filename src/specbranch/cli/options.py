"""Options that several commands share, and how they become parameters.

Owns names and help of the shared options; a value that was not given is not passed on, so that defaults live in `config` alone.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click

from specbranch.config import SamplingParams, SpeculativeConfig
from specbranch.core.methods import METHODS
from specbranch.errors import BadParameter

if TYPE_CHECKING:
    from specbranch.engine import LLM

F = TypeVar("F", bound=Callable[..., Any])

_METHOD_HELP = "Decoding method: " + "; ".join(f"{name} ({method.summary})" for name, method in METHODS.items()) + "."

MODEL = (
    click.option("--target", metavar="MODEL", help="Target model: a folder, a .gguf file, a Hub id, or a known name [smollm2-135m]."),
    click.option("--draft", metavar="MODEL", help="Draft model, with the target's vocabulary; needed by the methods that draft."),
    click.option("--device", metavar="DEVICE", help="cpu, cuda, cuda:1 … [a GPU if there is one]"),
    click.option("--draft-device", metavar="DEVICE", help="Device of the draft [the target's]."),
    click.option("--dtype", metavar="TYPE", help="float32, bfloat16, float16 or float64 [float32 on a CPU, else bfloat16]."),
    click.option("--runner", metavar="RUNNER", help="native, transformers, or auto: native where the architecture allows [auto]."),
    click.option("--context-length", type=int, metavar="N", help="Tokens that prompt and answer may have together."),
)
SPECULATION = (
    click.option("--method", metavar="METHOD", help=_METHOD_HELP + " [specbranch with a draft, else lookup]"),
    click.option(
        "--rule", metavar="RULE", help="match: exactly what plain decoding gives with this seed; ratio: the same distribution [match]."
    ),
    click.option("--num-speculative-tokens", type=int, metavar="N", help="Longest draft of a round [5]."),
    click.option("--executor", metavar="NAME", help="serial, or process: the draft in a process of its own, beside the target [serial]."),
    click.option("--speculative-config", metavar="JSON", help='Further settings, e.g. \'{"max_branches": 6, "stop_below": 0.4}\'.'),
)
SAMPLING = (
    click.option("--temperature", type=float, metavar="T", help="0 is greedy [0]."),
    click.option("--top-k", type=int, metavar="K", help="Sample among the K likeliest tokens."),
    click.option("--top-p", type=float, metavar="P", help="Sample among the likeliest tokens that make up P."),
    click.option("--min-p", type=float, metavar="P", help="Leave out tokens below P times the likeliest."),
    click.option("--repetition-penalty", type=float, metavar="X", help="Above 1 discourages tokens already in the text."),
    click.option("--presence-penalty", type=float, metavar="X", help="Subtracted once for a token already in the answer."),
    click.option("--frequency-penalty", type=float, metavar="X", help="Subtracted for each time a token is already in the answer."),
    click.option("--seed", type=int, help="The same seed gives the same answer, with every method [random]."),
    click.option("--max-tokens", type=int, metavar="N", help="Longest answer [256]."),
    click.option("--min-tokens", type=int, metavar="N", help="Shortest answer [0]."),
    click.option("--stop", multiple=True, metavar="TEXT", help="End the answer before this text; may be repeated."),
    click.option("--ignore-eos", is_flag=True, help="Do not end at the end-of-text token."),
    click.option("--logprobs", type=int, metavar="K", help="Log-probabilities of each token and the K likeliest (with --json)."),
)


def with_options(*groups: tuple[Callable[[F], F], ...]) -> Callable[[F], F]:
    """Decorate a command with groups of shared options, in their order."""

    def decorate(function: F) -> F:
        for option in reversed([option for group in groups for option in group]):
            function = option(function)
        return function

    return decorate


def sampling_params(given: dict[str, Any], **more: Any) -> SamplingParams:
    """Build the sampling parameters from what was given on the command line."""
    names = SamplingParams.__dataclass_fields__
    return SamplingParams.from_dict({k: v for k, v in {**given, **more}.items() if k in names and v not in (None, ())})


def speculative_config(given: dict[str, Any]) -> dict[str, Any]:
    """Collect the speculative settings: the JSON, then the options of their own, which win."""
    values = _parsed(given.get("speculative_config"))
    values |= {k: given[k] for k in ("method", "rule", "num_speculative_tokens") if given.get(k) is not None}
    SpeculativeConfig.from_dict(values)  # refuse mistakes before a model is loaded
    return values


def load_llm(given: dict[str, Any]) -> LLM:
    """Load the models that were asked for, with a progress bar where a fetch is needed."""
    from specbranch.cli.progress import pulled
    from specbranch.core.methods import find_method

    config = speculative_config(given)
    if "method" in config:
        find_method(config["method"], given.get("draft") is not None)
    names = ("target", "draft", "device", "draft_device", "dtype", "runner", "context_length", "executor")
    chosen = {name: given[name] for name in names if given.get(name) is not None}
    for role in ("target", "draft"):
        if role in chosen or role == "target":
            pulled(chosen.get(role))
    from specbranch.engine import LLM

    return LLM(**chosen, speculative=config)


def _parsed(text: str | None) -> dict[str, Any]:
    try:
        values = json.loads(text or "{}")
    except ValueError as error:
        raise BadParameter(f"--speculative-config is no JSON ({error}); expected an object such as '{{\"max_branches\": 6}}'.") from None
    if not isinstance(values, dict):
        raise BadParameter(f"--speculative-config is {text}; expected a JSON object.")
    return values
