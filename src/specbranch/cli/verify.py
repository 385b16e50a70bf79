"""`specbranch verify`: a check that saved answers are those of plain decoding."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from specbranch.cli.options import PAIR, TARGET, asking_once, load_llm, with_options
from specbranch.cli.sections import SectionedCommand
from specbranch.errors import BadParameter
from specbranch.pairs import chosen_models

if TYPE_CHECKING:
    from specbranch.engine import LLM
    from specbranch.lab.recheck.compare import Departure, Recheck


@click.command(cls=SectionedCommand)
@click.argument("file", type=click.Path(path_type=Path))
@with_options(PAIR, TARGET)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object per answer.")
def verify(file: Path, as_json: bool, **given: Any) -> int:
    """Check that saved answers are what plain decoding gives.

    FILE ('-' for standard input) holds the output of `generate --json`. The command decodes each answer again,
    autoregressively, and compares tokens, text, finish_reason, logprobs, prompt and number of tokens. It reports a
    difference with both tokens and the gap between their logits. One near-tie (1e-4 in logits) per answer passes,
    because another machine may round differently; the rest is then decoded after the saved token. The exit code is 1 if
    an answer differs by more. With the transformers runner on GPUs, rounding alone can exceed this limit.

    Target, precision, weights and runner are those saved with the answers, unless given; of a --pair only the target is
    used. What the file says of them and of the sampling parameters is a claim, so name the target that you trust. The
    context length never comes from the file, which could cut an answer short: it is the model's own (at most 8,192)
    unless given. What cannot be recomputed, such as origins and times, is reported as not checked.
    """
    from specbranch.cli.progress import tracked
    from specbranch.lab.recheck.compare import recheck
    from specbranch.lab.recheck.saved import claimed_settings, common_settings, naming, read_answers

    answers, pair = read_answers(_read(file), str(file)), given.pop("pair")
    if pair is not None:
        given["target"], _ = chosen_models(pair, given["target"], None)
    settings, claimed = common_settings(answers, given), claimed_settings(answers, given)
    results: list[Recheck] = []
    with load_llm(asking_once({**given, **settings, "method": "autoregressive"})) as plain:
        for number, answer in enumerate(tracked(answers, "Answers")):
            with naming(str(file), number):
                results.append(recheck(plain, answer))
            shown = _record(number, results[-1], claimed) if as_json else _sentence(plain, number, results[-1])
            click.echo(shown)
    if not as_json:
        click.echo(_total(results, claimed), err=True)
    return int(any(result.finding == "different" for result in results))


def _read(file: Path) -> str:
    try:
        return sys.stdin.read() if str(file) == "-" else file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BadParameter(f"The answers in {file} cannot be read: {error}.") from error


def _record(number: int, result: Recheck, claimed: list[str]) -> str:
    """Return a result as JSON; position, tokens and margin are those of the departure that decided."""
    departures = [asdict(departure) for departure in result.departures]
    found = {"answer": number, "tokens": result.tokens, "verdict": result.finding, **(departures or [{}])[-1]}
    found |= {"departures": departures, "mismatches": [asdict(one) for one in result.mismatches]}
    if result.claimed_context is not None:
        found["claimed_context_length"] = result.claimed_context
    return json.dumps({**found, "not_checked": list(result.not_checked), "claimed": claimed})


def _sentence(plain: LLM, number: int, result: Recheck) -> str:
    """Say what was found: what decided comes first."""
    findings = [f"{one.field} is {one.saved}, expected {one.plain}" for one in result.mismatches]
    findings += [_departed(plain, departure) for departure in reversed(result.departures)]
    if result.claimed_context is not None:
        claim = f"the file claims a context of {result.claimed_context} tokens"
        findings.append(f"{claim}: if that was the setting, give --context-length {result.claimed_context}")
    return f"answer {number}: {result.tokens} tokens, {'; '.join([result.finding, *findings])}"


def _departed(plain: LLM, departure: Departure) -> str:
    tokens = (departure.saved, departure.plain)
    saved, own = ("the end" if token is None else repr(plain.tokenizer.token(token)) for token in tokens)
    apart = "" if departure.margin is None else f", {departure.margin:.2g} logits apart"
    return f"at token {departure.position} saved {saved}, plain decoding {own}{apart}"


def _total(results: list[Recheck], claimed: list[str]) -> str:
    findings = [result.finding for result in results]
    counts = ", ".join(f"{findings.count(kind)} {kind}" for kind in ("identical", "near-tie", "different"))
    lines = [f"{sum(result.tokens for result in results)} tokens in {len(results)} answers: {counts}"]
    left = dict.fromkeys(name for result in results for name in result.not_checked)
    lines += [f"Not checked: {', '.join(left)}."] if left else []
    lines.append(f"Claimed by the file, and believed: {', '.join([*claimed, 'sampling parameters'])}.")
    return "\n".join(lines)
