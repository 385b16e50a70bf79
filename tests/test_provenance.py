"""Where results came from: the commit is that of this code, or of nothing."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from specbranch import provenance


def test_the_commit_of_a_checkout_is_found() -> None:
    root = Path(__file__).parents[1]
    assert root == provenance._SOURCE and (provenance.source_commit() is not None) == (root / ".git").exists()


def test_a_repository_around_an_installed_package_is_not_taken_for_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    who = ["-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run(["git", "-C", str(tmp_path), *who, "commit", "-q", "--allow-empty", "-m", "theirs"], check=True)
    (tmp_path / "installed").mkdir()
    monkeypatch.delenv("SPECBRANCH_COMMIT", raising=False)
    monkeypatch.setattr(provenance, "_SOURCE", tmp_path / "installed")
    assert provenance.trained_with("cpu")["commit"] == "unknown"
    monkeypatch.setattr(provenance, "_SOURCE", tmp_path)
    assert len(provenance.trained_with("cpu")["commit"]) == 12
