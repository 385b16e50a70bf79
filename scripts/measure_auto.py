"""Hold `auto` against plain decoding and against the best fixed method: every pair, suite and cost profile, from records.

A fixed method decides the same whatever the clock, so it is played once and charged by every profile; `auto` is played for each. Records
and what drafts said are kept in the lab's folder. Last line: JSON.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from specbranch.bench.lab import Lab, Workload
from specbranch.bench.record import Record
from specbranch.bench.suites import Suite, load_suites
from specbranch.config import SpeculativeConfig
from specbranch.core.pilot import Experience
from specbranch.pairs import PAIRS
from specbranch.sim.profile import CostProfile
from specbranch.sim.shipped import load_profile, shipped_profiles

PLAIN = SpeculativeConfig(method="autoregressive")
FIXED = (
    PLAIN,
    *(SpeculativeConfig(method="lookup", num_speculative_tokens=length) for length in (5, 10)),
    *(SpeculativeConfig(method="speculative", num_speculative_tokens=length) for length in (1, 2, 3, 5, 8)),
    *(SpeculativeConfig(method="adaptive", num_speculative_tokens=length) for length in (5, 10)),
    *(SpeculativeConfig(method="pearl", num_speculative_tokens=length) for length in (3, 5, 10)),
    *(
        SpeculativeConfig(method="specbranch", num_speculative_tokens=length, stop_below=stop, max_branches=width)
        for length, stop, width in ((3, 0.2, 6), (5, 0.4, 6), (8, 0.2, 12), (8, 0.4, 6), (12, 0.2, 6))
    ),
)
AUTO = SpeculativeConfig(method="auto")


@dataclass(slots=True)
class Cell:
    """A pair, a suite and a profile: seconds by setting, and what auto chose."""

    pair: str
    suite: str
    profile: str
    seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    chosen: Counter[str] = field(default_factory=Counter)

    def speedup(self, setting: str) -> float:
        """Over plain decoding."""
        return self.seconds[_name(PLAIN)] / self.seconds[setting]

    @property
    def best(self) -> str:
        """The quickest fixed setting."""
        return min((name for name in self.seconds if name != "auto"), key=self.seconds.__getitem__)

    def row(self) -> dict[str, Any]:
        """For JSON."""
        best = self.best
        ratios = {"auto": self.speedup("auto"), "best": self.speedup(best), "of_best": self.seconds[best] / self.seconds["auto"]}
        named = {"pair": self.pair, "suite": self.suite, "profile": self.profile, "best_setting": best}
        return {**named, **ratios, "chosen": dict(self.chosen)}


def main() -> None:
    """Measure and print a table."""
    given = _options()
    profiles = {name: load_profile(name) for name in given.profiles or shipped_profiles()}
    suites = load_suites(given.suites, files=given.prompts, data=given.data, limit=given.limit)
    rows = []
    print(f"{'pair':16} {'suite':12} {'profile':14} {'auto':>5} {'best':>5} {'auto/best':>9}  best fixed; tokens by what auto chose")
    for pair in given.pairs:
        with Lab(pair) as lab:
            for cell in _cells(lab, suites, profiles, Workload(temperature=given.temperature, max_tokens=given.max_tokens)):
                row = cell.row()
                rows.append(row)
                shown = ", ".join(f"{name} {count}" for name, count in cell.chosen.most_common())
                told = "{pair:16} {suite:12} {profile:14} {auto:5.2f} {best:5.2f} {of_best:9.3f}  {best_setting}; ".format(**row)
                print(told + shown, flush=True)
    print(json.dumps({"rows": rows}))


def _options() -> argparse.Namespace:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--pairs", nargs="+", default=list(PAIRS))
    options.add_argument("--suites", nargs="+", default=["own"])
    options.add_argument("--prompts", type=Path, nargs="+", default=[], help="files in Spec-Bench's format, besides the suites")
    options.add_argument("--data", type=Path, help="the folder of public suites")
    options.add_argument("--profiles", nargs="+", help="all that ship, unless named")
    options.add_argument("--limit", type=int, default=6, help="prompts a suite")
    options.add_argument("--max-tokens", type=int, default=128)
    options.add_argument("--temperature", type=float, default=0.0)
    return options.parse_args()


def _cells(lab: Lab, suites: Iterable[Suite], profiles: dict[str, CostProfile], workload: Workload) -> Iterator[Cell]:
    for suite in suites:
        cells = {name: Cell(lab.pair, suite.name, name) for name in profiles}
        known = {name: Experience(profile, lab.draft is not None) for name, profile in profiles.items()}  # a suite finds out for itself
        for record in (lab.records(prompt, workload)[0] for prompt in suite.prompts):  # the first turn
            _book(lab, record, cells, profiles)
            _choose(lab, record, cells, profiles, known)
        yield from cells.values()


def _book(lab: Lab, record: Record, cells: dict[str, Cell], profiles: dict[str, CostProfile]) -> None:
    """Play the fixed settings."""
    for config in FIXED:
        book = lab.books.of(record, config)
        for name, profile in profiles.items():
            cells[name].seconds[_name(config)] += book.seconds(profile)


def _choose(lab: Lab, record: Record, cells: dict[str, Cell], profiles: dict[str, CostProfile], known: dict[str, Experience]) -> None:
    """Play `auto` by each profile, with what it knows of the prompts before."""
    with lab.player(record) as player:
        for name, profile in profiles.items():
            stats = player.play(AUTO, profile, experience=known[name])
            cells[name].seconds["auto"] += stats.decode_seconds
            cells[name].chosen.update(stats.by_method)


def _name(config: SpeculativeConfig) -> str:
    values = asdict(config)
    told = {"specbranch": ("num_speculative_tokens", "stop_below", "max_branches"), "autoregressive": ()}.get(
        str(config.method), ("num_speculative_tokens",)
    )
    return " ".join([str(config.method), *(str(values[name]) for name in told)])


if __name__ == "__main__":
    main()
