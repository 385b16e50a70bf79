"""Measure tokens a second by the number of requests at once, while all of them decode: plain decoding, and planned
methods with rounds of draft trees on the device (`SPECBRANCH_FOREST`) and without them.

One process loads the pair once. Prompts come from suites, without text before them, other ones for each batch. The
first batch of each kind warms up and is not counted. `--check` also compares every text with that of plain decoding.
Prints a table last, and writes JSON to --out.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import cycle, islice
from pathlib import Path
from statistics import median
from typing import Any

PLAIN = "autoregressive"


@dataclass(slots=True)
class Noted:
    """When a request got how many tokens."""

    times: list[tuple[float, int]] = field(default_factory=list)

    def note(self, orders: Any, reports: Any, added: int) -> None:
        """Take note of a round."""
        if added:
            self.times.append((time.perf_counter(), added))


def main() -> None:
    """Measure all batch sizes, and print a table."""
    given = _options()
    os.environ["SPECBRANCH_FOREST"] = "1"
    with tempfile.TemporaryDirectory() as folder:
        os.environ.setdefault("SPECBRANCH_EXPERIENCE", folder)
        found = list(_measured(given, Path(folder)))
    if given.out is not None:
        given.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print(table(found))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pair", help="a pair by name")
    parser.add_argument("--target", help="a target, instead of a pair")
    parser.add_argument("--draft", help="its draft")
    parser.add_argument("--target-shape", default="8b", help="'own' keeps its shape [8b]")
    parser.add_argument("--draft-shape", default="1b", help="'own' keeps its shape [1b]")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--suites", default="own", help="suites, or groups of suites [own]")
    parser.add_argument("--at-once", default="1,4,16,64", help="numbers of requests [1,4,16,64]")
    parser.add_argument("--methods", default="specbranch", help="planned methods [specbranch]")
    parser.add_argument("--tokens", type=int, default=128, help="of each answer [128]")
    parser.add_argument("--turns", type=int, default=3, help="batches of each kind, the first one aside [3]")
    parser.add_argument("--without", action="store_true", help="also without rounds of draft trees on the device")
    parser.add_argument("--check", action="store_true", help="compare all texts with plain decoding's")
    parser.add_argument("--out", type=Path, help="file for the JSON")
    return parser.parse_args()


def _measured(given: argparse.Namespace, folder: Path) -> Iterator[dict[str, Any]]:
    import specbranch.lab.inflation.source  # noqa: F401 (registers inflated models)
    from specbranch import LLM, SamplingParams
    from specbranch.lab.suites.suite import conversation, load_suites

    target, draft = _pair(given, folder)
    sizes = [int(count) for count in given.at_once.split(",")]
    prompts = [
        conversation(prompt.turns[:1]) for suite in load_suites(given.suites.split(",")) for prompt in suite.prompts
    ]
    params = SamplingParams(max_tokens=given.tokens, temperature=0.0, seed=7, ignore_eos=True)
    method, options = given.methods.split(",")[0], {"max_batch": max(sizes)}
    with LLM(target, draft, method=method, device=given.device, warm_up="full", options=options) as llm:
        forest = llm.core.loop._forest
        able = forest._executor
        ways = [(PLAIN, False), *((method, True) for method in given.methods.split(","))]
        ways += [(method, False) for method in given.methods.split(",")] if given.without else []
        for count in sizes:
            texts: dict[int, list[list[int]]] = {}
            for method, on in ways:
                forest._executor = able if on else None
                view, rates, stats = llm.using(method), list[float](), list[Any]()
                for turn in range(1 + given.turns):
                    chosen = list(islice(cycle(prompts), turn * count, (turn + 1) * count))
                    rate, answers = _batch(view, chosen, params)
                    if turn:
                        rates.append(rate)
                        stats += answers
                    if given.check:
                        ids = [list(one.session.output) for one in answers]
                        if texts.setdefault(turn, ids) != ids:
                            print(f"{count} at once, {method}: a text differs", file=sys.stderr, flush=True)
                forwards = sum(one.session.stats.target_forwards for one in stats)
                yield {
                    "at_once": count,
                    "method": method,
                    "on_device": on,
                    "rate": median(rates),
                    "tokens_per_forward": sum(one.session.stats.emitted for one in stats) / max(forwards, 1),
                    "late": sum(one.session.stats.late_captures for one in stats),
                    "arms": _arms(stats),
                }
                print(f"{count} at once, {method}{' on the device' if on else ''}: {median(rates):,.0f}",
                      file=sys.stderr, flush=True)  # fmt: skip


def _pair(given: argparse.Namespace, folder: Path) -> tuple[str, str | None]:
    """Return the names of both models; larger shapes become recipes in the folder."""
    from specbranch.lab.bench.pair_setup import PairOrder, Running, make_subject
    from specbranch.pairs import DEFAULT_PAIR

    named = {"target": given.target, "draft": given.draft} if given.target else {"pair": given.pair or DEFAULT_PAIR}
    order = PairOrder(**named, target_shape=given.target_shape)
    order = replace(order, draft_shape=given.draft_shape if order.has_draft else None)
    subject = make_subject(order, Running(device=given.device), folder)
    return subject.target, subject.draft


def _batch(view: Any, prompts: Sequence[Any], params: Any) -> tuple[float, list[Any]]:
    """Answer prompts at once; returns tokens a second of all while all decode."""
    core = view.core
    answers = [
        answer for prompt in prompts for answer in core.make_samples(view.tokenizer.chat(prompt), params, view.decoding)
    ]
    noted = [Noted() for _ in answers]
    for answer, one in zip(answers, noted, strict=True):
        answer.session.on_round = one.note
    for answer in core.run_all(answers, len(answers)):
        if (error := answer.output().error) is not None:
            raise error
    begin = max(one.times[0][0] for one in noted)
    end = min(one.times[-1][0] for one in noted)
    tokens = sum(added for one in noted for at, added in one.times if begin < at <= end)
    return tokens / max(end - begin, 1e-9), answers


def _arms(answers: Sequence[Any]) -> dict[str, int]:
    found: dict[str, int] = {}
    for answer in answers:
        for name, tokens in answer.session.stats.arms.tokens.items():
            found[name] = found.get(name, 0) + tokens
    return found


def table(found: Sequence[dict[str, Any]]) -> str:
    """Return the figures as text, each beside plain decoding at the same batch size."""
    plain = {one["at_once"]: one["rate"] for one in found if one["method"] == PLAIN}
    lines = [
        "| at once | method | tokens/s | ÷ plain | tokens a forward | late | by arm |",
        "|---|---|---|---|---|---|---|",
    ]
    for one in found:
        name = one["method"] + (", trees on the device" if one["on_device"] else "")
        arms = ", ".join(f"{arm} {tokens}" for arm, tokens in one["arms"].items())
        lines.append(
            f"| {one['at_once']} | {name} | {one['rate']:,.0f} | {one['rate'] / plain[one['at_once']]:.2f} | "
            f"{one['tokens_per_forward']:.2f} | {one['late']} | {arms} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
