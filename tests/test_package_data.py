"""What a built package must carry beside its code."""

from __future__ import annotations

import tomllib
from pathlib import Path

from specbranch.pairs import DEFAULT_PAIR

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "specbranch"


def packed() -> set[Path]:
    """The files that pyproject's patterns find."""
    setuptools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    folders = {package: ROOT / "src" / package.replace(".", "/") for package in setuptools["package-data"]}
    return {
        file
        for package, patterns in setuptools["package-data"].items()
        for pattern in patterns
        for file in folders[package].glob(pattern)
    }


def test_all_data_in_the_source_is_packed() -> None:
    data = {file for file in SOURCE.rglob("*") if file.is_file() and file.suffix not in (".py", ".pyc")}
    assert data == packed()


def test_the_default_draft_and_a_profile_are_packed_and_small() -> None:
    found = packed()
    assert {
        SOURCE / "drafts" / DEFAULT_PAIR / name
        for name in ("config.json", "model.safetensors", "provenance.json", "evaluation.json", "README.md")
    } <= found
    assert SOURCE / "clock" / "profiles" / "h200-1b-8b.json" in found
    assert sum(file.stat().st_size for file in found) < 30e6
