"""Options that several commands share, and how they become parameters.

Owns names and help of the shared options; a value that was not given is not passed on, so that defaults live in
`config` alone.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from specbranch.cli.sections import PATH, F, options_of
from specbranch.config import TUNED_FOR, LoadOptions, SamplingParams, SpeculativeConfig, read_settings
from specbranch.core.methods import METHODS, find_method
from specbranch.core.policies import POLICIES
from specbranch.errors import BadParameter
from specbranch.pairs import DEFAULT_PAIR, PAIRS, chosen_models, draft_path

if TYPE_CHECKING:
    from specbranch.engine import LLM

TABLES = {
    "Pairs": [(name, pair.about) for name, pair in PAIRS.items()],
    "Methods": [(name, method.summary) for name, method in METHODS.items()],
}


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


_pair, _model, _draft, _speculation, _sampling, _writing = (
    options_of(title) for title in ("Pair", "Target", "Draft", "Speculation", "Sampling", "Writing")
)

PAIR = (
    _pair(
        "--pair", metavar="NAME", help=f"Target and draft by one name; `specbranch models` lists them [{DEFAULT_PAIR}]."
    ),
)
TARGET = (
    _model(
        "--target",
        metavar="MODEL",
        help="Target model, instead of a pair's: a folder, a .gguf file, a Hub id, or a known name.",
    ),
    _model("--device", metavar="DEVICE", help="cpu, cuda, cuda:1 … [a GPU if there is one]"),
    _model(
        "--dtype",
        metavar="TYPE",
        help="Computes in float32, bfloat16, float16 or float64 [float32 on a CPU, else bfloat16].",
    ),
    _model(
        "--weights",
        metavar="TYPE",
        help="How the target's matrices are stored: float32, bfloat16, int8, int4, or stored: as in its file, a "
        "quantised GGUF, multiplied by whole numbers. The last three have a text of their own [stored for such a file "
        "on a CPU unless --dtype is given, else as --dtype].",
    ),
    _model(
        "--runner", metavar="RUNNER", help="native, transformers, or auto: native where the architecture allows [auto]."
    ),
    _model("--context-length", type=int, metavar="N", help="Tokens that prompt and answer may have together."),
    _model(
        "--cache-tokens",
        type=int,
        metavar="N",
        help="Places in a model's cache for all requests together [what there is room for].",
    ),
    _model(
        "--cache-dtype",
        metavar="TYPE",
        help="What keys and values are stored in, on a CPU: float32, bfloat16 (half the memory) or int8 (about a "
        "quarter). The last two have a text of their own [as --dtype].",
    ),
)
DRAFT = (
    _draft(
        "--draft",
        metavar="MODEL",
        help="Draft model, with the target's vocabulary, or the name of a pair for its draft.",
    ),
    _draft("--draft-device", metavar="DEVICE", help="Device of the draft [the target's]."),
    _draft(
        "--draft-weights",
        metavar="TYPE",
        help="How the draft's matrices are stored, see --weights; this changes speed alone [stored (a GPU: int8) if "
        "its file is in int8, else as --dtype].",
    ),
)
SPECULATION = (
    # of the target, but for commands that load an LLM: those that measure a model have it on one device
    _model(
        "--device-map",
        metavar="MAP",
        help="auto: the target over all GPUs of this machine, layer by layer, by the transformers runner: for one that "
        "does not fit into one [on one device].",
    ),
    _model(
        "--no-prefix-cache",
        "prefix_cache",
        is_flag=True,
        flag_value=False,
        default=None,
        help="Read every prompt whole; else what was read of earlier ones that begin alike is kept, in either model's "
        "cache, and not read again.",
    ),
    _speculation(
        "--method", metavar="METHOD", help="Decoding method, see below [specbranch with a draft, auto without one]."
    ),
    _speculation(
        "--rule",
        metavar="RULE",
        help="match: what plain decoding gives with this seed, token for token (docs/lossless.md: when on GPUs); "
        "ratio: the same distribution [match].",
    ),
    _speculation("--num-speculative-tokens", type=int, metavar="N", help="Longest draft of a round [5]."),
    _speculation(
        "--policy",
        metavar="POLICY",
        help="How lengths and branches are chosen: planner (the default of specbranch), paper (as published, with "
        "H-RAD), confidence, entropy, last or fixed [the method's own].",
    ),
    _speculation(
        "--without",
        metavar="PART,…",
        help=f"Parts of the policy to leave out; of planner: {', '.join(POLICIES['planner'].parts)}; of paper: "
        f"{', '.join(POLICIES['paper'].parts)} [none].",
    ),
    _speculation(
        "--predictor",
        metavar="DIR",
        help="H-RAD for policy paper, as `specbranch train-predictor` writes it [the pair's own, if it has a name].",
    ),
    _speculation(
        "--executor",
        metavar="NAME",
        help="serial; process: the draft in a process of its own, beside the target; streams: both here, side by "
        "side, with a target on a GPU and the draft on the same, another, or the CPU [serial].",
    ),
    _speculation(
        "--no-experience",
        "keep_experience",
        is_flag=True,
        flag_value=False,
        default=None,
        help="Neither take up nor keep what is learned of the pair on this machine; else it is kept in the cache "
        "folder, or in $SPECBRANCH_EXPERIENCE.",
    ),
    _speculation(
        "--config",
        type=PATH,
        metavar="FILE",
        help="Settings from a file, such as `specbranch tune` writes; options given besides win.",
    ),
    _speculation(
        "--speculative-config",
        metavar="JSON",
        help='Further settings, e.g. \'{"max_branches": 6, "stop_below": 0.4}\'.',
    ),
)
CLOCK = (
    _speculation(
        "--clock", metavar="PROFILE", help="Model time by a cost profile, a name or a file, instead of measuring it."
    ),
    _speculation(
        "--force-profile", is_flag=True, help="Take a profile that was measured with another pair all the same."
    ),
)
SAMPLING = (
    _sampling("--temperature", type=float, metavar="T", help="0 is greedy [0]."),
    _sampling("--top-k", type=int, metavar="K", help="Sample among the K likeliest tokens."),
    _sampling("--top-p", type=float, metavar="P", help="Sample among the likeliest tokens that make up P."),
    _sampling("--min-p", type=float, metavar="P", help="Leave out tokens below P times the likeliest."),
    _sampling("--repetition-penalty", type=float, metavar="X", help="Above 1 discourages tokens already in the text."),
    _sampling("--presence-penalty", type=float, metavar="X", help="Subtracted once for a token already in the answer."),
    _sampling(
        "--frequency-penalty",
        type=float,
        metavar="X",
        help="Subtracted for each time a token is already in the answer.",
    ),
    _sampling(
        "--logit-bias", type=bias, multiple=True, metavar="ID:BIAS", help="Added to a token's logit; may be repeated."
    ),
    _sampling("--seed", type=int, metavar="N", help="The same seed gives the same answer, with every method [random]."),
    _sampling("--max-tokens", type=int, metavar="N", help="Longest answer [256]."),
    _sampling("--min-tokens", type=int, metavar="N", help="Shortest answer [0]."),
    _sampling(
        "--stop", type=text, multiple=True, metavar="TEXT", help="End the answer before this text; may be repeated."
    ),
    _sampling(
        "--stop-token-id",
        "stop_token_ids",
        type=int,
        multiple=True,
        metavar="ID",
        help="End the answer at this token; may be repeated.",
    ),
    _sampling("--ignore-eos", is_flag=True, help="Do not end at the end-of-text token."),
    _sampling(
        "--logprobs", type=int, metavar="K", help="Log-probabilities of each token and the K likeliest (with --json)."
    ),
)


def writing_options(seconds: int, rows: int, material: str) -> tuple[Callable[[F], F], ...]:
    """How a target writes what is learned from, where so many seconds and rows are usual; `material` is the help for
    what was written before."""
    return (
        _writing("--seconds-writing", type=float, metavar="S", help=f"How long the target writes [{seconds}]."),
        _writing("--tokens", type=int, metavar="N", help="Stop writing after N tokens."),
        _writing(
            "--data", type=PATH, metavar="FILE", help="Prompts for the target to answer too, as for generate --file."
        ),
        _writing("--material", type=PATH, metavar="PATH", help=material),
        _writing(
            "--writing-rows", type=int, metavar="N", help=f"Conversations written at once [{rows} on a GPU, else 16]."
        ),
        _writing("--writing-length", type=int, default=640, metavar="N", help="Most tokens of a conversation [640]."),
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
    """Collect the speculative settings: those of a file, then the JSON, then the options of their own, which win."""
    values = _from_file(given.get("config")) | _parsed(given.get("speculative_config"))
    values |= {k: given[k] for k in ("method", "rule", "policy", "num_speculative_tokens") if given.get(k) is not None}
    if given.get("without") is not None:
        values["without"] = [part.strip() for part in given["without"].split(",") if part.strip()]
    SpeculativeConfig.from_dict(values)  # refuse mistakes before a model is loaded
    return values


def load_llm(given: dict[str, Any]) -> LLM:
    """Load the models that were asked for, with a progress bar where a fetch is needed."""
    from specbranch.cli.progress import narrated, pulled

    config = speculative_config(given)
    names = ("pair", "target", "draft", "device", "dtype", "executor")
    chosen = {name: given[name] for name in names if given.get(name) is not None}
    target, draft = chosen_models(*(chosen.get(name) for name in ("pair", "target", "draft")))
    drafting = _used_draft(config.get("method"), draft, aloud="draft" in chosen)
    if drafting is not None:
        pulled(draft_path(drafting))  # before the target: a pair's draft may be missing, and a fetch takes long
    pulled(target)
    if given.get("config") is not None:
        _warn_of_other_circumstances(given, target, draft)
    if given.get("predictor") is not None and config.get("policy") != "paper":
        click.echo(
            f"The predictor {given['predictor']} is not used: only policy 'paper' heeds one (--policy paper).", err=True
        )
    from specbranch.engine import LLM

    with narrated("Loading the models"):
        return LLM(**chosen, speculative=config, options=load_options(given))


def load_options(given: dict[str, Any]) -> LoadOptions:
    """Collect how models are loaded from what was given on the command line; `max_batch` there is the server's."""
    names = [one.name for one in fields(LoadOptions) if one.name != "max_batch"]
    return LoadOptions.from_dict({name: given[name] for name in names if given.get(name) is not None})


