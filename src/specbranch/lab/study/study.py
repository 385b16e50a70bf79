"""The study behind `specbranch analyze`: its cases, tables and charts.

Owns the grid and the presentation; the formulas are in `formulas`, times on toy models in `toy_runs`, the map's model
in `strategies`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from typing import Any

from specbranch.charts import BarSeries, ChartLine, bar_chart, line_chart
from specbranch.clock.shipped import load_profile, shipped_profiles
from specbranch.lab.study import formulas
from specbranch.lab.study.strategies import STRATEGIES, STUDY_PAIRS, Gain, PaddedCosts, StrategyName, best, rates_of
from specbranch.lab.study.toy_runs import TOY_TOKENS, Case, MethodName, PredictedSteps, compare, predict

# Agreement of the pairs whose latency is drawn: α, and how often the target's token is among the draft's first three.
DRAWN_HEADS = 3
AGREEMENT = {alpha: rates_of(alpha, top3)[:DRAWN_HEADS] for alpha, top3 in ((0.5, 0.72), (0.7, 0.86), (0.9, 0.96))}
RATIOS = (5, 10, 20)
DRAWN_LENGTHS = range(1, 16)  # up to 16 rows of the target cost the same
MEASURED = (2, 6, 12)
TITLES: dict[MethodName, str] = {"speculative": "serial SD", "pearl": "PEARL", "specbranch": "two-stage"}
MapPlace = tuple[str, str, StrategyName]  # on the map: a profile, a pair, a strategy


@dataclass(frozen=True, slots=True)
class Study:
    """All results: predicted and charged latency, and each strategy with its best setting."""

    comparisons: tuple[PredictedSteps, ...]
    gains: Mapping[MapPlace, Gain]

    @property
    def profiles(self) -> list[str]:
        """The profiles of the map, in its order."""
        return list(dict.fromkeys(profile for profile, _, _ in self.gains))

    @property
    def farthest(self) -> float:
        """The largest relative error of the model."""
        return max((abs(one.off) for one in self.comparisons), default=0.0)

    def at(self, method: MethodName, alpha: float, c: float) -> list[PredictedSteps]:
        """Return the comparison of a method on one pair, by length."""
        cases = ((one, one.case) for one in self.comparisons)
        return [one for one, case in cases if (case.method, case.alpha, case.c) == (method, alpha, c)]


def run_study(profiles: Sequence[str], progress: Callable[[str, int, int], None], tokens: int = TOY_TOKENS) -> Study:
    """Compute everything and report `progress`; without names, use all shipped profiles."""
    costs = {name: PaddedCosts(load_profile(name)) for name in profiles or ordered(shipped_profiles())}
    compared, wanted = cases(), list(product(costs, STUDY_PAIRS, STRATEGIES))
    comparisons, gains = [], {}
    for done, case in enumerate(compared):
        progress("Methods on toys", done, len(compared))
        comparisons.append(compare(case, tokens))
    for done, (profile, pair, strategy) in enumerate(wanted):
        progress("Strategies on the map", done, len(wanted))
        gains[profile, pair, strategy] = best(costs[profile], STUDY_PAIRS[pair], strategy)
    return Study(tuple(comparisons), gains)


def ordered(names: Iterable[str]) -> list[str]:
    """Return measured profiles first, then the plain ratios in ascending order."""
    return sorted(names, key=lambda name: (name[1:].isdigit(), len(name) if name[1:].isdigit() else 0, name))


def cases() -> list[Case]:
    """Return the cases whose charged latency is compared with the model."""
    grid = product(RATIOS, TITLES, AGREEMENT, MEASURED)
    return [make_case(method, alpha, c, gamma) for c, method, alpha, gamma in grid]


def make_case(method: MethodName, alpha: float, c: float, gamma: int) -> Case:
    """Return a case of the grid; only the two-stage method has several heads."""
    return Case(method, AGREEMENT[alpha], c, gamma, DRAWN_HEADS if method == "specbranch" else 1)


def charts(study: Study) -> dict[str, str]:
    """Return the charts by file name, without the suffix."""
    made: dict[str, str] = {}
    for c in RATIOS:
        made[f"analysis-theorem-c{c}"] = _theorem_chart(study, c)
        made[f"analysis-methods-c{c}"] = _methods_chart(study, c)
    for pair in STUDY_PAIRS if study.gains else ():
        made[f"analysis-map-{pair}"] = _map_chart(study, pair)
    return made


def tables(study: Study) -> str:
    """Return the tables as Markdown, for a terminal."""
    parts = [
        ("Best γ and the speedup there", _lengths_table()),
        (f"Draft steps a token: model / charged (farthest off: {study.farthest:.1%})", _toys_table(study)),
        ("Speedup over plain decoding, each strategy at its best: weak / default / strong pair", _map_table(study)),
    ]
    return "\n\n".join(f"{title}\n\n{table}" for title, table in parts if table)


def record(study: Study) -> dict[str, Any]:
    """Return all results for JSON."""
    compared = [
        {**asdict(one.case), "predicted": one.predicted, "charged": one.on_toys, "off": one.off}
        for one in study.comparisons
    ]
    mapped = [
        {"profile": profile, "pair": pair, "strategy": strategy, **asdict(gain)}
        for (profile, pair, strategy), gain in study.gains.items()
    ]
    return {"farthest_off": study.farthest, "latency": compared, "map": mapped}


def _lengths_table() -> str:
    rows = [["c", "α", "theorem", "serial SD", "PEARL", "two-stage, 3 heads"]]
    for c, alpha in product(RATIOS, AGREEMENT):
        theorem = _at_best(partial(formulas.theorem_latency, alpha, c), c, formulas.TRIED)
        methods = [_at_best(_latency(method, alpha, c), c, DRAWN_LENGTHS) for method in TITLES]
        rows.append([str(c), f"{alpha}", theorem, *methods])
    return markdown(rows)


def _latency(method: MethodName, alpha: float, c: float) -> Callable[[int], float]:
    """Return draft steps per token by the model, as a function of the length."""
    return lambda length: predict(make_case(method, alpha, c, length))


def _at_best(latency: Callable[[int], float], c: float, lengths: Iterable[int]) -> str:
    gamma = formulas.best_length(latency, lengths)
    return f"{c / latency(gamma):.2f} (γ={gamma})"


def _toys_table(study: Study) -> str:
    rows = [["c", "method", "α", *(f"γ={gamma}" for gamma in MEASURED)]]
    for c, method, alpha in product(RATIOS, TITLES, AGREEMENT):
        cells = [f"{one.predicted:.2f} / {one.on_toys:.2f}" for one in study.at(method, alpha, c)]
        rows.append([str(c), TITLES[method], f"{alpha}", *cells])
    return markdown(rows)


def _map_table(study: Study) -> str:
    rows = [["costs", *STRATEGIES]]
    for name in study.profiles:
        cells = (" / ".join(f"{study.gains[name, pair, s].speedup:.2f}" for pair in STUDY_PAIRS) for s in STRATEGIES)
        rows.append([name, *cells])
    return markdown(rows) if study.gains else ""


def markdown(rows: Sequence[Sequence[str]]) -> str:
    """Format rows as a Markdown table with aligned columns; the first row is the header."""
    wide = [max(map(len, column)) for column in zip(*rows, strict=True)]
    head, *lines = ("| " + " | ".join(map(str.ljust, row, wide)) + " |" for row in rows)
    return "\n".join([head, "|" + "|".join("-" * (width + 2) for width in wide) + "|", *lines])


def _theorem_chart(study: Study, c: float) -> str:
    lines = []
    for hue, alpha in enumerate(AGREEMENT):
        latency = [(float(g), formulas.theorem_latency(alpha, c, g)) for g in DRAWN_LENGTHS]
        drawn = [(g, y if y <= 3 * c else None) for g, y in latency]
        lines.append(ChartLine(f"theorem, α = {alpha}", drawn, dashed=True, colour=hue))
        lines += _model_lines(study, "pearl", alpha, c, hue)
    return _latency_chart(f"Theorem against mechanism, c = {c}", lines, "γ, tokens drafted beside a forward", c)


def _methods_chart(study: Study, c: float) -> str:
    lines = []
    for hue, alpha in enumerate(AGREEMENT):
        lines += _model_lines(study, "speculative", alpha, c, hue, dashed=True)
        lines += _model_lines(study, "specbranch", alpha, c, hue)
    return _latency_chart(f"Serial and two-stage, c = {c}", lines, "γ, length of a chain", c)


def _latency_chart(title: str, lines: Sequence[ChartLine], x_label: str, c: float) -> str:
    plain = ChartLine("plain decoding", [(DRAWN_LENGTHS[0], c), (DRAWN_LENGTHS[-1], c)], colour=7)
    return line_chart(title, [plain, *lines], x_label, "draft steps a token", y_from_zero=True)


def _model_lines(
    study: Study, method: MethodName, alpha: float, c: float, hue: int, dashed: bool = False
) -> list[ChartLine]:
    """Return the model as a line and the charged latency as points."""
    name, label = f"{TITLES[method]}, α = {alpha}", "charged on toys" if alpha == min(AGREEMENT) and not dashed else ""
    latency = _latency(method, alpha, c)
    points = [(float(one.case.gamma), one.on_toys) for one in study.at(method, alpha, c)]
    return [
        ChartLine(name, [(float(g), latency(g)) for g in DRAWN_LENGTHS], dashed=dashed, colour=hue),
        ChartLine(label, points, drawn=False, colour=hue),
    ]


def _map_chart(study: Study, pair: str) -> str:
    profiles = study.profiles
    bars = [BarSeries(name, [study.gains[one, pair, name].speedup for one in profiles]) for name in STRATEGIES]
    title = f"Each strategy at its best, {pair} pair"
    return bar_chart(title, profiles, bars, "costs", "speedup over plain decoding")
