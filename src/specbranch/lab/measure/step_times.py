"""The times of all kinds of steps that a pair's warm-up captures, for `profile` and `doctor`.

Owns which warm-up is made for the table, and the table. Invariant: models that capture nothing, as on a CPU, have an
empty table.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from specbranch.config import SpeculativeConfig
from specbranch.core.methods import METHODS
from specbranch.core.warm_up import StepTime, WarmsUp
from specbranch.exec.forward_sizes import draft_sizes, target_sizes
from specbranch.lab.measure.loaded_pair import LoadedPair

TIMED_METHOD = "specbranch"
TIMED_SESSIONS = 64  # in a batch

StepTimes = Mapping[str, Sequence[StepTime]]  # by model: target, draft


def warmed_up(pair: LoadedPair) -> StepTimes:
    """Warm a pair up as an engine with the default method and batch size does; return the times of its steps."""
    method, config = METHODS[TIMED_METHOD], SpeculativeConfig(method=TIMED_METHOD)
    sizes = target_sizes(method, config, TIMED_SESSIONS), draft_sizes(method, config, TIMED_SESSIONS)
    found: dict[str, list[StepTime]] = {}
    for name, runner, wanted in zip(
        ("target", "draft"), (pair.verifier.runner, pair.drafter.runner), sizes, strict=True
    ):
        if isinstance(runner, WarmsUp):
            runner.warm_up(wanted)
            found[name] = runner.step_times()
    return {name: times for name, times in found.items() if times}


def step_table(times: StepTimes) -> list[str]:
    """Return the lines of a table, none without times."""
    lines: list[str] = []
    for name, of_model in times.items():
        lines += ["", f"Steps of the {name}, without context:"]
        lines += [f"  {time.seconds * 1e3:9.3f} ms   {time.kind}" for time in of_model]
    return lines


def plain_times(times: StepTimes) -> dict[str, list[dict[str, Any]]]:
    """Return the times as plain values, for JSON."""
    return {name: [asdict(time) for time in of_model] for name, of_model in times.items()}
