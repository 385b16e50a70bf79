"""A release: one version, its section in the changelog, extras that are complete, links that work elsewhere, and a
workflow that publishes tags alone."""

from __future__ import annotations

import importlib.util
import re
import tomllib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

import specbranch

ROOT = Path(__file__).parents[1]
VERSION = re.compile(r"\d+\.\d+\.\d+((a|b|rc)\d+)?")


def module(path: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(Path(path).stem, ROOT / path)
    assert spec and spec.loader
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def jobs() -> dict[str, Any]:
    return yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8"))["jobs"]


def test_the_version_stands_in_one_place() -> None:
    assert VERSION.fullmatch(specbranch.__version__)
    assert "version" in project()["project"]["dynamic"] and "version" not in project()["project"]
    assert project()["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "specbranch.__version__"}
    assert module("scripts/release_notes.py").version() == specbranch.__version__


def test_the_changelog_has_a_section_for_the_version() -> None:
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert module("scripts/release_notes.py").notes(changelog, specbranch.__version__).startswith("- ")


def test_notes_are_one_version_and_a_tag_of_another_or_an_unreleased_one_is_refused() -> None:
    notes = module("scripts/release_notes.py").notes
    text = "# Changelog\n\n## 0.3.0 (unreleased)\n\n- new\n\n## 0.2.0 (2026-12-01)\n\n- old\n"
    assert notes(text, "0.3.0") == "- new" and notes(text, "0.2.0", "v0.2.0") == "- old"
    for version, tag, message in (
        ("0.3.0", "v0.3.0", "CHANGELOG.md says that 0.3.0 is unreleased"),
        ("0.2.0", "v0.3.0", "expected the tag v0.2.0"),
        ("0.1.0", None, "no section '## 0.1.0'"),
    ):
        with pytest.raises(SystemExit, match=message):
            notes(text, version, tag)


def test_the_extra_all_has_every_extra_of_users() -> None:
    extras = project()["project"]["optional-dependencies"]
    (line,) = extras["all"]
    named = re.fullmatch(r"specbranch\[(.+)\]", line)
    assert named and named[1].split(",") == sorted(extras.keys() - {"all", "dev"})


def test_links_of_the_long_description_work_where_no_file_is_beside_it() -> None:
    long_description = module("setup.py").long_description
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    at_home = re.findall(r"\]\((?!https?:|#)([^)]+)\)", readme)
    assert at_home and all((ROOT / path.partition("#")[0]).exists() for path in at_home)
    for url in ("", "https://example.org/project/blob/v1.0.0"):
        assert not re.search(r"\]\((?!https?:|#)", long_description(readme, url))
    text = "[how](docs/many.md#top) ![seen](docs/timeline.svg) [web](https://example.org)"
    assert long_description(text, "https://example.org/p/blob/v1") == (
        "[how](https://example.org/p/blob/v1/docs/many.md#top) ![seen](https://example.org/p/raw/v1/docs/timeline.svg) "
        "[web](https://example.org)"
    )
    assert long_description(text, "") == "how  [web](https://example.org)"


def test_only_a_tag_publishes_and_only_after_all_other_jobs() -> None:
    found = jobs()
    publish = found.pop("publish")
    assert publish["if"] == "github.ref_type == 'tag'" and set(publish["needs"]) == found.keys()
    assert publish["permissions"] == {"id-token": "write"}
    assert not any("permissions" in job for job in found.values())
    commands = "\n".join(step.get("run", "") for job in found.values() for step in job["steps"])
    for command in ("make lint", "make test", "make test-all", "python -m build", "twine check --strict"):
        assert command in commands
