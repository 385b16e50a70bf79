"""Compare planned methods with every fixed one on a pair, each method in a process of its own with empty experience.

For each kind of prompt: tokens a second of each method over all prompts and over the second half, as a share of the
best fixed method (chosen over all prompts) and of plain decoding. Kinds come in random order, the same for all methods.
Several runs; their medians count. Prints a table last, and writes JSON to --out after each process.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

PLAIN = "autoregressive"
FIXED = (PLAIN, "lookup", "tree", "speculative-2", "speculative-5", "speculative-10")
PLANNED = ("specbranch", "auto")
CHILD_SECONDS = 600.0
Speeds = dict[str, list[tuple[int, float]]]  # by kind: tokens and seconds of each prompt


def main() -> None:
    """Run all processes, and print the shares."""
    given = _options()
    if given.child is not None:
        print(json.dumps(_answered(given, given.child, given.seed)))
        return
    runs: dict[str, list[Speeds]] = {method: [] for method in given.methods}
    for run in range(given.runs):
        for method in given.methods:
            runs[method].append(_in_process(given, method, run))
            print(f"run {run + 1}, {method}: {_line(runs[method][-1])}", file=sys.stderr, flush=True)
            if given.out is not None:
                given.out.write_text(json.dumps(runs) + "\n", encoding="utf-8")
    print(table(runs))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target")
    parser.add_argument("--draft")
    parser.add_argument("--suites", default="own,exam", help="suites, or groups of suites [own,exam]")
    parser.add_argument("--methods", default=",".join((*FIXED, *PLANNED)))
    parser.add_argument("--limit", type=int, default=8, help="prompts of each kind [8]")
    parser.add_argument("--tokens", type=int, default=128, help="of each answer [128]")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--device")
    parser.add_argument("--out", type=Path, help="file for the JSON")
    parser.add_argument("--details", type=Path, help="file for a JSON line of statistics for each prompt")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--seed", type=int, default=0, help=argparse.SUPPRESS)
    given = parser.parse_args()
    given.methods = given.methods.split(",")
    return given


def _in_process(given: argparse.Namespace, method: str, run: int) -> Speeds:
    """Answer all prompts in a new process with empty experience."""
    passed = [f"--{name}={value}" for name in ("target", "draft", "device") if (value := getattr(given, name))]
    passed += [f"--suites={given.suites}", f"--limit={given.limit}", f"--tokens={given.tokens}"]
    passed += [f"--temperature={given.temperature}", f"--child={method}", f"--seed={run}"]
    passed += [f"--details={given.details}"] if given.details else []
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [sys.executable, str(Path(__file__).resolve()), *passed],
            env={**os.environ, "SPECBRANCH_EXPERIENCE": folder},
            capture_output=True,
            text=True,
            timeout=CHILD_SECONDS,
            check=False,
        )
    if done.returncode != 0:
        raise SystemExit(f"The process of {method} ended with {done.returncode}: {done.stderr[-2000:]}")
    found: Speeds = json.loads(done.stdout.splitlines()[-1])
    return found


def _answered(given: argparse.Namespace, method: str, seed: int) -> Speeds:
    """Load the pair and answer all prompts, kind after kind."""
    import specbranch.lab.inflation.source  # noqa: F401 (registers inflated models)
    from specbranch import LLM, SamplingParams
    from specbranch.lab.suites.suite import conversation, load_suites

    suites = list(load_suites(given.suites.split(","), limit=given.limit))
    Random(f"order {seed}").shuffle(suites)
    name, _, length = method.partition("-")
    settings = {"num_speculative_tokens": int(length)} if length else None
    named = {"target": given.target, "draft": given.draft} if given.target else {}
    params = SamplingParams(max_tokens=given.tokens, temperature=given.temperature, seed=7)
    found: Speeds = {}
    with LLM(**named, method=name, speculative=settings, device=given.device) as llm:
        for suite in suites:
            for prompt in suite.prompts:
                started = time.perf_counter()
                output: Any = llm.chat(conversation(prompt.turns[:1]), params)
                seconds = time.perf_counter() - started
                found.setdefault(suite.name, []).append((len(output.token_ids), seconds))
                if given.details is not None:
                    which = {"method": method, "run": seed, "kind": suite.name, "costs": _learned(llm.core.loop.costs)}
                    _note(given.details, which, output, seconds)
    return found


def _note(file: Path, which: Mapping[str, Any], output: Any, seconds: float) -> None:
    """Append the statistics of an answer."""
    line = {**which, "tokens": len(output.token_ids), "seconds": seconds, "stats": output.stats}
    with file.open("a", encoding="utf-8") as lines:
        lines.write(json.dumps(line) + "\n")


def _learned(costs: Any) -> dict[str, float]:
    """Return what rounds have taught: a planner that drafts too much or too little shows here."""
    return {"factor": costs.factor, "beside": costs.forest.beside, "drafting": costs.forest.drafting}


def rate(speeds: Sequence[tuple[int, float]]) -> float:
    """Return the tokens a second of some prompts together."""
    return sum(tokens for tokens, _ in speeds) / sum(seconds for _, seconds in speeds)


def table(runs: Mapping[str, Sequence[Speeds]]) -> str:
    """Lay out, by kind, each method's speed over plain decoding; of planned ones, their share of the best fixed one."""
    methods = [method for method, found in runs.items() if found]
    kinds = list(runs[methods[0]][0])
    lines = [f"{'kind':20}" + "".join(f"{method:>17}" for method in methods) + "   best fixed"]
    for kind in sorted(kinds):
        whole = {method: median(rate(found[kind]) for found in runs[method]) for method in methods}
        late = {
            method: median(rate(found[kind][len(found[kind]) // 2 :]) for found in runs[method]) for method in methods
        }
        fixed = [method for method in methods if method not in PLANNED] or methods
        best = max(fixed, key=lambda method: whole[method])
        cells = [_cell(method, whole, late, best) for method in methods]
        lines.append(f"{kind:20}" + "".join(f"{cell:>17}" for cell in cells) + f"   {best}")
    lines.append(
        "Speed over plain decoding; of planned methods also the share of the best fixed one: all prompts, second half."
    )
    return "\n".join(lines)


def _cell(method: str, whole: Mapping[str, float], late: Mapping[str, float], best: str) -> str:
    plain = whole.get(PLAIN, whole[best])
    if method not in PLANNED:
        return f"{whole[method] / plain:.2f}"
    return f"{whole[method] / plain:.2f} {whole[method] / whole[best]:.2f} {late[method] / late[best]:.2f}"


def _line(found: Speeds) -> str:
    return ", ".join(f"{kind} {rate(speeds):.0f}" for kind, speeds in sorted(found.items()))


if __name__ == "__main__":
    main()
