"""Servers that tests share: one over the default pair, one over a tiny one, and the same models without a server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from running import Running, load_tiny, running

from specbranch import LLM


@pytest.fixture(scope="session")
def served(pair: tuple[str, str], nothing_kept: None) -> Iterator[Running]:
    """The tiny pair."""
    with running(load_tiny(pair), model_name="tiny") as found:
        yield found


@pytest.fixture(scope="session")
def reference(pair: tuple[str, str], nothing_kept: None) -> Iterator[LLM]:
    """The tiny target, decoding plainly."""
    with load_tiny(pair, method="autoregressive") as llm:
        yield llm


@pytest.fixture(scope="session")
def served_default(default_model: Path, nothing_kept: None) -> Iterator[Running]:
    """The default pair."""
    with running(LLM(device="cpu", options={"context_length": 512})) as found:
        yield found


@pytest.fixture(scope="session")
def default_reference(default_model: Path, nothing_kept: None) -> Iterator[LLM]:
    """The default target, decoding plainly."""
    with LLM(device="cpu", options={"context_length": 512}, method="autoregressive") as llm:
        yield llm
