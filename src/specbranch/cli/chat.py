"""`specbranch chat`: a conversation on the terminal."""

from __future__ import annotations

import sys
from typing import Any

import click

from specbranch.cli.options import MODEL, SAMPLING, SPECULATION, load_llm, sampling_params, with_options


@click.command()
@click.option("--system", metavar="TEXT", help="What the model is told before the conversation.")
@with_options(MODEL, SPECULATION, SAMPLING)
@click.option("--colour/--no-colour", default=None, help="Colour tokens by origin [on a terminal].")
def chat(system: str | None, colour: bool | None, **given: Any) -> None:
    """Talk with the model. An empty line or Ctrl-D ends the conversation; Ctrl-C ends an answer."""
    from specbranch.cli.paint import show, summary

    params = sampling_params(given)
    messages = [{"role": "system", "content": system}] if system else []
    with load_llm(given) as llm:
        while (question := _ask()) is not None:
            messages.append({"role": "user", "content": question})
            try:
                output = show(llm.stream_chat(messages, params), sys.stdout.isatty() if colour is None else colour)
            except KeyboardInterrupt:
                click.echo("\n(answer cut short)", err=True)
                messages.pop()
                continue
            messages.append({"role": "assistant", "content": output.text})
            click.echo(summary(output), err=True)


def _ask() -> str | None:
    """Read the next question; None at the end of the conversation."""
    try:
        line = input("> " if sys.stdin.isatty() else "")
    except EOFError:
        return None
    return line if line.strip() else None
