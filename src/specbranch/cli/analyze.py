"""`specbranch analyze`: what speculation can gain, by formula, on toy models, and on a map of strategies."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

from specbranch.cli.sections import SectionedCommand
from specbranch.errors import BadParameter

if TYPE_CHECKING:
    from specbranch.lab.study.study import Study


@click.command(cls=SectionedCommand)
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
def analyze(profiles: tuple[str, ...], out: Path | None, tokens: int, as_json: bool) -> None:
    """Show the trade-off between parallelism and rollback: latency over draft length, and where each strategy pays.

    Latency comes from three sources: the paper's theorem, our model of the mechanism, and the real methods. The
    methods run on toy models with known agreement, timed by the virtual clock. The map tunes six strategies for each
    cost profile. No model is needed; it takes about a minute.
    """
    from specbranch.cli.progress import counted
    from specbranch.lab.study.study import record, run_study, tables

    with counted() as progress:
        study = run_study(profiles, progress, tokens)
    if out is not None:
        _write(study, out)
    click.echo(json.dumps(record(study)) if as_json else tables(study))


def _write(study: Study, folder: Path) -> None:
    from specbranch.lab.study.study import charts, record

    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, drawing in charts(study).items():
            (folder / f"{name}.svg").write_text(drawing, encoding="utf-8")
        (folder / "analysis.json").write_text(json.dumps(record(study), indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        said = f"Cannot write to {folder} ({error}). Name a folder that can be written with --out."
        raise BadParameter(said) from error
    click.echo(f"Charts and analysis.json are in {folder}", err=True)
