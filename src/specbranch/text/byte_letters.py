"""The letters in which byte-level vocabularies spell bytes, and the bytes of their tokens.

Owns that table, as GPT-2 has it. Invariant: a byte-level decoder's text is that of its tokens' bytes, joined.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache


@cache
def byte_letters() -> dict[str, int]:
    """Return the byte of each letter: printable Latin-1 for itself, the others from U+0100 on."""
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + at): byte for at, byte in enumerate(others)}


class TokenBytes(dict[int, tuple[bytes, str | None]]):
    """The bytes of each token, with its text if they are whole characters. A token is looked up once."""

    def __init__(self, spell: Callable[[int], str]) -> None:
        """`spell`: a token as its vocabulary has it; empty for one that decoding skips."""
        super().__init__()
        self._spell = spell

    def __missing__(self, token: int) -> tuple[bytes, str | None]:
        spelled, known = self._spell(token), byte_letters()
        # an added token may have other letters: then it is its own text
        is_spelled = all(letter in known for letter in spelled)
        value = bytes([known[letter] for letter in spelled]) if is_spelled else spelled.encode()
        try:
            text: str | None = value.decode()
        except UnicodeDecodeError:
            text = None
        self[token] = value, text
        return value, text
