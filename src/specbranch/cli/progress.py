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
    Progress,
    ProgressColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
    track,
)

T = TypeVar("T")


class Bars:
    """A `progress.Onlooker` on standard error: one bar for the current work, on a terminal only."""

    def __init__(self, *columns: ProgressColumn) -> None:
        self.console = Console(stderr=True)
        shown = (TextColumn("{task.description}"), BarColumn(), *columns)
        self._bars = Progress(*shown, console=self.console, transient=True, disable=not self.console.is_terminal)
        self._task: TaskID | None = None
        self._kind = ""

    @property
    def shown(self) -> bool:
        """True if there was anything to show."""
        return self._task is not None

    def __call__(self, what: str, done: float, of: float | None, note: str = "") -> None:
        """Show the progress of some work; another first word of `what` starts a new bar."""
        kind = what.partition(" ")[0]
        if self._task is None or kind != self._kind:
            self._begin(kind)
        assert self._task is not None
        self._bars.update(self._task, description=what, total=of or None, completed=done, note=note or _steps(done, of))

    def _begin(self, kind: str) -> None:
        if self._task is None:
            self._bars.start()
        else:
            self._bars.remove_task(self._task)
        self._kind, self._task = kind, self._bars.add_task(kind, total=None, note="")

    def say(self, line: str) -> None:
        """Print a line that stays, on a terminal or not."""
        self.console.print(line, highlight=False)

    def close(self) -> None:
        """Remove the bar."""
        if self.console.is_terminal:  # elsewhere it would leave an empty line
            self._bars.stop()


def _steps(done: float, of: float | None) -> str:
    return f"{done:.0f}/{of:.0f}" if of else ""


@contextmanager
def counted() -> Iterator[Bars]:
    """Yield a progress callback (what, done, of); a terminal shows a bar with an estimate."""
    bars = Bars(TextColumn("{task.fields[note]}"), TimeElapsedColumn(), TimeRemainingColumn())
    try:
        yield bars
    finally:
        bars.close()


def pulled(name: str) -> str:
    """Return the path of a model; show its download if it must be fetched first."""
    from specbranch.assembly import ModelChoice, fetched, load_tokenizer

    bars, choice = Bars(DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn()), ModelChoice(name)
    try:
        path = fetched(choice, lambda total, done, note: bars(note or f"Fetching {name}", done, total))
    finally:
        bars.close()
    if bars.shown:
        with bars.console.status("Converting its tokenizer, once"):
            load_tokenizer(choice)
        bars.say(f"{name} is in {Path(path).parent}")
    return path


@contextmanager
def narrated(what: str) -> Iterator[None]:
    """Show one line for some work with its log messages, and a bar if they report progress; on a terminal only."""
    bars, log = Bars(TextColumn("{task.fields[note]}"), TimeElapsedColumn()), logging.getLogger("specbranch")
    if not bars.console.is_terminal:
        yield
        return
    level, narrator = log.level, _Narrator(lambda text, done, of: bars(f"{what}: {text}", done, of))
    bars(what, 0, None)
    log.addHandler(narrator)
    log.setLevel(logging.INFO)
    try:
        yield
    finally:
        log.setLevel(level)
        log.removeHandler(narrator)
        bars.close()


class _Narrator(logging.Handler):
    """Forwards log messages and their progress; warnings are printed elsewhere."""

    def __init__(self, show: Callable[[str, float, float | None], None]) -> None:
        super().__init__(logging.INFO)
        self._show = show

    def emit(self, record: logging.LogRecord) -> None:
        """Forward a message."""
        if record.levelno < logging.WARNING:
            self._show(record.getMessage(), getattr(record, "done", 0), getattr(record, "of", None))


def tracked(items: Sequence[T], what: str) -> Iterable[T]:
    """Show the progress through a list, if standard error is a terminal and standard output is not."""
    if len(items) < 2 or not sys.stderr.isatty() or sys.stdout.isatty():
        return items
    return track(items, what, console=Console(stderr=True), transient=True)
