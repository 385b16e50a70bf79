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

from specbranch.cli.options import (
    CLOCK,
    DRAFT,
    PAIR,
    SAMPLING,
    SPECULATION,
    TABLES,
    TARGET,
    load_llm,
    sampling_params,
    text,
    with_options,
)
from specbranch.cli.sections import SectionedCommand, options_of
from specbranch.errors import BadParameter

if TYPE_CHECKING:
    from specbranch.answer import Output
    from specbranch.core.trace import Trace
    from specbranch.engine import LLM
    from specbranch.traces.rounds import TracedRound
    from specbranch.traces.spans import SpanKind
    from specbranch.traces.timeline import Style

TOKENS = 64  # of the answer, unless told: a timeline is to be looked at
NAME = "timeline"  # of the files

_option = options_of("Prompt and output")


@click.command(cls=SectionedCommand, tables=TABLES)
@click.argument("prompt", type=text)
@_option("--chat", "as_chat", is_flag=True, help="Put the prompt into the model's chat template, as a user's message.")
@_option(
    "--out",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Write timeline.svg, timeline.txt, timeline.json (open it in ui.perfetto.dev or chrome://tracing) and "
    "timeline.jsonl there.",
)
@_option(
    "--json", "as_json", is_flag=True, help="One JSON object: rounds, seconds by kind, stats … instead of the drawing."
)
@_option("--colour/--no-colour", default=None, help="Colour the drawing [on a terminal].")
@_option("--width", type=click.IntRange(min=40), metavar="N", help="Columns of the drawing [the terminal's].")
@with_options(PAIR, TARGET, DRAFT, SPECULATION, CLOCK, SAMPLING)
def trace(
    prompt: str, as_chat: bool, out: Path | None, as_json: bool, colour: bool | None, width: int | None, **given: Any
) -> None:
    """Answer PROMPT (or '-' for standard input) and draw what both models did: verifying, branches kept and lost,
    rollbacks, waiting.

    \b
    specbranch trace "The capital of France is"
    specbranch trace --method specbranch --clock c10 --out timeline "Once upon a time"
    specbranch trace --executor process --chat "Why is the sky blue?" --max-tokens 40

    Time is this machine's, or that of a --clock PROFILE: then decisions are real and time is modelled. The answer has
    at most 64 tokens unless --max-tokens says otherwise.
    """
    from specbranch.cli.generate import read_prompts

    (asked,) = read_prompts(prompt, None)
    params = sampling_params({**given, "max_tokens": given["max_tokens"] or TOKENS})
    if out is not None:
        _make_folder(out)
    with load_llm(given) as llm:
        ids = llm.tokenizer.chat([{"role": "user", "content": asked}]) if as_chat else llm.tokenizer.encode(asked)
        recorded = llm.record()
        output = llm.generate([ids], params)[0]
    if output.error is not None:
        raise output.error
    _tell(llm, recorded, output, given.get("clock"), out, as_json, _style(llm, colour, width))


def _tell(
    llm: LLM, recorded: Trace, output: Output, clock: str | None, out: Path | None, as_json: bool, style: Style
) -> None:
    from specbranch.traces.rounds import read_rounds
    from specbranch.traces.timeline import draw_text

    rounds = read_rounds(recorded.events, len(output.token_ids), [piece.origin for piece in output.pieces])
    head = f"[{output.method}] {_clock(clock)}"
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


def _clock(clock: str | None) -> str:
    return "on this machine's clock" if clock is None else f"on a modelled clock: {clock}"


def _summary(rounds: Sequence[TracedRound], output: Output, clock: str | None, out: Path | None) -> dict[str, Any]:
    from specbranch.traces.rounds import times

    return {
        "method": output.method,
        "clock": clock or "wall",
        "modelled": clock is not None,
        "text": output.text,
        "times": times(rounds).to_dict(),
        "stats": output.stats,
        "rounds": [_round(one) for one in rounds],
        "out": None if out is None else str(out),
    }


def _round(one: TracedRound) -> dict[str, Any]:
    fates = ("used", "rolled_back", "beside", "dropped", "unused", "lost")  # in the order of `core.fates`
    return {
        "round": one.number,
        "emitted": one.emitted,
        "pending": one.target.pending if one.target else 0,
        "accepted": one.target.accepted if one.target else None,
        "branches": list(one.draft.branches) if one.draft else [],
        "kept": one.draft.kept if one.draft else None,
        "drafted": dict(zip(fates, one.fate.counts, strict=True)),
        **{f"{event.who}_seconds": event.end - event.start for event in one.events},
    }


def _write(
    folder: Path, recorded: Trace, rounds: Sequence[TracedRound], output: Output, head: str, modelled: bool
) -> None:
    from specbranch.traces.timeline import Style, draw_text
    from specbranch.traces.timeline_svg import draw_svg, subtitle

    try:
        recorded.write_chrome(folder / f"{NAME}.json")
        recorded.write_jsonl(folder / f"{NAME}.jsonl")
        picture = draw_svg(rounds, head, subtitle(rounds, len(output.token_ids), modelled))
        (folder / f"{NAME}.svg").write_text(picture, encoding="utf-8")
        drawn = draw_text(rounds, output.stats, Style(width=100), modelled)
        (folder / f"{NAME}.txt").write_text(f"{head}\n\n{drawn}\n", encoding="utf-8")
    except OSError as error:
        raise BadParameter(
            f"The timeline could not be written to {folder}: {error}. Name another folder with --out."
        ) from error


def _make_folder(out: Path) -> None:
    """Refuse a folder that cannot be written before the answer is made rather than after it."""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadParameter(f"--out is {out}, which cannot be made a folder: {error}. Name another one.") from error
    if not os.access(out, os.W_OK):
        raise BadParameter(f"--out is {out}, which cannot be written. Name another folder.")


def _style(llm: LLM, colour: bool | None, width: int | None) -> Style:
    from specbranch.traces.timeline import NARROWEST, Style, plain

    shown = sys.stdout.isatty() and not os.environ.get("NO_COLOR") if colour is None else colour
    columns = width or max(shutil.get_terminal_size().columns, NARROWEST)
    return Style(columns, _takes_unicode(), _painted if shown else plain, llm.tokenizer.decode)


def _takes_unicode() -> bool:
    """Whether standard output can show more than ASCII."""
    try:
        "█▓·»…␣".encode(sys.stdout.encoding or "ascii")
    except UnicodeEncodeError:
        return False
    return True


def _painted(words: str, kind: SpanKind) -> str:
    from specbranch.traces.spans import LOOKS

    colour = LOOKS[kind].colour
    return click.style(words, fg=colour) if colour else words
