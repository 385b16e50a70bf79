"""Which cases of a test belong to the quick tier: those that `quick` picks; the others are marked slow."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

import pytest

T = TypeVar("T")


def tiered(values: Iterable[T], quick: Callable[[T], bool]) -> list[object]:
    """Return parameters of a test, those that are not quick marked."""
    return [value if quick(value) else pytest.param(value, marks=pytest.mark.slow) for value in values]
