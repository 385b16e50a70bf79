"""Measure tokens a second by the number of requests at once, while all of them decode: plain decoding, and planned
methods with rounds of draft trees on the device (`SPECBRANCH_FOREST`) and without them.

One process loads the pair once. Prompts come from suites in turn, without text before them, the same ones for each
number of requests; they are read beforehand, so that the KV cache has them. The rate is that of all batches together,
each while nine of ten requests decode (all, if they are fewer than ten); beside it is that of whole batches, until the
last answer has ended. `--check` also compares every text with that of plain decoding. Prints a table last, and writes
JSON to --out.
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
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any

PLAIN = "autoregressive"
READ_FIRST = 4  # tokens of the answers that put prompts into the KV cache


@dataclass(slots=True)
class Noted:
    """When a request got how many tokens."""

    times: list[tuple[float, int]] = field(default_factory=list)

    def note(self, orders: Any, reports: Any, added: int) -> None:
        """Take note of a round."""
        if added:
            self.times.append((time.perf_counter(), added))


@dataclass(frozen=True, slots=True)
class Spans:
    """How long a batch took, in seconds."""

    tokens: int  # while nine of ten requests decode
    seconds: float  # of that
    all_tokens: int
    whole: float  # until the last answer has ended
    last_begins: float  # until all requests have a token
    first_ends: float  # until the first answer has ended


def main() -> None:
    """Measure all batch sizes, and print a table."""
    given = _options()
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
    parser.add_argument("--prompts", type=int, default=40, help="prompts, at least one batch [40]")
    parser.add_argument("--without", action="store_true", help="also without rounds of draft trees on the device")
    parser.add_argument("--idle", action="store_true", help="also how much of a round the GPU idles")
    parser.add_argument("--check", action="store_true", help="compare all texts with plain decoding's")
    parser.add_argument("--out", type=Path, help="file for the JSON")
    return parser.parse_args()


def _measured(given: argparse.Namespace, folder: Path) -> Iterator[dict[str, Any]]:
    import specbranch.lab.inflation.source  # noqa: F401 (registers inflated models)
    from specbranch import LLM, SamplingParams
    from specbranch.lab.suites.suite import conversation, load_suites

    target, draft = pair_of(given, folder)
    sizes = [int(count) for count in given.at_once.split(",")]
    suites = [suite.prompts for suite in load_suites(given.suites.split(","))]
    in_turn = [prompt for turn in zip_longest(*suites) for prompt in turn if prompt is not None]
    prompts = [conversation(prompt.turns[:1]) for prompt in in_turn[: max(given.prompts, max(sizes))]]
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
                view, spans, stats = llm.using(method), list[Spans](), list[Any]()
                batches = [prompts[at : at + count] for at in range(0, max(given.prompts // count, 1) * count, count)]
                for turn, chosen in enumerate(batches):
                    _batch(view, chosen, replace(params, max_tokens=READ_FIRST))
                    took, answers = _batch(view, chosen, params)
                    spans, stats = [*spans, took], stats + answers
                    ids = [list(one.session.output) for one in answers]
                    if given.check and texts.setdefault(turn, ids) != ids:
                        print(f"{count} at once, {method}: a text differs", file=sys.stderr, flush=True)
                rate, idle = sum(one.tokens for one in spans) / sum(one.seconds for one in spans), None
                if given.idle:
                    from device_idle import idle_share

                    idle = idle_share(partial(_batch, view, batches[0], params))[0]
                forwards = sum(one.session.stats.target_forwards for one in stats)
                yield {
                    "at_once": count,
                    "method": method,
                    "on_device": on,
                    "rate": rate,
                    "whole": sum(one.all_tokens for one in spans) / sum(one.whole for one in spans),
                    "last_begins": max(one.last_begins for one in spans),
                    "first_ends": min(one.first_ends for one in spans),
                    "idle": idle,
                    "tokens_per_forward": sum(one.session.stats.emitted for one in stats) / max(forwards, 1),
                    "late": sum(one.session.stats.late_captures for one in stats),
                    "arms": _arms(stats),
                }
                print(f"{count} at once, {method}{' on the device' if on else ''}: {rate:,.0f}",
                      file=sys.stderr, flush=True)  # fmt: skip


def pair_of(given: argparse.Namespace, folder: Path) -> tuple[str, str | None]:
    """Return the names of both models; larger shapes become recipes in the folder."""
    from specbranch.lab.bench.pair_setup import PairOrder, Running, make_subject
    from specbranch.pairs import DEFAULT_PAIR

    named = {"target": given.target, "draft": given.draft} if given.target else {"pair": given.pair or DEFAULT_PAIR}
    order = PairOrder(**named, target_shape=given.target_shape)
    order = replace(order, draft_shape=given.draft_shape if order.has_draft else None)
    subject = make_subject(order, Running(device=given.device), folder)
    return subject.target, subject.draft


def _batch(view: Any, prompts: Sequence[Any], params: Any) -> tuple[Spans, list[Any]]:
    """Answer prompts at once; returns how long it took, and the answers."""
    core = view.core
    answers = [
        answer for prompt in prompts for answer in core.make_samples(view.tokenizer.chat(prompt), params, view.decoding)
    ]
    noted, start = [Noted() for _ in answers], time.perf_counter()
    for answer, one in zip(answers, noted, strict=True):
        answer.session.on_round = one.note
    for answer in core.run_all(answers, len(answers)):
        if (error := answer.output().error) is not None:
            raise error
    few = len(noted) // 10
    begins, ends = sorted(one.times[0][0] for one in noted), sorted(one.times[-1][0] for one in noted)
    begin, end = begins[-1 - few], ends[few]
    tokens = sum(added for one in noted for at, added in one.times if begin < at <= end)
    whole = sum(added for one in noted for _, added in one.times)
    return Spans(tokens, max(end - begin, 1e-9), whole, ends[-1] - start, begins[-1] - start, ends[0] - start), answers


def _arms(answers: Sequence[Any]) -> dict[str, int]:
    found: dict[str, int] = {}
    for answer in answers:
        for name, tokens in answer.session.stats.arms.tokens.items():
            found[name] = found.get(name, 0) + tokens
    return found


def table(found: Sequence[dict[str, Any]]) -> str:
    """Return the figures as text, each beside plain decoding at the same batch size."""
    plain = {one["at_once"]: one for one in found if one["method"] == PLAIN}
    lines = [
        "| at once | method | tokens/s | ÷ plain | whole batches | ÷ plain | tokens a forward | idle | late | by arm |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for one in found:
        name = one["method"] + (", trees on the device" if one["on_device"] else "")
        arms = ", ".join(f"{arm} {tokens}" for arm, tokens in one["arms"].items())
        base = plain[one["at_once"]]
        idle = "" if one["idle"] is None else f"{one['idle']:.1f} %"
        lines.append(
            f"| {one['at_once']} | {name} | {one['rate']:,.0f} | {one['rate'] / base['rate']:.2f} | "
            f"{one['whole']:,.0f} | {one['whole'] / base['whole']:.2f} | "
            f"{one['tokens_per_forward']:.2f} | {idle} | {one['late']} | {arms} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
