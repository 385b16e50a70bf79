"""Measure structured output: do answers finish, are they valid, are they plain masked decoding's, and what masks cost.

Two hundred schemas (`grammar_schemas.py`), at two temperatures, by several methods, in batches. Every text is compared
with that of plain masked decoding, and every tenth of those with the request alone. Finished answers are validated by
`jsonschema` where it is installed; `--answers` keeps all of them, and `--validate FILE` checks such a file on another
machine. Costs are measured one request at a time, and then what one request with a schema costs the others of a batch.
A table comes last; then a line of JSON.

python scripts/measure_grammar.py --device cpu --schemas 20 --tokens 160
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from grammar_schemas import SchemaCase, schema_cases
from measure_forest import PLAIN, pair_of

SCHEMAS_BY_NAME = {case.name: case.schema for case in schema_cases()}
ALONE_EVERY = 10  # schemas: so often plain masked decoding in a batch is compared with the request alone
COSTLY_SHAPES = ("nested", "list", "mixed")
LONG_KEYS = "long keys"
COST_TURNS = 3  # each way is measured so often; the first turn warms up
LEAST_SHARES = {
    "finished": 0.95,
    "valid": 1.0,
    "identical": 1.0,
    "identical to alone": 1.0,
    "plain masked ÷ plain free": 0.95,
    "specbranch masked ÷ plain masked": 1.3,
    "specbranch with long keys ÷ specbranch free": 1.0,
    "plain beside a schema ÷ plain beside free text": 0.97,
    "specbranch beside a schema ÷ specbranch beside free text": 0.97,
}


@dataclass(frozen=True)
class Answered:
    """One answer."""

    schema: str
    method: str
    temperature: float
    text: str
    tokens: list[int]
    finished: bool


def main() -> None:
    """Measure, or validate a file of answers."""
    given = _options()
    if given.validate is not None:
        answers = [Answered(**json.loads(line)) for line in given.validate.read_text(encoding="utf-8").splitlines()]
        _print([("valid", *_valid(answers))])
        return
    with tempfile.TemporaryDirectory() as folder:
        os.environ.setdefault("SPECBRANCH_EXPERIENCE", folder)
        _measure(given, Path(folder))


def _measure(given: argparse.Namespace, folder: Path) -> None:
    import specbranch.lab.inflation.source  # noqa: F401 (registers inflated models)
    from specbranch import LLM

    target, draft = pair_of(given, folder)
    cases = list(schema_cases())
    cases = cases[:: max(len(cases) // given.schemas, 1)][: given.schemas]
    options = {"max_batch": given.at_once}
    with LLM(target, draft, method="specbranch", device=given.device, warm_up="full", options=options) as llm:
        rows: list[tuple[str, float, float]] = []
        if not given.only_cost:
            answers = list(_answers(llm, cases, given))
            if given.answers is not None:
                given.answers.write_text("".join(json.dumps(asdict(one)) + "\n" for one in answers), encoding="utf-8")
            rows += list(_shares(llm, cases, answers, given))
        rows += [*_costs(llm, cases, given), *_neighbours(llm, cases, given)]
    _print(rows)


def _params(case: SchemaCase | None, temperature: float, tokens: int) -> Any:
    from specbranch import SamplingParams

    schema = None if case is None else case.schema
    return SamplingParams(
        max_tokens=tokens, temperature=temperature, seed=11, json_schema=schema, ignore_eos=case is None
    )


def _run(view: Any, asked: Sequence[tuple[SchemaCase, Any]], at_once: int) -> list[Any]:
    """Answer prompts, some at once; returns the outputs."""
    core = view.core
    answers = [
        answer
        for case, params in asked
        for answer in core.make_samples(
            view.tokenizer.chat([{"role": "user", "content": case.prompt}]), params, view.decoding
        )
    ]
    outputs = [answer.output() for answer in core.run_all(answers, at_once)]
    for output in outputs:
        if output.error is not None:
            raise output.error
    return outputs


def _answers(llm: Any, cases: Sequence[SchemaCase], given: argparse.Namespace) -> Iterator[Answered]:
    for temperature in given.temperatures:
        asked = [(case, _params(case, temperature, given.tokens)) for case in cases]
        for method in dict.fromkeys((PLAIN, *given.methods)):
            outputs = _run(llm.using(method), asked, given.at_once)
            print(f"temperature {temperature}, {method}: {len(outputs)} answers", file=sys.stderr, flush=True)
            for case, output in zip(cases, outputs, strict=True):
                finished = output.finish_reason == "stop"
                yield Answered(case.name, method, temperature, output.text, list(output.token_ids), finished)


def _shares(
    llm: Any, cases: Sequence[SchemaCase], answers: Sequence[Answered], given: argparse.Namespace
) -> Iterator[tuple[str, float, float]]:
    """Return name, share and number of cases of what has to hold."""
    plain = {(one.schema, one.temperature): one for one in answers if one.method == PLAIN}
    yield "finished", _mean([one.finished for one in plain.values()]), len(plain)
    yield ("valid", *_valid(answers))
    others = [one for one in answers if one.method != PLAIN]
    same = [one.tokens == plain[one.schema, one.temperature].tokens for one in others]
    for one, is_same in zip(others, same, strict=True):
        if not is_same:
            print(f"differs: {one.schema}, {one.method}, temperature {one.temperature}", file=sys.stderr)
    yield "identical", _mean(same), len(same)
    alone = []
    for case in cases[::ALONE_EVERY]:
        for temperature in given.temperatures:
            found = _run(llm.using(PLAIN), [(case, _params(case, temperature, given.tokens))], 1)[0]
            alone.append(list(found.token_ids) == plain[case.name, temperature].tokens)
    yield "identical to alone", _mean(alone), len(alone)


def _valid(answers: Sequence[Answered]) -> tuple[float, float]:
    """Return the share of finished answers that their schema accepts, and their number; NaN: nobody can tell."""
    if find_spec("jsonschema") is None:
        return float("nan"), 0
    from jsonschema import Draft202012Validator

    finished = [one for one in answers if one.finished]
    valid = [Draft202012Validator(SCHEMAS_BY_NAME[one.schema]).is_valid(json.loads(one.text)) for one in finished]
    return _mean(valid), len(valid)


def _costs(llm: Any, cases: Sequence[SchemaCase], given: argparse.Namespace) -> Iterator[tuple[str, float, float]]:
    """Return ratios of tokens a second, and on how many prompts each is measured; all ways take turns."""
    usual = [case for case in cases if case.name.endswith(COSTLY_SHAPES)][: given.cost_prompts]
    keys = [case for case in cases if case.name.endswith(LONG_KEYS)][: given.cost_prompts]
    ways = {
        f"{method} {kind}": (llm.using(method), chosen, kind != "free")
        for method in (PLAIN, "specbranch")
        for kind, chosen in (("free", usual), ("masked", usual), (LONG_KEYS, keys))
    }
    tokens, seconds = dict.fromkeys(ways, 0), dict.fromkeys(ways, 0.0)
    for turn in range(COST_TURNS):
        for name, (view, chosen, is_masked) in ways.items():
            for case in chosen:
                params = _params(case if is_masked else None, 0.0, given.tokens if is_masked else given.free_tokens)
                output = _run(view, [(case, params)], 1)[0]
                if turn:
                    tokens[name] += len(output.token_ids) - 1
                    seconds[name] += output.stats["decode_seconds"]
    rates = {name: tokens[name] / seconds[name] for name in ways if seconds[name] > 0.0}
    for name, rate in rates.items():
        yield f"{name.replace(PLAIN, 'plain')}, tokens/s", rate, len(ways[name][1])
    for name in LEAST_SHARES:
        over, _, under = name.replace("plain", PLAIN).replace("with ", "").partition(" ÷ ")
        if over in rates and under in rates:
            yield name, rates[over] / rates[under], len(ways[over][1])


def _neighbours(llm: Any, cases: Sequence[SchemaCase], given: argparse.Namespace) -> Iterator[tuple[str, float, float]]:
    """Return how fast free answers are in a batch with one masked answer, by a batch with one more free one.

    All answers are as long as the masked one, so that it is there all the time.
    """
    usual = [case for case in cases if case.name.endswith(COSTLY_SHAPES)][: given.cost_prompts]
    others = [usual[at % len(usual)] for at in range(given.at_once - 1)] if usual else []
    for method in (PLAIN, "specbranch") if others else ():
        alone = _run(llm.using(method), [(usual[0], _params(usual[0], 0.0, given.free_tokens))], 1)[0]
        free = _params(None, 0.0, len(alone.token_ids))
        tokens, seconds = [0, 0], [0.0, 0.0]
        for turn in range(COST_TURNS):
            for masked in (False, True):
                last = _params(usual[0], 0.0, given.free_tokens) if masked else free
                asked = [*((case, free) for case in others), (usual[0], last)]
                outputs = _run(llm.using(method), asked, given.at_once)[:-1]
                for output in outputs if turn else ():
                    tokens[masked] += len(output.token_ids) - 1
                    seconds[masked] += output.stats["decode_seconds"]
        name = method.replace(PLAIN, "plain")
        ratio = tokens[True] * seconds[False] / max(tokens[False] * seconds[True], 1e-9)
        yield f"{name} beside a schema ÷ {name} beside free text", ratio, len(others)


def _mean(found: Sequence[bool]) -> float:
    return sum(found) / len(found) if found else float("nan")


def _print(rows: Sequence[tuple[str, float, float]]) -> None:
    print("| what | measured | bar | of |\n|---|---|---|---|")
    for name, value, count in rows:
        bar = f"{LEAST_SHARES[name]:.2f}" if name in LEAST_SHARES else ""
        print(f"| {name} | {value:,.3f} | {bar} | {count:.0f} |")
    print(json.dumps({name: value for name, value, _ in rows}))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pair", help="a pair by name [the default pair]")
    parser.add_argument("--target", help="a target, instead of a pair")
    parser.add_argument("--draft", help="its draft")
    parser.add_argument("--target-shape", default="own", help="such as 8b; 'own' keeps its shape [own]")
    parser.add_argument("--draft-shape", default="own", help="such as 1b; 'own' keeps its shape [own]")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--schemas", type=int, default=200, help="[200]")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.8])
    parser.add_argument("--methods", nargs="+", default=["specbranch", "tree", "lookup"])
    parser.add_argument("--at-once", type=int, default=8, help="requests of a batch [8]")
    parser.add_argument("--tokens", type=int, default=512, help="of an answer, at most [512]")
    parser.add_argument("--free-tokens", type=int, default=128, help="of a free answer whose speed is measured [128]")
    parser.add_argument("--cost-prompts", type=int, default=8, help="prompts on which costs are measured [8]")
    parser.add_argument("--only-cost", action="store_true", help="measure costs alone")
    parser.add_argument("--answers", type=Path, help="file for all answers, a line of JSON each")
    parser.add_argument(
        "--validate", type=Path, metavar="FILE", help="validate the answers of such a file, and no more"
    )
    return parser.parse_args()


if __name__ == "__main__":
    main()
