"""`specbranch verify`: is a saved answer what plain decoding gives?"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from specbranch.cli.options import PAIR, TARGET, load_llm, with_options
from specbranch.cli.sections import SectionedCommand
from specbranch.errors import BadParameter
from specbranch.pairs import chosen_models

if TYPE_CHECKING:
    from specbranch.engine import LLM
    from specbranch.recheck import Recheck, Saved

EXPECTED = "expected what `specbranch generate --json` prints"


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
    from specbranch.recheck import NOTED, recheck

    answers, pair = read_answers(file), given.pop("pair")
    if pair is not None:
        given["target"], _ = chosen_models(pair, given["target"], None)
    settings = {name: _agreed(name, answers) if given[name] is None else given[name] for name in NOTED}
    if settings["weights"] == settings["dtype"]:
        settings["weights"] = None  # stored as it is computed in, also where that is float16, which no --weights names
    results: list[Recheck] = []
    with load_llm({**given, **settings, "method": "autoregressive"}) as plain:
        for number, answer in enumerate(tracked(answers, "Answers")):
            with _naming(file, number):
                results.append(recheck(plain, answer))
            click.echo(json.dumps(_record(number, results[-1])) if as_json else _sentence(plain, number, results[-1]))
    if not as_json:
        click.echo(_total(results), err=True)
    return int(any(result.finding == "different" for result in results))


def read_answers(file: Path) -> list[Saved]:
    """Return all answers of a file, each checked."""
    from specbranch.recheck import Saved

    answers = []
    for number, values in enumerate(_objects(file)):
        with _naming(file, number):
            answers.append(Saved.from_dict(values))
    if not answers:
        raise BadParameter(f"{file} holds no answer; {EXPECTED}.")
    return answers


@contextmanager
def _naming(file: Path, number: int) -> Iterator[None]:
    """Say in an error which answer of which file it is about."""
    try:
        yield
    except BadParameter as error:
        raise BadParameter(f"{file}, answer {number}: {error}") from error


def _objects(file: Path) -> Iterator[dict[str, Any]]:
    try:
        text = sys.stdin.read() if str(file) == "-" else file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BadParameter(f"The answers in {file} cannot be read: {error}.") from error
    for number, line in enumerate(
        text.split("\n"), 1
    ):  # not splitlines: an answer may hold U+2028 and the like as they are
        if line.strip():
            yield from _with_alternatives(_object(line, f"{file}, line {number}"), f"{file}, line {number}")


def _object(line: str, where: str) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except ValueError as error:
        raise BadParameter(f"{where} is no JSON ({error}); {EXPECTED}.") from None
    if not isinstance(value, dict):
        raise BadParameter(f"{where} is no JSON object; {EXPECTED}.")
    return value


def _with_alternatives(answer: dict[str, Any], where: str) -> Iterator[dict[str, Any]]:
    """Yield an answer and the further samples it holds, which were made in the same way."""
    from specbranch.recheck import NOTED

    others = answer.get("alternatives") or []
    if not isinstance(others, list) or not all(isinstance(other, dict) for other in others):
        raise BadParameter(f"{where} has alternatives that are no answers; {EXPECTED}.")
    noted = {name: answer[name] for name in NOTED if name in answer}
    yield answer
    yield from ({**noted, **other} for other in others)


def _agreed(name: str, answers: list[Saved]) -> Any:
    """Return a setting that all answers were made with, for one model is loaded for them all."""
    found = {getattr(answer, name) for answer in answers}
    if len(found) > 1:
        values, option = ", ".join(sorted(map(str, found))), name.replace("_", "-")
        raise BadParameter(
            f"The answers were made with different values of {name} ({values}); verify them apart, or give --{option}."
        )
    return found.pop()


def _record(number: int, result: Recheck) -> dict[str, Any]:
    departure = result.departure
    where = (
        {}
        if departure is None
        else {
            "position": departure.position,
            "saved": departure.saved,
            "plain": departure.plain,
            "margin": departure.margin,
        }
    )
    return {"answer": number, "tokens": result.tokens, "verdict": result.finding, **where}


def _sentence(plain: LLM, number: int, result: Recheck) -> str:
    departure = result.departure
    if departure is None:
        return f"answer {number}: {result.tokens} tokens, identical"
    saved, own = (
        repr(plain.tokenizer.token(t)) if t is not None else "the end" for t in (departure.saved, departure.plain)
    )
    apart = "" if departure.margin is None else f", {departure.margin:.2g} logits apart"
    return (
        f"answer {number}: {result.finding} at token {departure.position}: saved {saved}, plain decoding {own}{apart}"
    )


def _total(results: list[Recheck]) -> str:
    counts = {kind: sum(r.finding == kind for r in results) for kind in ("identical", "near-tie", "different")}
    return f"{sum(r.tokens for r in results)} tokens in {len(results)} answers: " + ", ".join(
        f"{n} {kind}" for kind, n in counts.items()
    )
