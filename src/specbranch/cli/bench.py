"""`specbranch bench`: decoding methods compared on the same pair, prompts and hardware.

Owns `bench run` (one request at a time) and `bench compare` (two such runs). `bench load` (many requests at once) is in
`bench_load.py`, `bench regret` in `bench_regret.py`.
"""

from __future__ import annotations

import json
import shlex
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import click

from specbranch.cli.bench_load import load
from specbranch.cli.bench_options import (
    CACHE_OPTION,
    DATA,
    DRAFT_OPTION,
    DRAFT_SHAPE_OPTION,
    DRAFT_WEIGHTS_OPTION,
    PROFILES,
    PROMPTS,
    TARGET_OPTION,
    TARGET_SHAPE_OPTION,
    WARM_UP_OPTION,
    WEIGHTS_OPTION,
)
from specbranch.cli.bench_regret import regret
from specbranch.cli.options import DRAFT_WINDOW_OPTION, TABLES
from specbranch.cli.sections import SectionedCommand, options_of
from specbranch.config import ExecutorName, check_warm_up
from specbranch.lab.bench.methods import OTHER_ENGINES, listed
from specbranch.lab.bench.presets import DEFAULTS, PRESET_HELP, PRESETS, with_preset
from specbranch.lab.suites.suite import ALL_SHIPPED, SUITES
from specbranch.pairs import DEFAULT_PAIR

if TYPE_CHECKING:
    from specbranch.lab.bench.order import BenchOrder

OUT = Path("bench-results")
_what, _models, _how, _where = (options_of(title) for title in ("What to run", "Models", "How", "Where"))


@click.group()
def bench() -> None:
    """Compare decoding methods on the same pair, prompts and hardware."""


@bench.command(
    cls=SectionedCommand,
    tables={
        "Presets": PRESET_HELP,
        "Suites": list(SUITES.items()),
        **TABLES,
        "Methods of other engines": list(OTHER_ENGINES.items()),
        "Profiles (--clock)": PROFILES,
    },
)
@_what(
    "--preset",
    type=click.Choice(sorted(PRESETS)),
    help="Preset of the options below; options on the command line override it.",
)
@_what("--pair", multiple=True, metavar="NAME", help=f"Pair to run; may be repeated [{DEFAULT_PAIR}].")
@_what("--target", **TARGET_OPTION)
@_what("--draft", **DRAFT_OPTION)
@_what(
    "--methods",
    metavar="A,B,…",
    help="Methods, see below. METHOD:POLICY takes another policy (specbranch:confidence). METHOD-PART "
    "switches a part off (specbranch-trees). METHOD@SETTING=VALUE overrides a tuned setting "
    f"(specbranch:paper@stop_below=0.2). Plain decoding always runs too [{DEFAULTS['methods']}].",
)
@_what(
    "--suites",
    multiple=True,
    metavar="NAME",
    help=f"Suite, see below; may be repeated, or several names with commas [{ALL_SHIPPED}].",
)
@_what("--prompts", **PROMPTS)
@_what("--limit", type=int, metavar="N", help="Use only the first N prompts of each suite.")
@_what("--max-tokens", type=click.IntRange(min=2), metavar="N", help="Maximum number of tokens in an answer [128].")
@_what(
    "--context",
    type=click.IntRange(min=1),
    multiple=True,
    metavar="N",
    help="Insert filler text before each prompt, so that prompt and answer have about N tokens; may be "
    "repeated [no filler].",
)
@_what(
    "--temperature",
    "temperatures",
    type=float,
    multiple=True,
    metavar="T",
    help="Sampling temperature; may be repeated [0].",
)
@_models("--target-shape", **TARGET_SHAPE_OPTION)
@_models("--draft-shape", **DRAFT_SHAPE_OPTION)
@_models("--device", metavar="DEVICE", help="Device of the target: cpu, cuda, cuda:1 … [a GPU if there is one].")
@_models("--draft-device", metavar="DEVICE", help="Device of the draft [the target's].")
@_models("--weights", **WEIGHTS_OPTION)
@_models("--draft-weights", **DRAFT_WEIGHTS_OPTION)
@_models("--draft-window", **DRAFT_WINDOW_OPTION)
@_models("--cache-dtype", **CACHE_OPTION)
@_models("--executor", metavar="NAME", help=f"How draft and target run: {', '.join(get_args(ExecutorName))} [serial].")
@_how(
    "--clock",
    multiple=True,
    metavar="PROFILE",
    help="Cost profile (a name or a file) that models time, instead of measuring it; may be repeated.",
)
@_how(
    "--repeats",
    type=click.IntRange(min=1),
    metavar="N",
    help="Number of measurements of each prompt [1; a modelled clock needs no more].",
)
@_how(
    "--tune/--no-tune",
    default=None,
    help="Tune each method on the shipped prompts first, once per pair and clock [tune].",
)
@_how(
    "--trials",
    type=click.IntRange(min=1),
    metavar="N",
    help="Number of settings to try of a method with several knobs [40].",
)
@_how(
    "--tuning-prompts",
    type=click.IntRange(min=1),
    metavar="N",
    help="Number of prompts of each shipped suite to tune on, taken from its end [4].",
)
@_how(
    "--outside-limit",
    type=click.IntRange(min=1),
    metavar="N",
    help="Number of prompts of each suite for methods of other engines [all].",
)
@_how(
    "--timeline/--no-timeline",
    default=None,
    help="Draw a timeline of one answer of specbranch and one of pearl, by the wall clock [no].",
)
@_how(
    "--profile",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Profile of this machine to tune by, for the wall clock [measured first and saved in DIR].",
)
@_how(
    "--config",
    "configs",
    multiple=True,
    metavar="JSON",
    help='Run this setting as well: \'{"method": "pearl", "num_speculative_tokens": 8}\'.',
)
@_how(
    "--predictor",
    metavar="DIR",
    help="Output folder of `specbranch train-predictor`, for policy paper [the pair's own].",
)
@_how(
    "--experience",
    "keep_experience",
    is_flag=True,
    help="By the wall clock, planned methods start with what earlier runs learned about the pair on "
    "this machine, and add to it [they start from nothing].",
)
@_how("--force-profile", is_flag=True, help="Use a profile even if it was measured with another pair.")
@_how("--warm-up", **WARM_UP_OPTION)
@_how("--seed", type=int, default=0, metavar="N", help="Seed from which each prompt gets a seed of its own [0].")
@_where("--data", **DATA)
@_where("--records", type=click.Path(path_type=Path), metavar="DIR", help="Folder of the records [the cache folder].")
@_where(
    "--texts",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="With --clock, replay the texts that another target recorded in DIR, its --records [the target's own texts].",
)
@_where(
    "--out",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Folder of the results; the same command resumes in it [bench-results].",
)
@click.option("--quiet", is_flag=True, help="Print no table, only the last line.")
def run(**given: Any) -> None:
    """Run methods on prompts; report tokens per second, speedup over plain decoding, and whether all texts are equal.

    \b
    specbranch bench run --preset quick
    specbranch bench run --suites humaneval,gsm8k --limit 8 --repeats 3 --out here
    specbranch bench run --pair smollm2-weak --pair smollm2-strong --clock c10 --clock h200-1b-8b
    specbranch bench run --preset gpu-core --pair smollm2-weak --out gpu

    By the wall clock, the methods take turns on each prompt. With --clock, decisions are real and time is modelled: the
    target's text is recorded once, and every method is replayed from the record.

    The command writes DIR/results.json, results.csv and report.html; its last line on standard output is JSON. After an
    interruption the same command resumes. With --clock the rows are then those of an uninterrupted run; by the wall
    clock specbranch, tree and auto learn anew. Other commands may add pairs, methods and prompts to the same DIR.

    A pair in larger shapes (--target-shape, --draft-shape) is tuned in its own shape, with the costs of the larger one,
    on the same device.
    """
    from specbranch.cli.progress import counted, pulled
    from specbranch.lab.bench.job import Reporter, run_bench
    from specbranch.lab.bench.table import show

    order = _order(with_preset(given), context_is_given=bool(given["context"]))
    with counted() as progress:
        results = run_bench(order, Reporter(progress, partial(click.echo, err=True), pulled))
    if not given["quiet"]:
        show(results)
        click.echo(f"\nWritten: {order.out / 'results.json'}, results.csv, report.html")
    click.echo(results.last_line())


