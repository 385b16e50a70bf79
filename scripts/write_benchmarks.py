"""Write the tables of docs/benchmarks.md from results of the bench: the text between a pair of markers is replaced.

    python scripts/write_benchmarks.py --modelled DIR --wall DIR --gpu DIR --ablation DIR --sampled DIR --predictors
    python scripts/write_benchmarks.py --gpu DIR --predicted DIR --two-devices DIR
    python scripts/write_benchmarks.py --load DIR

Results come from `specbranch bench run --preset NAME --out DIR`, and may be in several folders:

- modelled: `--preset modelled`; sampled: the same with `--temperature 1`
- measured: `--preset wall` and `--preset gpu-core`; parts of the method: `--preset ablation`
- predicted: modelled runs of what was measured on a GPU
- two devices: modelled runs by a profile `h200-…` and its `h200x2-…`
- many requests at once: all `load.json` below a folder (`specbranch bench load`); these go to docs/many.md, too

The predictors' figures are in the package. If a method was run with several settings, the one with the best mean over
the suites counts.
"""

from __future__ import annotations

import argparse
import json
import re
import textwrap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean

from specbranch.lab.bench.results import BASELINE, ResultRow, Results, setting_text
from specbranch.lab.bench.under_load import LoadRow

PAGE = Path(__file__).parents[1] / "docs" / "benchmarks.md"
MANY = Path(__file__).parents[1] / "docs" / "many.md"
SUITES = {"humaneval": "HumanEval", "gsm8k": "GSM8K", "cnn_dm": "CNN/DM", "mt_bench": "MT-bench"}
COMPARED = ("humaneval", "gsm8k", "cnn_dm")  # the suites of the paper's table that are ours, too
PAPERS = "specbranch:paper"
BARE = "specbranch:confidence"  # the same without its predictor
OURS = "specbranch"
METHODS = ("speculative", "adaptive", "pearl", BARE, PAPERS, "lookup", "lookahead", "tree", OURS)
BASELINES = ("speculative", "adaptive", "pearl")
MAY_LACK = (PAPERS, "lookahead")  # of a pair by a clock: too slow to be run everywhere
ONE, TWO = "h200-", "h200x2-"  # profiles of one device for both models, and of two
NEAR = 0.08  # how far a predicted speedup may be from the measured one
FOLDERS = {
    "modelled": "modelled",
    "wall": "measured",
    "gpu": "measured on a GPU",
    "predicted": "modelled, of what was measured on a GPU; needs --gpu",
    "two-devices": "modelled, for one device and for two",
    "ablation": "of the ablation",
    "sampled": "modelled at temperature 1",
}
PLAIN_AND_OURS = (BASELINE, OURS)
PREDICTORS = Path(__file__).parents[1] / "src" / "specbranch" / "predictors"
PAPER = {  # arXiv 2506.01979: speedup over autoregressive decoding on HumanEval, GSM8K, CNN/DM
    "h200-68m-7b": ("LLaMA 68M & 7B", (1.69, 1.86, 1.66), (2.04, 2.12, 1.87)),
    "h200-68m-13b": ("Vicuna 68M & 13B", (2.02, 1.61, 1.68), (2.47, 1.95, 1.89)),
    "h200-1.3b-33b": ("Deepseek-Coder 1.3B & 33B", (3.39, 2.78, 2.63), (3.71, 3.02, 2.97)),
}

WIDE = 100  # columns of prose; tables may be wider
LoadCell = tuple[str, str, int]  # clock, pair, requests at once


def main() -> None:
    """Read results and write the page."""
    options = argparse.ArgumentParser(description=__doc__)
    for name, about in FOLDERS.items():
        options.add_argument(f"--{name}", type=Path, nargs="+", default=[], help=f"folders of results: {about}")
    options.add_argument("--load", type=Path, help="folder of results of bench load, in any depth")
    options.add_argument("--predictors", action="store_true", help="the figures of the shipped predictors")
    given = options.parse_args()
    text = PAGE.read_text(encoding="utf-8")
    found = {name: _read(getattr(given, name.replace("-", "_"))) for name in FOLDERS}
    rows = {name: [row for one in results for row in one.rows] for name, results in found.items()}
    for name, tables in TABLES.items():
        if found[name]:
            for marker, table in tables.items():
                text = _filled(text, marker, table(_best(rows[name])))
            text = _filled(text, f"{name}-origin", _origin(found[name]))
    if rows["predicted"] and rows["gpu"]:
        text = _filled(text, "predicted", _beside_the_measured(rows["predicted"], rows["gpu"]))
    if given.load:
        under_load = _load_rows(given.load)
        text = _filled(text, "load", _load(under_load))
        many = _filled(MANY.read_text(encoding="utf-8"), "load", _load_ours(under_load))
        MANY.write_text(many, encoding="utf-8")
    if given.predictors:
        text = _filled(text, "predictors", _predictors())
    PAGE.write_text(text, encoding="utf-8")


