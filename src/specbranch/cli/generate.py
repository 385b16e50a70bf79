"""`specbranch generate`: answer prompts from the command line, a file or standard input."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from specbranch.cli.options import (
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
from specbranch.config import SamplingParams
from specbranch.errors import BadParameter

if TYPE_CHECKING:
    from specbranch.core.trace import Trace
    from specbranch.engine import LLM

_option = options_of("Prompts and output")


@click.command(cls=SectionedCommand, tables=TABLES)
@click.argument("prompt", type=text, required=False)
@_option(
    "--file",
    "file",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help='Prompts from a file: one a line; in a .jsonl file JSON lines (a text, {"prompt": …} or {"turns": [ … ]}).',
)
@_option("--chat", "as_chat", is_flag=True, help="Put the prompt into the model's chat template, as a user's message.")
@_option("--n", type=int, metavar="N", help="Samples a prompt [1].")
@_option(
    "--json", "as_json", is_flag=True, help="One JSON object a prompt: text, token_ids, finish_reason, method, stats …"
)
@_option("--colour/--no-colour", default=None, help="Colour tokens by origin [on a terminal].")
@_option(
    "--trace",
    "trace_file",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Write a timeline: .json for chrome://tracing, .jsonl for lines.",
)
@with_options(PAIR, TARGET, DRAFT, SPECULATION, SAMPLING)
def generate(
    prompt: str | None,
    file: Path | None,
    as_chat: bool,
    as_json: bool,
    colour: bool | None,
    trace_file: Path | None,
    **given: Any,
) -> None:
    """Answer PROMPT (or '-' for standard input), or every prompt of --file.

    \b
    specbranch generate "The capital of France is" --max-tokens 20
    specbranch generate --chat "Why is the sky blue?" --temperature 0.7 --seed 1
    specbranch generate --pair smollm2-strong --method specbranch "Once upon a time"
    specbranch generate --file prompts.txt --json > answers.jsonl
    specbranch verify answers.jsonl

    On a terminal tokens are coloured: plain for the target's own, green for accepted draft tokens, magenta for branch
    hits.
    """
    from specbranch.cli.progress import tracked

    prompts = read_prompts(prompt, file)
    params = sampling_params(given)
    _check_writable(trace_file)
    llm = load_llm(given)
    recorder = llm.record() if trace_file else None
    with llm:
        for one in tracked(prompts, "Prompts"):
            _answer(llm, one, params, as_chat, as_json, sys.stdout.isatty() if colour is None else colour)
    if recorder and trace_file:
        _write(recorder, trace_file)


def read_prompts(prompt: str | None, file: Path | None) -> list[str]:
    """Return the prompts given, exactly one way."""
    if (prompt is None) == (file is None):
        got = "neither" if prompt is None else "both"
        raise BadParameter(
            f"Expected a PROMPT or --file FILE; got {got}. Use '-' to read the prompt from standard input."
        )
    if file is not None:
        return _from_file(file)
    assert prompt is not None
    return [_from_stdin() if prompt == "-" else prompt]


def _from_stdin() -> str:
    from specbranch.text.tokenizer import check_text

    try:
        text = sys.stdin.read()
    except UnicodeDecodeError as error:
        raise BadParameter(f"Standard input is no text: {error}. Expected UTF-8.") from error
    check_text(text, "Standard input")
    return text


def _from_file(file: Path) -> list[str]:
    try:
        lines = file.read_text(encoding="utf-8").split(
            "\n"
        )  # not splitlines: JSON may hold U+2028 and the like as they are
    except (OSError, UnicodeDecodeError) as error:
        raise BadParameter(f"The prompts in {file} cannot be read: {error}.") from error
    prompts = [
        _line(line, f"{file}, line {number}", file.suffix in (".jsonl", ".json"))
        for number, line in enumerate(lines, 1)
        if line.strip()
    ]
    if not prompts:
        raise BadParameter(f"{file} holds no prompt; expected one a line.")
    return prompts


def _line(line: str, where: str, is_json: bool) -> str:
    from specbranch.text.tokenizer import check_text

    text = _prompt_of(line, where) if is_json else line
    check_text(text, f"The prompt of {where}")
    return text


def _prompt_of(line: str, where: str) -> str:
    expected = 'expected JSON lines: on each line a text, {"prompt": …} or {"turns": [ … ]}.'
    try:
        value = json.loads(line)
    except ValueError as error:
        raise BadParameter(f"{where} is no JSON ({error}); {expected}") from None
    found = _first_turn(value) if isinstance(value, dict) else value
    if not isinstance(found, str):
        raise BadParameter(f"{where} has no prompt; {expected}")
    return found


def _first_turn(value: dict[str, Any]) -> Any:
    turns = value.get("turns")
    return value["prompt"] if "prompt" in value else turns[0] if isinstance(turns, list) and turns else None


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


def _answer(llm: LLM, text: str, params: SamplingParams, as_chat: bool, as_json: bool, colour: bool) -> None:
    from specbranch.cli.paint import LEGEND, show, summary

    ids = llm.tokenizer.chat([{"role": "user", "content": text}]) if as_chat else llm.tokenizer.encode(text)
    if as_json:
        output = llm.generate([ids], params)[0]
        click.echo(json.dumps({**output.to_dict(), "prompt": text, **_circumstances(llm)}, ensure_ascii=False))
        return
    if params.n > 1:
        _numbered(llm, ids, params)
        return
    output = show(llm.stream(ids, params), colour)
    click.echo(f"{summary(output)}" + (f"\n{LEGEND}" if colour else ""), err=True)


def _circumstances(llm: LLM) -> dict[str, Any]:
    """Return what `verify` needs to decode in the same way."""
    made = {"target": llm.target, "context_length": llm.context_length, "dtype": llm.dtype}
    return {**made, "weights": llm.weights, "runner": llm.runner}


def _numbered(llm: LLM, ids: list[int], params: SamplingParams) -> None:
    first = llm.generate([ids], params)[0]
    for output in (first, *first.alternatives):
        if output.error is not None:
            raise output.error
        click.echo(f"--- sample {output.sample}\n{output.text}")
