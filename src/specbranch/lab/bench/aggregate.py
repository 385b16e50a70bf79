"""From prompt runs to rows: pooled counters, paired speedups with their noise, and the check for losslessness.

Owns the statistics over runs. core.stats alone defines what one request did, and every rate; this file asks it for the
summary of the added counters. Invariant: a speedup compares a method only with autoregressive decoding of the same
prompts in the same repeats.
"""

from __future__ import annotations

import math
import random
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median, quantiles
from typing import Any, TypeVar

from specbranch.clock.shipped import WALL
from specbranch.core.stats import Stats
from specbranch.lab.bench.results import ResultRow
from specbranch.lab.bench.run_store import PromptRun
from specbranch.lab.suites.suite import prompt_set

DRAWS, BOOTSTRAP_SEED = 1000, 20260301  # the bootstrap's seed is fixed: equal runs give equal intervals


@dataclass(frozen=True, slots=True)
class Timing:
    """Decoded tokens and the seconds they took."""

    decoded: float
    seconds: float


Slot = tuple[str, int]  # prompt, repeat
T = TypeVar("T")
K = TypeVar("K")


def rows_of(measurements: Iterable[PromptRun]) -> tuple[ResultRow, ...]:
    """Return a row for each method and setting on each suite, pair, temperature and clock, in order of first
    appearance."""
    runs = list(measurements)
    baselines: dict[tuple[Any, ...], dict[Slot, PromptRun]] = defaultdict(dict)
    for one in runs:
        if one.is_baseline:
            baselines[_scene(one)].setdefault((one.prompt, one.repeat), one)
    cells = _grouped(runs, lambda one: one.key[:6])
    return tuple(_row(cell, baselines[_scene(cell[0])]) for cell in cells.values())


def pooled(turns: Iterable[Mapping[str, Any]]) -> Stats:
    """Add up summaries of requests, as one request; the first token of each request does not count as decoded."""
    total = Stats(emitted=1)
    for turn in turns:
        total.go_on_with(Stats.from_summary(turn))
    return total


def accepted_lengths(stats: Stats) -> tuple[int, ...]:
    """Return how many verifications of a chain accepted 0, 1, 2 … of its tokens.

    accepted_at[n] counts the chains with more than n accepted tokens, so neighbours differ by the chains that ended
    there.
    """
    more = [*stats.tested_at[:1], *stats.accepted_at, 0]
    return tuple(longer - longest for longer, longest in pairwise(more)) if stats.tested_at else ()


def interval(
    mine: Sequence[Timing], base: Sequence[Timing], draws: int = DRAWS, seed: int = BOOTSTRAP_SEED
) -> tuple[float, float] | None:
    """Return the 95 % bootstrap interval of the speedup; prompts are drawn with their pair of timings. None for fewer
    than two."""
    if len(mine) < 2:
        return None
    generator, indices = random.Random(seed), range(len(mine))
    columns = [
        [getattr(timing, name) for timing in timings] for timings in (mine, base) for name in ("decoded", "seconds")
    ]
    found = []
    for _ in range(draws):
        drawn = generator.choices(indices, k=len(mine))
        decoded, seconds, base_decoded, base_seconds = (sum(map(column.__getitem__, drawn)) for column in columns)
        found.append(decoded / seconds * base_seconds / base_decoded)
    found.sort()
    return found[math.floor(0.025 * (draws - 1))], found[math.ceil(0.975 * (draws - 1))]


def half_width(values: Sequence[float], clock: str) -> float | None:
    """Return half of the interquartile range over the median: the spread of repeats, as `results` defines it."""
    if len(values) < 2:
        return None if clock == WALL or not values else 0.0
    low, middle, high = quantiles(values, n=4, method="inclusive")
    return (high - low) / 2 / middle


def _scene(one: PromptRun) -> tuple[Any, ...]:
    """Return the values that two runs must share to be compared."""
    return one.pair, one.suite, one.clock, one.temperature


def _row(runs: list[PromptRun], base: dict[Slot, PromptRun]) -> ResultRow:
    first, of_prompt = runs[0], _grouped(runs, lambda run: run.prompt)
    return ResultRow(
        pair=first.pair,
        suite=first.suite,
        method=first.method,
        temperature=first.temperature,
        clock=first.clock,
        setting=first.setting,
        rule=first.rule,
        prompts=len(of_prompt),
        repeats=max(map(len, of_prompt.values())),
        tokens=round(sum(median(map(_tokens, same)) for same in of_prompt.values())),
        prompt_set=prompt_set({(run.prompt, run.digest) for run in runs}),
        **_counted(runs),
        **_timed(runs),
        **_paired(runs, base),
        **_checked(runs, base),
    )


