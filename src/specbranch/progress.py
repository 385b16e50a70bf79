"""Progress of long work: the interface that the work calls. It does not own how progress is drawn: see `cli/`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

StepsDone = Callable[[str, int, int], None]  # what is done, steps done, of how many


class Onlooker(Protocol):
    """Shows the progress of long work."""

    def __call__(self, what: str, done: float, of: float | None, note: str = "") -> None:
        """Show the work `what`, how much of it is done, of how much if that is known, and a note."""
        ...

    def say(self, line: str) -> None:
        """Show a line that stays."""
        ...


class Nobody:
    """Shows nothing."""

    def __call__(self, what: str, done: float, of: float | None, note: str = "") -> None:
        """Show nothing."""

    def say(self, line: str) -> None:
        """Show nothing."""


silent = Nobody()
