"""Which cases of a test belong to the quick tier; the others are marked slow.

`tiered` picks the cases of one parameter by a rule. `each_value` and `each_pair` mark a test whose cases are a product
of parameters. The quick cases are a covering array of it, chosen in the order of the cases, so always the same.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from itertools import combinations
from typing import TypeVar

import pytest

T = TypeVar("T")

each_value = pytest.mark.covering(1)  # every value of every parameter is in a quick case
each_pair = pytest.mark.covering(2)  # every pair of values of two parameters is in a quick case


def tiered(values: Iterable[T], quick: Callable[[T], bool]) -> list[object]:
    """Return parameters of a test, those that are not quick marked."""
    # `int.__eq__(0, 0.7)` is NotImplemented, which counts as true
    return [value if quick(value) is True else pytest.param(value, marks=pytest.mark.slow) for value in values]


def covering(rows: Sequence[Sequence[Hashable]], strength: int = 2) -> list[int]:
    """Return the numbers of rows that hold every combination of `strength` columns' values that any row holds.

    Greedy: the row with the most combinations that are still missing comes next, the first of several.
    """
    held = [set(combinations(enumerate(row), min(strength, len(row)))) for row in rows]
    missing, chosen = set().union(*held), list[int]()
    while missing:
        best = max(range(len(rows)), key=lambda row: len(held[row] & missing))
        missing -= held[best]
        chosen.append(best)
    return sorted(chosen)


def mark_uncovering(items: Iterable[pytest.Item]) -> None:
    """Mark as slow what the covering arrays of these tests leave out; a GPU's cases are left as they are."""
    products: dict[str, list[pytest.Item]] = {}
    for item in items:
        left_out = item.get_closest_marker("slow") or item.get_closest_marker("gpu")
        if item.get_closest_marker("covering") and not left_out:
            products.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for cases in products.values():
        _mark_cases(cases)


def _mark_cases(cases: list[pytest.Item]) -> None:
    strength = cases[0].get_closest_marker("covering").args[0]
    # The cases of a product share its values, which need not be hashable.
    quick = covering([tuple(map(id, case.callspec.params.values())) for case in cases], strength)
    for case in (case for number, case in enumerate(cases) if number not in quick):
        case.add_marker(pytest.mark.slow)
