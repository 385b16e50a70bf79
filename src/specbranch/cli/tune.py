"""`specbranch tune`: the fastest method and setting for a pair, a cost profile and some prompts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import click

from specbranch.cli.bench_options import CACHE_OPTION, DATA, DRAFT_WEIGHTS_OPTION, PROFILES, PROMPTS, WEIGHTS_OPTION
from specbranch.cli.options import DRAFT_WINDOW_OPTION, PAIR, TABLES, with_options
from specbranch.cli.sections import SectionedCommand, options_of
from specbranch.config import TUNED_FOR, ExecutorName
from specbranch.errors import BadParameter
from specbranch.lab.bench.methods import TRIALS, listed
from specbranch.lab.bench.results import BASELINE, rate_text, setting_text
from specbranch.lab.suites.suite import ALL_SHIPPED, SUITES

if TYPE_CHECKING:
    from specbranch.lab.bench.order import TuneOrder
    from specbranch.lab.suites.suite import Suite

_what, _how, _where = (options_of(title) for title in ("What to tune", "What for", "Output"))


@click.command(
    cls=SectionedCommand,
    tables={
        "Pairs": TABLES["Pairs"],
        "Suites": list(SUITES.items()),
        "Profiles": PROFILES,
    },
)
@with_options(PAIR)
@_what("--target", metavar="MODEL", help="Target model, instead of a pair's.")
@_what("--draft", metavar="MODEL", help="Draft model for --target.")
@_what("--weights", **WEIGHTS_OPTION)
@_what("--draft-weights", **DRAFT_WEIGHTS_OPTION)
@_what("--draft-window", **DRAFT_WINDOW_OPTION)
@_what("--cache-dtype", **CACHE_OPTION)
@_what(
    "--methods",
    metavar="A,B,…",
    help="Methods, or METHOD:POLICY, to search; plain decoding always takes part [all but lookahead, "
    "which takes hours].",
)
@_what(
    "--trials",
    type=click.IntRange(min=1),
    metavar="N",
    help="Number of settings to try of a method with several knobs [40].",
)
@_how(
    "--profile",
    metavar="PROFILE",
    help="Cost profile of the hardware: a shipped one, see below, or a FILE.json [this machine, measured first].",
)
@_how("--force-profile", is_flag=True, help="Use a profile even if it was measured with another pair.")
@_how(
    "--executor",
    type=click.Choice(get_args(ExecutorName)),
    default="serial",
    help="Without --profile: how draft and target run while they are measured [serial].",
)
@_how("--prompts", **PROMPTS)
@_how(
    "--suites",
    multiple=True,
    metavar="NAME",
    help=f"Suite, but no exam-…; may be repeated, or several names with commas [{ALL_SHIPPED}: 4 prompts of each].",
)
@_how("--data", **DATA)
@_how("--limit", type=click.IntRange(min=1), metavar="N", help="Use only the first N prompts of each suite.")
@_how("--temperature", type=float, default=0.0, metavar="T", help="Sampling temperature; 0 is greedy [0].")
@_how(
    "--max-tokens",
    type=click.IntRange(min=2),
    default=128,
    metavar="N",
    help="Maximum number of tokens in an answer [128].",
)
@_where(
    "--records",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Folder of records and earlier searches [the cache folder].",
)
@_where(
    "--out",
    type=click.Path(path_type=Path),
    required=True,
    metavar="FILE.json",
    help="File for the best setting.",
)
@_where(
    "--json",
    "as_json",
    is_flag=True,
    help="Print one JSON object: methods (tokens_per_second, speedup, setting …), best, out.",
)
def tune(as_json: bool, **given: Any) -> None:
    """Search for the fastest method and setting of a pair, and write them to a file for --config.

    \b
    specbranch tune --out tuned.json
    specbranch tune --pair smollm2-strong --profile c10 --methods speculative,specbranch --out strong.json
    specbranch generate --config tuned.json "Once upon a time"

    The target answers each prompt once. Every method is then replayed from the record, and the profile models its time;
    the prediction is as good as the profile. Finished searches are saved, so the same question is answered at once.
    Ctrl-C writes the best setting found so far.
    """
    from specbranch.cli.progress import counted, pulled
    from specbranch.lab.bench.tuning import run_tuning

    out = given["out"]
    _check_out(out)
    order = _order(given)
    with counted() as progress:
        found = run_tuning(order, progress, pulled)
    found.save(out)
    report = found.to_dict()
    click.echo(
        json.dumps({**report, "out": str(out)}, ensure_ascii=False) if as_json else "\n".join(_table(report, out))
    )
    if not found.complete:
        raise KeyboardInterrupt


def _order(given: dict[str, Any]) -> TuneOrder:
    """Translate options into an order."""
    from specbranch.clock.shipped import load_profile
    from specbranch.lab.bench.clocks import Clock
    from specbranch.lab.bench.order import TuneOrder, checked_running, chosen_pairs, tuned_methods
    from specbranch.lab.bench.recorded_pair import Workload

    (pair,) = chosen_pairs([given["pair"]] if given["pair"] else [], given["target"], given["draft"])
    profile = given["profile"]
    methods = tuned_methods(listed(given["methods"] or ""), pair.has_draft)
    suites = _suites(given)
    if profile is None and not pair.has_draft:
        raise BadParameter(
            "Only a pair can be measured, and a target alone was given. Name a --profile, or give a --draft."
        )
    return TuneOrder(
        pair=pair,
        methods=methods,
        suites=suites,
        clock=None if profile is None else Clock(profile, load_profile(profile)),
        force_profile=given["force_profile"],
        workload=Workload(temperature=given["temperature"], max_tokens=given["max_tokens"]),
        trials=given["trials"] or TRIALS,
        running=checked_running(
            given["executor"],
            None,
            None,
            given["weights"],
            given["draft_weights"],
            given["draft_window"],
            given["cache_dtype"],
            by_the_wall=True,
        ),
        records=given["records"],
    )


def _suites(given: dict[str, Any]) -> tuple[Suite, ...]:
    from specbranch.lab.bench.tuning import tuning_suites
    from specbranch.lab.suites.suite import load_suites, refuse_exam

    if not given["suites"] and not given["prompts"]:
        return tuple(suite.first(given["limit"]) for suite in tuning_suites())
    suites = load_suites(given["suites"], files=given["prompts"], data=given["data"], limit=given["limit"])
    refuse_exam(suites)
    return suites


def _table(report: dict[str, Any], out: Path) -> list[str]:
    best, about = report["best"], report["best"][TUNED_FOR]
    prompts = ", ".join(f"{count} of {name}" for name, count in about["prompts"].items())
    lines = [
        f"{report['pair']} by profile {about['profile']} (modelled time), temperature {about['temperature']:g}",
        f"on {prompts}: {about['tokens']} tokens, weights {about['weights']}",
        f"{'method':23}{'tok/s':>8}{'× plain':>9}{'tried':>7}  best setting",
    ]
    for row in report["methods"]:
        rate = rate_text(row["tokens_per_second"])
        lines.append(
            f"{row['method']:23}{rate:>8}{row['speedup']:8.2f}×{row['looked_at']:>7}  "
            f"{setting_text(row['setting'])}".rstrip()
        )
    lines += [
        "",
        *_verdict(_name(best), about),
        f'Written to {out}; use it with: specbranch generate --config {out} "…"',
    ]
    return lines


def _name(best: dict[str, Any]) -> str:
    return f"{best['method']}:{best['policy']}" if "policy" in best else str(best["method"])


def _verdict(method: str, about: dict[str, Any]) -> list[str]:
    stopped = [] if about["complete"] else ["Interrupted: this is the best of what was tried up to then."]
    if method == BASELINE:
        return [*stopped, "Nothing tried is faster than plain decoding here; the file says so."]
    return [*stopped, f"Best: {method}, predicted {about['speedup']:.2f} × plain decoding."]


def _check_out(out: Path) -> None:
    """Refuse before the search what could not be written after it."""
    if not out.absolute().parent.is_dir():
        raise BadParameter(f"--out is {out}, but there is no folder {out.parent}. Make it first, or name another file.")
    if out.is_dir():
        raise BadParameter(f"--out is {out}, which is a folder. Name a file, such as {out / 'tuned.json'}.")
