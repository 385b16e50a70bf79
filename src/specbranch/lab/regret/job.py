"""The job of `specbranch bench regret`: many cases, in several processes.

Invariant: results come in the order of their seeds, whoever computed them.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from specbranch.lab.processes import in_processes
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
    forest: bool = False,
) -> list[CaseResult]:
    """Run all cases, with drawn texts or with recorded ones; an interrupt ends the processes.

    `forest`: one device makes rounds of the forest.
    """
    judged(methods)  # refuses names before anything runs
    results: list[CaseResult] = []
    progress("Cases", 0, len(seeds))
    for result in in_processes(partial(run_one, methods, texts, forest), seeds, jobs):
        results.append(result)
        progress("Cases", len(results), len(seeds))
    return sorted(results, key=lambda result: result.seed)


def run_one(methods: tuple[str, ...], texts: Sequence[RecordedText], forest: bool, seed: int) -> CaseResult:
    """Run the arms and the judged methods on one case."""
    scripts = scripts_of(seed, texts)
    try:
        arms = tuple(run(scripts, one, forest) for one in arms_of(scripts.case))
        ours = tuple(run(scripts, one, forest) for one in judged(methods))
    except Exception as error:
        error.add_note(f"This was case {seed} of the regret lab.")
        raise
    return CaseResult(seed, scripts.case.describe(), arms, ours)
