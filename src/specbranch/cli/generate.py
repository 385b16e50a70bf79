"""`specbranch generate`: answer prompts from the command line, a file or standard input."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from specbranch.answer import Chunk, Output
from specbranch.cli.asking import ANSWERING, chat_option, encoded, from_standard_input
from specbranch.cli.options import TABLES, asking_once, load_llm, sampling_params, text, with_options
from specbranch.cli.paint import LEGEND, answered, wants_colour
from specbranch.cli.sections import SectionedCommand, options_of
from specbranch.core.trace import Trace
from specbranch.errors import BadParameter

if TYPE_CHECKING:
    from specbranch.engine import LLM

_option = options_of("Prompts and output")


@click.command(cls=SectionedCommand, tables=TABLES)
@click.argument("prompt", type=text, required=False)
@_option(
    "--file",
    "file",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="File of prompts, one per line. A .jsonl file holds one JSON value per line: a text, "
    '{"prompt": …} or {"turns": [ … ]}.',
)
@chat_option("Prompts and output")
@_option(
    "--prediction",
    "prediction_file",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="File with the text that the answers are expected to have. They come sooner where it is right, and do not "
    "change.",
)
@_option(
    "--json-schema",
    "schema_file",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="The answer is JSON that the schema in FILE describes.",
)
@_option("--regex", type=text, metavar="REGEX", help="The answer matches this regular expression as a whole.")
@_option("--choice", type=text, multiple=True, metavar="TEXT", help="The answer is one of these texts; repeat it.")
@_option(
    "--grammar",
    "grammar_file",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="The answer follows the grammar in FILE, in Lark's or llama.cpp's syntax.",
)
@_option("--n", type=int, metavar="N", help="Number of samples per prompt [1].")
@_option(
    "--json",
    "as_json",
    is_flag=True,
    help="Print one JSON object per prompt: text, token_ids, finish_reason, method, stats …",
)
@_option("--colour/--no-colour", default=None, help="Colour tokens by origin [on a terminal].")
@_option(
    "--trace",
    "trace_file",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Write a timeline to FILE: .json for chrome://tracing, .jsonl for one event per line.",
)
@with_options(ANSWERING)
def generate(
    prompt: str | None,
    file: Path | None,
    as_chat: bool,
    as_json: bool,
    colour: bool | None,
    trace_file: Path | None,
    prediction_file: Path | None,
    schema_file: Path | None,
    grammar_file: Path | None,
    **given: Any,
) -> None:
    """Answer PROMPT (or '-' for standard input), or every prompt of --file.

    \b
    specbranch generate "The capital of France is" --max-tokens 20
    specbranch generate --chat "Why is the sky blue?" --temperature 0.7 --seed 1
    specbranch generate --pair smollm2-strong --method specbranch "Once upon a time"
    specbranch generate --chat "Invent a person." --json-schema person.json
    specbranch generate --file prompts.txt --json > answers.jsonl
    specbranch verify answers.jsonl

    On a terminal, colours show where a token comes from: plain is the target's own, green an accepted draft token,
    magenta a branch hit.
    """
    from specbranch.cli.progress import tracked

    prompts = read_prompts(prompt, file)
    given |= {"json_schema": _text_of("--json-schema", schema_file), "grammar": _text_of("--grammar", grammar_file)}
    params, prediction = sampling_params(given), _text_of("--prediction", prediction_file)
    _check_writable(trace_file)
    llm = load_llm(asking_once(given) if len(prompts) == 1 else given)
    recorder = llm.core.loop.trace = Trace() if trace_file else None
    colours = wants_colour(colour)
    with llm:
        noted = _circumstances(llm) if as_json else None
        asked = [encoded(llm, one, as_chat) for one in prompts]
        if len(asked) == 1 and not as_json and params.n == 1:
            _show(llm.stream(asked[0], params, prediction=prediction), colours)
        else:  # many are decoded at once, and written in their order
            outputs = llm.outputs(asked, params, prediction=prediction)
            for one, output in zip(tracked(prompts, "Prompts"), outputs, strict=True):
                _answer(one, output, noted, colours)
    if recorder and trace_file:
        _write(recorder, trace_file)


def read_prompts(prompt: str | None, file: Path | None) -> list[str]:
    """Return the prompts given, exactly one way."""
    from specbranch.text.line_files import prompts_in
    from specbranch.text.tokenizer import check_text

    if (prompt is None) == (file is None):
        got = "neither" if prompt is None else "both"
        raise BadParameter(
            f"Expected a PROMPT or --file FILE; got {got}. Use '-' to read the prompt from standard input."
        )
    if file is not None:
        return prompts_in(file)
    assert prompt is not None
    if prompt != "-":
        return [prompt]
    given = from_standard_input(sys.stdin.read)
    check_text(given, "Standard input")
    return [given]


def _text_of(option: str, file: Path | None) -> str | None:
    """Return the text of a file that an option names, if it does."""
    if file is None:
        return None
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise BadParameter(f"{option} is {file}, which cannot be read: {error}. Name a text file.") from None


def _check_writable(trace: Path | None) -> None:
    """Refuse a trace that could not be written, before the answer is made rather than after it."""
    if trace is None:
        return
    folder = trace.parent
    if not folder.is_dir():
        raise BadParameter(f"--trace is {trace}, but there is no folder {folder}. Make it first, or name another file.")
    if trace.is_dir() or not os.access(trace if trace.exists() else folder, os.W_OK):
        raise BadParameter(f"--trace is {trace}, which cannot be written. Name another file.")


def _write(recorder: Trace, file: Path) -> None:
    try:
        recorder.write_jsonl(file) if file.suffix == ".jsonl" else recorder.write_chrome(file)
    except OSError as error:
        raise BadParameter(f"The trace could not be written to {file}: {error}.") from error


def _answer(prompt: str, output: Output, noted: dict[str, Any] | None, colour: bool) -> None:
    """Print an answer; as JSON if there is something noted that belongs to it."""
    if noted is not None:
        click.echo(json.dumps({**output.to_dict(), "prompt": prompt, **noted}, ensure_ascii=False))
    elif output.error is not None:
        raise output.error
    elif output.params.n > 1:
        _numbered(output)
    else:
        _show([Chunk(output.pieces, output)], colour)


def _show(chunks: Iterable[Chunk], colour: bool) -> None:
    answered(chunks, colour)
    if colour:
        click.echo(LEGEND, err=True)


def _circumstances(llm: LLM) -> dict[str, Any]:
    """Return what `verify` needs to decode in the same way, and which build made the answer on which device."""
    from specbranch.lab.recheck.saved import NOTED
    from specbranch.provenance import build, hardware

    made = {name: getattr(llm, name) for name in (*NOTED, "context_length")}
    return {**made, "build": build(), "device": hardware(llm.device)}


def _numbered(first: Output) -> None:
    for output in (first, *first.alternatives):
        if output.error is not None:
            raise output.error
        click.echo(f"--- sample {output.sample}\n{output.text}")
