"""Options that several commands share, and their translation into parameters.

Owns names and help of the shared options. A value that was not given is not passed on, so that defaults are in `config`
alone.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import fields
from typing import TYPE_CHECKING, Any

import click

from specbranch.cli.sections import PATH, F, options_of
from specbranch.config import TUNED_FOR, LoadOptions, SamplingParams, SpeculativeConfig, read_settings
from specbranch.core.methods import METHODS, find_method
from specbranch.core.policies import POLICIES
from specbranch.errors import BadParameter
from specbranch.exec.address import is_link
from specbranch.pairs import DEFAULT_PAIR, PAIRS, chosen_models, draft_path

if TYPE_CHECKING:
    from specbranch.engine import LLM

TABLES = {
    "Pairs": [(name, pair.about) for name, pair in PAIRS.items()],
    "Methods": [(name, method.summary) for name, method in METHODS.items()],
}


def text(value: str) -> str:
    """Refuse invalid UTF-8 from the shell before a model is loaded."""
    from specbranch.text.tokenizer import check_text

    try:
        check_text(value)
    except BadParameter as error:
        raise click.BadParameter(str(error)) from None
    return value


def bias(value: str) -> tuple[int, float]:
    """Split ID:BIAS into a token id and the number added to its logit."""
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
        "--pair",
        metavar="NAME",
        help=f"Name of a target with its draft; `specbranch models` lists the names [{DEFAULT_PAIR}].",
    ),
)
TARGET = (
    _model(
        "--target",
        metavar="MODEL",
        help="Target model, instead of the pair's: a folder, a .gguf file, a Hub id or a known name.",
    ),
    _model("--device", metavar="DEVICE", help="Device of the target: cpu, cuda, cuda:1 … [a GPU if there is one]."),
    _model(
        "--dtype",
        metavar="TYPE",
        help="Compute precision: float32, bfloat16, float16 or float64 [float32 on a CPU, else bfloat16].",
    ),
    _model(
        "--weights",
        metavar="TYPE",
        help="Storage type of the target's weight matrices: float32, bfloat16, int8, fp8, "
        "fp8-block, int4, int4-64, int4-32 or stored. 'stored' keeps a quantised checkpoint as it is; of a quantised "
        "GGUF file it keeps the blocks and multiplies in integers. All but float32 and bfloat16 are rounded, so that "
        "the target may write another text [stored for a quantised checkpoint, and for a quantised GGUF on a CPU if "
        "--dtype is not given, else --dtype].",
    ),
    _model(
        "--runner",
        metavar="RUNNER",
        help="Model runner: native, transformers or auto; auto takes native if it supports the architecture [auto].",
    ),
    _model("--context-length", type=int, metavar="N", help="Maximum number of tokens in prompt and answer together."),
    _model(
        "--cache-tokens",
        type=int,
        metavar="N",
        help="KV cache slots of each model, shared by all requests [as many as fit into memory].",
    ),
    _model(
        "--cache-dtype",
        metavar="TYPE",
        help="Storage type of the KV cache on a CPU: float32, bfloat16 (half the memory) or int8 (about a "
        "quarter). With bfloat16 and int8 the target may write another text [--dtype].",
    ),
)
DRAFT_WINDOW_OPTION: dict[str, Any] = {
    "type": int,
    "metavar": "N",
    "help": "Number of last positions that the draft attends to, besides the first few. Then its steps cost no more at "
    "long contexts, and its context may be longer than its own. It changes speed, never the text [all positions].",
}
DRAFT = (
    _draft(
        "--draft",
        metavar="MODEL",
        help="Draft model, best with the target's vocabulary, or a pair's name, which stands for its draft, or "
        "the address of a draft worker: tcp://HOST:PORT, with a certificate tls://HOST:PORT, on Ray ray://NAME (see "
        "`specbranch draft-worker`).",
    ),
    _draft("--draft-device", metavar="DEVICE", help="Device of the draft [the target's]."),
    _draft(
        "--draft-weights",
        metavar="TYPE",
        help="Storage type of the draft's weight matrices, see --weights. It changes speed, never the text "
        "[stored (on a GPU: int8) if the draft's file is in int8, else --dtype].",
    ),
    _draft("--draft-window", **DRAFT_WINDOW_OPTION),
)
BATCHED_TOKENS_OPTION: dict[str, Any] = {
    "type": int,
    "metavar": "N",
    "help": "Maximum number of tokens in a forward of the target, decode rows and prompt tokens together. Decode rows "
    "always run, and a prompt advances by at least one chunk [as many prompt tokens as measured costs allow].",
}
METHOD_OPTIONS = (
    # of the target, but for commands that load an LLM: those that measure a model have it on one device
    _model(
        "--device-map",
        metavar="MAP",
        help="auto spreads the target's layers over all GPUs of this machine, for a target that does not "
        "fit into one. It needs the transformers runner [one device].",
    ),
    _model("--max-num-batched-tokens", **BATCHED_TOKENS_OPTION),
    _model(
        "--no-prefix-cache",
        "prefix_cache",
        is_flag=True,
        flag_value=False,
        default=None,
        help="Prefill every prompt in full. By default both models keep the KV cache of earlier prompts "
        "and reuse it for common prefixes.",
    ),
    _model(
        "--warm-up",
        metavar="WHEN",
        help="When a GPU's kernels are compiled and its CUDA graphs captured. full: at load, for all steps that the "
        "method and the batch size can need. lazy: when a step first occurs, in the middle of an answer [full; "
        "lazy for commands that ask once].",
    ),
    _speculation(
        "--method", metavar="METHOD", help="Decoding method, see below [specbranch with a draft, auto without one]."
    ),
    _speculation(
        "--rule",
        metavar="RULE",
        help="Acceptance rule. match gives the tokens of plain decoding with this seed, one by one (on "
        "GPUs see docs/lossless.md); ratio keeps the distribution [match].",
    ),
    _speculation("--num-speculative-tokens", type=int, metavar="N", help="Maximum draft length of a round [5]."),
    _speculation(
        "--policy",
        metavar="POLICY",
        help="How draft lengths and branches are chosen: planner (the default of specbranch), paper (as "
        "published, with H-RAD), confidence, entropy, last or fixed [the method's own].",
    ),
    _speculation(
        "--without",
        metavar="PART,…",
        help=f"Parts of the policy to switch off. planner has {', '.join(POLICIES['planner'].parts)}; paper has "
        f"{', '.join(POLICIES['paper'].parts)} [none].",
    ),
    _speculation(
        "--predictor",
        metavar="DIR",
        help="Output folder of `specbranch train-predictor`, for policy paper [the pair's own, if it has a name].",
    ),
    _speculation(
        "--executor",
        metavar="NAME",
        help="serial: draft and target run in turn. process: the draft runs in a process of its own, in "
        "parallel with the target. streams: both run in parallel in this process, the target on a "
        "GPU, the draft on any device [serial].",
    ),
    _speculation(
        "--no-experience",
        "keep_experience",
        is_flag=True,
        flag_value=False,
        default=None,
        help="Ignore what earlier runs learned about the pair on this machine, and save nothing. By "
        "default it is saved in the cache folder, or in $SPECBRANCH_EXPERIENCE.",
    ),
)
JSON_OPTION = _speculation(
    "--speculative-config",
    metavar="JSON",
    help='More settings as JSON, e.g. \'{"max_branches": 6, "stop_below": 0.4}\'.',
)
SPECULATION = (
    *METHOD_OPTIONS,
    _speculation(
        "--config",
        type=PATH,
        metavar="FILE",
        help="File of settings, as `specbranch tune` writes it. Options on the command line override it.",
    ),
    JSON_OPTION,
)
CLOCK = (
    _speculation(
        "--clock", metavar="PROFILE", help="Cost profile (a name or a file) that models time, instead of measuring it."
    ),
    _speculation("--force-profile", is_flag=True, help="Use a profile even if it was measured with another pair."),
)
SAMPLING = (
    _sampling("--temperature", type=float, metavar="T", help="Sampling temperature; 0 is greedy [0]."),
    _sampling("--top-k", type=int, metavar="K", help="Sample among the K most likely tokens."),
    _sampling(
        "--top-p", type=float, metavar="P", help="Sample among the most likely tokens whose probabilities add up to P."
    ),
    _sampling("--min-p", type=float, metavar="P", help="Drop tokens less likely than P times the most likely one."),
    _sampling(
        "--repetition-penalty",
        type=float,
        metavar="X",
        help="Values above 1 discourage tokens that are already in the text.",
    ),
    _sampling(
        "--presence-penalty",
        type=float,
        metavar="X",
        help="Subtracted once from the logit of a token that is already in the answer.",
    ),
    _sampling(
        "--frequency-penalty",
        type=float,
        metavar="X",
        help="Subtracted from a token's logit for each time the token is already in the answer.",
    ),
    _sampling(
        "--logit-bias",
        type=bias,
        multiple=True,
        metavar="ID:BIAS",
        help="Number added to a token's logit; may be repeated.",
    ),
    _sampling(
        "--seed",
        type=int,
        metavar="N",
        help="Random seed; the same seed gives the same answer with every method [random].",
    ),
    _sampling("--max-tokens", type=int, metavar="N", help="Maximum number of tokens in the answer [256]."),
    _sampling("--min-tokens", type=int, metavar="N", help="Minimum number of tokens in the answer [0]."),
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
    _sampling("--ignore-eos", is_flag=True, help="Do not stop at the end-of-text token."),
    _sampling(
        "--logprobs",
        type=int,
        metavar="K",
        help="Report log-probabilities of each token and of the K most likely ones (with --json).",
    ),
)


def writing_options(seconds: int, rows: int, length: str, material: str) -> tuple[Callable[[F], F], ...]:
    """Return the options for writing training text, with default seconds, rows and length; `material` is the help of
    --material."""
    return (
        _writing(
            "--seconds-writing",
            type=float,
            metavar="S",
            help=f"Seconds for which the target writes training text [{seconds}].",
        ),
        _writing("--tokens", type=int, metavar="N", help="Stop writing after N tokens."),
        _writing(
            "--data",
            type=PATH,
            metavar="FILE",
            help="File of prompts for the target to answer too, in the format of generate --file. Every second "
            "conversation answers one.",
        ),
        _writing("--material", type=PATH, metavar="PATH", help=material),
        _writing(
            "--writing-rows",
            type=int,
            metavar="N",
            help=f"Batch size of writing, in conversations [{rows} on a GPU, else 16].",
        ),
        _writing(
            "--writing-length",
            type=int,
            metavar="N",
            help=f"Maximum number of tokens in a conversation [{length}].",
        ),
    )


def with_options(*groups: tuple[Callable[[F], F], ...]) -> Callable[[F], F]:
    """Decorate a command with groups of shared options, in their order."""

    def decorate(function: F) -> F:
        for option in reversed([option for group in groups for option in group]):
            function = option(function)
        return function

    return decorate


def sampling_params(given: dict[str, Any]) -> SamplingParams:
    """Build the sampling parameters from the options."""
    names = SamplingParams.__dataclass_fields__
    values = {name: value for name, value in given.items() if name in names and value not in (None, ())}
    if "logit_bias" in values:
        values["logit_bias"] = dict(values["logit_bias"])
    return SamplingParams.from_dict(values)


def speculative_config(given: dict[str, Any]) -> dict[str, Any]:
    """Collect the speculative settings: from the file, then from the JSON, then from single options, which override
    them."""
    values = {name: value for name, value in _settings(given).items() if name != TUNED_FOR}
    values |= {k: given[k] for k in ("method", "rule", "policy", "num_speculative_tokens") if given.get(k) is not None}
    if given.get("without") is not None:
        values["without"] = [part.strip() for part in given["without"].split(",") if part.strip()]
    SpeculativeConfig.from_dict(values)  # refuse mistakes before a model is loaded
    return values


def load_llm(given: dict[str, Any]) -> LLM:
    """Load the requested models, with a progress bar for a download."""
    from specbranch.cli.progress import narrated

    arguments = llm_arguments(given)
    from specbranch.engine import LLM

    with narrated("Loading the models"):
        return LLM(**arguments)


def llm_arguments(given: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of `LLM` for the requested models, which are fetched if they are not here."""
    from specbranch.cli.progress import pulled

    config, options = speculative_config(given), load_options(given)
    names = ("pair", "target", "draft", "device", "dtype", "executor")
    chosen = {name: given[name] for name in names if given.get(name) is not None}
    target, draft = chosen_models(*(chosen.get(name) for name in ("pair", "target", "draft")))
    drafting = _used_draft(config.get("method"), draft, warn="draft" in chosen)
    if drafting is not None and not is_link(drafting):
        pulled(draft_path(drafting))  # before the target: a pair's draft may be missing, and a fetch takes long
    pulled(target)
    _warn_of_other_circumstances(given, target, draft)
    if given.get("predictor") is not None and config.get("policy") != "paper":
        click.echo(
            f"The predictor {given['predictor']} is not used: only policy 'paper' heeds one (--policy paper).", err=True
        )
    return {**chosen, "speculative": config, "options": options}


