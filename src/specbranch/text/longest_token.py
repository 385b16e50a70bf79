"""A lower bound on the tokens of a text, by its characters alone: a text too long for a context is refused early.

Owns the proof. Invariant: a text never has fewer tokens than `TextBound.least` says. If that cannot be proved, there
is no bound: for tokenizers that drop words, or write one token for any unknown word.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil, prod
from typing import Any

from specbranch.text.byte_letters import byte_letters

Step = Mapping[str, Any]
# Characters that one of the normalised text can stand for. Composition (NFC, NFKC) joins four at most; a decomposition
# never shortens a text.
_NORMALIZERS = {"NFC": 4, "NFKC": 4, "NFD": 1, "NFKD": 1, "Prepend": 1, "ByteLevel": 1}
_KEEPING = ("ByteLevel", "Metaspace", "Digits")  # pre-tokenizers that drop no character
_FALLBACKS = [f"<0x{byte:02X}>" for byte in range(256)]


@dataclass(frozen=True, slots=True)
class TextBound:
    """What one token can stand for."""

    longest: int  # characters
    dropped: str  # characters without a token, which the tokenizer skips

    def least(self, text: str) -> int:
        """Return the least number of tokens that a text can have."""
        return ceil((len(text) - sum(map(text.count, self.dropped))) / self.longest)


def text_bound(described: Mapping[str, Any]) -> TextBound | None:
    """Return the bound of a tokenizer, by its tokenizer.json; None if there is none."""
    normalizers, splitters = _steps(described["normalizer"]), _steps(described["pre_tokenizer"])
    joined, added = [_joined(step) for step in normalizers], described["added_tokens"]
    dropped = _dropped(described["model"], any(step["type"] == "ByteLevel" for step in normalizers + splitters))
    if dropped is None or not all(joined) or not all(map(_keeps_all, splitters)):
        return None
    if any(token["lstrip"] or token["rstrip"] for token in added):
        return None  # such a token takes any number of spaces with it
    # a letter of a token is a character, or a byte of one, so letters are never fewer than characters
    names = [*described["model"]["vocab"], *(token["content"] for token in added)]
    return TextBound(max(map(len, names)) * prod(joined), dropped)


def _steps(found: Step | None) -> list[Step]:
    """Return a normalizer or pre-tokenizer as the list of its steps."""
    if found is None:
        return []
    inner = found.get("normalizers") or found.get("pretokenizers")
    return [found] if inner is None else [step for one in inner for step in _steps(one)]


def _joined(step: Step) -> int:
    """Return how many characters a normalizer may make one of; 0 if any number."""
    if step["type"] == "Replace":
        return int(0 < len(step["pattern"].get("String", "")) <= len(step["content"]))
    return _NORMALIZERS.get(step["type"], 0)


def _keeps_all(step: Step) -> bool:
    return step["type"] in _KEEPING or (step["type"] in ("Split", "Punctuation") and step["behavior"] != "Removed")


def _dropped(model: Mapping[str, Any], by_bytes: bool) -> str | None:
    """Return the characters that have no token; None if that is not known, or one token stands for any of them."""
    known = model.get("vocab", ())
    if model.get("type") != "BPE":
        return None
    if model.get("byte_fallback"):
        return "" if all(letter in known for letter in _FALLBACKS) else None
    if not by_bytes or model.get("unk_token") is not None:
        return None
    # every character beyond ASCII has a byte from 0x80 to 0xBF: with tokens for those, none is dropped whole
    missing = [byte for letter, byte in byte_letters().items() if byte < 0xC0 and letter not in known]
    return None if any(byte >= 0x80 for byte in missing) else "".join(map(chr, missing))
