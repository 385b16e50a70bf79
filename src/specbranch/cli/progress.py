"""Progress bars on standard error, so that standard output stays clean for pipes."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TypeVar

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn, track

T = TypeVar("T")


def pulled(name: str | None) -> Path | None:
    """Make sure a known model is here, showing its download; None for a model that is not a known one."""
    from specbranch.assembly import DEFAULT_TARGET
    from specbranch.models import store

    name = name or DEFAULT_TARGET
    if name not in store.KNOWN or Path(name).exists():
        return None
    return store.installed(name) or _pull(name)


def tracked(items: Sequence[T], what: str) -> Iterable[T]:
    """Show how far a long list has come, where somebody looks at standard error and standard output goes elsewhere."""
    if len(items) < 2 or not sys.stderr.isatty() or sys.stdout.isatty():
        return items
    return track(items, what, console=Console(stderr=True), transient=True)


def _pull(name: str) -> Path:
    from specbranch.models import store

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bars:
        bar = bars.add_task(f"Fetching {name}", total=None)
        path = store.pull(name, lambda total, done, note: bars.update(bar, total=total or None, completed=done, description=note or name))
    with console.status("Converting its tokenizer, once"):
        from specbranch.assembly import ModelChoice, load_tokenizer

        load_tokenizer(ModelChoice(name))
    console.print(f"{name} is in {path.parent}", highlight=False)
    return path