def _counted(runs: list[PromptRun]) -> dict[str, Any]:
    """Return the figures that depend on counters alone, and the shares of decode time."""
    turns = [turn for run in runs for turn in run.turns]
    stats, emitted = pooled(turns), sum(turn["tokens"] for turn in turns)
    summary = stats.summary()
    drafted = stats.drafted > 0
    clocked = all("both_busy_seconds" in turn for turn in turns)  # methods from outside and old files lack it
    return {
        "tokens_per_forward": summary["tokens_per_forward"],
        "rollback_rate": summary["rollback_rate"] if drafted else None,
        "run_between_rejections": summary["run_between_rejections"],
        "rollback": {reason: count / emitted for reason, count in summary["rollback"].items() if drafted and emitted},
        "accepted_lengths": accepted_lengths(stats),
        "acceptance_by_position": tuple(summary["acceptance_by_position"]),
        "tested_by_position": tuple(stats.tested_at),
        "branch_hit_rate": summary["branch_hit_rate"],
        "late_captures": stats.late_captures,
        "draft_idle": _share(summary["draft_idle_seconds"], stats.decode_seconds),
        "target_idle": _share(summary["target_idle_seconds"] if stats.target_busy else None, stats.decode_seconds),
        "draft_overlapped": _share(stats.both_busy, stats.draft_busy) if clocked else None,
        "host_share": _share(stats.host_seconds, stats.decode_seconds) if clocked else None,
        "begun_with_tree": _share(stats.rounds_begun, stats.target_forwards) if stats.rounds_overlapped else None,
        "begun_of_overlapped": _share(stats.rounds_begun, stats.rounds_overlapped),
    }


def _timed(runs: list[PromptRun]) -> dict[str, Any]:
    turns = [turn for run in runs for turn in run.turns]
    whole = sum(turn["ttft_seconds"] + turn["decode_seconds"] for turn in turns)
    slots = {(run.prompt, run.repeat): _timing(run) for run in runs}
    rate = _rate(list(_typical(slots).values()))
    return {
        "tokens_per_second": rate,
        "devices": runs[0].devices,
        "tokens_per_second_per_device": rate / runs[0].devices if rate is not None else None,
        "spread": half_width(_by_repeat(slots, lambda chosen: _rate([slots[slot] for slot in chosen])), runs[0].clock),
        "end_to_end_tokens_per_second": sum(turn["tokens"] for turn in turns) / whole if whole else None,
        "ttft_seconds": median(turn["ttft_seconds"] for turn in turns),
    }


def _paired(runs: list[PromptRun], base: dict[Slot, PromptRun]) -> dict[str, Any]:
    """Return the speedup over the prompts and repeats that both finished, its interval and its spread."""
    slots = {(run.prompt, run.repeat): _timing(run) for run in runs if (run.prompt, run.repeat) in base}
    others = {slot: _timing(base[slot]) for slot in slots}
    slots = {slot: timing for slot, timing in slots.items() if timing.decoded and others[slot].decoded}
    if not slots:
        return {"speedup": None}
    mine, theirs = _typical(slots), _typical({slot: others[slot] for slot in slots})
    low, high = interval(list(mine.values()), [theirs[prompt] for prompt in mine]) or (None, None)
    spread = half_width(
        _by_repeat(slots, lambda chosen: _ratio([slots[s] for s in chosen], [others[s] for s in chosen])), runs[0].clock
    )
    speedup = _ratio(list(mine.values()), list(theirs.values()))
    return {"speedup": speedup, "speedup_low": low, "speedup_high": high, "speedup_spread": spread}


def _checked(runs: list[PromptRun], base: dict[Slot, PromptRun]) -> dict[str, Any]:
    """Return whether all runs gave the tokens of autoregressive decoding, and how many did not. None if the rule keeps
    only the distribution."""
    pairs = [(run, base[run.prompt, run.repeat]) for run in runs if (run.prompt, run.repeat) in base]
    if runs[0].rule != "match" or not pairs:
        return {"lossless": None}
    # The first repeat decides: the baseline must agree with itself.
    texts = {other.prompt: other.output for other in reversed(base.values())}
    differing = sum(run.output != other.output or run.output != texts[run.prompt] for run, other in pairs)
    return {"lossless": differing == 0, "differing": differing}


def _tokens(run: PromptRun) -> int:
    return sum(turn["tokens"] for turn in run.turns)


def _timing(run: PromptRun) -> Timing:
    stats = pooled(run.turns)
    return Timing(stats.emitted - 1, stats.decode_seconds)


def _grouped(items: Iterable[T], key: Callable[[T], K]) -> dict[K, list[T]]:
    """Group items by a key, in order of first appearance."""
    found: dict[K, list[T]] = defaultdict(list)
    for item in items:
        found[key(item)].append(item)
    return found


def _typical(slots: Mapping[Slot, Timing]) -> dict[str, Timing]:
    """Return each prompt's median over repeats."""
    of_prompt = _grouped(slots.items(), lambda one: one[0][0])
    return {
        prompt: Timing(median(t.decoded for _, t in same), median(t.seconds for _, t in same))
        for prompt, same in of_prompt.items()
    }


def _by_repeat(slots: Mapping[Slot, Timing], value: Callable[[list[Slot]], float | None]) -> list[float]:
    """Return a figure for each complete repeat. An interrupted repeat has other prompts, and that difference is no
    noise."""
    prompts = {prompt for prompt, _ in slots}
    repeats = _grouped(slots, lambda slot: slot[1])
    found = [value(chosen) for chosen in repeats.values() if len(chosen) == len(prompts)]
    return [one for one in found if one]


def _rate(timings: Sequence[Timing]) -> float | None:
    seconds = sum(timing.seconds for timing in timings)
    return sum(timing.decoded for timing in timings) / seconds if seconds > 0 else None


def _ratio(mine: Sequence[Timing], base: Sequence[Timing]) -> float:
    """Return the ratio of two decode rates. Callers pass only timings with decoded tokens."""
    return (_rate(mine) or math.nan) / (_rate(base) or math.nan)


def _share(part: float | None, whole: float) -> float | None:
    return part / whole if part is not None and whole > 0 else None