def _read(folders: Sequence[Path]) -> list[Results]:
    return [Results.load(folder / "results.json") for folder in folders]


def _best(rows: Sequence[ResultRow]) -> list[ResultRow]:
    """The rows under the names of pairs and suites alone, however the pair was run and in what context; of several
    settings the best one's."""
    plain = [replace(row, pair=row.pair.partition("+")[0], suite=row.suite.partition("@")[0]) for row in rows]
    settings: dict[tuple[str, str, str], dict[str, list[float]]] = {}
    for row in plain:
        of_method = settings.setdefault((row.pair, row.clock, row.method), {})
        of_method.setdefault(setting_text(row.setting), []).append(row.speedup or 0.0)
    best = {key: max(some, key=lambda text: (len(some[text]), fmean(some[text]))) for key, some in settings.items()}
    return [row for row in plain if setting_text(row.setting) == best[row.pair, row.clock, row.method]]


def _filled(text: str, name: str, lines: Iterable[str]) -> str:
    begin, end = f"<!-- {name} -->", f"<!-- /{name} -->"
    if begin not in text or end not in text:
        raise SystemExit(f"{PAGE} lacks {begin} … {end}.")
    made = "\n".join([begin, *(wrapped for line in lines for wrapped in _wrapped(line)), end])
    return re.sub(f"{re.escape(begin)}.*?{re.escape(end)}", lambda _: made, text, flags=re.DOTALL)


def _wrapped(line: str) -> list[str]:
    """Prose in lines of at most WIDE columns; a row of a table as it is."""
    if line.startswith("|"):
        return [line]
    return textwrap.wrap(line, WIDE, break_long_words=False, break_on_hyphens=False) or [""]


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(line)} |" for line in (head, ["---"] * len(head), *rows)]


def _origin(found: Sequence[Results]) -> list[str]:
    rows = [row for results in found for row in results.rows]
    versions = dict.fromkeys(str(results.provenance.versions.get("specbranch")) for results in found)
    prompts = " or ".join(map(str, sorted({row.prompts for row in rows})))
    days = dict.fromkeys(sorted(results.provenance.made[:10] for results in found))
    return [
        f"specbranch {', '.join(versions)}, {', '.join(days)}; {prompts} prompts a suite, {len(rows)} rows, "
        f"{sum(row.tokens for row in rows):,} emitted tokens, {sum(bool(row.lossless) for row in rows)} of {len(rows)} "
        "rows lossless (every run identical to plain decoding)."
    ]


def _beside_the_paper(rows: Sequence[ResultRow]) -> list[str]:
    lines = []
    for clock, (models, pearl, branches) in PAPER.items():
        for pair in _pairs_by(rows, clock):
            shown = [
                _means([_speedup(rows, pair, suite, clock, method) for suite in COMPARED])[0]
                if _has(rows, pair, clock, method)
                else "–"
                for method in ("pearl", PAPERS, OURS)
            ]
            lines.append([clock, pair.removeprefix("smollm2-"), *shown])
        lines.append([clock, f"*paper: {models}*", *(f"*{text}*" for text in _means([*pearl, *branches])), "–"])
    titles = ("PEARL", "SpecBranch as published", "SpecBranch, ours")
    return _table(["costs", "pair", *(f"{m}: HumanEval / GSM8K / CNN-DM / mean" for m in titles)], lines)


def _means(cells: Sequence[float]) -> list[str]:
    threes = [cells[at : at + 3] for at in range(0, len(cells), 3)]
    return [" / ".join(f"{value:.2f}" for value in (*three, fmean(three))) for three in threes]


