"""A plain installation decodes with the default pair; where an extra is missing, a sentence says which and how to
have it."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from in_process import Command

from specbranch.errors import MissingPackage
from specbranch.extras import ACCELERATE, EXTRAS, OPTUNA

PROJECT = Path(__file__).parents[2]
TUNE = r"needs optuna, which is not installed. Install it with: pip install 'specbranch\[tune\]'"
TRANSFORMERS = r"needs accelerate, which is not installed. Install it with: pip install 'specbranch\[transformers\]'"


@pytest.fixture
def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if no extra were installed; what transformers itself has of them it has had before."""
    import specbranch.models.runners.transformers_runner  # noqa: F401

    for extra in EXTRAS:
        monkeypatch.setitem(sys.modules, extra.module, None)


def test_each_extra_is_one_of_the_installation_and_needed_by_nothing_else() -> None:
    project = tomllib.loads((PROJECT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    for extra in EXTRAS:
        assert any(line.startswith(extra.package) for line in project["optional-dependencies"][extra.name])
        assert not any(line.startswith(extra.package) for line in project["dependencies"])
        assert f"\n{extra.package}==" in "\n" + (PROJECT / "constraints.txt").read_text(encoding="utf-8")
    assert "'.[all,dev]'" in (PROJECT / "Makefile").read_text(encoding="utf-8")


def test_an_extra_that_is_there_is_required_in_silence() -> None:
    for extra in EXTRAS:
        assert extra.is_installed
        extra.require()


@pytest.mark.usefixtures("plain")
def test_an_extra_that_is_missing_is_a_sentence_with_its_command() -> None:
    with pytest.raises(MissingPackage, match=rf"^Searching for a setting of several values {TUNE}; or do without\.$"):
        OPTUNA.require("or do without")
    with pytest.raises(MissingPackage, match=rf"^Running a GGUF file on transformers {TRANSFORMERS}\.$"):
        ACCELERATE.require()


@pytest.mark.usefixtures("plain")
def test_a_gguf_file_on_transformers_tells_what_is_missing(tmp_path: Path) -> None:
    from specbranch.models.runners.transformers_runner import load_transformers

    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    with pytest.raises(MissingPackage, match=rf"{TRANSFORMERS}; or give runner='native'\."):
        load_transformers(tmp_path / "model.gguf")


@pytest.mark.usefixtures("plain", "tiny")
def test_tune_tells_what_is_missing_and_which_methods_need_it(command: Command, tmp_path: Path) -> None:
    printed = command("tune", "--profile", "c10", "--methods", "pearl,lookup", "--out", str(tmp_path / "tuned.json"))
    assert printed.code == 2 and "pip install 'specbranch[tune]'; or leave lookup out with --methods." in printed.err


@pytest.mark.usefixtures("plain")
def test_a_bench_that_tunes_tells_what_is_missing_before_anything_is_loaded(command: Command, tmp_path: Path) -> None:
    models = (
        "--target",
        str(tmp_path / "nowhere"),
        "--draft",
        str(tmp_path / "nowhere"),
        "--out",
        str(tmp_path / "out"),
    )
    printed = command("bench", "run", *models, "--methods", "lookup")
    assert printed.code == 2 and "pip install 'specbranch[tune]'; or give --no-tune." in printed.err
    for untuned in (("--methods", "lookup", "--no-tune"), ("--methods", "speculative")):
        printed = command("bench", "run", *models, *untuned)
        assert printed.code == 2 and "There is no model at" in printed.err


@pytest.mark.usefixtures("plain")
def test_a_bench_of_transformers_on_a_gguf_file_tells_what_is_missing(command: Command, tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    target = ("--target", str(tmp_path / "model.gguf"), "--out", str(tmp_path / "out"))
    printed = command("bench", "run", *target, "--methods", "hf-generate", "--no-tune")
    assert printed.code == 2 and "pip install 'specbranch[transformers]'; or leave hf-generate," in printed.err


@pytest.mark.usefixtures("plain")
def test_a_bench_of_llamacpp_tells_what_is_missing(command: Command, tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    target = ("--target", str(tmp_path / "model.gguf"), "--out", str(tmp_path / "out"))
    printed = command("bench", "run", *target, "--methods", "llamacpp", "--no-tune")
    assert printed.code == 2 and "needs xllamacpp, which is not installed." in printed.err
    assert "pip install 'specbranch[llamacpp]'; or leave llamacpp, llamacpp-ngram out" in printed.err


@pytest.mark.slow
@pytest.mark.default_model
def test_the_default_model_needs_no_extra(default_model: Path, tmp_path: Path) -> None:
    """Its tokenizer is converted anew, from the GGUF file."""
    code = f"""
import sys
for package in {[extra.package for extra in EXTRAS]!r}:
    sys.modules[package] = None
from pathlib import Path
from specbranch import LLM
from specbranch.text.tokenizer import Tokenizer
tokenizer = Tokenizer.from_gguf({str(default_model)!r}, Path({str(tmp_path)!r}))
with LLM({str(default_model)!r}, device="cpu") as llm:
    assert tokenizer.fingerprint == llm.tokenizer.fingerprint
    print(len(llm.generate("Once", {{"max_tokens": 4, "ignore_eos": True}}).token_ids))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0 and done.stdout.split() == ["4"], done.stderr
