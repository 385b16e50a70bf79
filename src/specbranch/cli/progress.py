"""Progress bars on standard error, so that standard output stays clean for pipes."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
    track,
)

T = TypeVar("T")


def pulled(name: str) -> str:
    """Return where to load a model from, showing its download if it has to be fetched first."""
    from specbranch.assembly import ModelChoice, fetched, load_tokenizer

    console, choice = Console(stderr=True), ModelChoice(name)
    bar = _Bar(name, console)
    try:
        path = fetched(choice, bar)
    finally:
        bar.close()
    if bar.shown:
        with console.status("Converting its tokenizer, once"):
            load_tokenizer(choice)
        console.print(f"{name} is in {Path(path).parent}", highlight=False)
    return path


@contextmanager
def narrated(what: str) -> Iterator[None]:
    """Say on one line what is done, and what the program tells of it meanwhile; only where somebody looks."""
    console, log = Console(stderr=True), logging.getLogger("specbranch")
    if not console.is_terminal:
        yield
        return
    with console.status(what) as status:
        level, narrator = log.level, _Narrator(lambda text: status.update(f"{what}: {text}"))
        log.addHandler(narrator)
        log.setLevel(logging.INFO)
        try:
            yield
        finally:
            log.setLevel(level)
            log.removeHandler(narrator)


class _Narrator(logging.Handler):
    """Passes on what is told by the way; warnings have their own place."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        super().__init__(logging.INFO)
        self._tell = tell

    def emit(self, record: logging.LogRecord) -> None:
        """Pass a message on."""
        if record.levelno < logging.WARNING:
            self._tell(record.getMessage())


def tracked(items: Sequence[T], what: str) -> Iterable[T]:
    """Show how far a long list has come, where somebody looks at standard error and standard output goes elsewhere."""
    if len(items) < 2 or not sys.stderr.isatty() or sys.stdout.isatty():
        return items
    return track(items, what, console=Console(stderr=True), transient=True)


@contextmanager
def counted() -> Iterator[Callable[[str, int, int], None]]:
    """Yield a function to tell what is done, how far it is and of how much; shown with an estimate where somebody
    looks."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(elapsed_when_finished=True),
    )
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bars:
        tasks: dict[str, TaskID] = {}

        def tell(what: str, done: int, total: int) -> None:
            name = what.partition(" ")[0]  # one bar for each kind of work, whatever part of it is under way
            task = tasks[name] if name in tasks else tasks.setdefault(name, bars.add_task(what, total=total))
            bars.update(task, description=what, completed=done, total=total)

        yield tell


class _Bar:
    """A bar that appears with the first report, so that a model which is here already shows none."""

    def __init__(self, name: str, console: Console) -> None:
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
        )
        self._name = name
        self._bars = Progress(*columns, console=console, transient=True)
        self._task: TaskID | None = None

    @property
    def shown(self) -> bool:
        """Whether there was anything to do."""
        return self._task is not None

    def __call__(self, total: int, done: int, note: str) -> None:
        if self._task is None:
            self._bars.start()
            self._task = self._bars.add_task(f"Fetching {self._name}", total=None)
        self._bars.update(self._task, total=total or None, completed=done, description=note or self._name)

    def close(self) -> None:
        """Take the bar away."""
        if self.shown:
            self._bars.stop()
