"""`specbranch doctor`: a check of the installation and a pair, and the speedup to expect."""

from __future__ import annotations

import json
import os
import shutil
import sys
import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, get_args

import click

from specbranch.cli.options import DRAFT, PAIR, TABLES, TARGET, with_options
from specbranch.cli.sections import SectionedCommand
from specbranch.config import ExecutorName

if TYPE_CHECKING:
    from specbranch.lab.doctor.finding import Finding
    from specbranch.lab.doctor.gains import Prediction

FINDING_COLOURS = {"ok": "green", "note": "yellow", "problem": "red"}


@click.command(cls=SectionedCommand, tables={"Pairs": TABLES["Pairs"]})
@with_options(PAIR, TARGET, DRAFT)
@click.option(
    "--executor",
    type=click.Choice(get_args(ExecutorName)),
    default="serial",
    help="How the models would run: in turn, in parallel processes, or on streams of a GPU [serial].",
)
@click.option("--colour/--no-colour", default=None, help="Colour the findings [on a terminal].")
@click.option(
    "--json", "as_json", is_flag=True, help="Print one JSON object: well, findings, predictions, best, steps."
)
def doctor(executor: ExecutorName, colour: bool | None, as_json: bool, **given: Any) -> None:
    """Check this installation and a pair, and predict the speedup of each method.

    It checks versions, processor, kernels, memory, disk and models. The target answers three prompts. The command
    compares the draft with the target, times both, and replays the answers with each method in modelled time. It
    fetches nothing, takes less than a minute on two cores, and exits with 1 if there is a problem.

    With --draft tcp://HOST:PORT it asks that draft worker instead, and says whether the link pays: it measures three
    answers with and without the worker.
    """
    from specbranch.cli.profile import pair_choices
    from specbranch.cli.progress import counted
    from specbranch.lab.doctor.examine import Patient, examine
    from specbranch.lab.measure.loaded_pair import pair_name
    from specbranch.lab.measure.step_times import step_table

    target, draft = pair_choices(given)
    name = pair_name(given["pair"], target.name, draft.name)
    shown = sys.stdout.isatty() and not os.environ.get("NO_COLOR") if colour is None else colour
    with counted() as progress:
        tell = (lambda finding: None) if as_json else (lambda finding: _echo(finding, shown))
        report = examine(Patient(target, draft, name, executor), tell, progress)
    if as_json:
        click.echo(json.dumps({"pair": name, **report.to_dict()}, ensure_ascii=False))
    else:
        click.echo("\n".join([*step_table(report.steps), *_table(report.predictions)]))
    if not report.is_well:
        click.get_current_context().exit(1)


def _echo(finding: Finding, shown: bool) -> None:
    level = click.style(f"{finding.level:8}", fg=FINDING_COLOURS[finding.level]) if shown else f"{finding.level:8}"
    words = " ".join(part for part in (f"{finding.about}: {finding.said}", finding.advice) if part)
    wide = max(shutil.get_terminal_size().columns, 40) - 8
    lines = textwrap.wrap(words, wide, break_long_words=False, break_on_hyphens=False)
    click.echo(level + ("\n" + " " * 8).join(lines), color=shown)


def _table(predictions: Sequence[Prediction]) -> list[str]:
    if not predictions:
        return []
    lines = ["", "Predicted speed-up over plain decoding (three prompts, modelled from what was measured):"]
    for one in sorted(predictions, key=lambda one: -one.speedup):
        length = one.setting.get("num_speculative_tokens")
        figures = f"  {one.method:16} {one.speedup:5.2f}   {one.tokens_per_forward or 0:4.2f} tokens a forward"
        lines.append(f"{figures}   drafts of {length}" if length else figures)
    return lines
