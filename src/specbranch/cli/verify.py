"""`specbranch verify`: is a saved answer what plain decoding gives?"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from specbranch.cli.options import PAIR, TARGET, load_llm, with_options
from specbranch.cli.sections import SectionedCommand
from specbranch.errors import BadParameter
from specbranch.pairs import chosen_models

if TYPE_CHECKING:
    from specbranch.engine import LLM
    from specbranch.recheck import Recheck


@click.command(cls=SectionedCommand)
@click.argument("file", type=click.Path(path_type=Path))
@with_options(PAIR, TARGET)
@click.option("--json", "as_json", is_flag=True, help="One JSON object an answer.")
def verify(file: Path, as_json: bool, **given: Any) -> int:
    """Check that saved answers are what plain decoding gives.

    FILE ('-' for standard input) holds what `generate --json` printed. For each answer it says whether autoregressive
    decoding gives the same; a first difference is named with both tokens and how close the target's choice was between
    them. Exit code 1 if an answer differs by more than a near-tie (1e-4 in logits). On GPUs rounding alone can make it
    larger with the transformers runner.

    Target, precision, weights, runner and context length are those the answers were saved with, unless given; of a
    --pair its target is taken.
    """
    from specbranch.cli.progress import tracked
    from specbranch.recheck import common_settings, naming, read_answers, recheck

    answers, pair = read_answers(_read(file), str(file)), given.pop("pair")
    if pair is not None:
        given["target"], _ = chosen_models(pair, given["target"], None)
    settings = common_settings(answers, given)
    results: list[Recheck] = []
    with load_llm({**given, **settings, "method": "autoregressive"}) as plain:
        for number, answer in enumerate(tracked(answers, "Answers")):
            with naming(str(file), number):
                results.append(recheck(plain, answer))
            click.echo(json.dumps(_record(number, results[-1])) if as_json else _sentence(plain, number, results[-1]))
    if not as_json:
        click.echo(_total(results), err=True)
    return int(any(result.finding == "different" for result in results))


def _read(file: Path) -> str:
    try:
        return sys.stdin.read() if str(file) == "-" else file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BadParameter(f"The answers in {file} cannot be read: {error}.") from error


def _record(number: int, result: Recheck) -> dict[str, Any]:
    where = {} if result.departure is None else asdict(result.departure)
    return {"answer": number, "tokens": result.tokens, "verdict": result.finding, **where}


def _sentence(plain: LLM, number: int, result: Recheck) -> str:
    departure = result.departure
    if departure is None:
        return f"answer {number}: {result.tokens} tokens, identical"
    tokens = (departure.saved, departure.plain)
    saved, own = ("the end" if token is None else repr(plain.tokenizer.token(token)) for token in tokens)
    apart = "" if departure.margin is None else f", {departure.margin:.2g} logits apart"
    where = f"{result.finding} at token {departure.position}"
    return f"answer {number}: {where}: saved {saved}, plain decoding {own}{apart}"


def _total(results: list[Recheck]) -> str:
    findings = [result.finding for result in results]
    counts = ", ".join(f"{findings.count(kind)} {kind}" for kind in ("identical", "near-tie", "different"))
    return f"{sum(result.tokens for result in results)} tokens in {len(results)} answers: {counts}"
