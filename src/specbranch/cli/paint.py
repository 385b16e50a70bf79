"""Answers on a terminal: each token in the colour of its origin, and a line of statistics below.

Owns colours and the wording of the summary. Invariant: without colours, standard output is the plain text.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from typing import Any

import click

from specbranch.answer import Chunk, Output, Piece

TOKEN_COLOURS = {"target": None, "draft": "green", "branch": "magenta"}
LEGEND = (
    "the target's own · " + click.style("accepted draft", fg="green") + " · " + click.style("branch hit", fg="magenta")
)


def wants_colour(given: bool | None) -> bool:
    """True if standard output is coloured: as given, else on a terminal unless NO_COLOR is set."""
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR") if given is None else given


def answered(chunks: Iterable[Chunk], colour: bool) -> Output:
    """Print an answer as it arrives, and its statistics below."""
    output = show(chunks, colour)
    click.echo(summary(output), err=True)
    return output


def show(chunks: Iterable[Chunk], colour: bool) -> Output:
    """Print an answer as it arrives; return it when it is complete."""
    output: Output | None = None
    for chunk in chunks:
        click.echo("".join(_painted(piece, colour) for piece in chunk.pieces) + chunk.rest, nl=False, color=colour)
        output = chunk.output
    click.echo()
    assert output is not None
    return output


def summary(output: Output) -> str:
    """Say in one line what a request did."""
    stats = output.stats
    parts = [
        f"{stats['tokens']} tokens ({output.finish_reason})",
        _number(stats["tokens_per_second"], "{:.1f} tok/s"),
        f"first token {stats['ttft_seconds']:.2f} s",
        _number(stats["tokens_per_forward"], "{:.2f} tokens per target forward"),
    ]
    if stats["prompt_tokens_cached"]:
        parts.append(f"{stats['prompt_tokens_cached']} of {len(output.prompt_token_ids)} prompt tokens from the cache")
    if stats["drafted"]:
        parts.append(_number(stats["rollback_rate"], "rollback {:.0%}"))
    if stats["branch_points"]:
        parts.append(_number(stats["branch_hit_rate"], "branch hits {:.0%}"))
    if stats["rounds_without_draft"]:
        parts.append(
            f"{stats['rounds_without_draft']} rounds without the draft worker, {stats['draft_restarts']} restarts"
        )
    return f"[{output.method}] " + " · ".join(part for part in parts if part)


def _painted(piece: Piece, colour: bool) -> str:
    shade = TOKEN_COLOURS[piece.origin]
    return click.style(piece.text, fg=shade) if colour and shade else piece.text


def _number(value: Any, form: str) -> str:
    return "" if value is None else form.format(value)
