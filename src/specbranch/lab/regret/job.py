"""The job of `specbranch bench regret`: many cases, in several processes.

Owns the processes. Invariant: results come in the order of their seeds, whoever computed them.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator, Sequence
from functools import partial
from multiprocessing import get_context

from specbranch.lab.regret.case import make_case
from specbranch.lab.regret.figures import CaseResult
from specbranch.lab.regret.runs import arms_of, judged, run_case
from specbranch.progress import StepsDone


def run_cases(seeds: Sequence[int], methods: tuple[str, ...], jobs: int, progress: StepsDone) -> list[CaseResult]:
    """Run all cases; an interrupt ends the processes."""
    judged(methods)  # refuses names before anything runs
    results: list[CaseResult] = []
    progress("Cases", 0, len(seeds))
    for result in _results(seeds, methods, min(jobs, len(seeds))):
        results.append(result)
        progress("Cases", len(results), len(seeds))
    return sorted(results, key=lambda result: result.seed)


def run_one(methods: tuple[str, ...], seed: int) -> CaseResult:
    """Run the arms and the judged methods on one case."""
    case, judged_methods = make_case(seed), judged(methods)
    arms = arms_of(case)
    try:
        runs = run_case(case, [*arms, *judged_methods])
    except Exception as error:
        error.add_note(f"This was case {seed} of the regret lab.")
        raise
    return CaseResult(seed, case.describe(), tuple(runs[: len(arms)]), tuple(runs[len(arms) :]))


def _results(seeds: Sequence[int], methods: tuple[str, ...], jobs: int) -> Iterator[CaseResult]:
    if jobs <= 1:
        yield from (run_one(methods, seed) for seed in seeds)
        return
    with get_context("spawn").Pool(jobs, _ignore_interrupts) as pool:  # leaving it ends the processes
        yield from pool.imap_unordered(partial(run_one, methods), seeds)


def _ignore_interrupts() -> None:
    """Leave Ctrl-C to the parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
