"""The study behind `specbranch analyze`: which cases are compared and mapped, and the tables and charts made of them.

Owns the grid and the presentation; formulas are in `formulas`, times on toys in `toy_runs`, the map's model in
`strategies`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

from specbranch.charts import BarSeries, ChartLine, bar_chart, line_chart
from specbranch.sim.shipped import load_profile, shipped_profiles
from specbranch.study import formulas
from specbranch.study.strategies import PAIRS, STRATEGIES, Gain, PaddedCosts, StrategyName, best, rates_of
from specbranch.study.toy_runs import TOKENS, Case, MethodName, PredictedSteps, compare, predict

T = TypeVar("T")
Track = Callable[[Sequence[T], str], Iterable[T]]

# Agreement of the pairs whose latency is drawn: α, and how often the target's token is among the draft's first three.
HEADS = 3
AGREEMENT = {alpha: rates_of(alpha, top3)[:HEADS] for alpha, top3 in ((0.5, 0.72), (0.7, 0.86), (0.9, 0.96))}
RATIOS = (5, 10, 20)
LENGTHS = range(1, 16)  # up to 16 rows of the target cost the same
MEASURED = (2, 6, 12)
TITLES: dict[MethodName, str] = {"speculative": "serial SD", "pearl": "PEARL", "specbranch": "two-stage"}


@dataclass(frozen=True, slots=True)
class Cell:
    """A strategy at its best for one profile and one pair."""

    profile: str
    pair: str
    strategy: StrategyName
    gain: Gain


@dataclass(frozen=True, slots=True)
class Study:
    """All that was computed."""

    comparisons: tuple[PredictedSteps, ...]
    cells: tuple[Cell, ...]

    @property
    def profiles(self) -> list[str]:
        """The profiles of the map, in its order."""
        return list(dict.fromkeys(cell.profile for cell in self.cells))

    @property
    def farthest(self) -> float:
        """The largest share by which the model is off what was charged."""
        return max((abs(one.off) for one in self.comparisons), default=0.0)

    def gain(self, profile: str, pair: str, strategy: str) -> Gain:
        """One cell of the map."""
        return next(c.gain for c in self.cells if (c.profile, c.pair, c.strategy) == (profile, pair, strategy))


def run_study(profiles: Sequence[str], track: Track[Any], tokens: int = TOKENS) -> Study:
    """Compute everything; `track` shows how far it has come. No profile named: all that ship."""
    costs = {name: PaddedCosts(load_profile(name)) for name in profiles or ordered(shipped_profiles())}
    comparisons = tuple(compare(case, tokens) for case in track(cases(), "The methods on toys"))
    wanted = [(name, pair, strategy) for name in costs for pair in PAIRS for strategy in STRATEGIES]
    cells = [
        Cell(name, pair, s, best(costs[name], PAIRS[pair], s))
        for name, pair, s in track(wanted, "The map of strategies")
    ]
    return Study(comparisons, tuple(cells))


def ordered(names: Iterable[str]) -> list[str]:
    """Measured profiles first, then the plain ratios from the smallest."""
    return sorted(names, key=lambda name: (name[1:].isdigit(), len(name) if name[1:].isdigit() else 0, name))


def cases() -> list[Case]:
    """The cases whose charged latency is compared with the model."""
    return [
        case(method, alpha, c, gamma) for c in RATIOS for method in TITLES for alpha in AGREEMENT for gamma in MEASURED
    ]


def case(method: MethodName, alpha: float, c: float, gamma: int) -> Case:
    """A case of the grid; only the two-stage method has several heads."""
    return Case(method, AGREEMENT[alpha], c, gamma, HEADS if method == "specbranch" else 1)


def charts(study: Study) -> dict[str, str]:
    """Return the charts by the names of their files, without their endings."""
    made: dict[str, str] = {}
    for c in RATIOS:
        made[f"analysis-theorem-c{c}"] = _theorem_chart(study, c)
        made[f"analysis-methods-c{c}"] = _methods_chart(study, c)
    for pair in PAIRS if study.cells else ():
        made[f"analysis-map-{pair}"] = _map_chart(study, pair)
    return made


def tables(study: Study) -> str:
    """Return the tables for a terminal, as Markdown, so that they can be pasted."""
    parts = [
        ("Best γ and the speedup there", _lengths_table()),
        (f"Draft steps a token: model / charged (farthest off: {study.farthest:.1%})", _charged_table(study)),
        ("Speedup over plain decoding, each strategy at its best: weak / default / strong pair", _map_table(study)),
    ]
    return "\n\n".join(f"{title}\n\n{table}" for title, table in parts if table)


def record(study: Study) -> dict[str, Any]:
    """Return all of it for JSON."""
    compared = [
        {**asdict(one.case), "predicted": one.predicted, "charged": one.charged, "off": one.off}
        for one in study.comparisons
    ]
    mapped = [{"profile": c.profile, "pair": c.pair, "strategy": c.strategy, **asdict(c.gain)} for c in study.cells]
    return {"farthest_off": study.farthest, "latency": compared, "map": mapped}


def _lengths_table() -> str:
    rows = [["c", "α", "theorem", "serial SD", "PEARL", "two-stage, 3 heads"]]
    for c in RATIOS:
        for alpha in AGREEMENT:
            rows.append(
                [str(c), f"{alpha}", _theorem_best(alpha, c), *(_at_best(method, alpha, c) for method in TITLES)]
            )
    return markdown(rows)


def _theorem_best(alpha: float, c: float) -> str:
    gamma = formulas.best_length(lambda length: formulas.theorem_latency(alpha, c, length))
    return f"{c / formulas.theorem_latency(alpha, c, gamma):.2f} (γ={gamma})"


def _at_best(method: MethodName, alpha: float, c: float) -> str:
    gamma = min(LENGTHS, key=lambda length: predict(case(method, alpha, c, length)))
    return f"{c / predict(case(method, alpha, c, gamma)):.2f} (γ={gamma})"


def _charged_table(study: Study) -> str:
    rows = [["c", "method", "α", *(f"γ={gamma}" for gamma in MEASURED)]]
    for c in RATIOS:
        for method in TITLES:
            for alpha in AGREEMENT:
                told = [f"{one.predicted:.2f} / {one.charged:.2f}" for one in _of(study, method, alpha, c)]
                rows.append([str(c), TITLES[method], f"{alpha}", *told])
    return markdown(rows)


def _map_table(study: Study) -> str:
    rows = [["costs", *STRATEGIES]]
    for name in study.profiles:
        rows.append(
            [name, *(" / ".join(f"{study.gain(name, pair, s).speedup:.2f}" for pair in PAIRS) for s in STRATEGIES)]
        )
    return markdown(rows) if study.cells else ""


def markdown(rows: Sequence[Sequence[str]]) -> str:
    """Lay out rows as a Markdown table with aligned columns; the first row is the head."""
    wide = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [
        "| " + " | ".join(entry.ljust(width) for entry, width in zip(row, wide, strict=True)) + " |" for row in rows
    ]
    return "\n".join([lines[0], "|" + "|".join("-" * (width + 2) for width in wide) + "|", *lines[1:]])


def _of(study: Study, method: MethodName, alpha: float, c: float) -> list[PredictedSteps]:
    return [one for one in study.comparisons if (one.case.method, one.case.alpha, one.case.c) == (method, alpha, c)]


def _theorem_chart(study: Study, c: float) -> str:
    lines = [ChartLine("plain decoding", [(LENGTHS[0], c), (LENGTHS[-1], c)], colour=7)]
    for hue, alpha in enumerate(AGREEMENT):
        theorem = [(float(g), formulas.theorem_latency(alpha, c, g)) for g in LENGTHS]
        lines.append(
            ChartLine(
                f"theorem, α = {alpha}", [(g, y if y <= 3 * c else None) for g, y in theorem], dashed=True, colour=hue
            )
        )
        lines += _model_lines(study, "pearl", alpha, c, hue, f"PEARL, α = {alpha}")
    return line_chart(
        f"Theorem against mechanism, c = {c}",
        lines,
        "γ, tokens drafted beside a forward",
        "draft steps a token",
        y_from_zero=True,
    )


def _methods_chart(study: Study, c: float) -> str:
    lines = [ChartLine("plain decoding", [(LENGTHS[0], c), (LENGTHS[-1], c)], colour=7)]
    for hue, alpha in enumerate(AGREEMENT):
        lines += _model_lines(study, "speculative", alpha, c, hue, f"serial SD, α = {alpha}", dashed=True)
        lines += _model_lines(study, "specbranch", alpha, c, hue, f"two-stage, α = {alpha}")
    return line_chart(
        f"Serial and two-stage, c = {c}", lines, "γ, length of a chain", "draft steps a token", y_from_zero=True
    )


def _model_lines(
    study: Study, method: MethodName, alpha: float, c: float, hue: int, name: str, dashed: bool = False
) -> list[ChartLine]:
    """The model as a line, what was charged as points."""
    model = [(float(g), predict(case(method, alpha, c, g))) for g in LENGTHS]
    points = [(float(one.case.gamma), one.charged) for one in _of(study, method, alpha, c)]
    return [
        ChartLine(name, model, dashed=dashed, colour=hue),
        ChartLine("charged on toys" if alpha == min(AGREEMENT) and not dashed else "", points, drawn=False, colour=hue),
    ]


def _map_chart(study: Study, pair: str) -> str:
    bars = [
        BarSeries(strategy, [study.gain(name, pair, strategy).speedup for name in study.profiles])
        for strategy in STRATEGIES
    ]
    return bar_chart(
        f"Each strategy at its best, {pair} pair", study.profiles, bars, "costs", "speedup over plain decoding"
    )
