"""Measure what prompts cost on one GPU, as a user meets it, and compare with the bars for prefill and warm-up.

Cases: prompts (64 short ones at once, and one alone), decode (rounds of plain decoding by batch size), transformers
(a long prompt, against transformers on the same weights), steps (decode steps of many rows), load (64 requests at
once, as `bench load`), arrival (a long prompt among decoding requests), fresh-METHOD (first against tenth request of a
fresh process), warm-up (loading). The pair is SmolLM2 in the shapes of 1B and 8B unless another is named. Prints a
table last, and writes JSON to --out.
"""

from __future__ import annotations

import argparse
import inspect
import json
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from decode_cases import decode_figures
from fresh_process import FreshOrder, late_captures
from prefill_cases import (
    LONG_CONTEXT,
    SMALL,
    Figure,
    Sizes,
    arriving_figures,
    fresh_figures,
    load_figures,
    short_figures,
    step_figures,
    transformers_figures,
    warm_up_figures,
)

from specbranch.lab.bench.pair_setup import PairOrder, Running, Subject, make_subject, trained_context
from specbranch.lab.bench.recorded_pair import RecordedPair
from specbranch.pairs import DEFAULT_PAIR
from specbranch.provenance import build, hardware

FRESH_METHODS = ("autoregressive", "tree", "specbranch")
FRESH = tuple(f"fresh-{method}" for method in FRESH_METHODS)
ON_PAIR = {
    "prompts": short_figures,
    "decode": decode_figures,
    "transformers": transformers_figures,
    "load": load_figures,
}
ARRIVAL = "arrival"  # closes the pair, so it comes last
CASES = (*FRESH, "warm-up", "steps", *ON_PAIR, ARRIVAL)
FAILED = "the case failed"
Found = list[Figure]
Measure = Callable[[], Iterator[Figure]]


def main() -> None:
    """Measure, print a table, write JSON."""
    given = _options()
    if given.device.startswith("cuda") and not torch.cuda.is_available():
        raise SystemExit("No GPU is here. Run this on a machine with one, or try it out with --device cpu --small.")
    sizes = SMALL if given.small else Sizes()
    found: Found = []
    with TemporaryDirectory() as folder, ExitStack() as opened:
        subject = _subject(given, Path(folder))
        for case, measure in _measures(given, sizes, subject, folder, opened):
            found += _figures(case, measure)
            if given.out is not None:  # after each case: a run that is ended early leaves what it has
                given.out.write_text(json.dumps(_record(given, subject, found), indent=2) + "\n", encoding="utf-8")
    print(table(found))
    sys.exit(1 if any(figure.what == FAILED for figure in found) else 0)


def _figures(case: str, measure: Measure) -> Found:
    """Run a case; one that fails becomes a figure, and the others still run."""
    started, found = time.perf_counter(), list[Figure]()
    try:
        for figure in measure():
            found.append(figure)
            print(line(figure), file=sys.stderr, flush=True)
    except (Exception, SystemExit) as error:
        traceback.print_exc()
        found.append(Figure(case, FAILED, None, "", 0.0, note=f"{type(error).__name__}: {str(error)[:300]}"))
    print(f"{case} took {time.perf_counter() - started:.0f} s", file=sys.stderr, flush=True)
    return found


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"{', '.join(CASES)} [all]")
    parser.add_argument("--pair", help=f"a pair by name [{DEFAULT_PAIR}]")
    parser.add_argument("--target", help="a target, instead of a pair")
    parser.add_argument("--draft", help="its draft")
    parser.add_argument("--target-shape", default="8b", help="'own' keeps its shape [8b]")
    parser.add_argument("--draft-shape", default="1b", help="'own' keeps its shape [1b]")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--small", action="store_true", help="few and short prompts: to try this script out")
    parser.add_argument("--out", type=Path, help="file for the JSON")
    given = parser.parse_args()
    if unknown := [case for case in given.cases if case not in CASES]:
        parser.error(f"unknown case {unknown[0]!r}; expected some of {', '.join(CASES)}")
    given.cases = [case for case in CASES if case in (given.cases or CASES)]
    return given


