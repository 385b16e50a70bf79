"""`specbranch bench regret`: planners judged on random cases."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from specbranch.cli.sections import SectionedCommand, options_of
from specbranch.lab.bench.methods import listed

if TYPE_CHECKING:
    from specbranch.lab.regret.case import Half
    from specbranch.lab.regret.figures import CaseResult
    from specbranch.lab.regret.recorded_texts import RecordedText

_what, _how = (options_of(title) for title in ("What to run", "How"))


@click.command("regret", cls=SectionedCommand)
@_what(
    "--methods",
    metavar="A,B,…",
    default="specbranch,auto",
    help="Planned methods to judge: specbranch, auto, tree [specbranch,auto].",
)
@_what("--cases", type=click.IntRange(min=1), default=40, metavar="N", help="Number of cases [40].")
@_what("--seed", type=click.IntRange(min=0), default=0, metavar="FIRST", help="Seed of the first case [0].")
@_what(
    "--half",
    type=click.Choice(["tune", "report"]),
    help="Run one half of the seeds only. Set constants on tune (even seeds) and report on report (odd seeds) [both].",
)
@_what("--show", type=click.IntRange(min=0), metavar="SEED", help="Run one case and print it in full.")
@_what(
    "--texts",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Use texts and proposals of a real pair, written by scripts/write_regret_texts.py [random ones].",
)
@_what("--forest", is_flag=True, help="Let a single device grow and verify draft trees by itself.")
@_how("--jobs", type=click.IntRange(min=1), metavar="N", help="Number of processes [cores].")
@_how("--worst", type=click.IntRange(min=0), default=5, metavar="N", help="Number of worst cases to list [5].")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def regret(
    methods: str,
    cases: int,
    seed: int,
    half: Half | None,
    show: int | None,
    texts: Path | None,
    forest: bool,
    jobs: int | None,
    worst: int,
    as_json: bool,
) -> None:
    """Put the planner on random machines and texts; report how far it stays behind the best fixed method.

    \b
    specbranch bench regret
    specbranch bench regret --half report --cases 200
    specbranch bench regret --show 5
    specbranch bench regret --cases 400 --json > regret.json

    A case is drawn from its seed alone. It has random costs (draft step ÷ target forward 1/50 to 1/2, further rows from
    free to half a forward, host time to 1 ms) and an agreement of 0.3 to 0.95 that changes between and within requests.
    Prompt lookup is useless, perfect or between. There are first-time spikes of 30 to 3,000 ms, stretches in which the
    machine is twice as slow, and one to sixteen requests at once.

    The models are toys and the clock is virtual, so a case takes seconds. Each method decodes eight requests of 128
    tokens, from empty experience. It learns costs from its rounds, as on a real machine; it never sees the case.

    Regret is the time of a method over that of the best fixed one, minus 1. Fixed are plain decoding, lookup,
    speculative with 2, 5 and 10 tokens, and tree; with two devices also pearl. A spike itself is charged to nobody;
    what the planner concludes from it is.
    """
    from specbranch.lab.regret.case import seeds_of
    from specbranch.lab.regret.figures import to_dict
    from specbranch.lab.regret.recorded_texts import load_texts, scripts_of
    from specbranch.lab.regret.table import shown, table

    names, recorded = tuple(listed(methods)), load_texts(texts) if texts else ()
    seeds = seeds_of(seed, cases, half) if show is None else [show]
    results, seconds = _judged(seeds, names, jobs, recorded, forest)
    if as_json:
        click.echo(json.dumps({"half": half, "run_seconds": round(seconds, 1), **to_dict(results, names)}))
    elif show is not None:
        click.echo("\n".join(shown(scripts_of(show, recorded).case, results[0])))
    else:
        click.echo("\n".join([*table(results, names, worst), "", f"Took {seconds:.0f} s."]))


def _judged(
    seeds: list[int], methods: tuple[str, ...], jobs: int | None, texts: tuple[RecordedText, ...], forest: bool
) -> tuple[list[CaseResult], float]:
    """Run the cases of the regret lab; returns their results and how long that took."""
    from specbranch.cli.progress import counted
    from specbranch.lab.regret.job import run_cases
    from specbranch.machine_load import usable_cores

    started = time.perf_counter()
    with counted() as progress:
        results = run_cases(seeds, methods, jobs or usable_cores(), progress, texts, forest)
    return results, time.perf_counter() - started
