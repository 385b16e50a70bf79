"""The clocks of a bench: the wall clock, cost profiles by name, and a profile of this machine.

Owns `Clock`, and the short measurement that tuning uses if no profile is given. Invariant: a profile measured with
other models is refused unless the user forces it.
"""

from __future__ import annotations

import gc
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from specbranch.assembly import ModelChoice, cost_profile, draft_cache_dtype, identity
from specbranch.clock.profile import CostProfile
from specbranch.clock.shipped import WALL, load_profile
from specbranch.errors import BadParameter
from specbranch.files import write_whole
from specbranch.lab.bench.pair_setup import Running, Subject
from specbranch.lab.measure.loaded_pair import load_pair
from specbranch.lab.measure.probes import QUICK
from specbranch.lab.measure.profile_pair import measure
from specbranch.progress import StepsDone, silent

HERE = "this machine"
BRIEFLY = replace(QUICK, rows=(1, 2, 4, 8, 16))  # enough rows for any tuned draft length
FARTHER = replace(BRIEFLY, far=True)  # also at a longer context


@dataclass(frozen=True, slots=True)
class Clock:
    """A cost profile and its name, or the wall clock if there is no profile."""

    name: str = WALL
    profile: CostProfile | None = None

    @property
    def is_wall(self) -> bool:
        """True if time is measured, false if it is modelled."""
        return self.profile is None

    def refuse_other_pair(self, target: str, draft: str | None) -> None:
        """Raise if the profile was measured with other models."""
        if self.profile is not None:
            self.profile.check_pair(identity(target), None if draft is None else identity(draft))


def named_clocks(names: Sequence[str]) -> tuple[Clock, ...]:
    """Return profiles by name or file, each once; the wall clock if none is named."""
    found = tuple(Clock(_stem(name), load_profile(name)) for name in dict.fromkeys(names))
    names = [clock.name for clock in found]
    twins = [name for name in names if names.count(name) > 1]
    if twins:
        raise BadParameter(
            f"Two clocks are named {twins[0]}, so their rows could not be distinguished. Rename one of the files."
        )
    return found or (Clock(),)


def given_clock(profile: Path, subject: Subject, force: bool) -> Clock:
    """Return the profile in a file as the clock to tune by."""
    return Clock(f"profile {profile.stem}", cost_profile(str(profile), subject.target, subject.draft, force))


def machine_clock(
    target: str, draft: str, title: str, running: Running, progress: StepsDone = silent, far: bool = False
) -> Clock:
    """Load both models and measure them in a few seconds; `specbranch profile` takes longer and is more precise."""
    big = ModelChoice(target, device=running.device, weights=running.weights, cache_dtype=running.cache_dtype)
    device = running.draft_device or running.device
    own: dict[str, Any] = {
        "weights": running.draft_weights,
        "draft_window": running.draft_window,
        "cache_dtype": draft_cache_dtype(running.cache_dtype, device),
    }
    small = ModelChoice(draft, device=device, shorten=True, **own)
    made = measure(load_pair(big, small, title, running.executor), FARTHER if far else BRIEFLY, progress)
    free_memory()
    return Clock(HERE, made)


def kept_machine_clock(subject: Subject, draft: str, out: Path, progress: StepsDone, far: bool) -> Clock:
    """Return the profile of this machine that is stored with the results; measure and store it if there is none."""
    file = out / f"profile-{subject.title}.json"
    if not file.exists():
        made = machine_clock(subject.target, draft, subject.title, subject.running, progress, far)
        assert made.profile is not None
        write_whole(file, json.dumps(made.profile.to_dict(), indent=2, ensure_ascii=False) + "\n")
    held = CostProfile.load(file)
    if (held.target_identity, held.draft_identity) != (identity(subject.target), identity(draft)):
        raise BadParameter(
            f"{file} was measured with other models. Delete it to measure this machine again, or name another --out."
        )
    return Clock(HERE, held)


def free_memory() -> None:
    """Release the memory of unused models before others are loaded."""
    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _stem(name: str) -> str:
    return Path(name).stem if name.endswith(".json") else name
