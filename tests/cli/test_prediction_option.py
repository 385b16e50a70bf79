"""`generate --prediction FILE`: the same answers, and the tokens of the prediction in their statistics."""

from __future__ import annotations

from pathlib import Path

from in_process import Command

PROMPT = "A branch is a guess about what the large model will say next."


def test_an_answer_stays_the_same_and_its_prediction_is_counted(
    command: Command, models: list[str], tmp_path: Path
) -> None:
    options = [*models, "--method", "lookup", "--max-tokens", "24", "--json"]
    (first,) = command("generate", PROMPT, *options).answers()
    file = tmp_path / "expected.txt"
    file.write_text(first["text"], encoding="utf-8")
    (again,) = command("generate", PROMPT, *options, "--prediction", str(file)).answers()
    assert again["text"] == first["text"] and again["stats"]["accepted_prediction_tokens"] > 0
    streamed = command("generate", PROMPT, *options[:-1], "--prediction", str(file))
    assert first["text"] in streamed.out


def test_a_file_that_cannot_be_read_gets_a_sentence(command: Command, models: list[str], tmp_path: Path) -> None:
    binary = tmp_path / "binary"
    binary.write_bytes(b"\xff\xfe\x00")
    for file in (tmp_path / "none.txt", binary):
        done = command("generate", PROMPT, *models, "--prediction", str(file))
        assert done.code == 2 and f"--prediction is {file}, which cannot be read" in done.err
