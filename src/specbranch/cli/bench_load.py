"""`specbranch bench load`: many requests at once, their throughput beside that of plain decoding."""

from __future__ import annotations

import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, get_args

import click

from specbranch.cli.bench_options import (
    CACHE_OPTION,
    DATA,
    DRAFT_OPTION,
    DRAFT_SHAPE_OPTION,
    PROFILES,
    PROMPTS,
    TARGET_OPTION,
    TARGET_SHAPE_OPTION,
    WARM_UP_OPTION,
    WEIGHTS_OPTION,
)
from specbranch.cli.options import BATCHED_TOKENS_OPTION, TABLES
from specbranch.cli.sections import SectionedCommand, options_of
from specbranch.config import ExecutorName, WarmUpName, check_warm_up
from specbranch.errors import BadParameter
from specbranch.lab.bench.methods import OTHER_ENGINES, listed
from specbranch.lab.bench.results import BASELINE
from specbranch.lab.suites.suite import ALL_SHIPPED, SUITES
from specbranch.pairs import DEFAULT_PAIR

if TYPE_CHECKING:
    from specbranch.lab.bench.under_load import LoadRow

_what, _models, _how, _where = (options_of(title) for title in ("What to run", "Models", "How", "Where"))


@click.command(
    "load", cls=SectionedCommand, tables={"Suites": list(SUITES.items()), "Profiles (--clock)": PROFILES, **TABLES}
)
@_what("--pair", metavar="NAME", help=f"Pair to run [{DEFAULT_PAIR}].")
@_what("--target", **TARGET_OPTION)
@_what("--draft", **DRAFT_OPTION)
@_what(
    "--methods",
    metavar="A,B,…",
    default="specbranch",
    help="Methods to compare; plain decoding always runs too [specbranch].",
)
@_what(
    "--at-once",
    metavar="N,N,…",
    default="1,2,4,8,16,32",
    help="Numbers of requests in flight, i.e. batch sizes [1,2,4,8,16,32].",
)
@_what("--suites", multiple=True, metavar="NAME", help=f"Suite, see below; may be repeated [{ALL_SHIPPED}].")
@_what("--prompts", **PROMPTS)
@_what("--limit", type=click.IntRange(min=1), default=4, metavar="N", help="Number of prompts of each suite [4].")
@_what(
    "--max-tokens",
    type=click.IntRange(min=2),
    default=96,
    metavar="N",
    help="Maximum number of tokens in an answer [96].",
)
@_models("--target-shape", **TARGET_SHAPE_OPTION)
@_models("--draft-shape", **DRAFT_SHAPE_OPTION)
@_models("--device", metavar="DEVICE", help="Device of the target: cpu, cuda, cuda:1 … [a GPU if there is one].")
@_models("--weights", **WEIGHTS_OPTION)
@_models("--cache-dtype", **CACHE_OPTION)
@_models("--max-num-batched-tokens", **BATCHED_TOKENS_OPTION)
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
    default=3,
    metavar="N",
    help="Number of measurements of each method, by the wall clock [3].",
)
@_how("--warm-up", **WARM_UP_OPTION)
@_where("--data", **DATA)
@_where("--records", type=click.Path(path_type=Path), metavar="DIR", help="Folder of the records [the cache folder].")
@_where("--out", type=click.Path(path_type=Path), metavar="DIR", help="Folder for load.json and a chart per clock.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def load(**given: Any) -> None:
    """Decode many requests at once; report their throughput, and its ratio to plain decoding.

    \b
    specbranch bench load --at-once 1,4,16
    specbranch bench load --clock c10 --at-once 1,4,16
    specbranch bench load --pair smollm2-weak --clock h200-68m-7b --methods specbranch,tree,speculative --out load
    specbranch bench load --target-shape 8b --draft-shape 1b --device cuda --at-once 1,4,16,64

    N requests are in flight at a time; when one ends, the next starts. By the wall clock, the methods take turns, the
    first turn is not counted, and prompts are prefilled. With --clock, decisions are real and time is modelled, as in
    `bench run --clock`: the target's answers are recorded once and replayed. Prefill then takes no time.
    """
    rows = _loaded(given)
    if given["out"] is not None:
        _write_load(rows, given["out"])
    found = {"rows": [row.to_dict() for row in rows]}
    click.echo(json.dumps(found) if given["as_json"] else "\n".join(_load_table(rows)))


def _loaded(given: dict[str, Any]) -> list[LoadRow]:
    from specbranch.cli.progress import counted, pulled
    from specbranch.lab.bench.clocks import named_clocks
    from specbranch.lab.bench.methods import chosen_methods
    from specbranch.lab.bench.pair_setup import PairOrder, Running, make_subject
    from specbranch.lab.bench.recorded_pair import RecordedPair, Workload
    from specbranch.lab.bench.under_load import run_by_wall, run_load
    from specbranch.lab.suites.suite import load_suites

    clocks, counts = named_clocks(given["clock"]), _counts(given["at_once"])
    named = {name: given[name] for name in ("pair", "target", "draft", "target_shape", "draft_shape")}
    if not named["target"]:
        named["pair"] = named["pair"] or DEFAULT_PAIR
    check_warm_up(given["warm_up"] or "full")
    order = PairOrder(**named)
    methods = [name for name in chosen_methods(listed(given["methods"]), order.has_draft) if name != BASELINE]
    if outside := [name for name in methods if name in OTHER_ENGINES]:
        raise BadParameter(f"{outside[0]} is no method of this engine, which `bench load` compares. Leave it out.")
    names = [name for one in given["suites"] for name in listed(one)]
    names = names or ([] if given["prompts"] else [ALL_SHIPPED])
    suites = load_suites(names, files=given["prompts"], data=given["data"], limit=given["limit"])
    pulled(order.models[0])
    asked = {name: given[name] for name in ("device", "weights", "cache_dtype")}
    running = Running(executor=given["executor"] or "serial", **asked)
    workload = Workload(max_tokens=given["max_tokens"])
    with TemporaryDirectory() as recipes, counted() as progress:
        subject = make_subject(order, running, Path(recipes))
        target, draft, title = subject.target, subject.draft, subject.title
        warm_up: WarmUpName = "lazy" if given["clock"] else given["warm_up"] or "full"
        with RecordedPair(
            target=target,
            draft=draft,
            title=title,
            folder=given["records"],
            running=running,
            max_num_batched_tokens=given["max_num_batched_tokens"],
            warm_up=warm_up,
            max_batch=max(counts),
        ) as recorded:
            if given["clock"]:
                return run_load(recorded, suites, workload, methods, clocks, counts, progress)
            return run_by_wall(recorded, suites, workload, methods, counts, given["repeats"], progress)


def _counts(text: str) -> list[int]:
    try:
        found = [int(word) for word in text.split(",") if word.strip()]
    except ValueError:
        found = []
    if not found or min(found) < 1:
        raise BadParameter(f"--at-once is {text!r}; expected numbers of requests such as 1,4,16.")
    return list(dict.fromkeys(found))


def _load_table(rows: list[LoadRow]) -> list[str]:
    from specbranch.lab.bench.under_load import table

    return table(rows)


def _write_load(rows: list[LoadRow], out: Path) -> None:
    from specbranch.files import write_whole
    from specbranch.lab.bench.under_load import picture

    write_whole(out / "load.json", json.dumps({"rows": [row.to_dict() for row in rows]}, indent=2) + "\n")
    for clock in dict.fromkeys(row.clock for row in rows):
        write_whole(out / f"load-{clock}.svg", picture(rows, clock))
