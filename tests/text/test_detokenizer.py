"""Text returned in parts is the text of the whole list."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence

import pytest

from small_tokenizers import SENTENCES, CountingDecoder
from specbranch.text.detokenizer import Detokenizer
from specbranch.text.tokenizer import Tokenizer

TEXTS = [
    *SENTENCES,
    "👨‍👩‍👧‍👦 family, 🇧🇷 flag, 汉字 and ᏣᎳᎩ",
    "  two spaces  first",
    "\n\nlines\n",
    " ",
    "",
    "ends in �",
]


def texts_of(tokenizer: Tokenizer, ids: Sequence[int], skip_special: bool = True) -> list[str]:
    detokenizer = Detokenizer(tokenizer, skip_special)
    return [*(detokenizer.feed([token]) for token in ids), detokenizer.finish()]


@pytest.mark.parametrize("text", TEXTS)
def test_texts_come_out_whole(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    assert "".join(texts_of(tokenizer, ids)) == tokenizer.decode(ids)


@pytest.mark.parametrize("skip_special", [True, False])
def test_random_tokens_give_the_text_of_the_whole_list(tokenizer: Tokenizer, skip_special: bool) -> None:
    draw = random.Random(7)
    for _ in range(400):
        # some ids have no token
        ids = [draw.randrange(tokenizer.vocabulary_size + 3) for _ in range(draw.randrange(1, 40))]
        assert "".join(texts_of(tokenizer, ids, skip_special)) == tokenizer.decode(ids, skip_special), ids


def test_random_bytes_and_special_tokens_give_the_text_of_the_whole_list(tokenizer: Tokenizer) -> None:
    draw = random.Random(8)
    single = [i for i, token in tokenizer.vocabulary().items() if len(token) == 1 or i in tokenizer.byte_ids] + [
        0,
        1,
        2,
    ]
    for _ in range(300):
        ids = draw.choices(single, k=draw.randrange(1, 120))
        assert "".join(texts_of(tokenizer, ids)) == tokenizer.decode(ids), ids


def test_several_tokens_at_once_give_the_same_text(tokenizer: Tokenizer) -> None:
    draw = random.Random(9)
    ids = [draw.randrange(tokenizer.vocabulary_size) for _ in range(200)]
    detokenizer, text, at = Detokenizer(tokenizer), "", 0
    while at < len(ids):
        size = draw.randrange(1, 9)
        text += detokenizer.feed(ids[at : at + size])
        at += size
    assert text + detokenizer.finish() == tokenizer.decode(ids)


def test_no_returned_text_ends_within_a_character(tokenizer: Tokenizer) -> None:
    for text in ("🙂😂👋🏽", "汉字不在词表里", "ᏣᎳᎩ ᎦᏬᏂᎯᏍᏗ"):
        ids = tokenizer.encode(text, add_special=False)
        shown = texts_of(tokenizer, ids)
        assert not any("\ufffd" in part for part in shown) or "\ufffd" in tokenizer.decode(ids)
        assert "".join(shown) == tokenizer.decode(ids)


def test_a_split_emoji_appears_with_its_last_byte(byte_level_tokenizer: Tokenizer) -> None:
    ids = byte_level_tokenizer.encode("🜚")
    assert len(ids) > 2
    assert texts_of(byte_level_tokenizer, ids) == [*[""] * (len(ids) - 1), "🜚", ""]


def test_plain_words_appear_with_their_token(byte_level_tokenizer: Tokenizer) -> None:
    ids = byte_level_tokenizer.encode("the guess was right")
    assert texts_of(byte_level_tokenizer, ids)[:-1] == [byte_level_tokenizer.decode([token]) for token in ids]


def test_half_a_character_at_the_end_is_marked_not_lost(byte_level_tokenizer: Tokenizer) -> None:
    ids = byte_level_tokenizer.encode("so 🜚")[:-1]
    shown = texts_of(byte_level_tokenizer, ids)
    assert "".join(shown[:-1]).strip() == "so" and shown[-1].endswith("\ufffd")
    assert "".join(shown) == byte_level_tokenizer.decode(ids)


def test_a_bad_byte_changes_the_whole_run_before_it_is_shown(byte_fallback_tokenizer: Tokenizer) -> None:
    by_name = {token: token_id for token_id, token in byte_fallback_tokenizer.vocabulary().items()}
    ids = [by_name["<0x41>"], by_name["<0xFF>"], by_name["a"]]
    assert byte_fallback_tokenizer.decode(ids[:1]) == "A"  # what a hasty reader would have shown
    assert "".join(texts_of(byte_fallback_tokenizer, ids)) == "\ufffd\ufffda"


def test_a_special_token_between_does_not_cost_a_space(byte_fallback_tokenizer: Tokenizer) -> None:
    first, second = (byte_fallback_tokenizer.encode(word, add_special=False) for word in ("guess", "branch"))
    assert "".join(texts_of(byte_fallback_tokenizer, [1, *first, 2, 2, *second])) == "guess branch"


def test_pending_reads_as_if_nothing_followed(byte_fallback_tokenizer: Tokenizer) -> None:
    by_name = {token: token_id for token_id, token in byte_fallback_tokenizer.vocabulary().items()}
    detokenizer = Detokenizer(byte_fallback_tokenizer)
    assert detokenizer.feed([by_name["a"], by_name["<0x0A>"]]) == "a"
    assert detokenizer.pending() == "\n"
    assert detokenizer.feed([by_name["a"]]) == "\na" and detokenizer.pending() == ""


def test_pending_is_what_the_whole_list_would_end_in(tokenizer: Tokenizer) -> None:
    """Runs of bytes that make characters, half of one, or none: what is held back is read as a whole list would be."""
    draw = random.Random(10)
    by_byte = {int(token[1:-1], 16): i for i, token in tokenizer.vocabulary().items() if i in tokenizer.byte_ids}
    words = [i for i, token in tokenizer.vocabulary().items() if token.isalpha()]
    for _ in range(200):
        detokenizer, ids, given = Detokenizer(tokenizer), list[int](), ""
        for _ in range(6):
            if by_byte and draw.random() < 0.8:
                chars = "".join(draw.choices(" aé€😀\ufffd", k=draw.randrange(1, 6))).encode()
                new = [by_byte[byte] for byte in chars[: draw.choice((None, None, -1, -2))]]
                new += [by_byte[0xFF]] * (draw.random() < 0.1)
            else:
                new = [draw.choice(words)]
            for token in new:
                ids.append(token)
                given += detokenizer.feed([token])
                whole = tokenizer.decode(ids)[len(given) :].rstrip("\ufffd")
                assert detokenizer.pending() == whole, ids
                assert detokenizer.pending(2) == whole[2:]


@pytest.mark.parametrize(
    "pattern", [(0xE4, 0xB8), (0xF0, 0x9F, 0x98), (0xF0, 0x9F, 0x98, 0xFF, 0xE4), (0xC3,), (0xBF,)]
)
def test_a_long_stretch_of_unfinished_characters_is_cut_between_them(
    byte_level_tokenizer: Tokenizer, pattern: tuple[int, ...]
) -> None:
    spelled = byte_level_tokenizer.vocabulary()
    single = {byte_of(token): token_id for token_id, token in spelled.items() if len(token) == 1}
    ids = [single[byte] for byte in pattern] * 60
    shown = texts_of(byte_level_tokenizer, ids)
    assert "".join(shown) == byte_level_tokenizer.decode(ids) == bytes(pattern * 60).decode(errors="replace")
    assert len(shown[-1]) < 40  # most of it was given out before the end


def byte_of(token: str) -> int:
    """The byte that a one-character token of the GPT-2 alphabet stands for."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return ord(token) if ord(token) in printable else others[ord(token) - 256]


@pytest.mark.parametrize("kind", ["text", "bytes that never make a character"])
def test_cost_grows_with_the_length_not_its_square(byte_level_tokenizer: Tokenizer, kind: str) -> None:
    lone = next(i for i in range(byte_level_tokenizer.vocabulary_size) if byte_level_tokenizer.decode([i]) == "\ufffd")
    ids = byte_level_tokenizer.encode(" ".join(SENTENCES) * 12) if kind == "text" else [lone] * 4000
    counting = CountingDecoder(byte_level_tokenizer)
    detokenizer = Detokenizer(counting)
    started = time.perf_counter()
    text = "".join(detokenizer.feed([token]) for token in ids) + detokenizer.finish()
    assert text == byte_level_tokenizer.decode(ids)
    assert counting.decoded < 64 * len(ids) and time.perf_counter() - started < 5
