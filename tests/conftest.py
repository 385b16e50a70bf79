"""Shared by all tests: a pair of tiny models on disk, one known by name, and the embedded default where it is at
hand."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tiers import mark_uncovering

if TYPE_CHECKING:
    from specbranch.pairs import Pair

NUMBERS = count()  # of tests


def _settings() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith("SPECBRANCH_")}


BEFORE_COLLECTION = _settings()


@pytest.fixture(scope="session", autouse=True)
def nothing_kept() -> Iterator[None]:
    """What tests learn is not the user's, nor what the user has learned theirs; for fixtures that outlive a test."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPECBRANCH_EXPERIENCE", "off")
        yield


@pytest.fixture(scope="session", autouse=True)
def short_rehearsals() -> Iterator[None]:
    """Loading a pair times few sizes of steps, and each once: hundreds of tests load one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("specbranch.core.rehearsal.REHEARSAL_TURNS", 1)
        patch.setattr("specbranch.core.rehearsal.REHEARSED_ROWS", (1, 16, 4))
        patch.setattr("specbranch.core.rehearsal.REHEARSED_WIDTHS", (1, 4))
        patch.setattr("specbranch.core.rehearsal.REHEARSED_LENGTHS", (1, 3))
        yield


@pytest.fixture(autouse=True)
def nothing_learned_before(
    nothing_kept: None, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is learned in a test stays there. No folder is made for it: few tests write one."""
    monkeypatch.setenv("SPECBRANCH_EXPERIENCE", str(tmp_path_factory.getbasetemp() / "experience" / str(next(NUMBERS))))


@pytest.fixture(autouse=True)
def same_logging() -> Iterator[None]:
    """A server that a test starts in this process sets up logging; the next test finds it as it was."""
    names = ("", "specbranch", "uvicorn.error")
    before = [(logger := logging.getLogger(name), logger.level) for name in names]
    yield
    for logger, level in before:
        logger.setLevel(level)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Sums over threads are no test's business."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    from tiny_pair import make_pair

    return make_pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture(scope="session")
def tiny_draft(pair: tuple[str, str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A draft of the tiny target as `specbranch distill` makes one; hardly trained."""
    from specbranch.cli.main import run

    folder = tmp_path_factory.mktemp("distilled") / "tiny"
    training = [
        "--layers",
        "1",
        "--writing-rows",
        "16",
        "--writing-length",
        "64",
        "--rows",
        "2",
        "--length",
        "64",
        "--steps",
        "10",
    ]
    assert (
        run(["distill", "--device", "cpu", "--target", pair[0], "--out", str(folder), "--tokens", "1000", *training])
        == 0
    )
    return folder


@pytest.fixture
def tiny(pair: tuple[str, str], tiny_draft: Path, monkeypatch: pytest.MonkeyPatch) -> Pair:
    """A pair known as 'tiny', which is the default one, too."""
    import specbranch.cli.bench
    import specbranch.cli.models
    import specbranch.cli.options  # noqa: F401 # these read the table once, for help: that must not be this one
    from specbranch import pairs

    made = pairs.Pair("tiny", pair[0], "a tiny pair")
    monkeypatch.setenv(pairs.DRAFTS_VARIABLE, str(tiny_draft.parent))
    monkeypatch.setitem(pairs.PAIRS, "tiny", made)
    monkeypatch.setattr(pairs, "DEFAULT_PAIR", "tiny")
    return made


@pytest.fixture(scope="session")
def default_model() -> Path:
    from specbranch.errors import DownloadError
    from specbranch.models.files import store

    try:
        return store.pull("smollm2-135m")
    except DownloadError as error:
        pytest.skip(f"the default model is not here: {error}")


def pytest_configure(config: pytest.Config) -> None:
    """In the quick tier hypothesis tries fewer examples, where a test does not say how many."""
    if config.option.markexpr == "not slow":
        from hypothesis import settings

        settings.register_profile("quick", max_examples=25)
        settings.load_profile("quick")


@pytest.hookimpl(tryfirst=True)  # before `-m` looks at the marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave the cases that a covering array can do without to `make test-all`. Without a GPU, the quick tier leaves out
    tests that need one: to skip hundreds of them one by one takes time."""
    mark_uncovering(items)
    if config.option.markexpr == "not slow" and not _has_gpu():
        left_out = [item for item in items if item.get_closest_marker("gpu")]
        items[:] = [item for item in items if not item.get_closest_marker("gpu")]
        config.hook.pytest_deselected(items=left_out)


def pytest_collection_finish() -> None:
    """No test file may change a setting of the engine when it is imported: all tests would run with it."""
    if _settings() != BEFORE_COLLECTION:
        raise pytest.UsageError(f"Importing the tests changed SPECBRANCH_… from {BEFORE_COLLECTION} to {_settings()}.")


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what needs a GPU before any of its fixtures is made."""
    if item.get_closest_marker("gpu") and not _has_gpu():
        pytest.skip("needs a CUDA device")
