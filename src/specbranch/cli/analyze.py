"""`specbranch analyze`: what speculation can gain, by formula, on toy models, and on a map of strategies.

Owns the bare command. `analyze scale` is in `analyze_scale.py`.
"""

from __future__ import annotations

import json
from pathlib import Path

import click

from specbranch.cli.analyze_scale import scale
from specbranch.cli.results_folder import written_to


@click.group(invoke_without_command=True)
@click.option(
    "--profile",
    "profiles",
    multiple=True,
    metavar="NAME",
    help="Cost profile to map the strategies for: a shipped one or a FILE.json; may be repeated [all shipped].",
)
@click.option(
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    metavar="DIR",
    help="Folder for the charts (SVG) and analysis.json.",
)
@click.option(
    "--tokens",
    type=click.IntRange(min=100),
    default=1000,
    metavar="N",
    help="Number of tokens per measured point [1000].",
)
@click.option(
    "--json", "as_json", is_flag=True, help="Print one JSON object: farthest_off, latency (predicted, charged …), map."
)
@click.pass_context
def analyze(context: click.Context, profiles: tuple[str, ...], out: Path | None, tokens: int, as_json: bool) -> None:
    """Show the trade-off between parallelism and rollback: latency over draft length, and where each strategy pays.

    Latency comes from three sources: the paper's theorem, our model of the mechanism, and the real methods. The
    methods run on toy models with known agreement, timed by the virtual clock. The map tunes six strategies for each
    cost profile. No model is needed; it takes about a minute.

    \b
    specbranch analyze --out analysis
    specbranch analyze scale --out analysis    (replicas, batches and drafts on other machines)
    """
    if context.invoked_subcommand is not None:
        return
    from specbranch.cli.progress import counted
    from specbranch.lab.study.study import charts, record, run_study, tables

    with counted() as progress:
        study = run_study(profiles, progress, tokens)
    if out is not None:
        written_to(out, charts(study), "analysis.json", record(study))
    click.echo(json.dumps(record(study)) if as_json else tables(study))


analyze.add_command(scale)
