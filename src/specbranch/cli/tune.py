"""`specbranch tune`: which method to use with a pair, some hardware and some prompts, and how to set it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from specbranch.cli.options import PAIR, TABLES, with_options
from specbranch.cli.sections import SectionedCommand, options_of
from specbranch.config import TUNED_FOR
from specbranch.errors import BadParameter, unknown
from specbranch.pairs import chosen_models, draft_path
from specbranch.sim.shipped import shipped_profiles
from specbranch.suites.suite import ALL_SHIPPED, SUITES

if TYPE_CHECKING:
    from specbranch.bench.run import Clock, StepsDone
    from specbranch.bench.tuning import Search, Tuner
    from specbranch.suites.suite import Suite

_what, _how, _where = (options_of(title) for title in ("What to tune", "What for", "Output"))
PLAIN = "autoregressive"


@click.command(
    cls=SectionedCommand,
    tables={
        "Pairs": TABLES["Pairs"],
        "Suites": list(SUITES.items()),
        "Profiles": [(name, "shipped; `specbranch profile` measures one of your own") for name in shipped_profiles()],
    },
)
@with_options(PAIR)
@_what("--target", metavar="MODEL", help="Target model, instead of a pair's.")
@_what("--draft", metavar="MODEL", help="Draft model, beside --target.")
@_what(
    "--methods",
    metavar="A,B,…",
    help="Methods, or METHOD:POLICY, to search among; plain decoding always takes part [all but lookahead, which "
    "takes hours].",
)
@_what("--trials", type=click.IntRange(min=1), metavar="N", help="Settings to try of a method with several knobs [40].")
@_how(
    "--profile",
    metavar="PROFILE",
    help="Hardware: a shipped profile, see below, or a FILE.json [this machine, measured first].",
)
@_how("--force-profile", is_flag=True, help="Take a profile that was measured with another pair all the same.")
@_how(
    "--executor",
    type=click.Choice(["serial", "process"]),
    default="serial",
    help="Without --profile: measure the models taking turns, or side by side [serial].",
)
@_how(
    "--prompts",
    multiple=True,
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="A file of prompts in Spec-Bench's format; may be repeated.",
)
@_how(
    "--suites",
    multiple=True,
    metavar="NAME",
    help=f"Suite; may be repeated, or several with commas [{ALL_SHIPPED}: 4 prompts of each].",
)
@_how("--data", type=click.Path(path_type=Path), metavar="DIR", help="Folder of the public suites [$SPECBRANCH_DATA].")
@_how("--limit", type=click.IntRange(min=1), metavar="N", help="Only the first N prompts of each suite.")
@_how("--temperature", type=float, default=0.0, metavar="T", help="0 is greedy [0].")
@_how("--max-tokens", type=click.IntRange(min=2), default=128, metavar="N", help="Longest answer [128].")
@_where(
    "--records",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Where records and earlier searches are kept [the cache folder].",
)
@_where(
    "--out",
    type=click.Path(path_type=Path),
    required=True,
    metavar="FILE.json",
    help="Where the best setting is written.",
)
@_where(
    "--json",
    "as_json",
    is_flag=True,
    help="One JSON object: methods (tokens_per_second, speedup, setting …), best, out.",
)
def tune(as_json: bool, **given: Any) -> None:
    """Search for the method and its setting that decode fastest with a pair, and write them to a file for --config.

    \b
    specbranch tune --out tuned.json
    specbranch tune --pair smollm2-strong --profile c10 --methods speculative,specbranch --out strong.json
    specbranch generate --config tuned.json "Once upon a time"

    The target answers each prompt once; then every method is replayed from the record and charged by the profile, so
    what is predicted is as good as the profile. Searches are kept: the same question is answered at once. Ctrl-C writes
    the best setting found up to then.
    """
    _check_out(given["out"])
    request = _request(given)
    done = _searched(request, given)
    report = request.report(done)
    _write(given["out"], report)
    told = {**report, "out": str(given["out"])}
    click.echo(json.dumps(told, ensure_ascii=False) if as_json else "\n".join(_table(report, given["out"])))
    if not done.complete:
        raise KeyboardInterrupt


@dataclass(frozen=True, slots=True)
class TuneOutcome:
    """What a search came to: by method, plain decoding first; not complete if it was interrupted."""

    searches: tuple[Search, ...]
    complete: bool
    pair: str
    identity: dict[str, Any]


@dataclass(frozen=True, slots=True)
class TuneJob:
    """What was asked for, all names checked and nothing loaded."""

    target: str
    draft: str | None
    suites: tuple[Suite, ...]
    methods: tuple[str, ...]
    clock: Clock | None  # nothing: this machine, to be measured

    def report(self, done: TuneOutcome) -> dict[str, Any]:
        """Return all that is told, the file's contents under `best`."""
        plain = done.searches[0].tokens_per_second
        best = max(done.searches, key=lambda found: found.tokens_per_second)
        rows = [_row(found, plain) for found in done.searches]
        about = {
            **done.identity,
            "tokens_per_second": best.tokens_per_second,
            "speedup": best.tokens_per_second / plain,
        }
        about |= {"plain_tokens_per_second": plain, "complete": done.complete}
        method, _, policy = best.method.partition(":")
        chosen = {"method": method, **({"policy": policy} if policy else {}), **_row(best, plain)["setting"]}
        return {"pair": done.pair, "methods": rows, "complete": done.complete, "best": {**chosen, TUNED_FOR: about}}