def asking_once(given: dict[str, Any]) -> dict[str, Any]:
    """Return the options of a command that answers few prompts: unless --warm-up is given, it is lazy."""
    return {**given, "warm_up": given.get("warm_up") or "lazy"}


def load_options(given: dict[str, Any]) -> LoadOptions:
    """Collect how models are loaded from what was given on the command line."""
    names = [one.name for one in fields(LoadOptions)]
    return LoadOptions.from_dict({name: given[name] for name in names if given.get(name) is not None})


def _used_draft(method: str | None, draft: str | None, warn: bool) -> str | None:
    """Return the draft if the method uses one. Refuse a method without its draft; warn about an unused draft if it
    was requested."""
    if method is None or find_method(method, draft is not None).uses_draft:
        return draft
    if warn:
        click.echo(f"The draft model {draft} is not used: method {method!r} drafts without one.", err=True)
    return None


def _settings(given: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of the file and of the JSON, with what they were tuned for."""
    file = given.get("config")
    return ({} if file is None else read_settings(file)) | parsed_settings(given.get("speculative_config"))


def _warn_of_other_circumstances(given: dict[str, Any], target: str, draft: str | None) -> None:
    """Warn if settings were tuned for something else; they are used all the same."""
    from specbranch.assembly import identity

    file, tuned = given.get("config") or "The configuration", _settings(given).get(TUNED_FOR)
    if not isinstance(tuned, dict):
        return
    theirs = None if draft is None or is_link(draft) else identity(draft)
    here = {"target_identity": identity(target), "draft_identity": theirs}
    if any(tuned.get(name) != value for name, value in here.items()):
        click.echo(f"{file} was tuned for another pair ({tuned.get('pair')}); it is used all the same.", err=True)
    elif tuned.get("overlap") and given.get("clock") is None and given.get("executor") in (None, "serial"):
        sentence = (
            f"{file} was tuned for draft and target at work at once ({tuned.get('profile')}); here they take "
            "turns (see --executor)."
        )
        click.echo(sentence, err=True)


def parsed_settings(text: str | None, name: str = "--speculative-config") -> dict[str, Any]:
    """Return speculative settings that are given as JSON; `name`: of what gives them."""
    try:
        values = json.loads(text or "{}")
    except ValueError as error:
        raise BadParameter(
            f"{name} is no JSON ({error}); expected an object such as '{{\"max_branches\": 6}}'."
        ) from None
    if not isinstance(values, dict):
        raise BadParameter(f"{name} is {text}; expected a JSON object.")
    return values
