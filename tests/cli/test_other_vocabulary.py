"""`generate --target X --draft Y` works with any two models, and says in one line what their vocabularies share."""

from __future__ import annotations

from pathlib import Path

import pytest
from in_process import Command

from small_tokenizers import byte_fallback, save
from tiny_pair import make_pair


def test_a_draft_with_another_vocabulary_just_works(
    command: Command, pair: tuple[str, str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _, draft = make_pair(tmp_path)
    save(byte_fallback(), Path(draft))
    asked = ("generate", "--target", pair[0], "--device", "cpu", "--max-tokens", "8", "A branch is")
    plain = command(*asked, "--method", "autoregressive")
    assert "vocabulary" not in caplog.text
    done = command(*asked, "--draft", draft, "--method", "speculative")
    assert (done.code, done.out) == (plain.code, plain.out) == (0, done.out)
    said = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(said) == 1 and "token strings are common" in said[0]