def _request(given: dict[str, Any]) -> TuneJob:
    from specbranch.bench.tuning import SPACES, candidates, has_several_values
    from specbranch.cli.progress import pulled
    from specbranch.core.methods import METHODS
    from specbranch.extras import OPTUNA

    target, draft = chosen_models(given["pair"], given["target"], given["draft"])
    known = candidates(draft is not None)
    usual = [
        name for name in known if name not in METHODS or not METHODS[name].guesses
    ]  # else the target decodes anew for each setting
    names = [name.strip() for name in (given["methods"] or ",".join(usual)).split(",") if name.strip()]
    for name in names:
        if name not in SPACES:
            raise unknown("method to tune", name, SPACES)
        if name not in known:
            raise BadParameter(
                f"Method {name!r} needs a draft model, and none was given. Give one with --draft, or name a --pair."
            )
    if several := [name for name in names if has_several_values(name)]:
        OPTUNA.require(f"or leave {', '.join(several)} out with --methods")
    suites = _suites(given)
    if given["profile"] is None and draft is None:
        raise BadParameter(
            "Only a pair can be measured, and a target alone was given. Name a --profile, or give a --draft."
        )
    if draft is not None:
        pulled(draft_path(draft))
    pulled(target)
    return TuneJob(target, draft, suites, tuple(dict.fromkeys((PLAIN, *names))), _named_clock(given, target, draft))


def _suites(given: dict[str, Any]) -> tuple[Suite, ...]:
    from specbranch.bench.tuning import tuning_suites
    from specbranch.suites.suite import load_suites

    names = [name for value in given["suites"] for name in value.split(",") if name]
    if not names and not given["prompts"]:
        return tuple(suite.first(given["limit"]) for suite in tuning_suites())
    return load_suites(names, files=given["prompts"], data=given["data"], limit=given["limit"])


def _named_clock(given: dict[str, Any], target: str, draft: str | None) -> Clock | None:
    from specbranch.assembly import cost_profile
    from specbranch.bench.run import Clock

    profile = cost_profile(given["profile"], target, draft, given["force_profile"])
    return None if profile is None else Clock(given["profile"], profile)