def _modelled(rows: Sequence[ResultRow]) -> list[str]:
    lines, run = [], {row.method for row in rows}
    columns = [m for m in METHODS if m in run]
    for clock in _names(rows, lambda row: row.clock):
        for pair in _pairs_by(rows, clock):
            there = [m for m in METHODS if _has(rows, pair, clock, m)]
            means = {m: fmean(_speedup(rows, pair, suite, clock, m) for suite in SUITES) for m in there}
            best = max(means.values())
            figures = [
                "–" if m not in means else f"**{means[m]:.2f}**" if means[m] == best else f"{means[m]:.2f}"
                for m in columns
            ]
            lines.append([clock, pair.removeprefix("smollm2-"), *figures])
    return _table(["costs", "pair", *columns], lines)


def _ours(rows: Sequence[ResultRow]) -> list[str]:
    """Compare ours with the best other method, tuned: minimum and median over all cells. Then compare it with the
    baselines by pair."""
    cells = []
    for clock in _names(rows, lambda row: row.clock):
        for pair in _pairs_by(rows, clock):
            for suite in SUITES:
                others = [m for m in ("autoregressive", *METHODS) if m != OURS and _has(rows, pair, clock, m)]
                fixed = {m: _speedup(rows, pair, suite, clock, m) for m in others}
                best = max(fixed, key=fixed.__getitem__)
                cells.append((_speedup(rows, pair, suite, clock, OURS), fixed[best], best, f"{clock}, {pair}, {suite}"))
    ratios = sorted((ours / best, f"{where}; {name}") for ours, best, name, where in cells)
    low = min(cells)
    return [
        f"In {len(cells)} cells (costs × pair × suite), ours reaches at least {ratios[0][0]:.3f} × the best other "
        f"method, tuned ({ratios[0][1]}). The median is {ratios[len(ratios) // 2][0]:.2f} ×. "
        f"It is ahead in {sum(ratio >= 1 for ratio, _ in ratios)} cells, "
        f"and within 5 % in {sum(ratio >= 0.95 for ratio, _ in ratios)}. "
        f"Its lowest speedup over plain decoding is {low[0]:.2f} ({low[3]}).",
        "",
        *_table(
            [
                *(
                    "pair",
                    "costs",
                    "ours over the best of serial, AdaEDL and PEARL",
                    "rejected per emitted token: ours",
                    "serial",
                    "PEARL",
                ),
                *("ours: siblings in the tree", "losing branches"),
            ],
            _by_pair(rows),
        ),
    ]


def _by_pair(rows: Sequence[ResultRow]) -> list[list[str]]:
    lines = []
    for clock in _names(rows, lambda row: row.clock):
        for pair in _pairs_by(rows, clock):
            means = {m: fmean(_speedup(rows, pair, suite, clock, m) for suite in SUITES) for m in (*BASELINES, OURS)}
            best = max(means[m] for m in BASELINES)
            lost = [_lost(rows, pair, clock, m, "rejected") for m in (OURS, "speculative", "pearl")]
            beside = [_lost(rows, pair, clock, OURS, kind) for kind in ("tree_siblings", "losing_branches")]
            lines.append(
                [
                    pair.removeprefix("smollm2-"),
                    clock,
                    f"{means[OURS] / best:.2f}",
                    *(f"{share:.2f}" for share in (*lost, *beside)),
                ]
            )
    return sorted(lines)


def _lost(rows: Sequence[ResultRow], pair: str, clock: str, method: str, kind: str) -> float:
    """Tokens drafted in vain, of one kind, for each that was emitted."""
    found = [_row(rows, pair, suite, clock, method) for suite in SUITES]
    return sum(row.rollback.get(kind, 0.0) * row.tokens for row in found) / sum(row.tokens for row in found)


def _ablation(rows: Sequence[ResultRow]) -> list[str]:
    """Every method and variant of the ablation: mean speedup over the suites for each pair, and what of it is left."""
    pairs, (clock,) = _names(rows, lambda row: row.pair), _names(rows, lambda row: row.clock)
    means = {
        (pair, m): fmean(_speedup(rows, pair, suite, clock, m) for suite in SUITES)
        for pair in pairs
        for m in _names([row for row in rows if row.pair == pair], lambda row: row.method)
    }
    lines = []
    for method in _names(rows, lambda row: row.method):
        whole = re.split("[-@]", method)[0]
        figures = [
            f"{means[pair, method]:.2f}" + _share(means[pair, method], means[pair, whole], whole != method)
            for pair in pairs
        ]
        lines.append([f"`{method}`", *figures])
    return _table(["method", *(pair.removeprefix("smollm2-") for pair in pairs)], lines)


