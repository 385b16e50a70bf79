"""The quick tier leaves out cases, never a package, a method, a rule or an executor."""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import combinations, product
from pathlib import Path

import pytest

from specbranch.core.methods import METHODS
from tiers import covering, mark_uncovering, tiered

TESTS = Path(__file__).parent
SOURCE = TESTS.parent / "src" / "specbranch"
PACKAGES = sorted(found.parent.name for found in SOURCE.glob("*/__init__.py"))
KINDS = {"serial", "process", "streams", "clock"}


@pytest.fixture
def quick(request: pytest.FixtureRequest) -> list[pytest.Function]:
    """The quick tests that run without a GPU, as they were collected here."""
    if TESTS not in [Path(one).resolve() for one in request.config.args] or request.config.option.keyword:
        pytest.skip("only part of the tests was collected")
    return [
        item
        for item in request.session.items
        if isinstance(item, pytest.Function) and not (item.get_closest_marker("slow") or item.get_closest_marker("gpu"))
    ]


def cases_of(quick: list[pytest.Function], name: str) -> list[dict[str, object]]:
    """The parameters of the quick cases of one test."""
    found = [item.callspec.params for item in quick if item.originalname == name]
    assert found, f"{name} has no quick case"
    return found


def method_of(name: object) -> str:
    """The method behind the name that a test has for its settings."""
    return {"confidence": "specbranch", "paper": "specbranch", "last": "specbranch"}.get(str(name), str(name))


def test_every_package_has_a_quick_test(quick: list[pytest.Function]) -> None:
    tested = {
        package
        for path in {item.path for item in quick}
        for package in re.findall(r"specbranch\.(\w+)", path.read_text(encoding="utf-8"))
    }
    assert PACKAGES and not set(PACKAGES) - tested


def test_every_method_runs_on_every_executor_and_at_every_temperature_under_the_match_rule(
    quick: list[pytest.Function],
) -> None:
    name = "test_a_few_answers_of_every_method_on_every_executor_are_those_of_plain_decoding"
    cells = [case["cell"] for case in cases_of(quick, name)]
    assert {(method_of(cell.method), cell.kind) for cell in cells} >= set(product(METHODS, KINDS))
    temperatures = {cell.temperature for cell in cells}
    assert {(method_of(cell.method), cell.temperature) for cell in cells} >= set(product(METHODS, temperatures))
    assert {(cell.kind, cell.temperature) for cell in cells} >= set(product(KINDS, temperatures))


def test_every_method_runs_under_the_ratio_rule_and_each_without_a_planner_on_every_executor(
    quick: list[pytest.Function],
) -> None:
    compared = cases_of(quick, "test_under_ratio_every_executor_gives_what_serial_gives")
    pairs = {(method_of(case["method"]), case["kind"]) for case in compared}
    methods = {method for method, _ in pairs}
    assert pairs == set(product(methods, KINDS - {"serial"}))  # which the others are compared with
    law = "test_every_method_emits_the_targets_joint_law"
    drawn = {item.module.CASES[item.callspec.params["name"]].method for item in quick if item.originalname == law}
    assert methods | drawn >= set(METHODS)


@pytest.mark.parametrize("strength", [1, 2])
def test_a_covering_array_has_every_combination_that_occurs_and_far_fewer_rows(strength: int) -> None:
    rows = [row for row in product(range(5), "abcd", (True, False), range(3)) if row[:2] != (4, "d")]
    chosen = [rows[number] for number in covering(rows, strength)]

    def held(some: list[tuple[object, ...]]) -> set[object]:
        return {one for row in some for one in combinations(enumerate(row), strength)}

    assert held(chosen) == held(rows) and len(chosen) <= (6, 24)[strength - 1]
    assert covering(rows, strength) == covering(rows, strength)


@pytest.mark.covering(1)
@pytest.mark.parametrize("first", range(3))
@pytest.mark.parametrize("second", tiered(range(4), (3).__ne__))
def test_what_a_covering_array_leaves_out_is_slow(first: int, second: int, request: pytest.FixtureRequest) -> None:
    """Its own cases: three of them are quick, and none with what is slow anyway."""
    is_slow = request.node.get_closest_marker("slow") is not None
    assert is_slow == (first != second)


@pytest.mark.parametrize("marks", [("slow",), ("gpu",), ()])
def test_cases_with_a_tier_of_their_own_are_left_as_they_are(marks: tuple[str, ...]) -> None:
    items = [Marked(number, marks) for number in range(3)]
    mark_uncovering(items)  # type: ignore[arg-type]
    assert [item.added for item in items] == [[] for _ in items]


class Marked:
    """A case of a test with one parameter."""

    def __init__(self, number: int, marks: tuple[str, ...]) -> None:
        self.nodeid, self.marks, self.added = f"test[{number}]", marks, list[object]()
        self.callspec = type("Spec", (), {"params": {"number": number}})
        self.add_marker: Callable[[object], None] = self.added.append

    def get_closest_marker(self, name: str) -> object:
        return pytest.mark.covering(1).mark if name == "covering" else name in self.marks or None
