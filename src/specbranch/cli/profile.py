"""`specbranch profile`: the costs of a pair on this hardware, as a file for --clock."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import click

from specbranch.cli.options import DRAFT, PAIR, TABLES, TARGET, with_options
from specbranch.cli.sections import SectionedCommand
from specbranch.config import ExecutorName
from specbranch.errors import BadParameter
from specbranch.pairs import chosen_models, draft_path

if TYPE_CHECKING:
    from specbranch.assembly import ModelChoice
    from specbranch.clock.profile import CostProfile
    from specbranch.lab.measure.check_profile import Compared
    from specbranch.lab.measure.loaded_pair import LoadedPair


@click.command(cls=SectionedCommand, tables={"Pairs": TABLES["Pairs"]})
@with_options(PAIR, TARGET, DRAFT)
@click.option(
    "--out", type=click.Path(path_type=Path), required=True, metavar="FILE.json", help="File for the profile."
)
@click.option(
    "--executor",
    type=click.Choice(get_args(ExecutorName)),
    default="serial",
    help="serial: the models run in turn, each with all threads; the profile has no overlap. process: "
    "they run in parallel, each with half of the threads; the profile says how much they slow "
    "each other down. streams: likewise in one process, with the target on a GPU [serial].",
)
@click.option(
    "--check/--no-check", default=True, help="Compare modelled with measured time of a few requests at the end [check]."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object: profile, check, out, steps.")
def profile(out: Path, executor: ExecutorName, check: bool, as_json: bool, **given: Any) -> None:
    """Measure what a pair costs on this machine: target forwards, draft steps, their mutual slow-down, and host time.

    \b
    specbranch profile --out mine.json
    specbranch profile --pair smollm2-strong --executor process --out strong.json
    specbranch trace --clock mine.json "Once upon a time"

    Target forwards are measured by number of tokens and context length, draft steps by width. The probes take turns,
    and medians count. It takes about a minute on two cores; leave the machine idle meanwhile. At the end, the command
    compares the profile's prediction for a few requests with their measured time. On a GPU it also prints the time of
    every kind of step that a warm-up captures.
    """
    from specbranch.cli.progress import counted
    from specbranch.lab.measure import check_profile
    from specbranch.lab.measure.profile_pair import measure
    from specbranch.lab.measure.step_times import plain_times, step_table, warmed_up

    _check_out(out)
    with counted() as progress:
        pair = _loaded(given, executor)
        steps = warmed_up(pair)
        made = measure(pair, progress=progress)
        _save(made, out)
        found = check_profile.check(made, pair, progress=progress) if check else []
    if as_json:
        result = {"profile": made.to_dict(), "check": [_record(one) for one in found], "out": str(out)}
        result["steps"] = plain_times(steps)
        click.echo(json.dumps(result, ensure_ascii=False))
        return
    lines = [*_table(made), *step_table(steps), "", *_verdict(found)]
    click.echo("\n".join([*lines, f"Written to {out}; use it with --clock {out}."]))


def _loaded(given: dict[str, Any], executor: ExecutorName) -> LoadedPair:
    """Load the requested pair; fetch missing models first."""
    from specbranch.cli.progress import pulled
    from specbranch.lab.measure.loaded_pair import load_pair, pair_name

    target, draft = pair_choices(given)
    pulled(draft_path(draft.name))
    pulled(target.name)
    return load_pair(target, draft, pair_name(given["pair"], target.name, draft.name), executor)


def pair_choices(given: dict[str, Any]) -> tuple[ModelChoice, ModelChoice]:
    """Return the choices of both models by the options; refuse a target without a draft."""
    from specbranch.assembly import ModelChoice, draft_cache_dtype

    target, draft = chosen_models(given["pair"], given["target"], given["draft"])
    if draft is None:
        raise BadParameter(
            "A target alone was given, and a pair is needed. Give its draft with --draft, or name a --pair."
        )
    both = {name: given[name] for name in ("runner", "dtype", "context_length") if given[name] is not None}
    cached, device = given["cache_dtype"], given["draft_device"] or given["device"]
    own = {"device": device, "weights": given["draft_weights"], "cache_dtype": draft_cache_dtype(cached, device)}
    own["draft_window"] = given["draft_window"]
    big = ModelChoice(target, device=given["device"], weights=given["weights"], cache_dtype=cached, **both)
    return big, ModelChoice(draft, shorten=True, **own, **both)


def _check_out(out: Path) -> None:
    if out.suffix != ".json":
        raise BadParameter(
            f"--out is {out}; expected a name that ends in .json, so that --clock can tell a file from a name."
        )
    if not out.absolute().parent.is_dir():
        raise BadParameter(f"--out is {out}, but there is no folder {out.parent}. Make it first, or name another file.")


def _save(made: CostProfile, out: Path) -> None:
    try:
        made.save(out)
    except OSError as error:
        raise BadParameter(f"The profile could not be written to {out}: {error}. Name another file.") from error


def _record(one: Compared) -> dict[str, Any]:
    return {
        "method": one.method,
        "measured_seconds": one.measured,
        "modelled_seconds": one.modelled,
        "off": one.off,
        "spread": one.spread,
    }


def _table(made: CostProfile) -> list[str]:
    facts = made.provenance
    spread, (short, long) = facts["spread"], facts["contexts"]
    threads = f"{facts['threads']} thread" + "s" * (facts["threads"] != 1)
    ratio = made.target_seconds(1) / made.draft_seconds(1)
    lines = [
        f"{made.pair} on {made.hardware}: {threads}, {_precision(facts)}, {facts['executor']} executor",
        *_curve("Target forward", "tokens", made.target, made.target_per_context, long - short, (short, long)),
        *_curve("Draft step", "width", made.draft, made.draft_per_context, long - short, (short, long)),
        f"c = {ratio:.1f}: a target forward over one token costs as much as {ratio:.1f} draft steps",
        _together(made),
        f"Host time a round: {made.host * 1e3:.2f} ms",
        f"Spread (half of the middle 50 %): target {spread['target']:.0%}, draft {spread['draft']:.0%}",
    ]
    return lines + _warning(spread)


def _precision(facts: Mapping[str, Any]) -> str:
    """Name the precision, and how matrices are stored where that differs."""
    stored = (("target", facts["weights"]), ("draft", facts["draft_weights"]))
    others = [f"{name} {'as ' if kind == 'stored' else 'in '}{kind}" for name, kind in stored if kind != facts["dtype"]]
    if facts.get("cache_dtype", facts["dtype"]) != facts["dtype"]:
        others.append(f"cache in {facts['cache_dtype']}")
    return ", ".join([str(facts["dtype"]), *others])


def _warning(spread: dict[str, float]) -> list[str]:
    if max(spread.values()) <= 0.15:
        return []
    return ["The timings spread widely: something else keeps this machine busy. Measure again when it rests."]


def _together(made: CostProfile) -> str:
    if not made.overlap:
        return "Both at once: no, they take turns (overlap: false)"
    target, draft = (f"{seconds * 1e3:.2f} ms" for seconds in (made.slow_down, made.draft_slow_down))
    return f"Both at once: a parallel draft step adds {target} to the target and {draft} to itself"


def _curve(title: str, unit: str, points: Any, slopes: Any, further: int, contexts: tuple[int, int]) -> list[str]:
    """Write a small table: rows, milliseconds at the short context, and at the long one where it was measured."""
    added = dict(slopes)
    lines = [f"{title:16} {unit:>6} {f'context {contexts[0]}':>14} {f'context {contexts[1]}':>14}   (ms)"]
    for rows, seconds in points:
        is_prompt = added.get(rows) == 0.0 and rows == points[-1][0]
        far = f"{(seconds + added[rows] * further) * 1e3:14.2f}" if rows in added and not is_prompt else " " * 14
        note = "   (a prompt, from its beginning)" if is_prompt else ""
        lines.append(f"{'':16} {rows:6.0f} {seconds * 1e3:14.2f} {far}{note}")
    return lines


def _verdict(found: Sequence[Compared]) -> list[str]:
    if not found:
        return []
    plain = found[0]  # the others' speed-up is over this one: a busy machine disturbs ratios less than seconds
    head = f"  {'':16} {'measured':>10} {'modelled':>10} {'off':>7}   {'speed-up':>10} {'modelled':>10} {'off':>7}"
    lines = ["How well it predicts (three prompts, decoding only)", head, *(_compared(one, plain) for one in found)]
    worst, wrong = max(found, key=lambda one: abs(one.off)), max(found, key=lambda one: abs(one.gain_off(plain)))
    said = f"  at worst {worst.off:+.0%} in seconds, for {worst.method}, and {wrong.gain_off(plain):+.0%} in speed-up"
    return [*lines, said + (f", for {wrong.method}" if wrong is not plain else "")]


def _compared(one: Compared, plain: Compared) -> str:
    seconds = f"{one.measured:8.2f} s {one.modelled:8.2f} s {one.off:+7.1%}"
    gains = f"{plain.measured / one.measured:10.2f} {plain.modelled / one.modelled:10.2f} {one.gain_off(plain):+7.1%}"
    return f"  {one.method:16} {seconds}   {gains}   {'once' if one.spread is None else f'spread {one.spread:.0%}'}"
