"""This machine's profile of a pair, measured in passing: what methods are tuned by where no profile is given."""

from __future__ import annotations

from dataclasses import replace

from specbranch.assembly import ModelChoice
from specbranch.bench.subjects import Running
from specbranch.measure.loaded_pair import load_pair
from specbranch.measure.probes import QUICK
from specbranch.measure.profile_pair import measure
from specbranch.progress import StepsDone, silent
from specbranch.sim.profile import CostProfile

BRIEFLY = replace(QUICK, rows=(1, 2, 4, 8, 16))  # as many rows as a tuned length may need
FARTHER = replace(BRIEFLY, far=True)  # also at a longer context


def machine_profile(
    target: str, draft: str, pair: str, running: Running | None = None, progress: StepsDone = silent, far: bool = False
) -> CostProfile:
    """Load both models by their names and measure them in some seconds; `specbranch profile` is slower and exacter."""
    how = running or Running()
    big = ModelChoice(target, device=how.device)
    small = ModelChoice(draft, device=how.draft_device or how.device, shorten=True, weights=how.draft_weights)
    made = measure(load_pair(big, small, pair, how.executor), FARTHER if far else BRIEFLY, progress)
    forget()
    return made


def forget() -> None:
    """Give back the memory of models that nobody holds any more, before others are loaded."""
    import gc

    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
