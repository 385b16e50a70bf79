"""Shared by all tests: a pair of tiny models on disk, and the embedded default where it is at hand."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    from tiny_pair import make_pair

    return make_pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture(scope="session")
def default_model() -> Path:
    from specbranch.errors import DownloadError
    from specbranch.models import store

    try:
        return store.pull("smollm2-135m")
    except DownloadError as error:
        pytest.skip(f"the default model is not here: {error}")


@pytest.fixture(autouse=True)
def no_gpu_unless_asked(request: pytest.FixtureRequest) -> None:
    if request.node.get_closest_marker("gpu"):
        import torch

        if not torch.cuda.is_available():
            pytest.skip("needs a CUDA device")
