"""Writes the results of a study to a folder: charts as SVG, and one JSON file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from specbranch.errors import BadParameter


def written_to(folder: Path, charts: Mapping[str, str], name: str, record: Mapping[str, Any]) -> None:
    """Write the charts and the record, called `name`; say where they are."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for chart, drawing in charts.items():
            (folder / f"{chart}.svg").write_text(drawing, encoding="utf-8")
        (folder / name).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        said = f"Cannot write to {folder} ({error}). Name a folder that can be written with --out."
        raise BadParameter(said) from error
    click.echo(f"Charts and {name} are in {folder}", err=True)
