"""Problems of an installation are found, and reported with what to do about them."""

from __future__ import annotations

from collections import namedtuple

import pytest

from specbranch.lab.doctor import installation

Usage = namedtuple("Usage", "total used free")


def test_a_full_disk_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installation.shutil, "disk_usage", lambda path: Usage(10**9, 10**9, 10**7))
    found = installation.cache()
    assert found.level == "problem" and "SPECBRANCH_CACHE" in found.advice


def test_an_old_library_is_a_problem_and_a_missing_one_too(monkeypatch: pytest.MonkeyPatch) -> None:
    for version, said in (("2.3.1+cpu", "too old"), (None, "not installed")):
        monkeypatch.setattr(installation, "_version", lambda package, version=version: version)
        torch = next(finding for finding in installation.libraries() if finding.about == "torch")
        assert torch.level == "problem" and said in torch.said and "2.11" in torch.advice


def test_a_missing_extra_is_no_problem_and_its_command_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    real = installation._version
    monkeypatch.setattr(installation, "_version", lambda package: None if package == "optuna" else real(package))
    found = {finding.about: finding for finding in installation.libraries()}
    assert found["optuna"].level == "ok" and "only searching for a setting" in found["optuna"].said
    assert "pip install 'specbranch[tune]'" in found["optuna"].advice
    assert found["accelerate"].advice == ""


@pytest.mark.parametrize(("free", "level"), [(0.2, "problem"), (0.8, "note"), (8.0, "ok"), (None, "note")])
def test_little_memory_is_noted(monkeypatch: pytest.MonkeyPatch, free: float | None, level: str) -> None:
    monkeypatch.setattr(installation, "_free_memory", lambda: None if free is None else free * 2**30)
    assert installation.memory().level == level


def test_threads_that_do_not_fit_the_cores_are_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(installation.os, "sched_getaffinity", lambda pid: set(range(4)), raising=False)
    for threads, said in ((1, "unset OMP_NUM_THREADS"), (8, "OMP_NUM_THREADS=4")):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        found = installation.processor()
        assert found.level == "note" and said in found.advice
