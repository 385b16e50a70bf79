"""Draft and target must mean the same by an id, and the error says where they do not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from small_tokenizers import byte_level, save
from specbranch.errors import ModelError, VocabularyMismatch
from specbranch.text.tokenizer import Tokenizer
from specbranch.text.vocabulary import compare_vocabularies


def test_equal_vocabularies_share_every_id(tmp_path: Path) -> None:
    first, second = (Tokenizer.from_folder(save(byte_level(), tmp_path / name)) for name in ("a", "b"))
    assert first.fingerprint == second.fingerprint
    assert compare_vocabularies(first, second) == first.vocabulary_size


def test_a_padded_vocabulary_shares_the_smaller_size(tmp_path: Path) -> None:
    made = byte_level()
    small = Tokenizer.from_folder(save(made, tmp_path / "small"))
    made.add_tokens([f"<pad {n}>" for n in range(7)])
    padded = Tokenizer.from_folder(save(made, tmp_path / "padded"))
    assert padded.vocabulary_size == small.vocabulary_size + 7
    assert compare_vocabularies(small, padded) == compare_vocabularies(padded, small) == small.vocabulary_size


def swapped(made_in: Path, pairs: int) -> Tokenizer:
    """A byte-level tokenizer in which `pairs` pairs of single-byte tokens are swapped."""
    plain = json.loads(byte_level().to_str())
    by_id = {token_id: token for token, token_id in plain["model"]["vocab"].items()}
    for n in range(pairs):
        one, other = 10 + 2 * n, 11 + 2 * n
        plain["model"]["vocab"].update({by_id[one]: other, by_id[other]: one})
    folder = save(byte_level(), made_in)
    (folder / "tokenizer.json").write_text(json.dumps(plain))
    return Tokenizer.from_folder(folder)


def test_the_error_names_the_first_five_and_counts_all(tmp_path: Path) -> None:
    target, draft = Tokenizer.from_folder(save(byte_level(), tmp_path / "a")), swapped(tmp_path / "b", 4)
    with pytest.raises(VocabularyMismatch) as caught:
        compare_vocabularies(target, draft)
    said = str(caught.value)
    assert f"8 of {target.vocabulary_size} shared token ids differ" in said and "and 3 more" in said
    for token_id in range(10, 15):
        assert (
            f"{token_id} is {target.token(token_id)!r} to the target and {draft.token(token_id)!r} to the draft" in said
        )
    assert "15 is" not in said
    assert isinstance(caught.value, ModelError)


def test_few_differences_are_all_named(tmp_path: Path) -> None:
    with pytest.raises(VocabularyMismatch, match="2 of") as caught:
        compare_vocabularies(Tokenizer.from_folder(save(byte_level(), tmp_path / "a")), swapped(tmp_path / "b", 1))
    assert "more" not in str(caught.value)
