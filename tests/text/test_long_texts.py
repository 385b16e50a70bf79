"""Long texts: other threads go on while they are read, the ids are the same, and characters alone prove a length."""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Callable
from typing import Any

import pytest
import tokenizers
from tokenizers import AddedToken, normalizers, pre_tokenizers

from small_tokenizers import KINDS, SENTENCES, byte_level
from specbranch.text.longest_token import TextBound, text_bound
from specbranch.text.tokenizer import _LONG, Tokenizer

LONG_TEXT = "".join(SENTENCES) * 200  # about a tenth of a second of work


def turns_beside(work: Callable[[], Any]) -> int:
    """How often this thread had its turn while another one worked."""
    done, started, turns = threading.Event(), threading.Event(), 0

    def at_work() -> None:
        started.set()
        work()
        done.set()

    thread = threading.Thread(target=at_work)
    thread.start()
    started.wait()
    while not done.wait(0.001):
        turns += 1
    thread.join()
    return turns


def test_other_threads_go_on_while_a_long_text_is_encoded_and_decoded() -> None:
    tokenizer = Tokenizer(byte_level(), {})
    ids = tokenizer.encode(LONG_TEXT)
    assert turns_beside(lambda: tokenizer.encode(LONG_TEXT)) > 2
    assert turns_beside(lambda: tokenizer.decode(ids * 20)) > 2


@pytest.mark.parametrize("kind", KINDS)
def test_a_long_text_has_the_ids_and_the_letters_of_a_short_one(kind: str) -> None:
    backend = KINDS[kind]()
    tokenizer, text = Tokenizer(backend, {}), "".join(SENTENCES) * 20
    assert len(text) > _LONG
    for special in (True, False):
        ids = backend.encode(text, add_special_tokens=special).ids
        assert tokenizer.encode(text, special) == ids and len(ids) > 200
        long = ids * (_LONG // len(ids) + 1)
        assert tokenizer.decode(long, special) == backend.decode(long, skip_special_tokens=special)


def described(made: tokenizers.Tokenizer) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(made.to_str())
    return found


def without(made: tokenizers.Tokenizer, letters: str) -> tokenizers.Tokenizer:
    """The same without tokens that have these letters."""
    plain = described(made)
    model = plain["model"]
    kept = [token for token in model["vocab"] if not set(token) & set(letters)]
    model["vocab"] = {token: at for at, token in enumerate(kept)}
    model["merges"] = [merge for merge in model["merges"] if not set("".join(merge)) & set(letters)]
    return tokenizers.Tokenizer.from_str(json.dumps(plain))


def composed() -> tokenizers.Tokenizer:
    made = byte_level()
    made.normalizer = normalizers.NFC()
    return made


MADE: dict[str, Callable[[], tokenizers.Tokenizer]] = {
    "byte level": byte_level,
    "byte fallback": KINDS["byte fallback"],
    "composed": composed,
    "some bytes missing": lambda: without(byte_level(), "ĄĆñò"),  # U+0004 and U+0006, and planes 4 to 11
}


@pytest.mark.parametrize("name", MADE)
def test_a_text_never_has_fewer_tokens_than_its_characters_prove(name: str) -> None:
    backend, draw = MADE[name](), random.Random(1)
    tokenizer, bound = Tokenizer(backend, {}), text_bound(described(MADE[name]()))
    assert bound is not None
    pieces = [*backend.get_vocab(), *"\4\6 \n", "e\u0301\u0302", "\u1f82", "\U00050000", "小", *SENTENCES]
    for text in ("\4" * 500, "\U00050000" * 500, "α\u0313\u0300\u0345" * 500, max(backend.get_vocab(), key=len) * 50):
        assert tokenizer.least_tokens(text) <= len(tokenizer.encode(text, False))
    for _ in range(60):
        text = "".join(draw.choices(pieces, k=draw.randrange(1, 200)))
        assert 0 < tokenizer.least_tokens(text + "x") <= len(tokenizer.encode(text + "x", False)), text


def test_a_character_without_a_token_proves_nothing() -> None:
    bound = text_bound(described(without(byte_level(), "ĄĆ")))
    assert bound is not None and sorted(bound.dropped) == ["\4", "\6"] and bound.least("\4\6" * 999) == 0
    assert TextBound(7, "").least("x" * 15) == 3


def stripping() -> tokenizers.Tokenizer:
    made = byte_level()
    made.add_tokens([AddedToken("<mask>", lstrip=True)])
    return made


def split_by_spaces() -> tokenizers.Tokenizer:
    made = byte_level()
    made.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.ByteLevel()])
    return made


def shortened() -> tokenizers.Tokenizer:
    made = byte_level()
    made.normalizer = normalizers.Replace("  ", " ")
    return made


@pytest.mark.parametrize(
    "made",
    [stripping, split_by_spaces, shortened, KINDS["metaspace"], lambda: without(byte_level(), "Ģ")],
    ids=["strips", "drops spaces", "shortens", "has an unknown token", "drops a continuation byte"],
)
def test_a_tokenizer_that_may_drop_text_has_no_bound(made: Callable[[], tokenizers.Tokenizer]) -> None:
    assert text_bound(described(made())) is None
    assert Tokenizer(made(), {}).least_tokens("x" * 10**6) == 0
