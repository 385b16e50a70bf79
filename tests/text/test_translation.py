"""Two vocabularies are translated by the bytes of their tokens: one to one where a string is common, else over text."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import decoders, normalizers

from small_tokenizers import SENTENCES, byte_fallback, byte_level, metaspace, save
from specbranch.core.reading import NOTHING_READ, Reading
from specbranch.errors import VocabularyMismatch
from specbranch.text.spelling import Spelling
from specbranch.text.tokenizer import Tokenizer
from specbranch.text.translation import Translation

Made = Callable[[], tokenizers.Tokenizer]
Change = Callable[[dict[str, Any]], None]


def loaded(folder: Path, made: tokenizers.Tokenizer, change: Change | None = None, **config: Any) -> Tokenizer:
    save(made, folder, **config)
    if change is not None:
        definition = json.loads((folder / "tokenizer.json").read_text())
        change(definition)
        (folder / "tokenizer.json").write_text(json.dumps(definition))
    return Tokenizer.from_folder(folder)


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    folder = tmp_path_factory.mktemp("tokenizers")
    kinds: dict[str, Made] = {
        "bytes": byte_level,
        "more bytes": lambda: byte_level(560),
        "spaces": byte_fallback,
        "unigram": metaspace,
    }
    return {name: loaded(folder / name, made()) for name, made in kinds.items()}


def read(translation: Translation, tokens: Sequence[int]) -> Reading:
    reading = translation.start
    for token in tokens:
        before = reading
        reading = translation.read(reading, token)
        assert reading.ids[: before.settled] == before.ids[: before.settled] and reading.settled >= before.settled
    return reading


PAIRS = [("bytes", "more bytes"), ("more bytes", "bytes"), ("bytes", "spaces"), ("spaces", "bytes")]


@pytest.mark.parametrize("target, draft", PAIRS)
def test_the_draft_reads_the_targets_text(both: dict[str, Tokenizer], target: str, draft: str) -> None:
    translation, own = Translation(both[target], both[draft]), Spelling(both[draft])
    for text in SENTENCES:
        ids = read(translation, both[target].encode(text)).ids
        assert own.text_of(ids) == own.text_of(tuple(both[draft].encode(text)))


def test_both_may_begin_with_the_same_token(tmp_path: Path, both: dict[str, Tokenizer]) -> None:
    other = loaded(tmp_path, byte_fallback(400))
    translation = Translation(both["spaces"], other)
    assert read(translation, both["spaces"].encode("A guess")).ids[:2] == tuple(other.encode("A guess"))[:2]
    alone = both["spaces"].encode("A guess", add_special=False)
    assert read(translation, alone).ids[:2] == tuple(other.encode("A guess"))[:2]


@pytest.mark.parametrize("target, draft", [pair for pair in PAIRS if "spaces" not in pair])
def test_what_it_reads_is_its_own_tokenisation(both: dict[str, Tokenizer], target: str, draft: str) -> None:
    translation = Translation(both[target], both[draft])
    for text in SENTENCES:
        assert list(read(translation, both[target].encode(text)).ids) == both[draft].encode(text)


def test_common_strings_are_one_token_of_the_other_whatever_marks_a_space(both: dict[str, Tokenizer]) -> None:
    target, draft = both["bytes"], both["spaces"]
    translation, theirs = Translation(target, draft), {text: i for i, text in draft.vocabulary().items()}
    common = 0
    for token, text in target.vocabulary().items():
        spaced = text.replace("Ġ", "▁")
        if text.isalpha() and spaced.replace("▁", "").isascii() and spaced in theirs:
            common += 1
            assert translation.same(token) == theirs[spaced] and translation.first_ids[theirs[spaced]] == token
    assert common > 30 and translation.same(target.vocabulary_size + 1) is None


def test_byte_tokens_are_common_too(both: dict[str, Tokenizer]) -> None:
    translation = Translation(both["bytes"], both["spaces"])
    byte = {text: i for i, text in both["spaces"].vocabulary().items()}["<0xE4>"]
    token = {text: i for i, text in both["bytes"].vocabulary().items()}["ä"]  # the letter of that byte
    assert translation.same(token) == byte and translation.first_ids[byte] == token


def test_a_longer_draft_token_counts_for_the_first_token_of_its_text(both: dict[str, Tokenizer]) -> None:
    target, draft = both["bytes"], both["more bytes"]
    translation, spelled = Translation(target, draft), Spelling(target)
    longer = [i for i, value in Spelling(draft).strings.items() if value and value not in spelled.ids]
    assert len(longer) > 50
    for draft_id in longer:
        text = Spelling(draft).strings[draft_id]
        assert text.startswith(spelled.strings[translation.first_ids[draft_id]])
        assert translation.first_of((draft_id,)) == (translation.first_ids[draft_id], False)


def test_two_draft_tokens_may_be_one_of_the_target(both: dict[str, Tokenizer]) -> None:
    target, draft = both["more bytes"], both["bytes"]
    translation, own = Translation(target, draft), Spelling(draft)
    whole = next(i for i, v in Spelling(target).strings.items() if v.isalpha() and len(own.ids_of(v)) == 2)
    assert translation.same(whole) is None
    assert translation.first_of(own.ids_of(Spelling(target).strings[whole])) == (whole, True)


def test_longer_tokens_are_those_that_go_on(both: dict[str, Tokenizer]) -> None:
    translation, strings = Translation(both["bytes"], both["more bytes"]), Spelling(both["more bytes"]).strings
    for draft_id, value in list(strings.items())[::7]:
        assert set(translation.longer(draft_id)) == {
            one for one, other in strings.items() if value and other.startswith(value) and other != value
        }
    some = next(i for i in strings if translation.longer(i))
    longer = translation.longer(some)[0]
    rest = strings[longer].removeprefix(strings[some])
    token = translation.first_after(longer, some)
    assert token is not None and rest.startswith(Spelling(both["bytes"]).strings[token])


@pytest.mark.parametrize("draft", ["spaces", "more bytes"])
def test_part_of_a_character_is_read_as_bytes_and_then_as_the_character(both: dict[str, Tokenizer], draft: str) -> None:
    translation, own = Translation(both["bytes"], both[draft]), Spelling(both[draft])
    letters = Spelling(both["bytes"])
    tokens = [letters.ids[bytes([byte])] for byte in "a🙂é".encode()]
    for count in range(1, len(tokens) + 1):
        assert own.text_of(read(translation, tokens[:count]).ids).lstrip() == "a🙂é".encode()[:count]
    assert list(read(translation, tokens).ids) == both[draft].encode("a🙂é")


def test_a_draft_without_bytes_reads_the_unknown_token(both: dict[str, Tokenizer]) -> None:
    translation = Translation(both["bytes"], both["unigram"])
    tokens = both["bytes"].encode("A 🦖 guess")
    reading = read(translation, tokens)
    unknown = both["unigram"].vocabulary()
    assert "<unk>" in [unknown[i] for i in reading.ids] and reading.ids[-1] in Spelling(both["unigram"]).strings


def test_special_tokens_stand_for_special_tokens_alone(tmp_path: Path) -> None:
    names = [("</s>", "<|end|>"), ("<s>", "<|begin|>")]

    def rename(definition: dict[str, Any]) -> None:
        vocabulary = definition["model"]["vocab"]
        for old, new in names:
            vocabulary[new] = vocabulary.pop(old)
        for token in definition["added_tokens"]:
            token["content"] = dict(names).get(token["content"], token["content"])

    target = loaded(tmp_path / "a", byte_level())
    ends = {"bos_token": "<|begin|>", "eos_token": "<|end|>"}
    draft = loaded(tmp_path / "b", byte_level(400), rename, **ends)
    translation = Translation(target, draft)
    end, begin = target.encode("</s>")[0], target.encode("<s>")[0]
    their_end, their_begin = draft.encode("<|end|>")[0], draft.encode("<|begin|>")[0]
    assert translation.read(NOTHING_READ, end) == Reading((their_end,), 1)
    assert translation.read(NOTHING_READ, begin) == Reading((their_begin,), 1)
    assert (translation.first_ids[their_end], translation.first_ids[their_begin]) == (end, begin)
    # the same letters as text are text
    letters = Spelling(target).ids_of(b"</s>")
    assert end not in letters and their_end not in read(translation, letters).ids
    # nothing is tokenised across one
    around = [*target.encode("gu"), end, *target.encode("ess")]
    assert read(translation, around).ids == (*draft.encode("gu"), their_end, *draft.encode("ess"))


def test_a_special_token_that_the_draft_lacks_is_read_by_its_name(tmp_path: Path) -> None:
    made = byte_level()
    made.add_special_tokens(["<|think|>"])
    target, draft = loaded(tmp_path / "a", made), loaded(tmp_path / "b", byte_level(400))
    token = target.encode("<|think|>")[0]
    read_ids = Translation(target, draft).read(NOTHING_READ, token).ids
    assert Spelling(draft).text_of(read_ids) == b"<|think|>"


def test_of_two_ids_for_one_string_the_one_that_text_has_is_proposed(tmp_path: Path) -> None:
    target, draft = loaded(tmp_path / "a", byte_fallback()), loaded(tmp_path / "b", byte_level())
    vocabulary = {text: i for i, text in target.vocabulary().items()}
    letter, byte = vocabulary["a"], vocabulary["<0x61>"]
    translation, theirs = Translation(target, draft), Spelling(draft).ids[b"a"]
    assert byte < letter and translation.first_ids[theirs] == letter
    assert translation.read(NOTHING_READ, byte).ids == translation.read(NOTHING_READ, letter).ids == (theirs,)
    back = Translation(draft, target)
    assert back.first_ids[letter] == back.first_ids[byte] == theirs and back.same(theirs) == letter


def test_ids_that_the_drafts_model_lacks_are_neither_read_nor_proposed(both: dict[str, Tokenizer]) -> None:
    size = both["more bytes"].vocabulary_size - 100
    translation = Translation(both["bytes"], both["more bytes"], size)
    for text in SENTENCES:
        assert max(read(translation, both["bytes"].encode(text)).ids) < size
    assert set(translation.first_ids[size:]) == {-1}


REFUSED: dict[str, tuple[Change, str]] = {
    "lower case": (
        lambda made: made.update(normalizer=json.loads(normalizers.Lowercase().__getstate__())),
        "normalises text by Lowercase",
    ),
    "word pieces": (
        lambda made: made.update(decoder=json.loads(decoders.WordPiece().__getstate__())),
        "its decoder: WordPiece",
    ),
    "no decoder": (lambda made: made.update(decoder=None), "its decoder: none"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_a_tokenizer_that_cannot_be_translated_is_refused_by_name(kind: str, tmp_path: Path) -> None:
    change, sentence = REFUSED[kind]
    target, draft = loaded(tmp_path / "a", byte_level()), loaded(tmp_path / "b", byte_level(400), change)
    for one, other in ((target, draft), (draft, target)):
        with pytest.raises(VocabularyMismatch, match=sentence):
            Translation(one, other)


def test_the_sentence_says_what_is_common_and_what_to_expect(both: dict[str, Tokenizer]) -> None:
    translation = Translation(both["bytes"], both["more bytes"])
    theirs = {text: i for i, text in both["more bytes"].vocabulary().items()}
    common = sum(text in theirs for text in both["bytes"].vocabulary().values())
    said = translation.sentence()
    assert translation.shared == common and f"{common:,} token strings are common" in said
    assert "Answers stay the same" in said and "fewer accepted tokens" in said
