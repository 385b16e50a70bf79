"""How far a long piece of work has come: what those who do it call. Who draws it, and where, is not their business."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

StepsDone = Callable[[str, int, int], None]  # what is done, steps done, of how many


class Onlooker(Protocol):
    """Somebody who watches a long piece of work."""

    def __call__(self, what: str, done: float, of: float | None, note: str = "") -> None:
        """Show what is done, how far it is, of how much where that is known, and what there is to note."""
        ...

    def say(self, line: str) -> None:
        """Show a line that stays."""
        ...


class Nobody:
    """Watches without a word."""

    def __call__(self, what: str, done: float, of: float | None, note: str = "") -> None:
        """Show nothing."""

    def say(self, line: str) -> None:
        """Show nothing."""


silent = Nobody()
