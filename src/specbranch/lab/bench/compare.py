"""The changes between two results, and whether they exceed the noise.

Owns the comparison of rows and its wording. Invariant: rows made from different prompts, models or texts get no
verdict; they are listed with the reason.

A change is real if it exceeds the root of the sum of both squared spreads, times a factor. The factor depends on the
number of repeats, because a spread from few repeats is itself uncertain. If a spread is unknown, the 95 % intervals
decide: they must not overlap. On a modelled clock both spreads are 0, and any change is real.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

from specbranch.lab.bench.results import BASELINE, ResultRow, Results, figure_text, setting_text

ChangeKind = Literal["faster", "slower", "same", "unclear", "not comparable"]
EXACT = 1e-9  # a smaller relative change is the same sum added up in another order
# By repeats: the factor that 95 % of all pairs of equal runs stay below, found by simulating normal noise.
NOISE_FACTORS = {2: 9.2, 3: 4.0, 4: 2.8, 5: 2.8, 6: 2.1, 7: 1.9, 8: 1.7, 10: 1.4, 12: 1.2, 15: 1.1, 20: 0.9, 30: 0.75}


@dataclass(frozen=True, slots=True)
class Delta:
    """A figure before and after, its relative change and the change that noise alone would explain."""

    before: float | None
    after: float | None
    change: float | None
    noise: float | None
    verdict: ChangeKind


@dataclass(frozen=True, slots=True)
class Change:
    """A row that is in both results."""

    before: ResultRow
    after: ResultRow
    verdict: ChangeKind  # about the speedup; about tokens per second for plain decoding, whose speedup is 1
    speedup: Delta
    tokens_per_second: Delta
    remarks: tuple[str, ...] = ()  # why it cannot be compared, or what else changed

    def to_dict(self) -> dict[str, Any]:
        """Return plain values."""
        figures = {"speedup": asdict(self.speedup), "tokens_per_second": asdict(self.tokens_per_second)}
        return {**_names(self.after), "verdict": self.verdict, **figures, "remarks": list(self.remarks)}


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two results, compared row by row."""

    changes: tuple[Change, ...]
    only_before: tuple[ResultRow, ...]
    only_after: tuple[ResultRow, ...]
    warnings: tuple[str, ...]  # what differs between the two runs as a whole

    def to_dict(self) -> dict[str, Any]:
        """Return plain values."""
        return {
            "changes": [change.to_dict() for change in self.changes],
            "only_before": [_names(row) for row in self.only_before],
            "only_after": [_names(row) for row in self.only_after],
            "warnings": list(self.warnings),
        }

    def lines(self) -> list[str]:
        """Return the comparison in words: warnings, then rows, then totals."""
        lines = [f"Note: {warning}" for warning in self.warnings]
        lines += [_sentence(change) for change in self.changes]
        lines += [f"only in the first: {row_name(row)}" for row in self.only_before]
        lines += [f"only in the second: {row_name(row)}" for row in self.only_after]
        counts = Counter(change.verdict for change in self.changes)
        total = ", ".join(f"{counts[verdict]} {verdict}" for verdict in get_args(ChangeKind))
        lines.append(
            f"{len(self.changes)} rows in both: {total}." if self.changes else "The two have no row in common."
        )
        return lines


def compare(before: Results, after: Results) -> Comparison:
    """Compare two results row by row."""
    pairs, only_before, only_after = _matched(before.rows, after.rows)
    changes = tuple(_change(old, new, _obstacles(old, new, before, after)) for old, new in pairs)
    return Comparison(changes, only_before, only_after, _warnings(before, after))


def noise(spread: float | None, other: float | None, repeats: int) -> float | None:
    """Return the relative change that two equal runs stay below with 95 % probability; None if a spread is unknown."""
    if spread is None or other is None:
        return None
    factor = NOISE_FACTORS[max((known for known in NOISE_FACTORS if known <= repeats), default=2)]
    return max(factor * math.hypot(spread, other), EXACT)


def row_name(row: ResultRow) -> str:
    """Return a short name of a row."""
    return f"{row.pair} · {row.suite} · {row.method} · temperature {row.temperature:g} · {row.clock}"


def _matched(
    before: tuple[ResultRow, ...], after: tuple[ResultRow, ...]
) -> tuple[list[tuple[ResultRow, ResultRow]], tuple[ResultRow, ...], tuple[ResultRow, ...]]:
    """Match rows of equal settings first. A remaining method with one setting on either side is matched across
    settings."""
    exact = {row.key: row for row in after}
    pairs = [(row, exact[row.key]) for row in before if row.key in exact]
    taken = {row.key for row, _ in pairs}
    old, new = ([row for row in rows if row.key not in taken] for rows in (before, after))
    loose = {}
    for key in {row.key[:5]: None for row in old}:
        mine, theirs = ([row for row in rows if row.key[:5] == key] for rows in (old, new))
        if len(mine) == len(theirs) == 1:
            loose[key] = mine[0], theirs[0]
    pairs += loose.values()
    return pairs, tuple(r for r in old if r.key[:5] not in loose), tuple(r for r in new if r.key[:5] not in loose)


