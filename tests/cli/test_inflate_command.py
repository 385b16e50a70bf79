"""`inflate` on a tiny model: what it writes, tells and refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from in_process import Command

from specbranch.lab.inflation.tensors import InflatedSource
from specbranch.lab.measure import likeness

pytestmark = pytest.mark.usefixtures("one_thread")
PROMPT = "A branch is a guess"
GROWN = (
    "--hidden",
    "64",
    "--layers",
    "3",
    "--heads",
    "8",
    "--kv-heads",
    "8",
    "--head-dim",
    "16",
    "--vocabulary",
    "600",
    "--device",
    "cpu",
)


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "inflated"


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16", "float16"])
def test_a_recipe_is_written_once_the_logits_agree(
    dtype: str, pair: tuple[str, str], out: Path, command: Command
) -> None:
    (record,) = command("inflate", pair[0], "--out", str(out), *GROWN, "--dtype", dtype, "--json").answers()
    recipe = json.loads((out / "inflation.json").read_text())
    assert [path.name for path in out.iterdir()] == ["inflation.json"]
    assert recipe["checked"] == record["checked"] and record["checked"]["dtype"] == dtype
    assert record["checked"]["difference"] <= record["checked"]["tolerance"] < 0.2
    assert recipe["source"] == str(Path(pair[0]).resolve())
    assert (record["head_rows"], record["head_scored"], record["sizes"]["hidden"]) == (600, 421, 64)
    assert record["identity"] and record["weight_bytes"] > 0


@pytest.mark.slow
def test_it_goes_wherever_a_model_is_named(pair: tuple[str, str], out: Path, command: Command) -> None:
    done = command("inflate", pair[0], "--out", str(out), *GROWN)
    assert done.code == 0 and "600" in done.out and "Compared after 48 tokens in float32" in done.out
    options = [
        "--device",
        "cpu",
        "--dtype",
        "float64",
        "--context-length",
        "128",
        "--max-tokens",
        "30",
        "--json",
        "--seed",
        "3",
    ]
    warm = ["--temperature", "0.8", "--draft", pair[1], *options]
    small, large = (
        command("generate", PROMPT, "--target", target, *warm).answers()[0] for target in (pair[0], str(out))
    )
    assert large["token_ids"] == small["token_ids"]
    checked = command("verify", "-", "--device", "cpu", stdin=json.dumps(large))
    assert checked.code == 0 and "identical" in checked.out


def test_a_model_that_says_something_else_is_not_written(
    pair: tuple[str, str], out: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(InflatedSource, "_scale", lambda self, part: 1.0)
    done = command("inflate", pair[0], "--out", str(out), *GROWN)
    assert done.code == 2 and "another model than its source" in done.err and "Nothing was written" in done.err
    assert not out.exists()


def test_what_is_no_number_never_agrees() -> None:
    assert not likeness.Likeness("float32", 1, float("nan"), 1e-4, 0.0, 1.0).agrees


@pytest.mark.parametrize(
    ("options", "printed"),
    [
        (["--shape", "7x"], "Unknown shape '7x'. Did you mean '7b'"),
        (["--layers", "1", "--hidden", "16"], "hidden 16 of at least 32, layers 1 of at least 2"),
        (["--head-dim", "12"], "expected a multiple of the model's 8"),
        (["--heads", "5"], "5 heads over 2 key heads"),
        (["--dtype", "float23"], "Unknown dtype 'float23'"),
        (["--shape", "33b", "--layers", "9000"], "does not fit on cpu"),
    ],
)
def test_mistakes_are_sentences(
    options: list[str], printed: str, pair: tuple[str, str], out: Path, command: Command
) -> None:
    done = command("inflate", pair[0], "--out", str(out), "--device", "cpu", *options)
    assert done.code == 2 and printed in done.err and "Traceback" not in done.err
    assert not out.exists()


def test_neither_an_inflated_model_nor_a_folder_in_use_is_taken(
    pair: tuple[str, str], out: Path, tmp_path: Path, tiny_draft: Path, command: Command
) -> None:
    assert command("inflate", pair[0], "--out", str(out), *GROWN).code == 0
    assert command("inflate", pair[0], "--out", str(out), *GROWN, "--seed", "2").code == 0, "a recipe may be replaced"
    assert "inflated already" in command("inflate", str(out), "--out", str(tmp_path / "again"), *GROWN).err
    assert "holds no recipe" in command("inflate", pair[0], "--out", pair[1], *GROWN).err
    assert (
        "Distill from its source"
        in command("distill", "--target", str(out), "--layers", "1", "--out", str(tmp_path / "d")).err
    )
    assert (
        "Say where that is with --target"
        in command("inflate", str(tiny_draft), "--out", str(tmp_path / "again"), *GROWN).err
    )


@pytest.mark.slow
@pytest.mark.default_model
def test_smollm2_says_the_same_in_a_larger_shape(out: Path, command: Command) -> None:
    torch.set_num_threads(2)
    sizes = [
        "--hidden",
        "640",
        "--layers",
        "31",
        "--heads",
        "12",
        "--kv-heads",
        "6",
        "--head-dim",
        "128",
        "--vocabulary",
        "50000",
    ]
    assert command("inflate", "smollm2-135m", "--out", str(out), "--device", "cpu", *sizes).code == 0
    options = ["--method", "autoregressive", "--device", "cpu", "--weights", "float32", "--max-tokens", "48", "--json"]
    targets = ("smollm2-135m", str(out))
    small, large = (
        command("generate", "Once upon a time", "--target", target, *options).answers()[0] for target in targets
    )
    assert large["token_ids"] == small["token_ids"]
