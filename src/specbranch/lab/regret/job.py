"""The job of `specbranch bench regret`: many cases, in several processes.

Owns the processes. Invariant: results come in the order of their seeds, whoever computed them.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from multiprocessing import get_context
from multiprocessing.pool import Pool

from specbranch.lab.regret.figures import CaseResult
from specbranch.lab.regret.recorded_texts import RecordedText, scripts_of
from specbranch.lab.regret.runs import arms_of, judged, run
from specbranch.progress import StepsDone


def run_cases(
    seeds: Sequence[int],
    methods: tuple[str, ...],
    jobs: int,
    progress: StepsDone,
    texts: Sequence[RecordedText] = (),
) -> list[CaseResult]:
    """Run all cases, with drawn texts or with recorded ones; an interrupt ends the processes."""
    judged(methods)  # refuses names before anything runs
    results: list[CaseResult] = []
    progress("Cases", 0, len(seeds))
    for result in _results(seeds, partial(run_one, methods, texts), min(jobs, len(seeds))):
        results.append(result)
        progress("Cases", len(results), len(seeds))
    return sorted(results, key=lambda result: result.seed)


def run_one(methods: tuple[str, ...], texts: Sequence[RecordedText], seed: int) -> CaseResult:
    """Run the arms and the judged methods on one case."""
    scripts = scripts_of(seed, texts)
    try:
        arms = tuple(run(scripts, one) for one in arms_of(scripts.case))
        ours = tuple(run(scripts, one) for one in judged(methods))
    except Exception as error:
        error.add_note(f"This was case {seed} of the regret lab.")
        raise
    return CaseResult(seed, scripts.case.describe(), arms, ours)


def _results(seeds: Sequence[int], one: Callable[[int], CaseResult], jobs: int) -> Iterator[CaseResult]:
    if jobs <= 1:
        yield from map(one, seeds)
        return
    with _pool(jobs) as pool:  # leaving it ends the processes
        yield from pool.imap_unordered(one, seeds)


def _pool(jobs: int) -> Pool:
    """Start processes that leave Ctrl-C to this one; they inherit that, so it holds while they still import."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        return get_context("spawn").Pool(jobs)
    finally:
        signal.signal(signal.SIGINT, before)