def _subject(given: argparse.Namespace, folder: Path) -> Subject:
    """Return the pair; larger shapes become recipes in the folder."""
    named = {"target": given.target, "draft": given.draft} if given.target else {"pair": given.pair or DEFAULT_PAIR}
    order = PairOrder(**named, target_shape=given.target_shape)
    order = replace(order, draft_shape=given.draft_shape if order.has_draft else None)
    return make_subject(order, Running(device=given.device), folder)


def _measures(
    given: argparse.Namespace, sizes: Sizes, subject: Subject, folder: str, opened: ExitStack
) -> Iterator[tuple[str, Measure]]:
    """Yield the chosen cases: fresh processes first, while this one holds nothing of the GPU; the loaded pair last."""
    method = FRESH_METHODS[-1] if subject.draft is not None else FRESH_METHODS[0]
    order = FreshOrder(
        target=subject.target, draft=subject.draft, device=given.device, method=method, tokens=sizes.tokens
    )
    for method, case in zip(FRESH_METHODS, FRESH, strict=True):
        if case in given.cases and (subject.draft is not None or method == FRESH_METHODS[0]):
            yield case, partial(fresh_figures, replace(order, method=method), sizes, folder)
    if "warm-up" in given.cases:
        small = replace(order, target=subject.source[0], draft=subject.source[1])
        yield "warm-up", partial(warm_up_figures, order, small, folder)
    if "steps" in given.cases:
        yield "steps", partial(step_figures, given.device, sizes)
    chosen = [case for case in (*ON_PAIR, ARRIVAL) if case in given.cases]
    if not chosen:
        return
    recorded = opened.enter_context(_loaded(subject, folder, sizes))
    for case in chosen:
        if case in ON_PAIR:
            yield case, partial(ON_PAIR[case], recorded, sizes)
    yield "late captures", partial(_late, recorded)
    if ARRIVAL in chosen:
        yield ARRIVAL, partial(arriving_figures, recorded.llm, sizes)


def _loaded(subject: Subject, folder: str, sizes: Sizes) -> RecordedPair:
    """Load the pair with a full warm-up for the batch size of the cases, if this engine has one."""
    wanted = {"warm_up": "full", "max_batch": sizes.at_once}
    known = inspect.signature(RecordedPair).parameters
    return RecordedPair(
        target=subject.target,
        draft=subject.draft,
        title=subject.title,
        folder=Path(folder) / "records",
        running=subject.running,
        context_length=min(trained_context(subject.target), LONG_CONTEXT),
        **{name: value for name, value in wanted.items() if name in known},
    )


def _late(recorded: RecordedPair) -> Iterator[Figure]:
    yield Figure("late captures", "of all cases on the loaded pair", late_captures(recorded.llm), "captures", 0.0)


def _record(given: argparse.Namespace, subject: Subject, found: Found) -> dict[str, Any]:
    arguments = {name: str(value) if isinstance(value, Path) else value for name, value in vars(given).items()}
    figures = [asdict(figure) | {"ok": figure.ok} for figure in found]
    made = {"pair": subject.title, "hardware": hardware(given.device), **build()}
    return {**made, "arguments": arguments, "figures": figures}


def table(found: Found) -> str:
    """Lay out all figures, one a line: case, figure, bar, whether it is met."""
    head = f"{'case':21} {'figure':70} {'measured':>16} {'bar':>8}  ok"
    missed = sum(figure.ok is False for figure in found)
    unknown = sum(figure.bar is not None and figure.ok is None for figure in found)
    last = f"{missed} bars are missed, {unknown} are not known."
    return "\n".join((head, *map(line, found), last))


def line(figure: Figure) -> str:
    """Lay out one figure."""
    value = "unknown" if figure.value is None else f"{figure.value:.2f} {figure.unit}"
    bar = "" if figure.bar is None else f"{'≥' if figure.at_least else '≤'} {figure.bar:g}"
    ok = {True: "yes", False: "NO", None: "–"}[figure.ok]
    note = f"  ({figure.note})" if figure.note else ""
    return f"{figure.case:21} {figure.what:70} {value:>16} {bar:>8}  {ok}{note}"


if __name__ == "__main__":
    main()
