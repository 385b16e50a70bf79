"""A tiny pair on disk, a folder of LLM's own, and engines that each test closes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from llm_specbranch import SpecBranchModel
from llm_specbranch.engines import ENGINES
from llm_specbranch.options import SpecBranchOptions
from specbranch.errors import DownloadError
from specbranch.models.files import store
from tiny_pair import make_pair


@pytest.fixture(scope="session")
def tiny_options(tmp_path_factory: pytest.TempPathFactory) -> SpecBranchOptions:
    """Options that name a tiny pair."""
    target, draft = make_pair(tmp_path_factory.mktemp("pair"))
    return SpecBranchOptions(target=target, draft=draft, device="cpu", context_length=400, max_tokens=24)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """LLM's folder. What tests learn of a pair stays in them, and loading one times few sizes of steps."""
    for name, value in (("REHEARSAL_TURNS", 1), ("REHEARSED_ROWS", (1, 16, 4)), ("REHEARSED_WIDTHS", (1, 4))):
        monkeypatch.setattr(f"specbranch.core.rehearsal.{name}", value)
    monkeypatch.setenv("SPECBRANCH_EXPERIENCE", "off")
    monkeypatch.setenv("LLM_USER_PATH", str(tmp_path))
    yield tmp_path
    ENGINES.close()


@pytest.fixture
def model(tiny_options: SpecBranchOptions) -> SpecBranchModel:
    return SpecBranchModel("specbranch/tiny", tiny_options)


@pytest.fixture(scope="session")
def default_model() -> Path:
    try:
        return store.pull("smollm2-135m")
    except DownloadError as error:
        pytest.skip(f"the default model is not here: {error}")