def _share(part: float, whole: float, differs: bool) -> str:
    return f" ({100 * (part / whole - 1):+.1f} %)" if differs else ""


def _gpu(rows: Sequence[ResultRow]) -> list[str]:
    """Every method on a GPU: the mean speedup over the suites, each suite's, and the share of time in which neither
    model works."""
    pairs = _names(rows, lambda row: row.pair)
    cells: dict[str, list[str]] = {f"`{method}`": [] for method in _names(rows, lambda row: row.method)}
    for pair in pairs:
        found = {(row.method, row.suite): row for row in rows if row.pair == pair}
        whole = [m for m in _names(rows, lambda row: row.method) if all((m, suite) in found for suite in SUITES)]
        speedups = {m: [found[m, suite].speedup or 0.0 for suite in SUITES] for m in whole}
        best = max(map(fmean, speedups.values()))
        for name, figures in cells.items():
            if (m := name.strip("`")) not in speedups:
                figures += ["–", "–", "–"]
                continue
            mean, host = fmean(speedups[m]), fmean(found[m, suite].host_share or 0.0 for suite in SUITES)
            shown = f"**{mean:.2f}**" if mean == best else f"{mean:.2f}"
            figures += [shown, " / ".join(f"{one:.2f}" for one in speedups[m]), f"{host:.0%}"]
    shapes = [pair.removeprefix("smollm2-") for pair in pairs]
    head = ["method", *(title for shape in shapes for title in (shape, "by suite", "host"))]
    return _table(head, [[name, *figures] for name, figures in cells.items()])


def _beside_the_measured(predicted: Sequence[ResultRow], measured: Sequence[ResultRow]) -> list[str]:
    """Return modelled and measured results of the same methods, settings and prompts: speedups, and the time of a
    round, as means over the suites. The last line has their largest difference."""
    modelled = [replace(row, pair=f"{row.pair}-{row.clock.removeprefix(ONE)}") for row in _best(predicted)]
    means = [{}, {}]  # of speedup and of a round's milliseconds, by pair and method
    for held, rows in zip(means, (modelled, _best(measured)), strict=True):
        for pair in _names(rows, lambda row: row.pair):
            for method in _names(rows, lambda row: row.method):
                found = [row for row in rows if (row.pair, row.method) == (pair, method)]
                if len(found) == len(SUITES):
                    held[pair, method] = fmean(row.speedup or 0.0 for row in found), fmean(map(_round, found))
    both = [key for key in means[1] if key in means[0]]
    pairs = list(dict.fromkeys(pair for pair, _ in both))
    cells: dict[str, list[str]] = {}
    for method in dict.fromkeys(method for _, method in both):
        figures = cells[f"`{method}`"] = []
        for pair in pairs:
            if (pair, method) not in both:
                figures += ["–", "–"]
                continue
            (speed, spent), (seen, took) = means[0][pair, method], means[1][pair, method]
            figures += [
                f"{speed:.2f} ÷ {seen:.2f} = {speed / seen:.2f}",
                f"{spent:.2f} ÷ {took:.2f} = {spent / took:.2f}",
            ]
    head = ["method", *(title for pair in pairs for title in (pair.removeprefix("smollm2-"), "ms a round"))]
    off = sorted((abs(means[0][key][0] / means[1][key][0] - 1.0), key) for key in both)
    near = sum(one <= NEAR for one, _ in off)
    worst = [f"`{method}` with {pair.removeprefix('smollm2-')} ({one:.0%})" for one, (pair, method) in off[:-4:-1]]
    return [
        *_table(head, [[name, *figures] for name, figures in cells.items()]),
        "",
        f"{near} of {len(off)} speedups are within {NEAR:.0%} of the measured ones; the median error is "
        f"{off[len(off) // 2][0]:.1%}. The largest errors are: {', '.join(worst)}.",
    ]


def _round(row: ResultRow) -> float:
    """Milliseconds from one verdict to the next."""
    return 1e3 * (row.tokens_per_forward or 0.0) / (row.tokens_per_second or 1.0)


