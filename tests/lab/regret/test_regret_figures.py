"""Percentiles, regrets and tables of the regret lab, on made-up numbers."""

from __future__ import annotations

import json

import pytest

from specbranch.lab.regret.figures import CaseResult, Spread, regrets, spread, to_dict, wins, worst
from specbranch.lab.regret.runs import BatchTime, Run
from specbranch.lab.regret.table import table


def made_run(name: str, *seconds: float) -> Run:
    return Run(name, tuple(BatchTime(1, 128, one, 128, 0) for one in seconds))


def made_result(seed: int, ours: tuple[float, ...]) -> CaseResult:
    arms = made_run("plain", 4.0, 4.0, 4.0, 4.0), made_run("lookup", 2.0, 2.0, 6.0, 6.0)
    return CaseResult(seed, "a case", arms, (made_run("specbranch", *ours),))


def test_percentiles_are_those_of_the_nearest_rank() -> None:
    assert spread([float(n) for n in range(100, 0, -1)]) == Spread(50.0, 90.0, 95.0, 99.0, 100.0)
    assert spread([float(n) for n in range(1, 21)]) == Spread(10.0, 18.0, 19.0, 20.0, 20.0)
    assert spread([3.0]) == Spread(3.0, 3.0, 3.0, 3.0, 3.0)


def test_regret_is_against_the_best_arm_of_the_same_requests() -> None:
    result = made_result(1, (3.0, 3.0, 4.0, 5.0))
    (found,) = regrets([result], "specbranch")
    assert (found.cold, found.warm) == pytest.approx((0.5, 0.125))  # lookup is best at first, plain later
    assert found.plain == pytest.approx(15 / 16 - 1)


def test_the_worst_cases_come_first_and_ties_by_seed() -> None:
    results = [made_result(seed, (cold, cold, 4.0, 4.0)) for seed, cold in ((3, 2.0), (2, 6.0), (1, 6.0), (0, 3.0))]
    assert [one.seed for one in worst(regrets(results, "specbranch"), "cold", 3)] == [1, 2, 0]


def test_an_arm_wins_a_case_once() -> None:
    assert wins([made_result(seed, (1.0,) * 4) for seed in range(3)]) == {"plain": 3}


def test_the_table_and_the_json_name_the_same_figures() -> None:
    results = [made_result(seed, (2.2, 2.2, 4.4, 4.4)) for seed in (1, 3)]
    lines, values = table(results, ["specbranch"], 1), json.loads(json.dumps(to_dict(results, ["specbranch"])))
    assert values["methods"]["specbranch"]["cold"]["p50"] == pytest.approx(0.1)
    assert [case["seed"] for case in values["cases"]] == [1, 3]
    assert any(line.split()[-2:] == ["+10", "%"] and "cold" in line for line in lines)
    assert any("seed 1" in line and "a case" in line for line in lines)
