"""`specbranch trace`: one request, and what draft and target did in it, round by round."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from specbranch.answer import Output
from specbranch.cli.asking import ANSWERING, chat_option, encoded
from specbranch.cli.options import CLOCK, TABLES, asking_once, load_llm, sampling_params, text, with_options
from specbranch.cli.paint import wants_colour
from specbranch.cli.sections import SectionedCommand, options_of
from specbranch.core.trace import Trace
from specbranch.errors import BadParameter
from specbranch.lab.traces.rounds import TracedRound, read_rounds, times
from specbranch.lab.traces.spans import SPAN_LOOKS, SpanKind
from specbranch.lab.traces.timeline import NARROWEST_TIMELINE, Style, draw_text, plain
from specbranch.lab.traces.timeline_svg import draw_svg, subtitle

if TYPE_CHECKING:
    from specbranch.engine import LLM

TRACED_TOKENS = 64  # default length of the answer: a timeline must stay readable
NAME = "timeline"  # of the files

_option = options_of("Prompt and output")


@click.command(cls=SectionedCommand, tables=TABLES)
@click.argument("prompt", type=text)
@chat_option("Prompt and output")
@_option(
    "--out",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Folder for timeline.svg, timeline.txt, timeline.json (for ui.perfetto.dev or "
    "chrome://tracing) and timeline.jsonl.",
)
@_option(
    "--json",
    "as_json",
    is_flag=True,
    help="Print one JSON object (rounds, seconds by kind, stats …) instead of the drawing.",
)
@_option("--colour/--no-colour", default=None, help="Colour the drawing [on a terminal].")
@_option("--width", type=click.IntRange(min=40), metavar="N", help="Width of the drawing in columns [the terminal's].")
@with_options(ANSWERING, CLOCK)
def trace(
    prompt: str, as_chat: bool, out: Path | None, as_json: bool, colour: bool | None, width: int | None, **given: Any
) -> None:
    """Answer PROMPT (or '-' for standard input) and draw a timeline: drafts, verification, branches, rollbacks, idle
    time.

    \b
    specbranch trace "The capital of France is"
    specbranch trace --method specbranch --clock c10 --out timeline "Once upon a time"
    specbranch trace --executor process --chat "Why is the sky blue?" --max-tokens 40

    Time is measured on this machine, or modelled with --clock PROFILE; decisions are real in both cases. The answer has
    at most 64 tokens unless --max-tokens is given.
    """
    from specbranch.cli.generate import read_prompts

    (asked,) = read_prompts(prompt, None)
    params = sampling_params({**given, "max_tokens": given["max_tokens"] or TRACED_TOKENS})
    if out is not None:
        _make_folder(out)
    with load_llm(asking_once(given)) as llm:
        recorded = llm.core.loop.trace = Trace()
        (output,) = llm.generate([encoded(llm, asked, as_chat)], params)
    if output.error is not None:
        raise output.error
    _tell(recorded, output, given.get("clock"), out, as_json, _style(llm, colour, width))


def _tell(recorded: Trace, output: Output, clock: str | None, out: Path | None, as_json: bool, style: Style) -> None:
    rounds = read_rounds(recorded.events, len(output.token_ids), [piece.origin for piece in output.pieces])
    measured = "on this machine's clock" if clock is None else f"on a modelled clock: {clock}"
    head = f"[{output.method}] {measured}"
    if out is not None:
        _write(out, recorded, rounds, output, head, clock is not None)
    if as_json:
        click.echo(json.dumps(_summary(rounds, output, clock, out), ensure_ascii=False))
        return
    click.echo(
        f"{head}\n\n{draw_text(rounds, output.stats, style, modelled=clock is not None)}", color=style.paint is _painted
    )
    if out is not None:
        click.echo(f"{NAME}.svg, .txt, .jsonl and .json (for ui.perfetto.dev) are in {out}", err=True)


def _summary(rounds: Sequence[TracedRound], output: Output, clock: str | None, out: Path | None) -> dict[str, Any]:
    return {
        "method": output.method,
        "clock": clock or "wall",
        "modelled": clock is not None,
        "text": output.text,
        "times": times(rounds).to_dict(),
        "stats": output.stats,
        "rounds": [one.to_dict() for one in rounds],
        "out": None if out is None else str(out),
    }


def _write(
    folder: Path, recorded: Trace, rounds: Sequence[TracedRound], output: Output, head: str, modelled: bool
) -> None:
    try:
        recorded.write_chrome(folder / f"{NAME}.json")
        recorded.write_jsonl(folder / f"{NAME}.jsonl")
        picture = draw_svg(rounds, head, subtitle(rounds, len(output.token_ids), modelled))
        (folder / f"{NAME}.svg").write_text(picture, encoding="utf-8")
        drawn = draw_text(rounds, output.stats, Style(width=100), modelled)
        (folder / f"{NAME}.txt").write_text(f"{head}\n\n{drawn}\n", encoding="utf-8")
    except OSError as error:
        sentence = f"The timeline could not be written to {folder}: {error}. Name another folder with --out."
        raise BadParameter(sentence) from error


def _make_folder(out: Path) -> None:
    """Refuse a folder that cannot be written before the answer is made rather than after it."""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadParameter(f"--out is {out}, which cannot be made a folder: {error}. Name another one.") from error
    if not os.access(out, os.W_OK):
        raise BadParameter(f"--out is {out}, which cannot be written. Name another folder.")


def _style(llm: LLM, colour: bool | None, width: int | None) -> Style:
    columns = width or max(shutil.get_terminal_size().columns, NARROWEST_TIMELINE)
    return Style(columns, _takes_unicode(), _painted if wants_colour(colour) else plain, llm.tokenizer.decode)


def _takes_unicode() -> bool:
    """Return True if standard output can show more than ASCII."""
    try:
        "█▓·»…␣".encode(sys.stdout.encoding or "ascii")
    except UnicodeEncodeError:
        return False
    return True


def _painted(words: str, kind: SpanKind) -> str:
    colour = SPAN_LOOKS[kind].colour
    return click.style(words, fg=colour) if colour else words
