"""Write docs/cli.md: the help of every command, as the commands print it. Run it after a change to a command or an
option."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import click

from specbranch.cli.main import cli

FILE = Path(__file__).parents[1] / "docs" / "cli.md"
WIDTH = 100  # columns, whatever terminal this runs in
HEAD = """# Command line

The output of `--help`, command by command. `scripts/write_cli_docs.py` writes this file, and a test
compares the two.

Exit codes: 0 done, 1 a check failed (`verify`), 2 an error that the user can fix, 130 interrupted.
"""


def contexts(command: click.Command, name: str, above: click.Context | None = None) -> Iterator[click.Context]:
    """Yield a command and all that lie below it."""
    context = click.Context(
        command, parent=above, info_name=name, terminal_width=WIDTH, help_option_names=["-h", "--help"]
    )
    yield context
    if isinstance(command, click.Group):
        for below in command.list_commands(context):
            found = command.get_command(context, below)
            assert found is not None
            yield from contexts(found, below, context)


def document() -> str:
    """Return the whole file."""
    parts = [
        f"## {context.command_path}\n\n```text\n{context.get_help()}\n```\n" for context in contexts(cli, "specbranch")
    ]
    return "\n".join([HEAD, *parts])


if __name__ == "__main__":
    FILE.write_text(document(), encoding="utf-8")
