"""This machine's profile of a pair, measured in passing: what methods are tuned by where no profile is given."""

from __future__ import annotations

from dataclasses import replace

from specbranch.assembly import ModelChoice
from specbranch.bench.measure import QUICK, Progress, measure, silent
from specbranch.bench.workers import load_workers
from specbranch.config import ExecutorName
from specbranch.sim.profile import CostProfile

BRIEFLY = replace(QUICK, rows=(1, 2, 4, 8, 16))  # as many rows as a tuned length may need


def machine_profile(target: str, draft: str, pair: str, executor: ExecutorName = "serial", progress: Progress = silent) -> CostProfile:
    """Load both models by their names and measure them, in some seconds; `specbranch profile` takes its time and is exacter."""
    workers = load_workers(ModelChoice(target), ModelChoice(draft, shorten=True), pair, executor)
    return measure(workers, BRIEFLY, progress)