def _obstacles(old: ResultRow, new: ResultRow, before: Results, after: Results) -> tuple[str, ...]:
    """Return the reasons why a row gets no verdict."""
    found = []
    if old.prompt_set != new.prompt_set:
        found.append(f"made from different prompts ({old.prompts} and {new.prompts})")
    mine, theirs = before.provenance.pairs.get(old.pair), after.provenance.pairs.get(new.pair)
    if mine is not None and theirs is not None and mine != theirs:
        found.append(f"{old.pair} stands for different models ({_differences(mine, theirs)})")
    if before.provenance.workload != after.provenance.workload:
        asked = _differences(before.provenance.workload, after.provenance.workload)
        found.append(f"answers were asked for differently ({asked})")
    if old.rule != new.rule:
        found.append(f"accepted by different rules ({old.rule} and {new.rule})")
    return tuple(found)


def _change(old: ResultRow, new: ResultRow, obstacles: tuple[str, ...]) -> Change:
    intervals = (old.speedup_low, old.speedup_high), (new.speedup_low, new.speedup_high)
    repeats = min(old.repeats, new.repeats)
    speedup = _delta(
        old.speedup, new.speedup, noise(old.speedup_spread, new.speedup_spread, repeats), _apart(*intervals)
    )
    rate = _delta(old.tokens_per_second, new.tokens_per_second, noise(old.spread, new.spread, repeats), None)
    verdict = rate.verdict if new.method == BASELINE else speedup.verdict
    return Change(old, new, "not comparable" if obstacles else verdict, speedup, rate, obstacles + _remarks(old, new))


def _delta(old: float | None, new: float | None, noise: float | None, apart: bool | None) -> Delta:
    if not old or not new:
        return Delta(old, new, None, None, "unclear")
    change = new / old - 1
    real = apart if noise is None else abs(change) > noise
    if real is None:
        return Delta(old, new, change, None, "unclear")
    return Delta(old, new, change, noise, "same" if not real else "faster" if change > 0 else "slower")


def _apart(first: tuple[float | None, float | None], second: tuple[float | None, float | None]) -> bool | None:
    """True if two intervals do not overlap; None if one is missing."""
    (low, high), (other_low, other_high) = first, second
    if low is None or high is None or other_low is None or other_high is None:
        return None
    return high < other_low or other_high < low


def _remarks(old: ResultRow, new: ResultRow) -> tuple[str, ...]:
    found = []
    if old.lossless != new.lossless:
        words = {True: "lossless", False: "NOT lossless", None: "not checked"}
        found.append(f"was {words[old.lossless]}, is {words[new.lossless]}")
    if setting_text(old.setting) != setting_text(new.setting):
        found.append(f"setting: {setting_text(old.setting) or 'none'} → {setting_text(new.setting) or 'none'}")
    return tuple(found)


def _warnings(before: Results, after: Results) -> tuple[str, ...]:
    """List differences between the two runs as a whole, since they may explain the changes."""
    found = []
    for what in ("hardware", "versions", "settings", "commit", "Python"):
        mine, theirs = (getattr(results.provenance, what.lower()) for results in (before, after))
        if mine != theirs:
            difference = _differences(mine, theirs) if isinstance(mine, Mapping) else f"{mine} → {theirs}"
            found.append(f"{what} {'differ' if what.endswith('s') else 'differs'}: {difference}")
    return tuple(found)


def _differences(mine: Mapping[str, Any], theirs: Mapping[str, Any]) -> str:
    names = [name for name in dict.fromkeys((*mine, *theirs)) if mine.get(name) != theirs.get(name)]
    return ", ".join(f"{name} {mine.get(name)} → {theirs.get(name)}" for name in names)


def _sentence(change: Change) -> str:
    shown = change.tokens_per_second if change.after.method == BASELINE else change.speedup
    unit = " tok/s" if change.after.method == BASELINE else "×"
    figures = " → ".join(figure_text(value, ".3g") + unit for value in (shown.before, shown.after))
    by = f" ({shown.change:+.1%}{_noise(shown)})" if shown.change is not None else ""
    return "; ".join([f"{change.verdict}: {row_name(change.after)}: {figures}{by}", *change.remarks])


def _noise(delta: Delta) -> str:
    if delta.noise is None:
        return ", noise unknown" if delta.verdict == "unclear" else ", by the intervals"
    return ", exact" if delta.noise <= EXACT else f", noise ±{delta.noise:.1%}"


def _names(row: ResultRow) -> dict[str, Any]:
    return {name: getattr(row, name) for name in ("pair", "suite", "method", "temperature", "clock", "setting")}
