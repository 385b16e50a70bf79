"""The figures of the regret lab as lines for a terminal.

Owns the wording and the columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, fields

from specbranch.lab.regret.case import Case
from specbranch.lab.regret.figures import REGRET_KINDS, CaseResult, Kind, Regret, Spread, regrets, spread, wins, worst
from specbranch.lab.regret.runs import BatchTime, Run

NAMES = tuple(field.name for field in fields(Spread))


def table(results: Sequence[CaseResult], methods: Sequence[str], count: int) -> list[str]:
    """Return the percentiles of each method, and its `count` worst cases."""
    seeds = [result.seed for result in results]
    lines = [f"{len(seeds)} cases, seeds {seeds[0]} to {seeds[-1]}; more time than the best fixed method takes", ""]
    for method in methods:
        found = regrets(results, method)
        lines += [f"{method:44}" + "".join(f"{name:>8}" for name in NAMES)]
        lines += [f"  {words:42}" + _percents([one.of(kind) for one in found]) for kind, words in REGRET_KINDS.items()]
        lines.append("")
    best = ", ".join(f"{name} {times}" for name, times in wins(results).items())
    lines.append(f"Best fixed method, by number of cases: {best}")
    for method in methods:
        lines += _worst_lines(results, method, count)
    return lines


def _percents(values: Sequence[float]) -> str:
    return "".join(f"{_percent(value):>8}" for value in asdict(spread(values)).values())


def _percent(value: float) -> str:
    return f"{100 * value:+.0f} %" if abs(value) >= 0.095 else f"{100 * value:+.1f} %"


def _worst_lines(results: Sequence[CaseResult], method: str, count: int) -> list[str]:
    known, found = {result.seed: result for result in results}, regrets(results, method)
    lines: list[str] = []
    for kind in REGRET_KINDS if count else ():
        lines += ["", f"Worst cases of {method}, {REGRET_KINDS[kind]}"]
        lines += [_worst_line(known[one.seed], one, kind) for one in worst(found, kind, count)]
    return lines


def _worst_line(result: CaseResult, regret: Regret, kind: Kind) -> str:
    return f"  seed {regret.seed:<5}{_percent(regret.of(kind)):>8}  best {result.best.name:15} {result.description}"


def shown(case: Case, result: CaseResult) -> list[str]:
    """Return one case in full: its parameters, the arms' times, and each request of the judged methods."""
    lines = [f"Case {case.seed}: {case.describe()}", "", *_parameters(case), "", *_texts(case), ""]
    lines.append(f"{'seconds without first-time spikes':36}{'cold':>10}{'warm':>10}{'all':>10}")
    ordered = sorted((*result.arms, *result.judged), key=lambda run: run.seconds)
    lines += [f"  {run.name:34}{run.cold:10.3f}{run.warm:10.3f}{run.seconds:10.3f}" for run in ordered]
    for run in result.judged:
        lines += ["", *_by_batch(case, result, run)]
    return lines


def _parameters(case: Case) -> list[str]:
    """Return the costs and the draft's properties, a line each."""
    named = {name: value for name, value in asdict(case).items() if name not in ("seed", "phases")}
    words = {name: f"{value:.6g}" if isinstance(value, float) else str(value) for name, value in named.items()}
    return [f"  {name:14}{value}" for name, value in words.items()]


def _texts(case: Case) -> list[str]:
    """Return each request's phases."""
    lines = ["agreement / lookup × tokens, by request"]
    for number, phases in enumerate(case.phases, 1):
        words = "   ".join(f"{one.agreement:.2f} / {one.lookup:.2f} × {one.tokens}" for one in phases)
        lines.append(f"  {number:<4}{words}")
    return lines


def _by_batch(case: Case, result: CaseResult, run: Run) -> list[str]:
    """Return what each batch of a run took, beside the arm that was fastest there."""
    regret = result.regret(run)
    head = ", ".join(f"{kind} {_percent(regret.of(kind))}" for kind in REGRET_KINDS)
    columns = f"{'requests':12}{'tokens':>8}{'seconds':>10}{'tokens/s':>10}{'a forward':>11}{'draft steps':>13}"
    lines = [f"{run.name}: {head}", f"  {columns}   best arm there"]
    for at, (numbers, batch) in enumerate(zip(case.batches, run.batches, strict=True)):
        best = min(result.arms, key=lambda arm: arm.batches[at].seconds)
        last = f"{best.name} {best.batches[at].seconds:.3f}"
        lines.append(f"  {f'{numbers[0] + 1}–{numbers[-1] + 1}':12}{_figures(batch)}   {last}")
    return lines


def _figures(batch: BatchTime) -> str:
    rate, length = batch.tokens / batch.seconds, batch.tokens / batch.forwards / batch.requests
    return f"{batch.tokens:8}{batch.seconds:10.3f}{rate:10.0f}{length:11.2f}{batch.draft_steps:13}"
