"""`specbranch generate`: answer prompts from the command line, a file or standard input."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from specbranch.cli.options import MODEL, SAMPLING, SPECULATION, load_llm, sampling_params, with_options
from specbranch.config import SamplingParams
from specbranch.errors import BadParameter

if TYPE_CHECKING:
    from specbranch.engine import LLM


@click.command()
@click.argument("prompt", required=False)
@click.option(
    "--file",
    "file",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help='Prompts from a file: one a line, or JSON lines (text or {"prompt": …}).',
)
@click.option("--chat", "as_chat", is_flag=True, help="Put the prompt into the model's chat template, as a user's message.")
@click.option("--n", type=int, metavar="N", help="Samples a prompt [1].")
@with_options(MODEL, SPECULATION, SAMPLING)
@click.option("--json", "as_json", is_flag=True, help="One JSON object a prompt: text, token_ids, finish_reason, method, stats …")
@click.option("--colour/--no-colour", default=None, help="Colour tokens by origin [on a terminal].")
@click.option(
    "--trace",
    "trace_file",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Write a timeline: .json for chrome://tracing, .jsonl for lines.",
)
def generate(
    prompt: str | None, file: Path | None, as_chat: bool, as_json: bool, colour: bool | None, trace_file: Path | None, **given: Any
) -> None:
    """Answer PROMPT (or '-' for standard input), or every prompt of --file.

    \b
    specbranch generate "The capital of France is" --max-tokens 20
    specbranch generate --chat "Why is the sky blue?" --temperature 0.7 --seed 1
    specbranch generate --file prompts.txt --json > answers.jsonl
    specbranch verify answers.jsonl

    On a terminal tokens are coloured: plain for the target's own, green for accepted draft tokens, magenta for branch hits.
    """
    from specbranch.cli.progress import tracked

    prompts = read_prompts(prompt, file)
    params = sampling_params(given)
    llm = load_llm(given)
    recorder = llm.record() if trace_file else None
    with llm:
        for text in tracked(prompts, "Prompts"):
            _answer(llm, text, params, as_chat, as_json, sys.stdout.isatty() if colour is None else colour)
    if recorder and trace_file:
        recorder.write_jsonl(trace_file) if trace_file.suffix == ".jsonl" else recorder.write_chrome(trace_file)


def read_prompts(prompt: str | None, file: Path | None) -> list[str]:
    """Return the prompts given, exactly one way."""
    if (prompt is None) == (file is None):
        got = "neither" if prompt is None else "both"
        raise BadParameter(f"Expected a PROMPT or --file FILE; got {got}. Use '-' to read the prompt from standard input.")
    if prompt is not None:
        return [sys.stdin.read() if prompt == "-" else prompt]
    assert file is not None
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise BadParameter(f"The prompts in {file} cannot be read: {error}.") from error
    prompts = [_line(line, number, file) for number, line in enumerate(lines, 1) if line.strip()]
    if not prompts:
        raise BadParameter(f"{file} holds no prompt; expected one a line.")
    return prompts


def _line(line: str, number: int, file: Path) -> str:
    if file.suffix not in (".jsonl", ".json"):
        return line
    try:
        value = json.loads(line)
    except ValueError as error:
        raise BadParameter(f"{file}, line {number} is no JSON ({error}).") from None
    if isinstance(value, dict):
        value = value.get("prompt", (value.get("turns") or [None])[0])
    if not isinstance(value, str):
        raise BadParameter(f'{file}, line {number} has no prompt; expected a text, {{"prompt": …}} or {{"turns": [ … ]}}.')
    return value


def _answer(llm: LLM, text: str, params: SamplingParams, as_chat: bool, as_json: bool, colour: bool) -> None:
    from specbranch.cli.paint import LEGEND, show, summary

    ids = llm.tokenizer.chat([{"role": "user", "content": text}]) if as_chat else llm.tokenizer.encode(text)
    if as_json:
        output = llm.generate([ids], params)[0]
        click.echo(json.dumps({**output.to_dict(), "prompt": text, "target": llm.target}, ensure_ascii=False))
        return
    if params.n > 1:
        _numbered(llm, ids, params)
        return
    output = show(llm.stream(ids, params), colour)
    click.echo(f"{summary(output)}" + (f"\n{LEGEND}" if colour else ""), err=True)


def _numbered(llm: LLM, ids: list[int], params: SamplingParams) -> None:
    first = llm.generate([ids], params)[0]
    for output in (first, *first.alternatives):
        click.echo(f"--- sample {output.sample}\n{output.text}")
