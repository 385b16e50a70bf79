"""The bytes of a vocabulary's tokens, and the tokens of bytes: what two vocabularies can be compared by.

Owns the letters of both kinds of vocabularies: byte-level ones, and those with a mark for spaces ("▁") and byte
fallback. Does not own a comparison (`translation.py`). Invariants: special tokens have no bytes. Tokens of bytes come
from the model's merges alone; nothing is normalised, added or recognised as a special token.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cached_property, lru_cache
from typing import Any

from specbranch.errors import VocabularyMismatch
from specbranch.text.byte_letters import byte_letters
from specbranch.text.tokenizer import Tokenizer

REMEMBERED = 65_536  # texts whose tokens are remembered
# Normalizers that lose text for good: a model behind one never says some of the text that another model may.
LOSING = ("Lowercase", "StripAccents", "BertNormalizer")


class Spelling:
    """One tokenizer's tokens as bytes, in both directions."""

    def __init__(self, tokenizer: Tokenizer, size: int | None = None) -> None:
        """Raise VocabularyMismatch if the tokens cannot be read as bytes.

        `size`: how many ids the model knows; None: all that the tokenizer has.
        """
        self.tokenizer = tokenizer
        self._size = tokenizer.vocabulary_size if size is None else size
        definition = json.loads(tokenizer.definition())
        decoders = list(_parts(definition.get("decoder"), "decoders"))
        kinds = [str(part.get("type")) for part in decoders]
        self.by_bytes = "ByteLevel" in kinds
        self._space = None if self.by_bytes else _space_mark(decoders)
        losing = [
            name for part in _parts(definition.get("normalizer"), "normalizers") if (name := part["type"]) in LOSING
        ]
        if losing:
            raise VocabularyMismatch(
                f"A tokenizer normalises text by {losing[0]}, so its model cannot say all text. Use a draft of the "
                "target's own family, or method 'lookup', which needs no draft."
            )
        if not self.by_bytes and self._space is None:
            said = ", ".join(kinds) or "none"
            raise VocabularyMismatch(
                f"The tokens of a tokenizer cannot be read as bytes (its decoder: {said}; expected ByteLevel, or a "
                "mark for spaces). Use a draft of the target's own family, or method 'lookup', which needs no draft."
            )
        self.ids_of = lru_cache(REMEMBERED)(self._ids_of)

    @cached_property
    def leads_with_space(self) -> bool:
        """True if every text is tokenised as if a space came before it."""
        return self.text_of(tuple(self.tokenizer.encode("a", add_special=False))) == b" a"

    @cached_property
    def strings(self) -> dict[int, bytes]:
        """The bytes of each token that is not special."""
        special, known = self.tokenizer.special_ids, self.tokenizer.vocabulary().items()
        return {i: self._bytes(i, token) for i, token in known if i not in special and i < self._size}

    @cached_property
    def special(self) -> dict[str, int]:
        """The special tokens by name."""
        ids = sorted(self.tokenizer.special_ids, reverse=True)
        return {self.tokenizer.token(i): i for i in ids if i < self._size}

    @cached_property
    def ids(self) -> dict[bytes, int]:
        """The token of each string; of several with one string, the one that text is tokenised to."""
        found: dict[bytes, int] = {}
        several: set[bytes] = set()
        for token_id, value in sorted(self.strings.items()):
            several.update((value,) if value in found else ())
            found.setdefault(value, token_id)
        for value in several:
            if len(ids := self.ids_of(value)) == 1 and self.strings.get(ids[0]) == value:
                found[value] = ids[0]
        return {value: token_id for value, token_id in found.items() if value}

    def exactly(self, value: bytes) -> tuple[int, ...]:
        """Return the tokens of bytes; none if the vocabulary cannot spell them."""
        ids = self.ids_of(value)
        return ids if self.text_of(ids) == value else ()

    def text_of(self, ids: tuple[int, ...]) -> bytes:
        """Return the bytes of tokens; special ones have none."""
        return b"".join([self.strings.get(token_id, b"") for token_id in ids])

    def _ids_of(self, value: bytes) -> tuple[int, ...]:
        """Return the tokens of bytes; the unknown token, or nothing, stands for what the vocabulary cannot spell."""
        if self.by_bytes:
            found = [token for word in self._words(value) for token in self.tokenizer.merged(word)]
        else:
            found = [token for run in _runs(value) for token in self._ids_of_run(run)]
        return tuple([token for token in found if token < self._size])

    def _words(self, value: bytes) -> list[str]:
        """Cut bytes into words as the tokenizer does before it merges, in its own letters."""
        raw = "".join([_LETTERS[byte] for byte in value])
        try:
            words = self.tokenizer.words(value.decode())
        except UnicodeDecodeError:
            return [raw]
        return words if "".join(words) == raw else [raw]

    def _ids_of_run(self, run: str | bytes) -> list[int]:
        if isinstance(run, str):
            return self.tokenizer.merged(run.replace(" ", self._space or " "))
        return [self._fallback[byte] for byte in run if byte in self._fallback]

    @cached_property
    def _fallback(self) -> dict[int, int]:
        """The token of each byte, if there is byte fallback."""
        return {self._byte_of(token_id): token_id for token_id in self.tokenizer.byte_ids}

    def _byte_of(self, token_id: int) -> int:
        return int(self.tokenizer.token(token_id)[1:-1], 16)

    def _bytes(self, token_id: int, token: str) -> bytes:
        if token_id in self.tokenizer.byte_ids:
            return bytes([self._byte_of(token_id)])
        if not self.by_bytes:
            return token.replace(self._space or " ", " ").encode()
        known = byte_letters()
        # an added token may have other letters: then it is its own text
        spelled = all(letter in known for letter in token)
        return bytes([known[letter] for letter in token]) if spelled else token.encode()


_LETTERS = {byte: letter for letter, byte in byte_letters().items()}


def _parts(found: dict[str, Any] | None, several: str) -> Iterator[dict[str, Any]]:
    """Yield a part of a tokenizer's definition, or the parts of a sequence of them."""
    if found is not None and found.get("type") == "Sequence":
        for part in found[several]:
            yield from _parts(part, several)
    elif found is not None:
        yield found


def _space_mark(decoders: list[dict[str, Any]]) -> str | None:
    """Return the letter that stands for a space; None: there is none."""
    for part in decoders:
        if part["type"] == "Metaspace":
            return str(part.get("replacement", "▁"))
        if part["type"] == "Replace" and part.get("content") == " ":
            return str(part["pattern"].get("String", "")) or None
    return None


def _runs(value: bytes) -> Iterator[str | bytes]:
    """Cut bytes into runs of whole characters, as text, and of bytes that make none."""
    text, stray = "", b""
    for letter in value.decode("utf-8", "surrogateescape"):
        is_stray = "\udc80" <= letter <= "\udcff"
        if is_stray and text:
            yield text
            text = ""
        if not is_stray and stray:
            yield stray
            stray = b""
        text, stray = (text, stray + bytes([ord(letter) - 0xDC00])) if is_stray else (text + letter, stray)
    if text or stray:
        yield text or stray
