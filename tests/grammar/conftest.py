"""What tests of grammars share: a tiny pair that is loaded once."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from specbranch import LLM


@pytest.fixture(scope="session")
def llm(pair: tuple[str, str], nothing_kept: None) -> Iterator[LLM]:
    options = {"context_length": 256, "keep_experience": False}
    with LLM(*pair, "specbranch", dtype="float64", device="cpu", options=options) as loaded:
        yield loaded