def _two_devices(rows: Sequence[ResultRow]) -> list[str]:
    """What overlap brings on one device and on two."""
    lines = []
    for clock in _names(rows, lambda row: row.clock):
        for pair in _names([row for row in rows if row.clock == clock], lambda row: row.pair):
            with_it, without = (
                fmean(_speedup(rows, pair, suite, clock, method) for suite in SUITES)
                for method in (OURS, f"{OURS}-overlap")
            )
            shares = [
                fmean(getattr(_row(rows, pair, suite, clock, OURS), name) or 0.0 for suite in SUITES)
                for name in ("begun_with_tree", "target_idle", "draft_overlapped")
            ]
            where = "two" if clock.startswith(TWO) else "one"
            costs = clock.removeprefix(TWO).removeprefix(ONE)
            gain = f"{100 * (with_it / without - 1):+.1f} %"
            shown = [f"{with_it:.2f}", f"{without:.2f}", gain, *(f"{share:.0%}" for share in shares)]
            lines.append([costs, pair.removeprefix("smollm2-"), where, *shown])
    head = ["costs", "pair", "H200", "ours", "without overlap", "overlap brings", "rounds that start with a tree"]
    return _table(
        [*head, "target waits", "draft's work that overlaps with the target's"],
        sorted(lines, key=lambda line: line[:3]),
    )


def _sampled(rows: Sequence[ResultRow]) -> list[str]:
    """Sampled decoding: ours against the baselines, mean over the suites."""
    methods = (*BASELINES, "lookup", "tree", OURS)
    lines = []
    for clock in _names(rows, lambda row: row.clock):
        for pair in _names([row for row in rows if row.clock == clock], lambda row: row.pair):
            means = {m: fmean(_speedup(rows, pair, suite, clock, m) for suite in SUITES) for m in methods}
            best = max(means[m] for m in BASELINES)
            lines.append(
                [
                    clock,
                    pair.removeprefix("smollm2-"),
                    *(f"{mean:.2f}" for mean in means.values()),
                    f"{means[OURS] / best:.2f}",
                ]
            )
    return _table(["costs", "pair", *methods, "ours over the best of the first three"], lines)


def _predictors() -> list[str]:
    """What each way foretells of a draft's length, in nats a round, on texts that were not learned from."""
    figures = {
        folder.name: json.loads((folder / "predictor.json").read_text(encoding="utf-8"))["figures"]
        for folder in sorted(PREDICTORS.iterdir())
    }
    ways = list(next(iter(figures.values()))["rivals"])
    lines = [
        [way, *(f"{one['rivals'][way]['nats']:.3f} ({_interval(one['rivals'][way])})" for one in figures.values())]
        for way in ways
    ]
    classes = [
        "accuracy of the three classes at γ = 8 (none / some / all)",
        *(
            f"{one['accuracy']:.0%} ({' / '.join(f'{share:.0%}' for share in one['accuracy_by_class'].values())})"
            for one in figures.values()
        ),
    ]
    hard = [
        "share of rounds predicted as none or all, their accuracy",
        *(f"{o['hard_share']:.0%}, {o['hard_accuracy']:.0%}" for o in figures.values()),
    ]
    return _table(
        [
            "nats a round (95 % interval of the difference to H-RAD)",
            *(name.removeprefix("smollm2-") for name in figures),
        ],
        [*lines, classes, hard],
    )


def _interval(one: dict[str, float]) -> str:
    return "–" if one["low"] == one["high"] else f"{one['low']:+.2f} … {one['high']:+.2f}"


def _wall(rows: Sequence[ResultRow]) -> list[str]:
    lines = []
    for pair in _names(rows, lambda row: row.pair):
        for method in _names(rows, lambda row: row.method):
            found = [_row(rows, pair, suite, "wall", method) for suite in SUITES]
            figures = [
                f"{row.tokens_per_second:.1f} ({row.speedup:.2f}, ±{100 * (row.spread or 0):.1f} %)" for row in found
            ]
            lines.append([pair.removeprefix("smollm2-"), method, *figures])
    return _table(["pair", "method", *SUITES.values()], lines)


def _load_rows(folder: Path) -> list[LoadRow]:
    files = sorted(folder.rglob("load.json"))
    if not files:
        raise SystemExit(f"{folder} holds no load.json; expected results of `specbranch bench load --out`.")
    rows = [LoadRow(**row) for file in files for row in json.loads(file.read_text(encoding="utf-8"))["rows"]]
    return sorted(rows, key=lambda row: (row.clock, row.pair.removeprefix("smollm2-") != "default", row.pair))