def _searched(request: TuneJob, given: dict[str, Any]) -> TuneOutcome:
    """Carry out the searches; whatever was found before Ctrl-C is kept, if there is anything to hold it against."""
    from specbranch.bench.lab import Lab, Workload
    from specbranch.bench.tuning import TRIALS, Goal, Tuner
    from specbranch.cli.progress import counted

    with counted() as progress:
        clock = request.clock or _measured(request, given["executor"], progress)
        workload = Workload(temperature=given["temperature"], max_tokens=given["max_tokens"])
        goal = Goal(clock, workload, request.suites, given["trials"] or TRIALS)
        with Lab(_pair_name(given), given["target"], given["draft"], given["records"]) as lab:
            tuner, complete = Tuner(lab, goal, progress), True
            try:
                for method in request.methods:
                    tuner.search(method)
            except KeyboardInterrupt:
                complete = False
            found = tuple(one for method in request.methods if (one := tuner.found(method)) is not None)
            if not found:
                raise KeyboardInterrupt
            return TuneOutcome(found, complete, lab.pair, _circumstances(request, goal, tuner))


def _pair_name(given: dict[str, Any]) -> str | None:
    """Return the pair by its name, the default one's where nothing is named."""
    from specbranch.pairs import DEFAULT_PAIR

    return given["pair"] or (DEFAULT_PAIR if given["target"] is given["draft"] is None else None)


def _measured(request: TuneJob, executor: str, progress: StepsDone) -> Clock:
    """Measure this machine with the pair, briefly."""
    from specbranch.bench.own_profile import machine_profile
    from specbranch.bench.run import Clock
    from specbranch.bench.subjects import Running

    assert request.draft is not None
    kind: Any = executor
    return Clock(
        "this machine", machine_profile(request.target, request.draft, request.draft, Running(executor=kind), progress)
    )


def _circumstances(request: TuneJob, goal: Any, tuner: Tuner) -> dict[str, Any]:
    """Return what a setting was tuned for."""
    from specbranch import __version__
    from specbranch.assembly import identity

    return {
        "pair": tuner.lab.pair,
        "target": request.target,
        "draft": request.draft,
        "target_identity": identity(request.target),
        "draft_identity": None if request.draft is None else identity(request.draft),
        "profile": goal.clock.name,
        "hardware": goal.profile.hardware,
        "overlap": goal.profile.overlap,
        "prompts": {suite.name: len(suite.prompts) for suite in goal.suites},
        "tokens": tuner.decoded,
        "temperature": goal.workload.temperature,
        "max_tokens": goal.workload.max_tokens,
        "version": __version__,
    }


def _row(found: Search, plain: float) -> dict[str, Any]:
    from specbranch.bench.tuning import chosen

    rate = found.tokens_per_second
    tried = [{**chosen(trial.config), "tokens_per_second": found.decoded / trial.seconds} for trial in found.trials]
    return {
        "method": found.method,
        "tokens_per_second": rate,
        "speedup": rate / plain,
        "setting": chosen(found.best.config),
        "looked_at": found.looked_at,
        "tried": tried,
    }


def _table(report: dict[str, Any], out: Path) -> list[str]:
    from specbranch.bench.results import setting_text
    from specbranch.bench.table import rate_text

    best, about = report["best"], report["best"][TUNED_FOR]
    prompts = ", ".join(f"{count} of {name}" for name, count in about["prompts"].items())
    lines = [
        f"{report['pair']} by profile {about['profile']} (modelled time), temperature {about['temperature']:g}",
        f"on {prompts}: {about['tokens']} tokens",
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
    if method == PLAIN:
        return [*stopped, "Nothing tried is faster than plain decoding here; the file says so."]
    return [*stopped, f"Best: {method}, predicted {about['speedup']:.2f} × plain decoding."]


def _check_out(out: Path) -> None:
    """Refuse before the search what could not be written after it."""
    if not out.absolute().parent.is_dir():
        raise BadParameter(f"--out is {out}, but there is no folder {out.parent}. Make it first, or name another file.")
    if out.is_dir():
        raise BadParameter(f"--out is {out}, which is a folder. Name a file, such as {out / 'tuned.json'}.")


def _write(out: Path, report: dict[str, Any]) -> None:
    from specbranch.files import write_whole

    write_whole(out, json.dumps(report["best"], indent=2, ensure_ascii=False) + "\n")
