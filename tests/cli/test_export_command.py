"""`export` from a draft that `distill` made: what it prints, and what it refuses."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import pytest
from in_process import Command

from specbranch.cli.export import FORMAT_TABLE
from specbranch.pairs import Pair
from specbranch.training.export.card import EXPORT_FORMATS, ExportFormat


def test_the_help_names_every_format() -> None:
    assert tuple(name for name, _ in FORMAT_TABLE) == EXPORT_FORMATS == get_args(ExportFormat)


def test_a_distilled_draft_is_exported_by_its_name_and_drafts_in_its_new_form(
    command: Command, tiny: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    printed = command("export", "tiny", "--format", "gguf", "--target", tiny.target)
    assert printed.code == 0 and "tiny-gguf: 1 layers" in printed.out and "Its head scores all tokens." in printed.out
    assert "Agreement with target: top-1 " in printed.out
    (made,) = command("export", "tiny", "--format", "hf", "--target", tiny.target, "--out", "hf", "--json").answers()
    assert made["out"] == "hf" and made["exact"] and made["agreement"]["positions"] > 0
    small = ("--target", tiny.target, "--device", "cpu", "--method", "speculative", "--max-tokens", "8", "--json")
    texts = {
        command("generate", *small, "--draft", draft, "A branch").answers()[0]["text"] for draft in ("tiny-gguf", "hf")
    }
    assert texts == {command("generate", *small[:4], *small[6:], "--method", "auto", "A branch").answers()[0]["text"]}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("no-such-draft", "--format", "hf"), "no-such-draft is no folder of a draft made by `specbranch distill`."),
        (("tiny", "--format", "hf"), "which is no known name. Say where that is with --target."),
        (("tiny", "--format", "hf", "--out", "."), "is there already. Name another folder with --out"),
        (("tiny", "--format", "onnx"), "Invalid value for '--format'"),
    ],
)
def test_mistakes_are_sentences(command: Command, tiny: Pair, options: tuple[str, ...], said: str) -> None:
    printed = command("export", *options)
    assert printed.code == 2 and said in printed.err


def test_a_head_that_is_both_full_and_reduced_is_refused(
    command: Command, pair: tuple[str, str], tmp_path: Path
) -> None:
    wanted = ("distill", "--target", pair[0], "--layers", "1", "--out", str(tmp_path / "out"))
    for options, said in (
        (("--head", "full", "--head-tokens", "40"), "--head is full and there is --head-tokens 40"),
        (("--head", "reduced"), "--head is reduced and there is no --head-tokens"),
    ):
        printed = command(*wanted, *options)
        assert printed.code == 2 and said in printed.err and not (tmp_path / "out").exists()
