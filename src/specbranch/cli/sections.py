"""Help in sections: options under headings, and tables of the names that an option takes.

Owns the layout of `--help`, not its words. Options without a section come last, under "Options".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click

OTHERS = "Options"
PATH = click.Path(path_type=Path)
HelpRow = tuple[str, str]
F = TypeVar("F", bound=Callable[..., Any])


class Sectioned(click.Option):
    """An option with its section."""

    def __init__(self, *arguments: Any, section: str = OTHERS, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self.section = section


class SectionedCommand(click.Command):
    """A command whose help has sections, and tables below them."""

    def __init__(self, *arguments: Any, tables: Mapping[str, Sequence[HelpRow]] | None = None, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self.tables = tables or {}

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options section by section, then the tables."""
        for title, rows in (*self._sections(ctx).items(), *self.tables.items()):
            with formatter.section(title):
                formatter.write_dl(list(rows))

    def _sections(self, ctx: click.Context) -> dict[str, list[HelpRow]]:
        found: dict[str, list[HelpRow]] = {}
        for parameter in self.get_params(ctx):
            row = parameter.get_help_record(ctx)
            if row is not None and isinstance(parameter, click.Option):
                found.setdefault(getattr(parameter, "section", OTHERS), []).append(row)
        others = found.pop(OTHERS, [])
        return {**found, OTHERS: others} if others else found


def options_of(section: str) -> Callable[..., Callable[[F], F]]:
    """Return `click.option` for options of one section."""

    def option(*names: str, **settings: Any) -> Callable[[F], F]:
        return click.option(*names, cls=Sectioned, section=section, **settings)

    return option