bench.add_command(load)
bench.add_command(regret)


@bench.command("compare")
@click.argument("before", type=click.Path(path_type=Path))
@click.argument("after", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def compare_results(before: Path, after: Path, as_json: bool) -> None:
    """Report what changed from one results.json to another, and whether the change exceeds the noise."""
    from specbranch.lab.bench.compare import compare
    from specbranch.lab.bench.results import Results

    found = compare(Results.load(_file(before)), Results.load(_file(after)))
    click.echo(json.dumps(found.to_dict()) if as_json else "\n".join(found.lines()))


def _file(path: Path) -> Path:
    return path / "results.json" if path.is_dir() else path


def _order(wanted: dict[str, Any], context_is_given: bool) -> BenchOrder:
    """Translate options into an order; errors are reported in the order of these checks."""
    from specbranch.lab.bench.clocks import named_clocks
    from specbranch.lab.bench.order import (
        BenchOrder,
        checked_methods,
        checked_running,
        checked_texts,
        chosen_pairs,
        given_settings,
    )
    from specbranch.lab.bench.recorded_pair import Workload

    def same(*names: str) -> dict[str, Any]:
        return {name: wanted[name] for name in names if wanted[name] is not None}

    check_warm_up(wanted["warm_up"] or "full")
    clocks = named_clocks(wanted["clock"])
    usual = same("target_shape", "draft_shape", "limit", "outside_limit")
    named = wanted["pair"], wanted["target"], wanted["draft"]
    pairs = chosen_pairs(*named, usual, wanted["of_pair"], wanted["preset"])
    return BenchOrder(
        pairs=pairs,
        methods=checked_methods(listed(wanted["methods"]), pairs, clocks, wanted["tune"]),
        settings=given_settings(wanted["configs"], pairs),
        workloads=tuple(
            Workload(temperature=temperature, **same("max_tokens", "seed"))
            for temperature in dict.fromkeys(wanted["temperatures"] or (0.0,))
        ),
        clocks=clocks,
        running=checked_running(
            wanted["executor"],
            wanted["device"],
            wanted["draft_device"],
            wanted["weights"],
            wanted["draft_weights"],
            wanted["draft_window"],
            wanted["cache_dtype"],
            by_the_wall=clocks[0].is_wall,
        ),
        contexts=tuple(dict.fromkeys(wanted["context"])),
        may_leave_out_contexts=not context_is_given,
        out=wanted["out"] or OUT,
        command=_command(),
        **same("suites", "prompts", "data", "limit", "repeats", "tune", "trials", "tuning_prompts", "profile"),
        texts=checked_texts(wanted["texts"], by_the_wall=clocks[0].is_wall),
        **same("force_profile", "predictor", "keep_experience", "timeline", "records", "warm_up"),
    )


def _command() -> str:
    """Return what was typed, without the folders of this machine."""
    words = (Path(word).name if Path(word).is_absolute() else word for word in sys.argv[1:])
    return shlex.join(["specbranch", *words])
