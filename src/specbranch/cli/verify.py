"""`specbranch verify`: is a saved answer what plain decoding gives?"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from specbranch.cli.options import MODEL, load_llm, with_options
from specbranch.errors import BadParameter

if TYPE_CHECKING:
    from specbranch.engine import LLM
    from specbranch.recheck import Recheck


@click.command()
@click.argument("file", type=click.Path(path_type=Path))
@with_options(MODEL)
@click.option("--json", "as_json", is_flag=True, help="One JSON object an answer.")
def verify(file: Path, as_json: bool, **given: Any) -> int:
    """Re-check the answers in FILE ('-' for standard input), saved by `generate --json`, against autoregressive decoding.

    Prints, for each, whether it is identical; a first difference is named with both tokens and how close the target's choice was
    between them. Exit code 1 if an answer differs by more than a near-tie (1e-4 in logits).
    """
    from specbranch.cli.progress import tracked
    from specbranch.recheck import recheck

    answers = list(_answers(file))
    given["target"] = given.get("target") or _same_target(answers)
    given["draft"] = None
    with load_llm({**given, "method": "autoregressive"}) as plain:
        results = []
        for number, answer in enumerate(tracked(answers, "Answers")):
            results.append(recheck(plain, answer))
            click.echo(json.dumps(_record(number, results[-1])) if as_json else _sentence(plain, number, results[-1]))
    if not as_json:
        click.echo(_total(results), err=True)
    return int(any(result.verdict == "different" for result in results))


def _answers(file: Path) -> Iterator[dict[str, Any]]:
    try:
        text = sys.stdin.read() if str(file) == "-" else file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BadParameter(f"The answers in {file} cannot be read: {error}.") from error
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip():
            yield from _with_alternatives(_object(line, number, file))


def _object(line: str, number: int, file: Path) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except ValueError as error:
        raise BadParameter(f"{file}, line {number} is no JSON ({error}); expected what `specbranch generate --json` prints.") from None
    if not isinstance(value, dict):
        raise BadParameter(f"{file}, line {number} is no JSON object; expected what `specbranch generate --json` prints.")
    return value


def _with_alternatives(answer: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield answer
    yield from answer.get("alternatives", [])


def _same_target(answers: list[dict[str, Any]]) -> str | None:
    names = {answer["target"] for answer in answers if "target" in answer}
    if len(names) > 1:
        raise BadParameter(f"The answers are of {len(names)} targets ({', '.join(sorted(names))}); verify them one target at a time.")
    return names.pop() if names else None


def _record(number: int, result: Recheck) -> dict[str, Any]:
    departure = result.departure
    where = (
        {}
        if departure is None
        else {"position": departure.position, "saved": departure.saved, "plain": departure.plain, "margin": departure.margin}
    )
    return {"answer": number, "tokens": result.tokens, "verdict": result.verdict, **where}


def _sentence(plain: LLM, number: int, result: Recheck) -> str:
    departure = result.departure
    if departure is None:
        return f"answer {number}: {result.tokens} tokens, identical"
    saved, own = (repr(plain.tokenizer.token(t)) if t is not None else "the end" for t in (departure.saved, departure.plain))
    return (
        f"answer {number}: {result.verdict} at token {departure.position}: saved {saved}, plain decoding {own}, "
        f"{departure.margin:.2g} logits apart"
    )


def _total(results: list[Recheck]) -> str:
    counts = {kind: sum(r.verdict == kind for r in results) for kind in ("identical", "near-tie", "different")}
    return f"{sum(r.tokens for r in results)} tokens in {len(results)} answers: " + ", ".join(f"{n} {kind}" for kind, n in counts.items())
