"""Regret: how much longer a method takes than the best fixed arm, and its percentiles over many cases.

Owns the arithmetic; knows nothing of models or time. Invariant: regret is relative, 0.1 means ten percent more time.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from specbranch.lab.regret.runs import PLAIN_ARM, Run

REGRET_PERCENTILES = (50, 90, 95, 99)
Kind = Literal["cold", "warm", "plain"]
REGRET_KINDS: dict[Kind, str] = {
    "cold": "behind the best arm, requests 1–4 (cold)",
    "warm": "behind the best arm, requests 5–8 (warm)",
    "plain": "behind plain decoding, all eight",
}


@dataclass(frozen=True, slots=True)
class CaseResult:
    """The runs of one case."""

    seed: int
    description: str
    arms: tuple[Run, ...]
    judged: tuple[Run, ...]

    @property
    def best(self) -> Run:
        """The arm that is fastest over all requests."""
        return min(self.arms, key=lambda run: run.seconds)

    def regret(self, run: Run) -> Regret:
        """Compare a run with the arms. The best arm is that of the compared requests, so it may change."""
        plain = next(arm for arm in self.arms if arm.name == PLAIN_ARM)
        return Regret(
            seed=self.seed,
            method=run.name,
            cold=run.cold / min(arm.cold for arm in self.arms) - 1.0,
            warm=run.warm / min(arm.warm for arm in self.arms) - 1.0,
            plain=run.seconds / plain.seconds - 1.0,
        )


@dataclass(frozen=True, slots=True)
class Regret:
    """The regret of one method in one case."""

    seed: int
    method: str
    cold: float  # over the first half of the requests, against the best fixed arm
    warm: float  # over the second half
    plain: float  # over all of them, against plain decoding

    def of(self, kind: Kind) -> float:
        """Return one of the three."""
        return {"cold": self.cold, "warm": self.warm, "plain": self.plain}[kind]


@dataclass(frozen=True, slots=True)
class Spread:
    """Percentiles of one kind of regret."""

    p50: float
    p90: float
    p95: float
    p99: float
    worst: float


def spread(values: Sequence[float]) -> Spread:
    """Return the percentiles by nearest rank: at most p % of the values are below the p-th."""
    ordered = sorted(values)
    p50, p90, p95, p99 = (ordered[max(math.ceil(len(ordered) * part / 100) - 1, 0)] for part in REGRET_PERCENTILES)
    return Spread(p50, p90, p95, p99, ordered[-1])


def regrets(results: Iterable[CaseResult], method: str) -> list[Regret]:
    """Return the regret of a method in each case."""
    return [result.regret(run) for result in results for run in result.judged if run.name == method]


def worst(found: Sequence[Regret], kind: Kind, count: int) -> list[Regret]:
    """Return the cases with the largest regret, the largest first."""
    return sorted(found, key=lambda regret: (-regret.of(kind), regret.seed))[:count]


def wins(results: Iterable[CaseResult]) -> dict[str, int]:
    """Return how often each arm is the best one."""
    return dict(Counter(result.best.name for result in results).most_common())


def to_dict(results: Sequence[CaseResult], methods: Sequence[str]) -> dict[str, Any]:
    """Return all figures as plain values."""
    found = {method: regrets(results, method) for method in methods}
    return {
        "methods": {
            method: {kind: asdict(spread([one.of(kind) for one in of_method])) for kind in REGRET_KINDS}
            for method, of_method in found.items()
        },
        "best_arms": wins(results),
        "cases": [_case_dict(result) for result in results],
    }


def _case_dict(result: CaseResult) -> dict[str, Any]:
    kinds = {run.name: {kind: result.regret(run).of(kind) for kind in REGRET_KINDS} for run in result.judged}
    runs = {run.name: {"cold": run.cold, "warm": run.warm} for run in (*result.arms, *result.judged)}
    return {
        "seed": result.seed,
        "case": result.description,
        "best_arm": result.best.name,
        "regret": kinds,
        "seconds": runs,
    }
