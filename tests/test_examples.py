"""The programs of examples/: short, listed, and run as a reader would run them."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from specbranch.cli.serve import serve

EXAMPLES = Path(__file__).parents[1] / "examples"
PROGRAMS = sorted(EXAMPLES.glob("*.py"))
LINES = 30
TINY_DRAFT = "--tokens 300 --writing-rows 8 --writing-length 64 --rows 1 --length 64 --steps 4 --device cpu"
HAS_REPLICAS = any("--replicas" in option.opts for option in serve.params)


def said(name: str, *given: str, url: str = "", typed: str = "") -> str:
    """Run an example; return what it printed. `typed`: its standard input."""
    environment = {**os.environ, "SPECBRANCH_EXAMPLE_TOKENS": "12", "OMP_NUM_THREADS": "1", "OPENAI_BASE_URL": url}
    command = [sys.executable, str(EXAMPLES / name), *given]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=False, timeout=400, input=typed
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@contextmanager
def serving(*options: str) -> Iterator[str]:
    """Serve the default pair on a free port; yield the address of its API."""
    command = [sys.executable, "-m", "specbranch", "serve", "--port", "0", *options]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        try:
            found = (re.search(r'"address": "(.+?)"', line) for line in process.stderr)
            yield next(one[1] for one in found if one) + "/v1"
        finally:
            process.terminate()
            process.communicate(timeout=120)


def test_examples_are_short_and_say_how_they_are_run() -> None:
    for path in PROGRAMS:
        text = path.read_text(encoding="utf-8")
        assert len(text.splitlines()) <= LINES, path.name
        assert f"python examples/{path.name}" in (ast.get_docstring(ast.parse(text)) or ""), path.name


def test_every_example_is_listed_and_run() -> None:
    listed = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    runs = Path(__file__).read_text(encoding="utf-8")
    assert PROGRAMS and all(f"`{path.name}`" in listed and f'said("{path.name}"' in runs for path in PROGRAMS)


@pytest.mark.slow
def test_chat(default_model: Path) -> None:
    assert said("chat.py", "Name a colour.", "Another one.").count("tokens a forward of the target") == 2
    assert said("chat.py", typed="Name a colour.\nAnother one.").count("tokens a forward of the target") == 2


@pytest.mark.slow
def test_many_at_once(default_model: Path) -> None:
    *answers, finished = said("many.py").splitlines()
    assert sum(line.startswith("- ") for line in answers) == 8 and finished == "8 requests finished"


@pytest.mark.slow
def test_structured_output(default_model: Path) -> None:
    person, choice, date = said("structured.py").splitlines()
    assert set(ast.literal_eval(person)) == {"name", "age", "languages"}
    assert choice in ("yes", "no") and re.fullmatch(r"\d{1,2} (June|July) 1\d{3}", date)


@pytest.mark.slow
def test_a_draft_of_ones_own(default_model: Path, tmp_path: Path) -> None:
    printed = said("own_draft.py", str(tmp_path / "draft"), *TINY_DRAFT.split())
    assert "The text of plain decoding: True" in printed and (tmp_path / "draft" / "evaluation.json").is_file()


@pytest.mark.slow
def test_the_server_with_the_client_of_openai(default_model: Path) -> None:
    with serving() as url:
        printed = said("openai_client.py", url=url)
    assert "Once upon a time" in printed and "num_accepted_draft_tokens" in printed


@pytest.mark.slow
@pytest.mark.skipif(not HAS_REPLICAS, reason="`specbranch serve` has no --replicas here")
def test_ray_replicas(default_model: Path) -> None:
    with serving("--replicas", "2") as url:
        printed = said("ray_replicas.py", url=url)
    found = json.loads(printed.partition("From the cache:")[2])
    assert len(found) == 4 and sum(found) >= 3 * 256  # a replica under load may hand one on