def _load(rows: Sequence[LoadRow]) -> list[str]:
    """Ours, the best of the other methods, and the bound, over requests at once; then how often ours falls behind."""
    cells = [row for row in rows if row.method == OURS]
    others = {
        _cell(row): row for row in sorted(rows, key=lambda row: row.over_plain) if row.method not in PLAIN_AND_OURS
    }
    figures = {
        _cell(row): f"{row.over_plain:.2f} / {others[_cell(row)].over_plain:.2f} / {row.bound or 0.0:.2f}"
        for row in cells
    }
    worst = min(cells, key=lambda row: row.over_plain)
    behind = min(cells, key=lambda row: row.over_plain / others[_cell(row)].over_plain)
    ratio = behind.over_plain / others[_cell(behind)].over_plain
    return [
        *_over_loads(cells, figures),
        "",
        f"Our lowest speedup is {worst.over_plain:.3f} ({_named(worst)}). Against the best other method, our lowest "
        f"ratio is {ratio:.2f} ({_named(behind)}, {others[_cell(behind)].method}).",
    ]


def _load_ours(rows: Sequence[LoadRow]) -> list[str]:
    cells = [row for row in rows if row.method == OURS]
    return _over_loads(cells, {_cell(row): f"{row.over_plain:.2f}" for row in cells})


def _over_loads(cells: Sequence[LoadRow], figures: dict[LoadCell, str]) -> list[str]:
    counts = sorted({row.at_once for row in cells})
    lines = [
        [clock, pair.removeprefix("smollm2-"), *(figures.get((clock, pair, count), "–") for count in counts)]
        for clock, pair in dict.fromkeys((row.clock, row.pair) for row in cells)
    ]
    return _table(["costs", "pair", *map(str, counts)], lines)


def _cell(row: LoadRow) -> LoadCell:
    return row.clock, row.pair, row.at_once


def _named(row: LoadRow) -> str:
    return f"{row.clock}, {row.pair.removeprefix('smollm2-')}, {row.at_once} at once"


def _pairs_by(rows: Sequence[ResultRow], clock: str) -> list[str]:
    """The pairs whose rows by a clock are all there, but for those that may lack: a run may have been broken off."""
    rows = [row for row in rows if row.method not in MAY_LACK]
    whole = len(METHODS) - len(MAY_LACK) + 1, len(SUITES)  # and plain decoding
    found = {
        pair: [row for row in rows if (row.pair, row.clock) == (pair, clock)]
        for pair in _names(rows, lambda row: row.pair)
    }
    fewest = {pair: min((row.prompts for row in some), default=0) for pair, some in found.items()}
    most = max((row.prompts for row in rows), default=0)
    return [pair for pair, some in found.items() if len(some) >= whole[0] * whole[1] and fewest[pair] == most]


def _has(rows: Sequence[ResultRow], pair: str, clock: str, method: str) -> bool:
    """Whether a method was run on all suites and prompts."""
    found = [row for row in rows if (row.pair, row.clock, row.method) == (pair, clock, method)]
    return len(found) == len(SUITES) and all(row.prompts == max(other.prompts for other in rows) for row in found)


def _names(rows: Sequence[ResultRow], name: Callable[[ResultRow], str]) -> list[str]:
    return list(dict.fromkeys(map(name, rows)))


def _speedup(rows: Sequence[ResultRow], pair: str, suite: str, clock: str, method: str) -> float:
    return _row(rows, pair, suite, clock, method).speedup or 0.0


def _row(rows: Sequence[ResultRow], pair: str, suite: str, clock: str, method: str) -> ResultRow:
    for row in rows:
        if (row.pair, row.suite, row.clock, row.method) == (pair, suite, clock, method):
            return row
    raise SystemExit(f"The results lack {method} on {suite} with {pair} by {clock}.")


TABLES: dict[str, dict[str, Callable[[Sequence[ResultRow]], list[str]]]] = {
    "modelled": {"paper": _beside_the_paper, "modelled": _modelled, "ours": _ours},
    "wall": {"wall": _wall},
    "gpu": {"gpu": _gpu},
    "predicted": {},
    "two-devices": {"two-devices": _two_devices},
    "ablation": {"ablation": _ablation},
    "sampled": {"sampled": _sampled},
}

if __name__ == "__main__":
    main()
