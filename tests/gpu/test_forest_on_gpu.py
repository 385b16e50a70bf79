"""The forest's kernels on a GPU: tables and packed steps are those of their twins, step by step."""

from __future__ import annotations

import pytest

from forests import compare_rounds

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("sessions", [1, 2, 5, 16, 64])
@pytest.mark.parametrize("seed", range(4))
def test_rounds_of_a_random_forest_are_those_of_its_twin(seed: int, sessions: int) -> None:
    compare_rounds(seed, sessions, "cuda", nodes=256 if seed % 2 else 64, rounds=6)
