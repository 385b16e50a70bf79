"""A user who installs the wheel has everything: the command, the default pair, every feature, and needs no file of the
repository."""

from __future__ import annotations

import json
import os
import signal
import sys
import tarfile
import zipfile
from pathlib import Path

import httpx
import pytest
from packaging.metadata import Metadata
from packaging.requirements import Requirement

import specbranch
from built import ROOT, Built, Installed, build, install
from specbranch.cli.main import COMMANDS
from specbranch.extras import EXTRAS

MOST_BYTES = 25e6  # of the wheel
PROMPT = "The capital of France is"
# Runs a command as `specbranch` would, and ends with an error if it opened a file below a folder, but not below others.
WATCHED = """
import os, sys
root, *others = (os.path.realpath(folder) + os.sep for folder in sys.argv[1].split(os.pathsep))
opened = []
def hook(event, arguments):
    if event == "open" and isinstance(arguments[0], (str, bytes)):
        path = os.path.realpath(os.fsdecode(arguments[0]))
        if path.startswith(root) and not path.startswith(tuple(others)):
            opened.append(path)
sys.addaudithook(hook)
import specbranch
from specbranch.cli.main import run
code = run(sys.argv[2:])
print("opened", opened, "of", specbranch.__file__, file=sys.stderr)
sys.exit(code or bool(opened))
"""
# Features that have files of their own, or packages that an extra brings.
FEATURES = """
import json
from specbranch import LLM, SamplingParams
from specbranch.clock.shipped import load_profile, shipped_profiles
from specbranch.lab.suites.suite import GROUPS, load_suites

if __name__ == "__main__":  # the draft's process imports this file
    greedy = SamplingParams(max_tokens=8, ignore_eos=True)
    found = {
        "profiles": len([load_profile(name) for name in shipped_profiles()]),
        "suites": len(load_suites(tuple(GROUPS))),
    }
    with LLM(device="cpu", executor="process", options={"context_length": 256}) as llm:
        found["regex"] = llm.generate("The year is", SamplingParams(max_tokens=8, regex="[0-9]{4}")).text
        for name, settings in {"ours": {}, "paper": {"policy": "paper"}}.items():
            found[name] = llm.using(speculative=settings).generate("The capital of France is", greedy).token_ids
    print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    return build(tmp_path_factory.mktemp("built"))


@pytest.fixture(scope="module")
def installed(built: Built, tmp_path_factory: pytest.TempPathFactory) -> Installed:
    return install(built.wheel, tmp_path_factory.mktemp("installed"))


@pytest.mark.slow
def test_the_wheel_is_small_and_its_metadata_is_valid(built: Built) -> None:
    assert built.wheel.stat().st_size <= MOST_BYTES
    with zipfile.ZipFile(built.wheel) as wheel:
        (name,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = Metadata.from_email(wheel.read(name), validate=True)
    assert str(metadata.version) == specbranch.__version__ and built.wheel.name.startswith(
        f"specbranch-{metadata.version}-"
    )
    assert metadata.description_content_type == "text/markdown" and "](docs/" not in (metadata.description or "")
    extras = {extra for need in metadata.requires_dist or () for extra in _extras(need)}
    assert {"all", *(extra.name for extra in EXTRAS)} <= extras == set(metadata.provides_extra or ())


@pytest.mark.slow
def test_the_sdist_has_all_that_a_build_needs_and_no_draft_for_experiments(built: Built) -> None:
    """The wheel was built from it."""
    with tarfile.open(built.sdist) as sdist:
        names = {name.partition("/")[2] for name in sdist.getnames()}
    assert {"pyproject.toml", "setup.py", "CHANGELOG.md", "LICENSE", "README.md"} <= names
    assert not any(name.startswith(("drafts/", "tests/")) for name in names)


@pytest.mark.slow
def test_an_installed_wheel_has_the_command_and_all_of_its_requirements(installed: Installed) -> None:
    command = installed.folder / "bin" / "specbranch"
    said = installed.run(command, "--version")
    assert said.stdout.split()[-1] == specbranch.__version__, said.stderr
    for name in COMMANDS:
        helped = installed.run(command, name, "--help")
        assert helped.returncode == 0 and f"specbranch {name}" in helped.stdout, helped.stderr
    where = installed.run(installed.python, "-I", "-c", "import specbranch; print(specbranch.__file__)").stdout
    assert Path(where.strip()).is_relative_to(installed.folder)


@pytest.mark.slow
@pytest.mark.default_model
def test_an_installed_wheel_answers_with_the_default_pair_and_no_file_of_the_repository(
    installed: Installed, default_model: Path
) -> None:
    asked = ("generate", "--device", "cpu", "--method", "speculative", "--max-tokens", "12", "--json", PROMPT)
    # the environment of the tests may lie in the repository, and the dependencies are links into it
    folders = os.pathsep.join((str(ROOT), str(installed.folder), sys.prefix))
    watched = installed.run(installed.python, "-I", "-c", WATCHED, folders, *asked)
    assert watched.returncode == 0, watched.stderr
    with specbranch.LLM(device="cpu", method="autoregressive") as llm:
        plain = llm.generate(PROMPT, specbranch.SamplingParams(max_tokens=12))
    answer = json.loads(watched.stdout)
    assert answer["text"] == plain.text and answer["stats"]["drafted"] > 0
    control = installed.run(installed.python, "-I", "-c", WATCHED, installed.folder, "models")
    assert control.returncode == 1 and "opened ['" in control.stderr


@pytest.mark.slow
@pytest.mark.default_model
def test_an_installed_wheel_has_every_feature(installed: Installed, default_model: Path) -> None:
    (installed.work / "features.py").write_text(FEATURES, encoding="utf-8")
    done = installed.run(installed.python, "-I", "features.py")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["regex"].isdigit() and len(found["regex"]) == 4
    assert len(found["ours"]) == 8 and found["paper"] == found["ours"]
    assert found["profiles"] >= 9 and found["suites"] >= 8


@pytest.mark.slow
@pytest.mark.default_model
def test_an_installed_wheel_serves_answers_and_the_page(installed: Installed, default_model: Path) -> None:
    command = (installed.folder / "bin" / "specbranch", "serve", "--device", "cpu", "--port", "0")
    with installed.started(*command) as server:
        assert server.stderr is not None
        log = (json.loads(line) for line in server.stderr)
        url = next(line["address"] for line in log if "address" in line)
        page = httpx.get(url, headers={"Accept": "text/html"}, follow_redirects=True)
        asked = {"prompt": PROMPT, "max_tokens": 8, "ignore_eos": True}
        said = httpx.post(f"{url}/v1/completions", json=asked, timeout=120).json()
        server.send_signal(signal.SIGTERM)
        rest = list(log)
    assert page.status_code == 200 and "<script" in page.text
    assert said["usage"]["completion_tokens"] == 8 and rest


def _extras(need: Requirement) -> set[str]:
    """The extras under which a requirement stands."""
    marker = str(need.marker or "")
    return {marker.split('"')[1]} if marker.startswith("extra ==") else set()
