"""Vocabularies are compared id by id; where one id means two tokens, they are not the same."""

from __future__ import annotations

import json
from pathlib import Path

from small_tokenizers import byte_level, save
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


def test_one_id_with_two_meanings_makes_them_different(tmp_path: Path) -> None:
    folder = save(byte_level(), tmp_path / "b")
    plain = json.loads((folder / "tokenizer.json").read_text())
    by_id = {token_id: token for token, token_id in plain["model"]["vocab"].items()}
    plain["model"]["vocab"].update({by_id[10]: 11, by_id[11]: 10})
    (folder / "tokenizer.json").write_text(json.dumps(plain))
    target = Tokenizer.from_folder(save(byte_level(), tmp_path / "a"))
    assert compare_vocabularies(target, Tokenizer.from_folder(folder)) is None