def _used_draft(method: str | None, draft: str | None, aloud: bool) -> str | None:
    """Refuse a method without the draft it needs; leave out, aloud if it was asked for, a draft that it does not."""
    if method is None or find_method(method, draft is not None).uses_draft:
        return draft
    if aloud:
        click.echo(f"The draft model {draft} is not used: method {method!r} drafts without one.", err=True)
    return None


def _from_file(file: Path | None) -> dict[str, Any]:
    return {} if file is None else {name: value for name, value in read_settings(file).items() if name != TUNED_FOR}


def _warn_of_other_circumstances(given: dict[str, Any], target: str, draft: str | None) -> None:
    """Say in a line that settings were tuned for something else; they are used all the same."""
    from specbranch.assembly import identity

    file, settings = given["config"], read_settings(given["config"])
    tuned = settings.get(TUNED_FOR)
    if not isinstance(tuned, dict):
        return
    here = {"target_identity": identity(target), "draft_identity": None if draft is None else identity(draft)}
    if any(tuned.get(name) != value for name, value in here.items()):
        click.echo(f"{file} was tuned for another pair ({tuned.get('pair')}); it is used all the same.", err=True)
    elif tuned.get("overlap") and given.get("clock") is None and given.get("executor") in (None, "serial"):
        told = (
            f"{file} was tuned for draft and target at work at once ({tuned.get('profile')}); here they take "
            "turns (see --executor)."
        )
        click.echo(told, err=True)


def _parsed(text: str | None) -> dict[str, Any]:
    try:
        values = json.loads(text or "{}")
    except ValueError as error:
        raise BadParameter(
            f"--speculative-config is no JSON ({error}); expected an object such as '{{\"max_branches\": 6}}'."
        ) from None
    if not isinstance(values, dict):
        raise BadParameter(f"--speculative-config is {text}; expected a JSON object.")
    return values
